//! The program behind `make fleet`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_laboratory::fleet::run(prepull_laboratory::fleet::FleetOptions::parse()).await
}
