//! The program behind `make storm`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    // It holds every part of the scene.
    Box::pin(prepull_laboratory::storm::run(prepull_laboratory::storm::StormOptions::parse())).await
}
