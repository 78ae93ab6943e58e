//! The program behind `make demo`.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    if let Some(argument) = std::env::args().nth(1) {
        eprintln!("demo takes no arguments, and got {argument:?}: KEEP=1 leaves the cluster running");
        return ExitCode::from(2);
    }
    prepull_laboratory::demo::run().await
}
