//! The program; everything is in the library.

use std::process::ExitCode;

use clap::Parser;
use cloudcore_prepull::{Cli, run};

fn main() -> ExitCode {
    run::main(Cli::parse())
}
