//! The tunnel's cloud side: sessions come in, events go to the controller, messages go out.
//!
//! ```text
//! listener ─TLS, websocket─▶ session (one task each) ─SessionEvent─▶ controller
//!                               ▲ bounded queue
//!                            registry (the one place that holds sessions) ◀─send─ dispatch
//! ```

pub mod listener;
mod meters;
mod overload;
pub(crate) mod peer;
pub mod registry;
mod session;
pub(crate) mod throttle;

use std::fmt;

use prepull_api::task::NodeName;
use prepull_api::wire::{EdgeMessage, Hello};

pub use meters::Meters;

/// Names one session among all of this process. A later session of the same node has a larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What the sessions tell the controller. The node is always the certificate's.
#[derive(Debug)]
pub enum SessionEvent {
    /// The node said `Hello`, and was welcomed. An earlier session of the node has been replaced: its `Down`
    /// may come before or after this, and is to be ignored by its id.
    Up {
        /// Whose.
        node: NodeName,
        /// Which.
        session: SessionId,
        /// What it said.
        hello: Hello,
    },
    /// The node said something else.
    Message {
        /// Whose.
        node: NodeName,
        /// Which.
        session: SessionId,
        /// What it said.
        message: EdgeMessage,
    },
    /// The session ended.
    Down {
        /// Whose.
        node: NodeName,
        /// Which.
        session: SessionId,
    },
}

/// Why a message was not handed to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The node has no session.
    #[error("the node has no session")]
    Offline,
    /// The message is larger than any session takes. The session is left alone.
    #[error("the message is too large: {0} bytes")]
    TooLarge(usize),
    /// The node does not read: its queue is full, and its session is being closed.
    #[error("the node reads too slowly")]
    Full,
}
