//! Several images on many nodes: one ImagePullJob each.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::PullJobTemplate;

/// Images of one list, at most: Kruise's bound.
pub const MAX_LIST: usize = 255;

/// Pulls images onto nodes, as OpenKruise's ImageListPullJob does.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "ImageListPullJob",
    plural = "imagelistpulljobs",
    singular = "imagelistpulljob",
    namespaced,
    status = "ImageListPullJobStatus",
    doc = "Pulls several images onto nodes, by an ImagePullJob for each. OpenKruise's API, served by cloudcore-prepull.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"TOTAL","type":"integer","jsonPath":".status.desired","description":"Images of the list"}"#,
    printcolumn = r#"{"name":"SUCCEEDED","type":"integer","jsonPath":".status.succeeded","description":"Images that are on all nodes"}"#,
    printcolumn = r#"{"name":"COMPLETED","type":"integer","jsonPath":".status.completed","description":"Images that are through with all nodes"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobSpec {
    /// The images; at most 255, each once.
    #[serde(default)]
    pub images: Vec<String>,
    /// Where, how, and for how long.
    #[serde(flatten)]
    pub template: PullJobTemplate,
}

/// Where an ImageListPullJob stands. Written by cloudcore alone.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobStatus {
    /// When cloudcore first took the job up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When all of its ImagePullJobs were over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Images of the list.
    #[serde(default)]
    pub desired: i32,
    /// ImagePullJobs with nodes that pull now.
    #[serde(default)]
    pub active: i32,
    /// ImagePullJobs that are over.
    #[serde(default)]
    pub completed: i32,
    /// ImagePullJobs that succeeded on every node.
    #[serde(default)]
    pub succeeded: i32,
    /// Why the list is refused. Kruise has no such field: there, its webhook says it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// ImagePullJobs with nodes that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_image_statuses: Vec<FailedImageStatus>,
}

/// An ImagePullJob with nodes that failed.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailedImageStatus {
    /// Its name.
    #[serde(default)]
    pub image_pull_job: String,
    /// Its image.
    #[serde(default)]
    pub name: String,
    /// How to find out more.
    #[serde(default)]
    pub message: String,
}
