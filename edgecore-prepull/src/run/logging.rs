//! Logging to stderr.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::commands::args::{LogArgs, LogFormat};

/// Installs the subscriber. Must be called once, before anything is logged.
pub(super) fn init(args: &LogArgs) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&args.log)
        .with_context(|| format!("--log {} is not a filter; try info or debug", args.log))?;
    // When stderr is closed, reporting the failed write there would panic.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let builder = builder.log_internal_errors(false);
    match args.log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
