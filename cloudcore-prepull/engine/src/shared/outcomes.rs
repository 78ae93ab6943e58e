//! How what the engines asked for has ended.

use crate::shared::session::SessionId;

/// How a dispatch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DispatchOutcome {
    /// Handed to this session.
    Sent(SessionId),
    /// There was no session that would take it.
    Offline,
    /// No session could ever take it.
    Unsendable(String),
}
