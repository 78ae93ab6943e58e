//! The status of an ImagePrePullJob.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::remove::RemovalStatus;
use crate::failure::FailureCode;
use crate::task::{ImageFacts, RemovalResult};

/// Most nodes in `nodeStatus`, and in `skippedNodes`. Of more nodes, those that need attention are listed.
pub const MAX_NODES_IN_STATUS: usize = 200;

/// The state of a job. Written by cloudcore alone.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullJobStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Init, InProgress, Completed or Failure.
    #[serde(default)]
    pub phase: JobPhase,
    /// Why the job is in this phase, as one sentence.
    #[serde(default)]
    pub reason: String,
    /// When the nodes were selected, which is the start of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the phase became Completed or Failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// When the nodes were selected, or when the last suspension ended: activeDeadlineSeconds counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_since: Option<Time>,
    /// Counts of the nodes by phase.
    #[serde(default)]
    pub summary: Summary,
    /// Nodes in Failure and Unknown by code, the most frequent code first. Each node counts once, by its own code.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures_by_code: Vec<FailureCount>,
    /// What the job has removed. Absent for a job that pulls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<RemovalStatus>,
    /// Progress of the waves. Absent if the job has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Number of rounds of spec.retry that have begun.
    #[serde(default)]
    pub retry: u32,
    /// The last re-check. Absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recheck: Option<RecheckStatus>,
    /// Number of the first attempt that a node may make in this run of the job. A run begins each time a job that has
    /// ended gets other images, nodes or overriders. Absent in the first run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_attempt: Option<u32>,
    /// Hash of the part of the spec that must not change after the start, names of nodes included: shows whether that
    /// part has changed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub spec_hash: String,
    /// The spec that is carried out, as JSON without nodeNames: the one at the start, with the changes since that the job
    /// could follow. Absent if it is longer than 256 KiB.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub started_spec: String,
    /// Conditions of the types Valid, Progressing, Suspended, Complete, Failed and Finished.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Records of at most 200 nodes. Of more nodes, those that need attention are listed, failed ones first. The
    /// ImagePrePullReports of the job have all nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_status: Vec<NodeStatus>,
    /// Nodes that the job names or selects but skips, at most 200. summary.skipped counts all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped_nodes: Vec<SkippedNode>,
}

/// The last re-check of a job: whether the nodes that had succeeded still have their images.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecheckStatus {
    /// Number of re-checks of spec.recheck that have begun.
    #[serde(default)]
    pub rounds: u32,
    /// When the last one began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the last one ended. Absent while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Nodes that still have every image.
    #[serde(default)]
    pub present: u32,
    /// Nodes that lack an image which they had, and that no retry round has begun for since.
    #[serde(default)]
    pub missing: u32,
    /// Nodes that have not answered, and keep the result that they had.
    #[serde(default)]
    pub not_checked: u32,
}

/// How many nodes failed for one cause.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureCount {
    /// The cause.
    pub code: FailureCode,
    /// How many nodes have this code.
    pub nodes: u32,
}

/// The progress of the waves.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// Number of the current wave, counted from 1.
    #[serde(default)]
    pub step: u32,
    /// Number of waves of the job.
    #[serde(default)]
    pub steps: u32,
    /// How many nodes may have started by the end of the current wave.
    #[serde(default)]
    pub nodes: u32,
    /// When the next wave begins. Present only during the pause between two waves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<Time>,
}

/// The phase of a job.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JobPhase {
    /// The job has not been started.
    #[default]
    Init,
    /// Nodes are pulling, or wait for their turn.
    InProgress,
    /// Every node has ended, and no more failed than failureTolerate allows.
    Completed,
    /// The job is invalid, no node is eligible, its deadline has passed, or more nodes failed than failureTolerate
    /// allows.
    // Also what only a newer version knows: an older leader must neither start such a job nor call it complete.
    #[serde(other)]
    Failure,
}

/// Counts of the nodes of a job.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Nodes that are to pull: all but the skipped ones.
    #[serde(default)]
    pub desired: u32,
    /// Nodes that have not started.
    #[serde(default)]
    pub pending: u32,
    /// Nodes that have started and have no result yet.
    #[serde(default)]
    pub in_progress: u32,
    /// Nodes that have every image.
    #[serde(default)]
    pub successful: u32,
    /// Nodes where a check or an image failed, or that exceeded their deadline.
    #[serde(default)]
    pub failure: u32,
    /// Nodes without a result at their deadline. failureTolerate counts them as failed.
    #[serde(default)]
    pub unknown: u32,
    /// Nodes that were skipped: not an edge node, NotReady, deleted before their start, or not found with
    /// allowMissingNodes.
    #[serde(default)]
    pub skipped: u32,
}

/// The state of a node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the Node.
    pub node_name: String,
    /// Pending, InProgress, Successful, Failure or Unknown.
    pub phase: NodePhase,
    /// Why the node is in this phase, as one sentence. May be absent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The cause in one word, if the phase is Failure or Unknown: that of the checks or of the first image that is
    /// missing, or why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<FailureCode>,
    /// Number of the attempt that this record describes, counted from 1.
    #[serde(default)]
    pub attempt: u32,
    /// When the node started. Its deadline counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// What the last re-check found on the node. Absent if the node was in none since it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recheck: Option<NodeRecheck>,
    /// What counts the node's time beside the windows of the job, while it is in progress: should its edge be away, its
    /// deadline is computed with it. Absent where timeoutSeconds counts all the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<NodeClock>,
    /// Steps of the node, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub action_flow: Vec<ActionStatus>,
    /// State of the images, in the order of the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_status: Vec<JobImageStatus>,
    /// What became of the images that the job removes. Absent until the node has looked at them, and for a job that pulls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<RemovalResult>,
}

/// What a re-check found on a node. While the node is Pending or InProgress, it is being checked, and downloads nothing.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRecheck {
    /// When cloudcore last learnt which images are there. Absent if the node has never answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_time: Option<Time>,
    /// Why the node was not checked the last time: it keeps the result that it had.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub not_checked_reason: String,
}

/// When a node downloads by its own settings.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeClock {
    /// Its time zone, as its edge knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// Its own windows (--download-window), such as "Mon-Fri 01:00+4h Europe/Berlin".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<String>,
}

/// The phase of a node.
#[derive(
    JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum NodePhase {
    /// The node waits for a slot, or for its edge to be online.
    #[default]
    Pending,
    /// The node has started.
    InProgress,
    /// The node has every image.
    Successful,
    /// A check or an image failed, the edge reported that the deadline had passed, or an image was removed since.
    Failure,
    /// There was no result at the deadline.
    // Also what only a newer version knows: an older leader must not start such a node again.
    #[serde(other)]
    Unknown,
}

/// One step of a node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActionStatus {
    /// Check, Pull or Remove.
    pub action: Action,
    /// True if the step succeeded, False if it failed, Unknown while it runs.
    pub status: Tristate,
    /// Why the step failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// When cloudcore learnt of the step.
    pub time: Time,
}

/// The kind of a step.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// The check items of the job.
    Check,
    /// The removal of images.
    Remove,
    /// The pulls of the images.
    // Also what only a newer version knows: what follows the checks.
    #[serde(other)]
    Pull,
}

/// The outcome of something that may still be running.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tristate {
    /// Success.
    True,
    /// Failure.
    False,
    /// Still running, or not known.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The state of an image on a node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobImageStatus {
    /// The image as the job names it.
    pub image: String,
    /// Name of the imageSources entry, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The normalised reference that is pulled, after the overriders.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pulled_image: String,
    /// Digest of the manifest on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// True if the image is on the node, False if it failed, Unknown while it is pulled or if nothing is known.
    pub status: Tristate,
    /// Why the image failed, or why its last try did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The cause in one word, where there is a reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<FailureCode>,
    /// Progress in compressed bytes. Absent if the runtime does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ImageBytes>,
    /// Number of tries so far, the first one included; 0 if none was needed.
    #[serde(default)]
    pub attempts: u32,
    /// With spec.pin, whether the container runtime reports the image as pinned, so that the kubelet's garbage collection
    /// leaves it alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// Facts about the image, by its edge.
    #[serde(flatten)]
    pub facts: ImageFacts,
}

/// Progress of an image in compressed bytes.
#[derive(KubeSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageBytes {
    /// Bytes on the node.
    pub done: u64,
    /// Bytes of the whole image; 0 while unknown.
    pub total: u64,
    /// Those that neighbours of the site have delivered, and the uplink did not carry. Absent where none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_peers: Option<u64>,
}

/// A node that the job names or selects but skips.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// Name of the node.
    pub node_name: String,
    /// Why the node is skipped: not found, not an edge node, or NotReady.
    pub reason: String,
}
