//! The work of one node, its progress and its result. A task knows images, not jobs: an ImagePrePullJob and a NodeImage
//! both end in the same [`Task`].
//!
//! Nothing in this module can hold a credential, so everything in it may be written to disk and to a log.

mod facts;
mod removal;
mod upgrade;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::dns_name::{self, is_dns_subdomain};
use crate::failure::FailureCode;
pub use facts::{ImageFacts, KubeletRecord, NoDelta, PulledBy};
pub use removal::{
    ImageRemoval, KeepCode, LAST_REMOVAL, MAX_REMOVALS, Removal, RemovalOutcome, RemovalResult,
};
pub use upgrade::Upgrade;

/// Most bytes of the [`JobUid`] of a task in a message. One of Kubernetes has 36, and that of an image on a NodeImage 17 more. A node may
/// invent UIDs, which the cloud keeps for a while.
pub const MAX_JOB_UID: usize = 128;

/// The UID of the object that a task comes from, as Kubernetes gave it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobUid(pub String);

fn short_uid<'de, D: Deserializer<'de>>(deserializer: D) -> Result<JobUid, D::Error> {
    let uid = JobUid::deserialize(deserializer)?;
    let bytes = uid.0.len();
    if bytes > MAX_JOB_UID {
        let problem = format_args!("the UID of a job has {bytes} bytes; at most {MAX_JOB_UID} are accepted");
        return Err(D::Error::custom(problem));
    }
    Ok(uid)
}

impl fmt::Display for JobUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a Kubernetes Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeName(pub String);

impl NodeName {
    /// Most bytes of the name of a Node in Kubernetes (RFC 1123).
    pub const MAX: usize = dns_name::MAX_NAME;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a Node object can have this name: an RFC 1123 subdomain of at most [`Self::MAX`] bytes.
    pub fn is_valid(&self) -> bool {
        is_dns_subdomain(&self.0)
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for NodeName {
    fn from(name: &str) -> Self {
        Self(name.to_owned())
    }
}

/// The identity of a task on one node. The node is not part of it, since no message names its node: the client
/// certificate of the connection does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskId {
    /// Identity of the object that the task comes from, of at most [`MAX_JOB_UID`] bytes.
    #[serde(deserialize_with = "short_uid")]
    pub job: JobUid,
    /// Number of the attempt, counted from 1. A later attempt replaces an earlier one.
    pub attempt: u32,
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.attempt)
    }
}

/// When to pull an image, with the kubelet's meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PullPolicy {
    /// Ask the registry every time; layers that are on the node already are not fetched again.
    Always,
    /// Pull only if the runtime does not have the reference.
    IfNotPresent,
    /// Never pull; a missing image is a failure.
    Never,
    /// A policy that only a newer version knows: the image fails.
    #[serde(other)]
    Other,
}

impl fmt::Display for PullPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
            Self::Other => "Other",
        })
    }
}

/// A check that the edge makes before it pulls anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckItem {
    /// Free space on the runtime's image file system.
    Disk,
    /// Processor load.
    Cpu,
    /// Available memory.
    Mem,
    /// A check that only a newer version knows: it doesn't pass.
    #[serde(other)]
    Other,
}

/// One node's share of a job. It cannot hold a credential: an image refers to its key by index into the list that
/// [`crate::wire::Assign`] carries beside the task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    /// Identity of the task.
    pub id: TaskId,
    /// Name of the task in logs, such as `imageprepulljob/nginx`.
    pub title: String,
    /// Checks to make before the first pull.
    pub checks: Vec<CheckItem>,
    /// Images to pull, in the order of the job. At most [`crate::wire::MAX_IMAGES`].
    pub images: Vec<ImageTask>,
    /// What to remove; the task pulls nothing then. Only for an edge with `removes` in its `Hello`: an older one would take
    /// the task for one without images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<Box<Removal>>,
    /// What to do with the program in the only image. Only for an edge with `upgrades` in its `Hello`: an older one would
    /// pull the image alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<Upgrade>,
}

impl Task {
    /// A task that pulls these images, without a title and without checks.
    pub fn new(id: TaskId, images: Vec<ImageTask>) -> Self {
        Self { id, title: String::new(), checks: Vec::new(), images, removal: None, upgrade: None }
    }
}

/// One image of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTask {
    /// The image as the job names it.
    pub image: String,
    /// Normalised reference to pull, after the overriders.
    pub reference: String,
    /// When to pull the image.
    pub policy: PullPolicy,
    /// Tries after the first one. Only transient errors are retried; a permanent error ends the image at once.
    pub retries: u32,
    /// Index of the image's key in [`crate::wire::Assign::keys`].
    pub key: u32,
    /// Longest duration of one try. Absent: only the deadline of the task limits it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub timeout: Option<Duration>,
    /// Pod sandbox metadata that the runtime gets with the pull, as from the kubelet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxMetadata>,
}

impl ImageTask {
    /// An image that the job names like this, pulled in one try with the first key unless it is there.
    pub fn new(reference: &str) -> Self {
        Self {
            image: reference.to_owned(),
            reference: reference.to_owned(),
            policy: PullPolicy::IfNotPresent,
            retries: 0,
            key: 0,
            timeout: None,
            sandbox: None,
        }
    }
}

/// Labels and annotations of the pod sandbox that a pull is made for: CRI's `PodSandboxConfig`, without the fields that
/// do not concern a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetadata {
    /// Value of `PodSandboxConfig.labels`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Value of `PodSandboxConfig.annotations`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What the edge does with an image at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImagePhase {
    /// The pull has not begun: the image waits for other images.
    Waiting,
    /// The runtime is pulling the image.
    Pulling,
    /// The last try failed, and the next one has not begun.
    BackingOff,
    /// The image has ended, in success or failure.
    Done,
    /// A phase that only a newer version knows.
    #[serde(other)]
    Other,
}

/// Progress of an image in bytes of its compressed layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteProgress {
    /// Bytes that are in the content store.
    pub done: u64,
    /// Bytes of the whole image; 0 while unknown.
    pub total: u64,
}

/// The current state of one image's pull. It may be lost on the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageProgress {
    /// Index of the image in [`Task::images`].
    pub index: u32,
    /// What the edge does with the image.
    pub phase: ImagePhase,
    /// Bytes of the image. Absent if the runtime does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteProgress>,
    /// Number of tries so far.
    pub attempts: u32,
    /// Why the last try failed; empty if none did. At most [`crate::wire::MAX_REASON`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The code of [`Self::reason`]. Absent if no try failed, and from edges without codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<FailureCode>,
}

impl ImageProgress {
    /// An image before its first try, with nothing else known about it.
    pub fn new(index: u32, phase: ImagePhase) -> Self {
        Self { index, phase, bytes: None, attempts: 0, reason: String::new(), code: None }
    }
}

/// How a task ended on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TaskOutcome {
    /// Every image is on the node.
    Succeeded,
    /// A check or at least one image failed.
    Failed,
    /// The deadline passed before all images were on the node.
    DeadlineExceeded,
    /// The cloud cancelled the task.
    Cancelled,
    /// An end that only a newer version knows. Since it isn't [`Self::Succeeded`], it counts as a failure.
    #[serde(other)]
    Other,
}

impl TaskOutcome {
    /// The outcome as a label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::Other => "other",
        }
    }
}

/// The result of the checks before the first pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckOutcome {
    /// Whether all checks passed.
    pub passed: bool,
    /// What a failed check found; empty if all passed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// How one image ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImageOutcome {
    /// The image was pulled.
    Pulled,
    /// The image was on the node already, and the policy did not require a pull.
    Present,
    /// The image could not be pulled.
    Failed,
    /// The deadline or a cancellation stopped the image before it ended.
    Stopped,
    /// An end that only a newer version knows. We can't tell that the image is on the node, so it counts as a failure.
    #[serde(other)]
    Other,
}

impl ImageOutcome {
    /// Whether the image is on the node.
    pub fn is_on_node(self) -> bool {
        matches!(self, Self::Pulled | Self::Present)
    }

    /// The outcome as a label of metrics and an attribute of traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pulled => "pulled",
            Self::Present => "present",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
            Self::Other => "other",
        }
    }
}

/// The result of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageResult {
    /// How the image ended.
    pub outcome: ImageOutcome,
    /// Digest of the manifest that the runtime has for the reference, `sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Id of the image in the runtime, which is the `sha256:…` of its configuration. Absent if the runtime or the edge
    /// does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why the image is not on the node. At most [`crate::wire::MAX_REASON`] bytes; never contains a credential.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The code of [`Self::reason`]. Absent for an image that is on the node, and from edges without codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<FailureCode>,
    /// Bytes of the image. Absent if the runtime does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteProgress>,
    /// Number of tries, the first one included; 0 if none was made.
    pub attempts: u32,
    /// Whether the runtime keeps the image from garbage collection. Absent if the task does not ask for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// Facts that the status of the job has as well.
    #[serde(flatten)]
    pub facts: ImageFacts,
    /// Bytes that neighbours of the site delivered. Absent where none did, and from edges that do not share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_peers: Option<u64>,
    /// Time from the first try to the end of the image. Absent if none was made, and from edges that do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub took: Option<Duration>,
    /// Time from the acceptance of the task to the end of the image, by the clock of [`TaskResult::took`]: it began
    /// [`Self::took`] earlier. Absent like that.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub ended: Option<Duration>,
}

impl ImageResult {
    /// An image that ended like this, with nothing else known about it.
    pub fn new(outcome: ImageOutcome) -> Self {
        Self {
            outcome,
            digest: None,
            id: None,
            reason: String::new(),
            code: None,
            bytes: None,
            attempts: 0,
            pinned: None,
            facts: ImageFacts::default(),
            from_peers: None,
            took: None,
            ended: None,
        }
    }
}

/// The result of a task. The edge stores it on disk before it sends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskResult {
    /// Identity of the task.
    pub task: TaskId,
    /// How the task ended.
    pub outcome: TaskOutcome,
    /// Why the task did not succeed, as one sentence. At most [`crate::wire::MAX_REASON`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Result of the checks. Absent if they did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckOutcome>,
    /// Results of all images, in the order of [`Task::images`].
    pub images: Vec<ImageResult>,
    /// What became of the images of [`Task::removal`]. Absent if the task ended before it looked at them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<RemovalResult>,
    /// Time from acceptance to end, by the edge's monotonic clock unless the agent was restarted.
    #[serde(with = "millis")]
    pub took: Duration,
}

impl TaskResult {
    /// A task that ended like this, with nothing else known about it.
    pub fn new(task: TaskId, outcome: TaskOutcome) -> Self {
        let (reason, took) = (String::new(), Duration::ZERO);
        Self { task, outcome, reason, check: None, images: Vec::new(), removal: None, took }
    }
}

/// Serialisation of durations as whole milliseconds.
pub mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the milliseconds; saturates at `u64::MAX`.
    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    /// Reads the milliseconds; any `u64` is valid.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

/// Serialisation of optional durations as whole milliseconds.
pub(crate) mod optional_millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes the milliseconds; saturates at `u64::MAX`.
    #[allow(clippy::ref_option, reason = "the signature that serde requires")]
    pub(crate) fn serialize<S: Serializer>(
        duration: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
    }

    /// Reads the milliseconds; any `u64` is valid.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_name_is_an_rfc_1123_subdomain() {
        for good in ["edge-1", "a", "10.0.0.1", "edge.hangzhou.example"] {
            assert!(NodeName::from(good).is_valid(), "{good}");
        }
        for bad in ["", "Edge", "a_b", "-a", "a-", "a..b", "../etc", "a/b", &"a".repeat(254)] {
            assert!(!NodeName::from(bad).is_valid(), "{bad}");
        }
    }
}
