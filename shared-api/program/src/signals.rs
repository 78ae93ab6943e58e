//! Signals that end the program.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Waits for SIGTERM or SIGINT, and returns its name.
///
/// # Errors
/// The process cannot receive signals.
pub async fn wait_for_termination() -> anyhow::Result<&'static str> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}
