//! Reasons for the end of a session, or of an attempt at one.

use std::time::Duration;

use prepull_api::wire::DecodeError;
use prepull_tunnel::{ChannelEnd, CloseCode};
use tokio_tungstenite::tungstenite::Error as WsError;

use crate::cloud::endpoint::{Trouble, printable};
use crate::cloud::tunnel::route;

/// Why an attempt or a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("{0}")]
    Unreachable(Trouble),
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
    Connection(Trouble),
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

impl From<ChannelEnd> for End {
    fn from(ended: ChannelEnd) -> Self {
        match ended {
            // With TLS 1.3 the server's rejection of our certificate arrives only after the handshake.
            ChannelEnd::Io(error) => Self::Connection(error.into()),
            ended => Self::Channel(ended),
        }
    }
}

impl End {
    /// The kind of end for the choice of the next attempt. `None` if the agent is stopping.
    pub(super) fn for_route(&self, had_session: bool) -> Option<route::Ended> {
        Some(match self {
            Self::Shutdown => return None,
            Self::Goaway { after, .. } => route::Ended::Goaway { after: *after },
            Self::Renewed => route::Ended::Renewed,
            _ if !had_session => route::Ended::Failed,
            Self::Channel(ChannelEnd::Silent(_) | ChannelEnd::Stalled(_)) => route::Ended::Gone,
            // The server's queue had no room for a `Goaway`.
            Self::Channel(ChannelEnd::ByPeer { code, .. }) if *code == u16::from(CloseCode::Away) => {
                route::Ended::Gone
            }
            _ => route::Ended::Lost,
        })
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
pub(super) fn from_websocket(error: WsError) -> End {
    match error {
        WsError::Io(error) => End::Unreachable(error.into()),
        WsError::Http(response) => {
            let body = response.body().as_deref().unwrap_or_default();
            let reason = printable(&String::from_utf8_lossy(body));
            End::Refused(format!("{reason} (HTTP {})", response.status().as_u16()))
        }
        other => End::Refused(other.to_string()),
    }
}
