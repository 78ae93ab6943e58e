//! Reasons for the end of a session, or of an attempt at one.

use std::time::Duration;

use prepull_api::wire::DecodeError;
use prepull_tunnel::{ChannelEnd, CloseCode};
use rustls::AlertDescription;
use tokio_tungstenite::tungstenite::Error as WsError;

use crate::cloud::endpoint::{ConnectTrouble, printable_start};
use crate::cloud::tunnel::route;

/// Why an attempt or a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum TunnelEnd {
    #[error("{0}")]
    Unreachable(ConnectTrouble),
    #[error("no handshake within {0:?}")]
    HandshakeTooSlow(Duration),
    #[error("the server refused the tunnel: {0}")]
    Refused(String),
    #[error("the agent did not say Hello")]
    NoHello,
    #[error("no Welcome within {0:?}")]
    NoWelcome(Duration),
    #[error("the server's first message was not Welcome")]
    NotWelcome,
    #[error("{0}")]
    Connection(ConnectTrouble),
    #[error("{0}")]
    Channel(ChannelEnd),
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("the server asks to come back later: {reason}")]
    Goaway { after: Duration, reason: String },
    #[error("the certificate was renewed")]
    Renewed,
    #[error("the agent is stopping")]
    Shutdown,
}

impl From<ChannelEnd> for TunnelEnd {
    fn from(ended: ChannelEnd) -> Self {
        match ended {
            // With TLS 1.3 the server's rejection of our certificate arrives only after the handshake.
            ChannelEnd::Io(error) => Self::Connection(error.into()),
            ended => Self::Channel(ended),
        }
    }
}

impl TunnelEnd {
    /// The kind of end for the choice of the next attempt. `None` if the agent is stopping.
    pub(super) fn for_route(&self, had_session: bool) -> Option<route::AttemptEnd> {
        Some(match self {
            Self::Shutdown => return None,
            Self::Goaway { after, .. } => route::AttemptEnd::Goaway { after: *after },
            Self::Renewed => route::AttemptEnd::Renewed,
            _ if !had_session => route::AttemptEnd::Failed,
            Self::Channel(ChannelEnd::Silent(_) | ChannelEnd::Stalled(_)) => route::AttemptEnd::Gone,
            // The server's queue had no room for a `Goaway`.
            Self::Channel(ChannelEnd::ByPeer { code, .. }) if *code == u16::from(CloseCode::Away) => {
                route::AttemptEnd::Gone
            }
            _ => route::AttemptEnd::Lost,
        })
    }

    /// Whether the server has refused our certificate because it has expired.
    pub(super) fn says_expired(&self) -> bool {
        let (Self::Unreachable(trouble) | Self::Connection(trouble)) = self else { return false };
        matches!(trouble, ConnectTrouble::Refused(AlertDescription::CertificateExpired))
    }

    /// The code of the close frame. `None` if there's no websocket to close.
    pub(super) fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::Channel(ended) => ended.close_code(),
            Self::Decode(DecodeError::TooLarge(_)) => Some(CloseCode::Size),
            Self::Decode(DecodeError::Malformed(_)) => Some(CloseCode::Invalid),
            Self::NotWelcome | Self::NoWelcome(_) => Some(CloseCode::Protocol),
            Self::NoHello | Self::Goaway { .. } | Self::Renewed | Self::Shutdown => Some(CloseCode::Away),
            Self::Unreachable(_) | Self::HandshakeTooSlow(_) | Self::Refused(_) | Self::Connection(_) => None,
        }
    }
}

/// Translates an error of the websocket handshake.
pub(super) fn from_websocket(error: WsError) -> TunnelEnd {
    match error {
        WsError::Io(error) => TunnelEnd::Unreachable(error.into()),
        WsError::Http(response) => {
            let body = response.body().as_deref().unwrap_or_default();
            let reason = printable_start(&String::from_utf8_lossy(body));
            TunnelEnd::Refused(format!("{reason} (HTTP {})", response.status().as_u16()))
        }
        other => TunnelEnd::Refused(other.to_string()),
    }
}
