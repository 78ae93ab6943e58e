//! The outcomes of the work that the engines asked for.

use serde::{Deserialize, Serialize};

use crate::fleet::session::SessionId;

/// How a dispatch ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DispatchOutcome {
    /// The task was handed to this session.
    Sent(SessionId),
    /// The task was handed to this session without the keys from withheld secrets: the node may need none of them.
    SentWithoutKeys(SessionId),
    /// There was no session that would take the task.
    Offline,
    /// The task could not be made for now, for this reason: a registry secret cannot be read.
    Postponed(String),
    /// The task was not made, since the owners of its secrets have not allowed their use. It may be made once they have.
    Withheld {
        /// The secrets, as namespace/name.
        secrets: Vec<String>,
        /// The reason, for everyone who may read the job.
        reason: String,
    },
    /// The node's agent doesn't know tasks of this kind. A newer one does.
    TooOld(String),
    /// No session could ever take the task, for this reason.
    Unsendable(String),
}

/// How a write of an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteOutcome {
    /// The API server has it.
    Done,
    /// The object is gone, or another one has its name by now.
    Gone,
    /// The write failed, or its outcome is unknown: try again with the state of that time.
    Failed,
}
