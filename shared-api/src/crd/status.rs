//! The status of an ImagePrePullJob.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Nodes in `nodeStatus` and in `skippedNodes`, at most. Beyond it those that need eyes come first.
pub const MAX_NODES_IN_STATUS: usize = 200;

/// How a job stands.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullJobStatus {
    /// The generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Init, InProgress, Completed or Failure.
    #[serde(default)]
    pub phase: JobPhase,
    /// One sentence for a person.
    #[serde(default)]
    pub reason: String,
    /// When the nodes were selected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the phase became Completed or Failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// When the nodes were selected, or the last suspension ended: activeDeadlineSeconds counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_since: Option<Time>,
    /// The nodes, counted.
    #[serde(default)]
    pub summary: Summary,
    /// Where the waves stand, if the job has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Rounds of spec.retry that have begun.
    #[serde(default)]
    pub retry: u32,
    /// Of that part of the spec which must not change after the start: a later life of cloudcore sees by it
    /// whether it did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub spec_hash: String,
    /// That part as it was at the start, as JSON, where the spec is another one by now: the job goes on with this.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub started_spec: String,
    /// Valid, Progressing, Suspended, Complete, Failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// At most 200 nodes: where there are more, those that need eyes, failing ones first. The
    /// ImagePrePullReports of the job have all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_status: Vec<NodeStatus>,
    /// Nodes that were asked for and left out, at most 200; summary.skipped counts them all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped_nodes: Vec<SkippedNode>,
}

/// Where the waves stand.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The wave that runs, from 1.
    #[serde(default)]
    pub step: u32,
    /// How many waves there are.
    #[serde(default)]
    pub steps: u32,
    /// How many nodes may have started by the end of this wave.
    #[serde(default)]
    pub nodes: u32,
    /// When the next wave begins, while this one has ended and the pause runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<Time>,
}

/// The phase of a job.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JobPhase {
    /// Seen, and not begun.
    #[default]
    Init,
    /// Nodes pull, or wait for their turn.
    InProgress,
    /// Every node ended, and no more failed than the tolerance allows.
    Completed,
    /// The job is invalid, no node is eligible, or more nodes failed than the tolerance allows.
    Failure,
}

/// The nodes of a job, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Nodes that the job is for: all but the skipped ones.
    #[serde(default)]
    pub desired: u32,
    /// Not started.
    #[serde(default)]
    pub pending: u32,
    /// Started, no result yet.
    #[serde(default)]
    pub in_progress: u32,
    /// Every image is there.
    #[serde(default)]
    pub successful: u32,
    /// A check or an image failed.
    #[serde(default)]
    pub failure: u32,
    /// No result by the deadline. Counts as failed for the tolerance.
    #[serde(default)]
    pub unknown: u32,
    /// Left out: not found, not an edge node, NotReady.
    #[serde(default)]
    pub skipped: u32,
}

/// How a node stands.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The Node.
    pub node_name: String,
    /// Pending, InProgress, Successful, Failure or Unknown.
    pub phase: NodePhase,
    /// One sentence for a person, where there is something to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The task that this speaks of: 1 is the first.
    #[serde(default)]
    pub attempt: u32,
    /// When the task was sent to the node. The node's deadline counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// What the node did, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub action_flow: Vec<ActionStatus>,
    /// The images, in the order of the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_status: Vec<ImageStatus>,
}

/// The phase of a node.
#[derive(
    JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum NodePhase {
    /// Waits for a slot, or for its edge to be online.
    #[default]
    Pending,
    /// Has the task.
    InProgress,
    /// Every image is there.
    Successful,
    /// A check or an image failed.
    Failure,
    /// No result by the deadline.
    Unknown,
}

/// One step on a node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActionStatus {
    /// Check or Pull.
    pub action: Action,
    /// True, False, or Unknown while it runs.
    pub status: Tristate,
    /// Why not, where it did not succeed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// When cloudcore heard of it.
    pub time: Time,
}

/// What a node does.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// The check items.
    Check,
    /// The pulls.
    Pull,
}

/// The status of something that may still run.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tristate {
    /// It succeeded.
    True,
    /// It failed.
    False,
    /// It runs, or nobody knows.
    #[default]
    Unknown,
}

/// How an image fared on a node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// As the job names it.
    pub image: String,
    /// The name of the imageSources entry, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What was pulled, after the overriders, normalised.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pulled_image: String,
    /// The manifest digest on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// True: it is there. False: it failed. Unknown: it runs, or nobody knows.
    pub status: Tristate,
    /// Why not, or what the last try failed with.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Compressed bytes of the layers; absent where the runtime cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ImageBytes>,
    /// Tries so far, the first one included; 0 where none was needed.
    #[serde(default)]
    pub attempts: u32,
}

/// Progress in bytes.
#[derive(KubeSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageBytes {
    /// On the node.
    pub done: u64,
    /// In all; 0 while it is not known.
    pub total: u64,
}

/// A node that was asked for and left out.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// The name as the job has it.
    pub node_name: String,
    /// not found, not an edge node, NotReady.
    pub reason: String,
}
