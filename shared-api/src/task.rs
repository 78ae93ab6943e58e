//! What one node is asked to do, and how it fared. A task knows images, not jobs: whatever plans work for a
//! node (an ImagePrePullJob today, a NodeImage later) ends in the same [`Task`].
//!
//! Nothing in this module can hold a credential, so everything in it may be written to disk and to a log.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The UID of the object that a task comes from, as Kubernetes gave it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobUid(pub String);

impl fmt::Display for JobUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a Kubernetes Node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeName(pub String);

impl NodeName {
    /// The name as Kubernetes writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is a name that a Node object can have: an RFC 1123 subdomain of at most 253 bytes.
    pub fn is_valid(&self) -> bool {
        let label = |l: &str| {
            let alnum = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            l.starts_with(alnum) && l.ends_with(alnum) && l.chars().all(|c| alnum(c) || c == '-')
        };
        self.0.len() <= 253 && self.0.split('.').all(label)
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

/// Identifies a task on one node. The node itself is never part of a message: it is the certificate's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskId {
    /// The object that the task comes from.
    pub job: JobUid,
    /// Counts from 1; a later attempt replaces an earlier one.
    pub attempt: u32,
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.attempt)
    }
}

/// When an image is pulled, with the kubelet's meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PullPolicy {
    /// Ask the registry every time; layers that are there already are not fetched again.
    Always,
    /// Pull only if the runtime does not know the reference.
    IfNotPresent,
    /// Never pull; an absent image is a failure.
    Never,
}

impl fmt::Display for PullPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        })
    }
}

/// What the edge looks at before it pulls anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckItem {
    /// Room on the file system where the runtime keeps images.
    Disk,
    /// Load of the processors.
    Cpu,
    /// Memory that is available.
    Mem,
}

/// One node's share of a job. Free of credentials by construction: an image names its key by its index into
/// the list that travels beside the task in [`crate::wire::Assign`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    /// Which task this is.
    pub id: TaskId,
    /// A name that a person recognises, for logs: `imageprepulljob/nginx`.
    pub title: String,
    /// Checked before the first pull.
    pub checks: Vec<CheckItem>,
    /// In the order of the job. At most [`crate::wire::MAX_IMAGES`].
    pub images: Vec<ImageTask>,
}

/// One image of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTask {
    /// As the job names it.
    pub image: String,
    /// The normalised reference to pull, after the overriders.
    pub reference: String,
    /// When to pull.
    pub policy: PullPolicy,
    /// Tries after the first one. Transient errors only; a permanent one ends the image at once.
    pub retries: u32,
    /// Index into the keys of [`crate::wire::Assign`].
    pub key: u32,
    /// The longest that one try may take. Absent: the task's deadline is the only limit.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_millis")]
    pub timeout: Option<Duration>,
    /// Handed to the runtime with the pull, as the kubelet does for a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxMetadata>,
}

/// Labels and annotations of the pod sandbox that a pull is made for, as far as the runtime is to believe (CRI's
/// `PodSandboxConfig`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetadata {
    /// `PodSandboxConfig.labels`
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// `PodSandboxConfig.annotations`
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What the edge says of one image while it works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImagePhase {
    /// Not begun: another image of the node is being pulled.
    Waiting,
    /// The runtime is pulling it.
    Pulling,
    /// Between two tries.
    BackingOff,
    /// Final, whichever way.
    Done,
}

/// Bytes of an image's layers, compressed, as they travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// In the content store.
    pub done: u64,
    /// Of the whole image. 0 while it is not known.
    pub total: u64,
}

/// A moment of one image's pull. May be dropped on the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageProgress {
    /// Index into [`Task::images`].
    pub index: u32,
    /// What happens with it.
    pub phase: ImagePhase,
    /// Absent where the runtime cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
    /// Tries so far.
    pub attempts: u32,
    /// Why the last try failed, if one did. At most [`crate::wire::MAX_REASON`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// How a task ended on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TaskOutcome {
    /// Every image is there.
    Succeeded,
    /// A check or at least one image failed; the images say which.
    Failed,
    /// The deadline passed before all images were there.
    DeadlineExceeded,
    /// The cloud asked to stop.
    Cancelled,
}

/// How the checks before the first pull ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckOutcome {
    /// Whether the node was fit to pull.
    pub passed: bool,
    /// What was found, where it was not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// How one image ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImageOutcome {
    /// Pulled now.
    Pulled,
    /// There already, and the policy asked for no more.
    Present,
    /// Not there; the reason says why.
    Failed,
    /// Not finished: deadline or cancel.
    Stopped,
}

impl ImageOutcome {
    /// Whether the image is on the node.
    pub fn is_there(self) -> bool {
        matches!(self, Self::Pulled | Self::Present)
    }
}

/// The end of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageResult {
    /// Whether it is there.
    pub outcome: ImageOutcome,
    /// The manifest digest that the runtime has under the reference, `sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The image's own id in the runtime, `sha256:…` of its configuration. Absent from a runtime or an agent that
    /// does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why it is not there. At most [`crate::wire::MAX_REASON`] bytes, and never a credential.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Absent where the runtime cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
    /// Tries, the first one included; 0 where none was made.
    pub attempts: u32,
}

/// The end of a task. On the edge's disk before it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskResult {
    /// Which task ended.
    pub task: TaskId,
    /// How.
    pub outcome: TaskOutcome,
    /// One sentence for a person where it did not succeed. At most [`crate::wire::MAX_REASON`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Absent where the checks did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckOutcome>,
    /// In the order of [`Task::images`], one for each.
    pub images: Vec<ImageResult>,
    /// From the acceptance to the end, by the edge's monotonic clock where the agent was not restarted.
    #[serde(with = "millis")]
    pub took: Duration,
}

/// Durations travel as whole milliseconds.
pub mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// Saturates at `u64::MAX` milliseconds.
    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    /// Any `u64` is a duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

/// As [`millis`], of what may be absent.
pub mod optional_millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Saturates at `u64::MAX` milliseconds.
    #[allow(clippy::ref_option, reason = "serde's own signature")]
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
    }

    /// Any `u64` is a duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_are_what_kubernetes_accepts() {
        for good in ["edge-1", "a", "10.0.0.1", "edge.hangzhou.example"] {
            assert!(NodeName::from(good).is_valid(), "{good}");
        }
        for bad in ["", "Edge", "a_b", "-a", "a-", "a..b", "../etc", "a/b", &"a".repeat(254)] {
            assert!(!NodeName::from(bad).is_valid(), "{bad}");
        }
    }
}
