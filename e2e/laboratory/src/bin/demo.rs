//! The program behind `make demo`.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    prepull_laboratory::demo::run().await
}
