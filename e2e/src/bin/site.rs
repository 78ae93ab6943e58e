//! The program behind `make site`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_e2e::boxes::run(prepull_e2e::boxes::Options::parse()).await
}
