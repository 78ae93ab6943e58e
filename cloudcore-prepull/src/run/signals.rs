//! The signals that end the program.

use tokio::signal::unix::{SignalKind, signal};
use tracing::error;

/// Resolves at SIGTERM or SIGINT.
pub(super) async fn termination() {
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        }
        (Err(error), _) | (_, Err(error)) => {
            error!(%error, "no signals can be received; end the program with SIGKILL");
            std::future::pending::<()>().await;
        }
    }
}
