//! The command line, and the commands that end: `plan`, `token`, `crds`.

pub mod args;
pub mod crds;
pub mod plan;
pub mod token;
