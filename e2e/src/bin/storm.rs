//! The program behind `make storm`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    // It holds every part of the scene.
    Box::pin(prepull_e2e::storm::run(prepull_e2e::storm::Options::parse())).await
}
