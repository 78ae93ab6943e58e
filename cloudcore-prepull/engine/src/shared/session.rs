//! The sessions of edges, as both engines hear of them.

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

/// What the sessions tell the controller. The node is always the certificate's.
#[derive(Debug, Serialize, Deserialize)]
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
