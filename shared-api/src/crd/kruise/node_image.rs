//! NodeImage: the images that one node is to pull, and their state.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pull_job::SandboxConfig;

/// Most images of one NodeImage, as in Kruise.
pub const MAX_IMAGES: usize = 256;
/// Most tags of one image. Kruise has no bound, but the API server needs one to accept the CEL rules; this is more than
/// a node has room for.
pub const MAX_TAGS: usize = 256;

/// The spec of OpenKruise's NodeImage, which has the name of its node: the images that the node is to pull.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "NodeImage",
    plural = "nodeimages",
    singular = "nodeimage",
    status = "NodeImageStatus",
    doc = "The images that one node is to pull, and their state. cloudcore-prepull creates one for each node, with the name and the labels of the node. OpenKruise's API, served by cloudcore-prepull.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"DESIRED","type":"integer","jsonPath":".status.desired","description":"Images of this node"}"#,
    printcolumn = r#"{"name":"PULLING","type":"integer","jsonPath":".status.pulling","description":"Images that are being pulled"}"#,
    printcolumn = r#"{"name":"SUCCEED","type":"integer","jsonPath":".status.succeeded","description":"Images that are on the node"}"#,
    printcolumn = r#"{"name":"FAILED","type":"integer","jsonPath":".status.failed","description":"Images that failed"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageSpec {
    /// Images by name without tag, such as ubuntu or registry.example/team/app. At most 256.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, ImageSpec>,
}

/// The tags of one image that are to be pulled.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageSpec {
    /// Secrets for private registries. A tag that belongs to jobs uses only those in the namespaces of its jobs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<SecretObject>,
    /// Tags of the image, each once.
    #[serde(default)]
    pub tags: Vec<ImageTagSpec>,
    /// Metadata that the container runtime gets with the pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
}

/// The name of a Secret.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretObject {
    /// Namespace of the secret.
    #[serde(default)]
    pub namespace: String,
    /// Name of the secret.
    #[serde(default)]
    pub name: String,
}

/// One tag of an image.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagSpec {
    /// The tag, or a digest, sha256:….
    #[serde(default)]
    pub tag: String,
    /// When the tag was added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// Limits of the pull, and how long its result is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<ImageTagPullPolicy>,
    /// Jobs that requested the tag. The tag is removed when the last of them is gone. None: it was added by hand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owner_references: Vec<ObjectReference>,
    /// Version of the request for this tag. Raising it pulls the tag again.
    #[serde(default)]
    pub version: i64,
    /// Always, or IfNotPresent (default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// The limits of one tag's pull.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagPullPolicy {
    /// How long one try may take, in seconds. Default 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// How often a failed pull is retried. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
    /// Required. The tag is removed from spec and status this many seconds after it succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "ttlSecondsAfterFinished")]
    pub ttl_seconds_after_finished: Option<i32>,
    /// How long all tries together may take, in seconds from the start of the pull. Unset: no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
}

/// The state of the images. Written by cloudcore alone, from the messages of the node's edge.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageStatus {
    /// Number of tags in the spec.
    #[serde(default)]
    pub desired: i32,
    /// Number of tags that are on the node.
    #[serde(default)]
    pub succeeded: i32,
    /// Number of tags that failed.
    #[serde(default)]
    pub failed: i32,
    /// Number of tags that are being pulled.
    #[serde(default)]
    pub pulling: i32,
    /// Number of tags that wait for their turn, or for the node to be reachable.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting: i32,
    /// State of the images by name without tag.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub image_statuses: BTreeMap<String, ImageStatus>,
}

/// The state of the tags of one image.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// State of the tags, in the order of the spec.
    #[serde(default)]
    pub tags: Vec<ImageTagStatus>,
}

/// The state of one tag.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagStatus {
    /// The tag as in the spec.
    #[serde(default)]
    pub tag: String,
    /// Waiting, Pulling, Succeeded or Failed.
    #[serde(default)]
    pub phase: PullPhase,
    /// Percentage of the image's bytes that are on the node.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub progress: i32,
    /// When the node was asked to pull the tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the tag succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Version of the request, in the spec, that this state describes.
    #[serde(default)]
    pub version: i64,
    /// Name of the image, and its id in the container runtime.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "imageID")]
    pub image_id: Option<String>,
    /// Why the tag failed, or why its last try did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The phase of a pull.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPhase {
    /// The pull has not begun.
    #[default]
    Waiting,
    /// The pull is running.
    Pulling,
    /// The image is on the node.
    Succeeded,
    /// The image could not be pulled.
    // Also what only a newer version knows.
    #[serde(other)]
    Failed,
}

impl ImageTagStatus {
    /// Whether the given version of the request succeeded or failed.
    pub fn has_ended(&self, version: i64) -> bool {
        self.version == version && self.completion_time.is_some()
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &i32) -> bool {
    *value == 0
}
