//! The log, which goes to stderr, and its flags.

use std::io::IsTerminal as _;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

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
    let filter = filter(&args.log, defaults)?;
    // When stderr is closed, reporting the failed write there would panic.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let lines = match args.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    Ok(())
}

fn filter(log: &str, defaults: &str) -> anyhow::Result<Targets> {
    let directives: Vec<_> = [defaults, log].into_iter().filter(|part| !part.is_empty()).collect();
    let filter = directives.join(",").parse::<Targets>();
    filter.with_context(|| format!("--log {log} is not a filter; try info or debug"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(log: &str) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let filter = filter(log, "quiet::inside=off").unwrap();
        let lines = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(target: "quiet::inside::module", "a body");
            tracing::warn!(target: "quiet::outside", "a warning");
        });
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn noisy_targets_are_off_unless_named() {
        for log in ["info", "debug", "trace", "quiet=trace"] {
            let logged = logged(log);
            assert!(logged.contains("a warning") && !logged.contains("a body"), "{log}: {logged}");
        }
        assert!(logged("info,quiet::inside=trace").contains("a body"));
    }
}
