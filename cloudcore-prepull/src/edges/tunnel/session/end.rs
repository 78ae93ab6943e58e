//! Reasons for the end of a session.

use std::time::Duration;

use prepull_api::wire::{DecodeError, MAX_OPEN_TASKS};
use prepull_tunnel::{ChannelEnd, CloseCode};

use crate::edges::tunnel::outbox::Close;
use crate::edges::tunnel::overload::OverloadReason;

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionEnd {
    #[error("{0}")]
    Connection(#[from] ChannelEnd),
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("no Hello within {0:?}")]
    NoHello(Duration),
    #[error("the first message must be Hello")]
    NotHello,
    #[error("Hello may come only once")]
    SecondHello,
    #[error("Hello lists {0} tasks; at most {MAX_OPEN_TASKS} are accepted")]
    TooManyTasks(usize),
    #[error("too many messages: the node keeps sending although its messages are delayed")]
    Flood,
    #[error("{}", OverloadReason::MessageNotTaken(*.0))]
    MessageNotTaken(Duration),
    #[error("the client certificate has expired: renew it, or join again with a new token")]
    CertificateExpired,
    #[error("the CA of the client certificate is not trusted any more: join again with a new token")]
    CaRetired,
    /// The registry closed the session: it was replaced, its queue was full, or cloudcore shuts down.
    #[error("{}", .0.reason)]
    Closed(Close),
}

impl SessionEnd {
    /// The close code for the peer; `None` if the connection is already unusable.
    pub(super) fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::Connection(ended) => ended.close_code(),
            Self::Decode(DecodeError::TooLarge(_)) => Some(CloseCode::Size),
            Self::Decode(DecodeError::Malformed(_)) => Some(CloseCode::Invalid),
            Self::NoHello(_) | Self::NotHello | Self::SecondHello | Self::TooManyTasks(_) => {
                Some(CloseCode::Protocol)
            }
            Self::Flood | Self::CertificateExpired | Self::CaRetired => Some(CloseCode::Policy),
            Self::MessageNotTaken(_) => Some(CloseCode::Again),
            Self::Closed(close) => Some(close.code),
        }
    }

    /// Whether an operator may have to act on it.
    pub(super) fn is_fault(&self) -> bool {
        match self {
            Self::Connection(
                ChannelEnd::ByPeer { .. } | ChannelEnd::Cut | ChannelEnd::Io(_) | ChannelEnd::Silent(_),
            )
            | Self::Closed(_) => false,
            Self::Connection(
                ChannelEnd::Stalled(_) | ChannelEnd::TooLarge { .. } | ChannelEnd::Protocol(_),
            )
            | Self::Decode(_)
            | Self::NoHello(_)
            | Self::NotHello
            | Self::SecondHello
            | Self::TooManyTasks(_)
            | Self::Flood
            | Self::MessageNotTaken(_)
            | Self::CertificateExpired
            | Self::CaRetired => true,
        }
    }
}
