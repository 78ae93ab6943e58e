//! Reasons for refusing a connection.

use std::error::Error as _;

use prepull_api::task::NodeName;

use super::overload::OverloadReason;
use crate::edges::door::Turned;
use crate::edges::pki::peer::PeerError;
use crate::edges::roster;

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionRefusal {
    #[error(transparent)]
    Turned(#[from] Turned),
    #[error("sent away: {0}")]
    SentAway(OverloadReason),
    #[error("{0}")]
    Peer(#[from] PeerError),
    #[error("the client certificate is of no CA that is trusted")]
    UnknownCa,
    #[error("{0}")]
    Roster(#[from] roster::NodeRefusal),
    #[error("node {0} has too many open connections")]
    TooManyConnections(NodeName),
    #[error("websocket handshake failed")]
    WebSocket(#[source] tokio_tungstenite::tungstenite::Error),
}

impl ConnectionRefusal {
    pub(super) fn log(&self) {
        let cause = self.source().map(ToString::to_string);
        tracing::warn!(reason = %self, cause, "connection refused");
    }
}
