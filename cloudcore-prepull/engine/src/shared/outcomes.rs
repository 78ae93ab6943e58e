//! How the work that the engines asked for has ended.

use serde::{Deserialize, Serialize};

use crate::shared::session::SessionId;

/// How a dispatch ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DispatchOutcome {
    /// The task was handed to this session.
    Sent(SessionId),
    /// The task was handed to this session without keys of some images, whose secrets are withheld: the node may need none.
    SentWithoutKeys(SessionId),
    /// There was no session that would take the task.
    Offline,
    /// The task could not be made for now, for this reason: a registry secret cannot be read.
    Postponed(String),
    /// The task was not made, since the owners of its secrets have not allowed their use. It may be made once they have.
    Withheld {
        /// The secrets, as namespace/name.
        secrets: Vec<String>,
        /// The reason, for whoever may see the job.
        reason: String,
    },
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
    /// It was not written, or not known to be: to be tried again with whatever is true then.
    Failed,
}
