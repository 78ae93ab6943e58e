//! One image on many nodes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelectorRequirement, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Pulls an image onto nodes, as OpenKruise's ImagePullJob does.
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
    printcolumn = r#"{"name":"ACTIVE","type":"integer","jsonPath":".status.active","description":"Nodes that pull now"}"#,
    printcolumn = r#"{"name":"SUCCEED","type":"integer","jsonPath":".status.succeeded","description":"Nodes that have the image"}"#,
    printcolumn = r#"{"name":"FAILED","type":"integer","jsonPath":".status.failed","description":"Nodes where the pull failed"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"MESSAGE","type":"string","jsonPath":".status.message","description":"Where the job stands"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobSpec {
    /// The image, such as nginx:1.9.1 or registry.example/team/app@sha256:….
    #[serde(default)]
    pub image: String,
    /// Where, how, and for how long.
    #[serde(flatten)]
    pub template: PullJobTemplate,
}

/// What ImagePullJob and ImageListPullJob have in common.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullJobTemplate {
    /// Secrets of the job's own namespace, type kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg, for private
    /// registries. Cannot be changed later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
    /// The nodes, by names or by labels: not both. Without it, and without podSelector: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<NodeSelector>,
    /// The nodes on which pods of the job's namespace with these labels run. Not together with selector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<PodSelector>,
    /// How many nodes pull at the same time: an integer, or an integer in quotes; no percentage. 0 pauses. Default 1.
    /// That of an ImageListPullJob bounds the nodes that are busy with any image of the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<IntOrString>,
    /// Limits of each node's pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullLimits>,
    /// When the job is over.
    #[serde(default)]
    pub completion_policy: CompletionPolicy,
    /// Metadata that the container runtime is given with the pull, as the kubelet gives it that of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
    /// Always: ask the registry each time. IfNotPresent (default): only where the node does not have the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// Nodes by names or by labels.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Names of nodes. Those without a NodeImage are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
    /// Labels that a node has, every one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Requirements for labels: In, NotIn, Exists, DoesNotExist. Every one is to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<LabelSelectorRequirement>>,
}

/// Pods by labels.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSelector {
    /// Labels that a pod has, every one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Requirements for labels: In, NotIn, Exists, DoesNotExist. Every one is to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<LabelSelectorRequirement>>,
    /// Labels that stand here without matchLabels around them, as in Kruise's English manual: they count as such.
    #[serde(flatten)]
    #[schemars(skip)]
    pub plain: BTreeMap<String, String>,
}

/// Limits of one node's pull.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullLimits {
    /// Time for one try, in seconds. Default 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// Tries after the first that failed. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
}

/// When a job is over.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CompletionPolicy {
    /// Always (default): once each node has succeeded or failed. Never: the image is pulled again every 24 hours.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// Time for the whole job, in seconds; longer than pullPolicy.timeoutSeconds. Nodes that have not succeeded by
    /// then count as failed. Only with Always. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// The job is deleted this many seconds after it is over. Only with Always. Unset: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Metadata for the container runtime.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxConfig {
    /// Becomes PodSandboxConfig.labels of the CRI call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Becomes PodSandboxConfig.annotations of the CRI call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// Where an ImagePullJob stands. Written by cloudcore alone.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobStatus {
    /// When cloudcore first took the job up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Nodes of the job.
    #[serde(default)]
    pub desired: i32,
    /// Nodes that pull now.
    #[serde(default)]
    pub active: i32,
    /// Nodes that have the image.
    #[serde(default)]
    pub succeeded: i32,
    /// Nodes where it failed.
    #[serde(default)]
    pub failed: i32,
    /// Where the job stands, or why it is refused.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The nodes where it failed, by name. Why, their NodeImages say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_nodes: Vec<String>,
}
