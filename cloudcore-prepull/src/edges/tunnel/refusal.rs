//! Reasons for refusing a connection, and their rate-limited log.

use std::error::Error as _;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prepull_api::task::NodeName;
use prepull_engine::shared::pacing::TokenBucket;
use tokio::time::Instant;

use super::overload::OverloadReason;
use crate::edges::pki::peer::PeerError;

/// Refusals that are logged per second, and at once. Anyone who reaches the port can cause them.
const LOGGED_REFUSALS: (f64, f64) = (5.0, 50.0);

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("TLS handshake failed")]
    Tls(#[source] io::Error),
    #[error("the handshake took longer than {0:?}")]
    HandshakeDeadline(Duration),
    #[error("the handshake could not begin within {0:?}: too many others were in flight")]
    QueueDeadline(Duration),
    #[error("the handshake was not done after {0:?}, and others wait for its slot")]
    ContendedHandshake(Duration),
    #[error("sent away: {0}")]
    SentAway(OverloadReason),
    #[error("{0}")]
    Peer(#[from] PeerError),
    #[error("node {0} has too many open connections")]
    TooManyConnections(NodeName),
    #[error("websocket handshake failed")]
    WebSocket(#[source] tokio_tungstenite::tungstenite::Error),
}

/// Logs refusals at a limited rate.
#[derive(Debug)]
pub(super) struct RefusalLog {
    rate: Mutex<TokenBucket<std::time::Instant>>,
}

impl RefusalLog {
    pub(super) fn new() -> Self {
        let (per_second, burst) = LOGGED_REFUSALS;
        Self { rate: Mutex::new(TokenBucket::new(per_second, burst)) }
    }

    /// Logs the refusal unless too many were logged recently.
    pub(super) fn log(&self, refusal: &Refusal, now: Instant) {
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        if rate.try_take(1.0, now.into_std()).is_ok() {
            let cause = refusal.source().map(ToString::to_string);
            tracing::warn!(reason = %refusal, cause, "connection refused");
        }
    }
}
