//! Logs, which go to stderr.

use std::io::IsTerminal as _;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::commands::args::{LogArgs, LogFormat};

/// Starts the log of the program. To be called once, before anything is logged.
pub(super) fn start(args: &LogArgs) -> anyhow::Result<()> {
    // kube's client returns these errors as well, and whoever called it knows what they mean.
    let filter = format!("kube_client::client::builder=off,{}", args.log);
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("--log {} is no filter; try info or debug", args.log))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Where stderr is closed, reporting that on stderr would panic.
    let builder = builder.log_internal_errors(false);
    match args.log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
