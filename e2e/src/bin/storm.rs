//! The program behind `make storm`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_e2e::storm::run(prepull_e2e::storm::Options::parse()).await
}
