//! The program; everything is in the library.

use std::process::ExitCode;

use clap::Parser;
use edgecore_prepull::{args::Cli, runtime};

fn main() -> ExitCode {
    runtime::main(Cli::parse())
}
