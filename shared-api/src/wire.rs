//! The messages of the tunnel: JSON text frames, one message a frame, a `type` tag each.
//!
//! - An unknown optional field is ignored, so that either side may be newer than the other.
//! - An unknown `type` is a [`DecodeError`]; whoever reads it closes that session with the reason.
//! - A message says nothing of who sent it: the identity is the certificate of the connection.
//! - Every message can arrive twice, late, or after a restart of either side.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::credentials::RegistryCredential;
use crate::task::{ImageProgress, Task, TaskId, TaskResult, millis};

/// The websocket subprotocol. A breaking change of the messages gets a new one.
pub const SUBPROTOCOL: &str = "prepull.v1";
/// The path that the edge dials.
pub const TUNNEL_PATH: &str = "/v1/edge";
/// A message is refused beyond this, on both sides. An `Assign` of [`MAX_IMAGES`] images at the longest
/// references (about 700 bytes each) with a dozen identity tokens (a few KiB each) stays below a third of it.
pub const MAX_MESSAGE: usize = 1024 * 1024;
/// Images of one task: Kruise allows a NodeImage as many.
pub const MAX_IMAGES: usize = 256;
/// Bytes of a reason: enough for a registry's whole answer, little enough for 256 of them in one message.
pub const MAX_REASON: usize = 1024;
/// Tasks that one edge holds at a time. Each is a file of some KiB in its ledger and a line in its `Hello`.
pub const MAX_OPEN_TASKS: usize = 64;

/// What the edge says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum EdgeMessage {
    /// First on every session.
    Hello(Hello),
    /// The task is in the ledger: from here on it survives a restart of the edge.
    Accepted {
        /// Which.
        task: TaskId,
    },
    /// How far a task is. At most one a second per task; may be dropped.
    Progress(Progress),
    /// The final outcome. Sent again on every session until it is acknowledged.
    Result(TaskResult),
}

/// What the cloud says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum CloudMessage {
    /// The answer to `Hello`.
    Welcome(Welcome),
    /// Do this. Idempotent by task id: for a task that is known it only brings the keys and the deadline anew.
    Assign(Assign),
    /// The API server has the result: the edge may forget the task.
    ResultAck {
        /// Which.
        task: TaskId,
    },
    /// Stop the task; answered by a `Result` that says what was done. An unknown task is answered by
    /// nothing.
    Cancel {
        /// Which.
        task: TaskId,
        /// For the log and the result.
        reason: String,
    },
    /// Close, and come back after this long. It wins over the edge's own backoff.
    Goaway {
        /// Not before this.
        #[serde(with = "millis")]
        after: Duration,
        /// For the log.
        reason: String,
    },
}

/// Who the edge is, beyond its certificate, and what it still has to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// Of edgecore-prepull.
    pub version: String,
    /// `linux`.
    pub os: String,
    /// Go's name of the architecture, as in Node objects: `amd64`, `arm64`.
    pub arch: String,
    /// Name and version as the runtime gives them, `containerd 1.6.20`. Absent while it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Where the runtime keeps images. Absent while it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_filesystem: Option<Filesystem>,
    /// Tasks that the edge works on at the same time; more wait on the edge. Absent from an edge that does not
    /// say: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tasks: Option<u32>,
    /// Every task in the ledger. At most [`MAX_OPEN_TASKS`].
    #[serde(default)]
    pub open: Vec<OpenTask>,
}

/// A file system, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Where it is mounted, as the runtime reports it.
    pub mountpoint: String,
    /// Free for an unprivileged writer.
    pub available: u64,
    /// In all.
    pub capacity: u64,
}

/// A task of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenTask {
    /// Which.
    pub task: TaskId,
    /// Where it stands.
    pub phase: OpenPhase,
}

/// Where a task of the ledger stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OpenPhase {
    /// Being worked on.
    Running,
    /// The agent was restarted, and keys are never on its disk: it waits for an `Assign` with the same id.
    NeedsKeys,
    /// Ended; the `Result` follows.
    Finished,
}

/// The terms of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Welcome {
    /// For the logs of both sides.
    pub session: String,
    /// Both sides ping this often; silence for two of them ends the session, on both sides.
    #[serde(with = "millis")]
    pub heartbeat: Duration,
    /// The shortest time between two `Progress` of one task.
    #[serde(with = "millis")]
    pub progress_interval: Duration,
}

/// A task with what it takes to carry it out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assign {
    /// What to do. This part goes to the ledger.
    pub task: Task,
    /// Time left from the moment of arrival: a duration, since the edge's clock may be wrong.
    #[serde(with = "millis")]
    pub remaining: Duration,
    /// By index from [`crate::task::ImageTask::key`]. This part stays in memory.
    pub keys: Vec<Key>,
}

/// How to authenticate a pull.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Key {
    /// No secret has a credential for the image: the node's own credential providers are asked, else the pull is
    /// anonymous.
    Anonymous {
        /// What is to be said where the registry refuses: which secrets were looked at in vain. At most
        /// [`MAX_REASON`] bytes.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        note: String,
    },
    /// In this order, until one is accepted.
    Credentials {
        /// Never empty.
        credentials: Vec<RegistryCredential>,
    },
    /// The job names a secret that cannot serve. The image fails with this reason, and no request is made.
    Unavailable {
        /// Names the secret and what is wrong with it.
        reason: String,
    },
}

impl Key {
    /// No credential, and nothing to say of it.
    pub fn anonymous() -> Self {
        Self::Anonymous { note: String::new() }
    }
}

/// How far a task is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Which.
    pub task: TaskId,
    /// The images of which there is something new to say.
    pub images: Vec<ImageProgress>,
}

/// A frame that is no message of this protocol.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than [`MAX_MESSAGE`].
    #[error("message of {0} bytes; at most {MAX_MESSAGE} are accepted")]
    TooLarge(usize),
    /// Not JSON, of an unknown type, or with a field of the wrong kind.
    #[error("not a message of {SUBPROTOCOL}: {0}")]
    Malformed(String),
}

/// Reads one frame. Never panics, whatever the bytes.
///
/// The error names line and column and never quotes the frame: it might hold a credential.
pub fn decode<T: DeserializeOwned>(frame: &str) -> Result<T, DecodeError> {
    if frame.len() > MAX_MESSAGE {
        return Err(DecodeError::TooLarge(frame.len()));
    }
    serde_json::from_str(frame).map_err(|error| {
        DecodeError::Malformed(format!(
            "{:?} error at line {} column {}",
            error.classify(),
            error.line(),
            error.column()
        ))
    })
}

/// Writes one frame.
pub fn encode<T: Serialize>(message: &T) -> Result<String, DecodeError> {
    let frame = serde_json::to_string(message).map_err(|error| DecodeError::Malformed(error.to_string()))?;
    if frame.len() > MAX_MESSAGE { Err(DecodeError::TooLarge(frame.len())) } else { Ok(frame) }
}

/// Cuts a text to at most [`MAX_REASON`] bytes, at a character boundary, and says that it did.
pub fn bounded_reason(text: &str) -> String {
    const MARK: &str = " …";
    if text.len() <= MAX_REASON {
        return text.to_owned();
    }
    let mut end = MAX_REASON - MARK.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MARK}", &text[..end])
}

#[cfg(test)]
mod tests;
