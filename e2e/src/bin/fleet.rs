//! The program behind `make fleet`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_e2e::fleet::run(prepull_e2e::fleet::Options::parse()).await
}
