//! The log, which goes to stderr, and its flags.

use std::io::IsTerminal as _;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// The flags of the log.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "PREPULL_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// What to log, in the syntax of RUST_LOG: info, debug, info,MODULE=debug; each line names its module
    #[arg(long, value_name = "FILTER", default_value = "info", env = "PREPULL_LOG")]
    pub log: String,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Plain text for people
    Text,
    /// One JSON object per line
    Json,
}

/// Starts the log. To be called once, before anything is logged.
///
/// `defaults` are directives that `--log` may override, in the syntax of RUST_LOG; it may be empty.
///
/// # Errors
/// `--log` is not a filter.
pub fn start(args: &LogArgs, defaults: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("{defaults},{}", args.log))
        .with_context(|| format!("--log {} is not a filter; try info or debug", args.log))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // When stderr is closed, reporting the failed write there would panic.
    let builder = builder.log_internal_errors(false);
    match args.log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
