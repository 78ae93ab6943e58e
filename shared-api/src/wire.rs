//! The messages of the tunnel: JSON objects with a `type`, one in each text frame.
//!
//! Either side may be newer than the other:
//!
//! - Unknown fields are ignored.
//! - A message of an unknown `type` is skipped, with one line in the log of the receiver.
//! - Every enum has a variant for values that only a newer version knows, and each use of it decides what that means.
//! - Anything else that isn't a message is a [`DecodeError`]; the receiver closes the session with the reason.
//!
//! And always:
//!
//! - No message names its sender: the client certificate of the connection does.
//! - Every message may arrive twice, late, or after a restart of either side.

use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::credentials::RegistryCredential;
use crate::download::{DownloadTerms, Window};
use crate::settings::NodeSettings;
use crate::sites::{BlobSources, Blobs, PeerDoor, TicketTerms};
use crate::task::{ImageProgress, JobUid, Task, TaskId, TaskResult, millis, optional_millis};

/// Websocket subprotocol. A breaking change of the messages needs a new one.
pub const SUBPROTOCOL: &str = "prepull.v1";
/// Path of the URL that the edge connects to.
pub const TUNNEL_PATH: &str = "/v1/edge";
/// Largest message in bytes, enforced on both sides. An `Assign` of [`MAX_IMAGES`] images with the longest references
/// (about 700 bytes each) and a dozen identity tokens (a few KiB each) stays below a third of it.
pub const MAX_MESSAGE: usize = 1024 * 1024;
/// Most images of one task: as many as Kruise allows in a NodeImage.
pub const MAX_IMAGES: usize = 256;
/// Longest reason in bytes: enough for a registry's whole answer, and 256 of them fit into one message.
pub const MAX_REASON: usize = 1024;
/// Longest note about an image that is on the node, in bytes: each node of a fleet may have the same to say of each image,
/// and all of that is in the reports.
pub const MAX_NOTE: usize = 256;
/// Most tasks in the ledger of one edge. Each is a file of a few KiB and an entry in `Hello`.
pub const MAX_OPEN_TASKS: usize = 64;
/// Most jobs in [`Hello::pins`], which is 40 KiB of UIDs. Of more, each `Hello` names others.
pub const MAX_PINNING_JOBS: usize = 1024;

/// A message from the edge to the cloud.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum EdgeMessage {
    /// First message of every session.
    Hello(Box<Hello>),
    /// The task is stored in the ledger, and from now on survives a restart of the edge.
    Accepted {
        /// Identity of the task.
        task: TaskId,
    },
    /// Progress of a task. Limited to one per [`Welcome::progress_interval`] and task; may be lost.
    Progress(TaskProgress),
    /// Final result of a task. Sent again in every session until it is acknowledged.
    Result(TaskResult),
    /// Answer to [`CloudMessage::Trust`]: the CAs are on the edge's disk.
    Trusts {
        /// SHA-256 of [`TrustedCas::bundle`], in hex.
        bundle: String,
    },
    /// The node has changed since `Hello` or the last of these. Only for a cloud that asks for it by
    /// [`Welcome::state_interval`]; may be lost.
    State(NodeState),
    /// The node's part in the blobs of a task that its site shares. Only for a cloud that has announced
    /// [`Welcome::tickets`], and for tasks with [`DownloadTerms::share`]; may be lost.
    Blobs(Blobs),
    /// Answer to [`CloudMessage::Settings`]: they are in force, and on the edge's disk.
    Configured {
        /// The settings of that message.
        settings: NodeSettings,
        /// As [`Hello::windows`], from now on.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        windows: Vec<Window>,
    },
    /// A message that only a newer edge sends: the cloud skips it.
    #[serde(other)]
    Other,
}

/// A message from the cloud to the edge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum CloudMessage {
    /// Answer to `Hello`.
    Welcome(Welcome),
    /// Assigns a task. For a task that the edge has already, it only renews keys, deadline and
    /// download terms.
    Assign(Assign),
    /// Acknowledges a result, after the API server has it: the edge may forget the task.
    ResultAck {
        /// Identity of the task.
        task: TaskId,
    },
    /// Stops a task. The edge answers with a `Result` of what was done, and not at all if it does not know the task.
    Cancel {
        /// Identity of the task.
        task: TaskId,
        /// Why the task is stopped, for the log and the result.
        reason: String,
    },
    /// These jobs want no image pinned any more: they were deleted or changed. Only for an edge with `pins` in its `Hello`.
    Unpin {
        /// UIDs of the jobs, at most [`MAX_PINNING_JOBS`]. Shared, since every edge of a fleet gets the same list.
        #[serde(with = "shared_list")]
        jobs: Arc<[JobUid]>,
    },
    /// Where to get blobs from. Only for an edge that has asked by [`EdgeMessage::Blobs`].
    Sources(BlobSources),
    /// The CAs to trust from now on. Only for an edge with `trusts` in its `Hello`.
    Trust(TrustedCas),
    /// Asks the edge to close the session and to reconnect later. Takes precedence over the edge's own backoff.
    Goaway {
        /// Earliest time of the next connection, from now.
        #[serde(with = "millis")]
        after: Duration,
        /// Why the edge has to reconnect, for the log.
        reason: String,
    },
    /// The settings that the cloud has for the node from now on. Only for an edge with `settings` in its `Hello`. It answers
    /// with [`EdgeMessage::Configured`].
    Settings(NodeSettings),
    /// A message that only a newer cloud sends: the edge skips it.
    #[serde(other)]
    Other,
}

/// A description of the edge and of the tasks in its ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// Version of edgecore-prepull.
    pub version: String,
    /// Operating system as in Node objects: `linux`.
    pub os: String,
    /// Architecture as in Node objects: `amd64`, `arm64`.
    pub arch: String,
    /// Name and version of the container runtime, such as `containerd 1.6.20`. Absent while it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// The runtime's image file system. Absent while the runtime does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_filesystem: Option<Filesystem>,
    /// How many tasks the edge works on at the same time; others wait on the edge. Absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tasks: Option<u32>,
    /// All tasks in the ledger. At most [`MAX_OPEN_TASKS`].
    #[serde(default)]
    pub open: Vec<OpenTask>,
    /// SHA-256 of the CAs that the edge trusts, as [`TrustedCas::bundle`] holds them, in hex. Absent for agents that
    /// can't change their CAs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusts: Option<String>,
    /// Name of the node's time zone in the IANA database. Absent where the edge does not know it, which means UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// The node's windows. It downloads for no task outside of them. Of its own and those of the cloud's settings, the list
    /// that is open for a shorter time a week; it keeps to both. Empty: always. At most [`crate::download::MAX_WINDOWS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// Jobs for which images are pinned on the node, at most [`MAX_PINNING_JOBS`]. Absent for agents and runtimes that
    /// cannot pin: they do not know [`CloudMessage::Unpin`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pins: Option<Vec<JobUid>>,
    /// Where the node serves its neighbours. Absent where it serves none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<PeerDoor>,
    /// Whether the edge knows [`Task::removal`]. No task with one is sent to an edge that doesn't.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removes: bool,
    /// Whether the edge knows [`Task::upgrade`], in the same way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub upgrades: bool,
    /// The cloud's settings that are in force on the node, even if its disk has refused them. Absent for agents that can't take
    /// any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<NodeSettings>,
}

/// The CAs that an edge is to trust.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustedCas {
    /// Certificates as PEM, at most [`crate::enroll::MAX_TRUSTED_CAS`]. The first CA signs.
    pub bundle: String,
    /// An edge with a certificate of another CA than the first renews it within this time, at a random moment: a whole
    /// fleet must not renew at once.
    #[serde(with = "millis")]
    pub renew_within: Duration,
}

/// What changes of a node while a session lasts. For people; nothing is decided by it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeState {
    /// As [`Hello::runtime`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// As [`Hello::image_filesystem`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_filesystem: Option<Filesystem>,
}

/// A file system and its size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Mount point, as the runtime reports it.
    pub mountpoint: String,
    /// Bytes available to an unprivileged process.
    pub available: u64,
    /// Total size in bytes.
    pub capacity: u64,
}

/// A task in the ledger of an edge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenTask {
    /// Identity of the task.
    pub task: TaskId,
    /// State of the task.
    pub phase: OpenPhase,
    /// Whether the task has [`DownloadTerms`] that say something. What was changed in the job while there was no session
    /// is assigned again, so that no limit outlives its job's wish.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
}

/// The state of a task in the ledger of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OpenPhase {
    /// The edge is working on the task, or the task waits for its turn.
    Running,
    /// The agent was restarted, and keys are never on its disk: the task waits for an `Assign` with the same id.
    NeedsKeys,
    /// The task has ended; its `Result` follows.
    Finished,
    /// A state that only a newer version knows. The cloud takes it for [`Self::Running`], and the deadline bounds it.
    #[serde(other)]
    Other,
}

/// The parameters of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Welcome {
    /// Id of the session, for the logs of both sides.
    pub session: String,
    /// Interval of pings, on both sides. Either side ends the session after two intervals of silence.
    #[serde(with = "millis")]
    pub heartbeat: Duration,
    /// Shortest time between two `Progress` messages of one task.
    #[serde(with = "millis")]
    pub progress_interval: Duration,
    /// Shortest time between two [`EdgeMessage::State`]. Absent from clouds that do not know them: none is sent then.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub state_interval: Option<Duration>,
    /// By what the node knows the tickets of its neighbours. Absent from clouds that know of no sharing: they get no
    /// [`EdgeMessage::Blobs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tickets: Option<TicketTerms>,
}

/// A task, with its deadline, its keys and its download terms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assign {
    /// The task, which the edge stores in its ledger.
    pub task: Task,
    /// Time until the deadline. Only time with open windows counts. A duration and not a time of day, since the edge's
    /// clock may be wrong.
    #[serde(with = "millis")]
    pub remaining: Duration,
    /// Keys, to which [`crate::task::ImageTask::key`] is an index. The edge keeps them in memory only.
    pub keys: Vec<PullKey>,
    /// How the task may download. Absent from clouds that have no such terms.
    #[serde(default, skip_serializing_if = "DownloadTerms::is_default")]
    pub download: DownloadTerms,
}

/// How to authenticate a pull.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum PullKey {
    /// No secret has a credential for the image: the edge asks the node's credential providers, and pulls anonymously
    /// if they have none either.
    Anonymous {
        /// Which secrets were searched in vain; part of the reason if the registry refuses the pull. At most
        /// [`MAX_REASON`] bytes.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        note: String,
    },
    /// Credentials from secrets.
    Credentials {
        /// Credentials to try in this order until one is accepted. Never empty.
        credentials: Vec<RegistryCredential>,
    },
    /// The job names a secret that cannot be used. The image fails, and no request is made.
    Unavailable {
        /// Name of the secret, and why it cannot be used.
        reason: String,
    },
    /// A kind of key that only a newer version knows: the image fails, and no request is made.
    #[serde(other)]
    Other,
}

impl PullKey {
    /// An anonymous pull without a note.
    pub fn anonymous() -> Self {
        Self::Anonymous { note: String::new() }
    }
}

/// The progress of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskProgress {
    /// Identity of the task.
    pub task: TaskId,
    /// Progress of the images for which it has changed.
    pub images: Vec<ImageProgress>,
    /// Why nothing of the task is downloaded at the moment, such as a closed window; empty if nothing holds it up. Clouds
    /// without windows ignore it, and show only that the images wait. At most [`MAX_REASON`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub waits: String,
}

/// Why a frame is not a message of this protocol.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The frame is longer than [`MAX_MESSAGE`].
    #[error("message of {0} bytes; at most {MAX_MESSAGE} are accepted")]
    TooLarge(usize),
    /// The frame is not JSON, has no type, or has a field of the wrong kind.
    #[error("not a message of {SUBPROTOCOL}: {0}")]
    Malformed(String),
}

/// Decodes one frame. Never panics on any text.
///
/// The error gives line and column and never quotes the frame, which might contain a credential.
pub fn decode_frame<T: DeserializeOwned>(frame: &str) -> Result<T, DecodeError> {
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

/// Encodes one frame.
pub fn encode_frame<T: Serialize>(message: &T) -> Result<String, DecodeError> {
    let frame = serde_json::to_string(message).map_err(|error| DecodeError::Malformed(error.to_string()))?;
    if frame.len() > MAX_MESSAGE { Err(DecodeError::TooLarge(frame.len())) } else { Ok(frame) }
}

/// Cuts a text at a character boundary to at most [`MAX_REASON`] bytes. A text that was cut ends in `…`.
///
/// A control character becomes a space: it would take six bytes of a message, so that [`MAX_IMAGES`] reasons would not
/// fit into one. A line feed and a tab, which take two, stay.
pub fn truncate_reason(text: &str) -> String {
    truncate(text, MAX_REASON)
}

/// Does the same to at most [`MAX_NOTE`] bytes.
pub fn truncate_note(text: &str) -> String {
    truncate(text, MAX_NOTE)
}

fn truncate(text: &str, most: usize) -> String {
    const MARK: &str = " …";
    let text = text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), " ");
    if text.len() <= most {
        return text;
    }
    let mut end = most - MARK.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MARK}", &text[..end])
}

/// Serialisation of a list that many messages share.
mod shared_list {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(list: &Arc<[T]>, to: S) -> Result<S::Ok, S::Error> {
        list.as_ref().serialize(to)
    }

    pub(super) fn deserialize<'de, T, D>(from: D) -> Result<Arc<[T]>, D::Error>
    where
        T: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Vec::deserialize(from).map(Arc::from)
    }
}

#[cfg(test)]
mod tests;
