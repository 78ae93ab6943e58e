//! What one node is to have pulled.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::SandboxConfig;

/// Images of one NodeImage, at most: Kruise's bound.
pub const MAX_IMAGES: usize = 256;
/// Tags of one image, at most. Kruise has no bound; one is needed for the rules of the definition, and this is more
/// than a node has room for.
pub const MAX_TAGS: usize = 256;

/// The images that one node is to have, as OpenKruise's NodeImage. Has the node's name.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "NodeImage",
    plural = "nodeimages",
    singular = "nodeimage",
    status = "NodeImageStatus",
    doc = "The images that one node is to pull, and how each fares. Made for each node, with the node's name and labels. OpenKruise's API, served by cloudcore-prepull.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"DESIRED","type":"integer","jsonPath":".status.desired","description":"Images of this node"}"#,
    printcolumn = r#"{"name":"PULLING","type":"integer","jsonPath":".status.pulling","description":"Images that are being pulled"}"#,
    printcolumn = r#"{"name":"SUCCEED","type":"integer","jsonPath":".status.succeeded","description":"Images that are there"}"#,
    printcolumn = r#"{"name":"FAILED","type":"integer","jsonPath":".status.failed","description":"Images that failed"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageSpec {
    /// By the image's name without its tag, such as ubuntu or registry.example/team/app. At most 256.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, ImageSpec>,
}

/// The tags of one image.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageSpec {
    /// Secrets for private registries. A tag that belongs to jobs uses those of its jobs' namespaces only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<SecretObject>,
    /// The tags, each once.
    #[serde(default)]
    pub tags: Vec<ImageTagSpec>,
    /// Metadata that the container runtime is given with the pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
}

/// A secret.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretObject {
    /// Where it is.
    #[serde(default)]
    pub namespace: String,
    /// Its name.
    #[serde(default)]
    pub name: String,
}

/// One tag.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagSpec {
    /// The tag, or a digest, sha256:….
    #[serde(default)]
    pub tag: String,
    /// When the tag came into this list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// Limits of the pull, and how long its outcome is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<ImageTagPullPolicy>,
    /// The jobs that want the tag. It is removed when the last of them is gone. None: somebody wants it by hand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owner_references: Vec<ObjectReference>,
    /// Counts the requests for this tag: raising it has the tag pulled once more.
    #[serde(default)]
    pub version: i64,
    /// Always, or IfNotPresent (default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
}

/// Limits of one tag's pull.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagPullPolicy {
    /// Time for one try, in seconds. Default 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// Tries after the first that failed. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
    /// Required. The tag is removed from spec and status this many seconds after it succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "ttlSecondsAfterFinished")]
    pub ttl_seconds_after_finished: Option<i32>,
    /// Time for all tries together, in seconds, from the start of the pull. Unset: no limit of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
}

/// How the images fare. Written by cloudcore alone, from what the node itself says.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageStatus {
    /// Tags in the spec.
    #[serde(default)]
    pub desired: i32,
    /// Tags that are there.
    #[serde(default)]
    pub succeeded: i32,
    /// Tags that failed.
    #[serde(default)]
    pub failed: i32,
    /// Tags that are being pulled.
    #[serde(default)]
    pub pulling: i32,
    /// Tags that wait for their turn, or for the node to be reachable.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting: i32,
    /// By the image's name without its tag.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub image_statuses: BTreeMap<String, ImageStatus>,
}

/// The tags of one image.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// In the order of the spec.
    #[serde(default)]
    pub tags: Vec<ImageTagStatus>,
}

/// How one tag fares.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagStatus {
    /// As in the spec.
    #[serde(default)]
    pub tag: String,
    /// Waiting, Pulling, Succeeded or Failed.
    #[serde(default)]
    pub phase: PullPhase,
    /// Per cent of the image's bytes that are on the node.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub progress: i32,
    /// When the node was told to pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When it succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// The version of the spec that this is about.
    #[serde(default)]
    pub version: i64,
    /// The image's name, and its id in the container runtime.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "imageID")]
    pub image_id: Option<String>,
    /// Why it failed, or what the last try ran into.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Where a pull stands.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPhase {
    /// Not begun.
    #[default]
    Waiting,
    /// Begun.
    Pulling,
    /// The image is there.
    Succeeded,
    /// It could not be pulled.
    Failed,
}

impl ImageTagStatus {
    /// Whether it succeeded or failed, in this version.
    pub fn has_ended(&self, version: i64) -> bool {
        self.version == version && self.completion_time.is_some()
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &i32) -> bool {
    *value == 0
}
