//! The sessions of edges, as the engines see them.

use std::fmt;

use prepull_api::task::NodeName;
use prepull_api::wire::{EdgeMessage, Hello};
use serde::{Deserialize, Serialize};

/// Names one session among all of this process. A later session of the same node has a larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What happens to sessions. The node is always the one of the certificate.
#[derive(Debug, Serialize, Deserialize)]
pub enum SessionEvent {
    /// The node said `Hello`, and was welcomed. An earlier session of the node has been replaced: its `Down` may come
    /// before or after this, and is recognised by its id.
    Up {
        /// The node of the session.
        node: NodeName,
        /// The session.
        session: SessionId,
        /// The `Hello` of the node.
        hello: Box<Hello>,
    },
    /// The node sent another message.
    Message {
        /// The node of the session.
        node: NodeName,
        /// The session.
        session: SessionId,
        /// The message.
        message: EdgeMessage,
    },
    /// The session ended.
    Down {
        /// The node of the session.
        node: NodeName,
        /// The session.
        session: SessionId,
    },
}
