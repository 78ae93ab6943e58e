//! The signals that end a program.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Ends with the signal's name when the program is told to stop.
pub(crate) async fn termination() -> anyhow::Result<&'static str> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}
