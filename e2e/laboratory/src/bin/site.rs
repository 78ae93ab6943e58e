//! The program behind `make site`.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_laboratory::site::run(prepull_laboratory::site::SiteOptions::parse()).await
}
