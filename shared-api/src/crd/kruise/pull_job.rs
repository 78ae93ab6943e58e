//! ImagePullJob: one image on many nodes. Also the fields that it shares with ImageListPullJob.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelectorRequirement, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The spec of OpenKruise's ImagePullJob, which pulls one image onto nodes.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "ImagePullJob",
    plural = "imagepulljobs",
    singular = "imagepulljob",
    namespaced,
    status = "ImagePullJobStatus",
    doc = "Pulls an image onto nodes ahead of the pods that need it. OpenKruise's API, served by cloudcore-prepull.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"TOTAL","type":"integer","jsonPath":".status.desired","description":"Nodes of this job"}"#,
    printcolumn = r#"{"name":"ACTIVE","type":"integer","jsonPath":".status.active","description":"Nodes that are pulling"}"#,
    printcolumn = r#"{"name":"SUCCEED","type":"integer","jsonPath":".status.succeeded","description":"Nodes that have the image"}"#,
    printcolumn = r#"{"name":"FAILED","type":"integer","jsonPath":".status.failed","description":"Nodes where the pull failed"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"MESSAGE","type":"string","jsonPath":".status.message","description":"State of the job"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobSpec {
    /// The image, such as nginx:1.9.1 or registry.example/team/app@sha256:….
    #[serde(default)]
    pub image: String,
    /// Fields that are the same as in an ImageListPullJob.
    #[serde(flatten)]
    pub template: PullJobTemplate,
}

/// The fields that ImagePullJob and ImageListPullJob share.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullJobTemplate {
    /// Secrets for private registries, in the namespace of the job, of type kubernetes.io/dockerconfigjson or
    /// kubernetes.io/dockercfg. Immutable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
    /// The nodes, by names or by labels, but not both. With neither selector nor podSelector: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<NodeSelector>,
    /// The nodes that run pods with these labels in the namespace of the job. Cannot be combined with selector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<PodSelector>,
    /// How many nodes pull at the same time: an integer, also in quotes, but not a percentage. 0 pauses the job.
    /// Default 1. In an ImageListPullJob, it limits the nodes that are busy with any image of the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<IntOrString>,
    /// Limits of the pull on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullLimits>,
    /// When the job ends, and what happens to it afterwards.
    #[serde(default)]
    pub completion_policy: CompletionPolicy,
    /// Metadata that the container runtime gets with the pull, as it gets that of the pod from the kubelet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
    /// Always: ask the registry every time. IfNotPresent (default): pull only if the node does not have the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// Nodes by names or by labels.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Names of nodes. Nodes without a NodeImage are skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
    /// Labels that a node must have, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Requirements for labels, all of which must hold: In, NotIn, Exists, DoesNotExist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<LabelSelectorRequirement>>,
}

/// Pods by labels.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSelector {
    /// Labels that a pod must have, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Requirements for labels, all of which must hold: In, NotIn, Exists, DoesNotExist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<LabelSelectorRequirement>>,
    /// Labels outside of matchLabels, as in an example of Kruise's English manual. They count as matchLabels.
    #[serde(flatten)]
    #[schemars(skip)]
    pub plain: BTreeMap<String, String>,
}

/// The limits of one node's pull.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullLimits {
    /// How long one try may take, in seconds. Default 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// How often a failed pull is retried. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
}

/// When a job ends, and what happens to it afterwards.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CompletionPolicy {
    /// Always (default): the job ends when each node has succeeded or failed. Never: the job does not end, and the
    /// image is pulled again every 24 hours.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// How long the whole job may take, in seconds; must exceed pullPolicy.timeoutSeconds. Nodes that have not
    /// succeeded by then count as failed. Only with Always. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// The job is deleted this many seconds after its end. Only with Always. Unset: it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Metadata for the container runtime.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxConfig {
    /// Value of PodSandboxConfig.labels in the CRI call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Value of PodSandboxConfig.annotations in the CRI call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// The state of an ImagePullJob. Written by cloudcore alone.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobStatus {
    /// When cloudcore began to process the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the job ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Number of nodes of the job.
    #[serde(default)]
    pub desired: i32,
    /// Number of nodes that are pulling.
    #[serde(default)]
    pub active: i32,
    /// Number of nodes that have the image.
    #[serde(default)]
    pub succeeded: i32,
    /// Number of nodes where the pull failed.
    #[serde(default)]
    pub failed: i32,
    /// State of the job as a sentence, or why it is refused.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Names of the nodes where the pull failed. Their NodeImages have the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_nodes: Vec<String>,
}
