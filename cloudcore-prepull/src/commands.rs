//! The command line, and the commands that do not stay running: `plan`, `token`, `node`, `ca`, `crds`.

pub(crate) mod args;
pub(crate) mod ca;
pub(crate) mod crds;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod otlp_endpoint;
pub(crate) mod token;
