//! The program; everything is in the library.

use std::process::ExitCode;

use clap::Parser;
use edgecore_prepull::{commands::args::Cli, run};

fn main() -> ExitCode {
    run::main(Cli::parse())
}
