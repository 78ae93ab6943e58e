//! ImageListPullJob: several images on many nodes, by one ImagePullJob for each image.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::pull_job::PullJobTemplate;

/// Most images of one list, as in Kruise.
pub const MAX_IMAGES_IN_LIST: usize = 255;

/// The spec of OpenKruise's ImageListPullJob, which pulls several images onto nodes.
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
    printcolumn = r#"{"name":"COMPLETED","type":"integer","jsonPath":".status.completed","description":"Images that have ended on all nodes"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobSpec {
    /// The images; at most 255, each once.
    #[serde(default)]
    pub images: Vec<String>,
    /// Fields that are the same as in an ImagePullJob.
    #[serde(flatten)]
    pub template: PullJobTemplate,
}

/// The state of an ImageListPullJob. Written by cloudcore alone.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobStatus {
    /// When cloudcore began to process the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the last of its ImagePullJobs ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Number of images in the list.
    #[serde(default)]
    pub desired: i32,
    /// Number of ImagePullJobs with nodes that are pulling.
    #[serde(default)]
    pub active: i32,
    /// Number of ImagePullJobs that have ended.
    #[serde(default)]
    pub completed: i32,
    /// Number of ImagePullJobs that succeeded on every node.
    #[serde(default)]
    pub succeeded: i32,
    /// Why the list is refused. Kruise has no such field; its webhook refuses the object instead.
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
    /// Name of the ImagePullJob.
    #[serde(default)]
    pub image_pull_job: String,
    /// Image of the ImagePullJob.
    #[serde(default)]
    pub name: String,
    /// Where to find the details.
    #[serde(default)]
    pub message: String,
}
