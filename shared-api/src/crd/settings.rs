//! `ImagePrePullSettings`: settings of agents, for groups of nodes.
#![allow(clippy::struct_excessive_bools)] // the KubeSchema derive repeats the fields

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use serde::{Deserialize, Serialize};

use super::defaults::correct;
use super::download::WindowSpec;

/// Settings of the agents on some nodes.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "operations.kubeedge.io",
    version = "v1alpha2",
    kind = "ImagePrePullSettings",
    plural = "imageprepullsettings",
    singular = "imageprepullsettings",
    shortname = "ipps",
    status = "ImagePrePullSettingsStatus",
    doc = "Settings of the agents on some edge nodes. A node's own configuration is the upper bound: of each setting, the stricter is in force. Where several choose a node, those that are later by name override earlier ones, setting by setting.",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Nodes","type":"integer","jsonPath":".status.nodes"}"#,
    printcolumn = r#"{"name":"Informed","type":"integer","jsonPath":".status.informed"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"Ready\")].message"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.nodeNames) && size(self.nodeNames) > 0 ? !has(self.labelSelector) : has(self.labelSelector)").message("set exactly one of nodeNames and labelSelector")
)]
pub struct ImagePrePullSettingsSpec {
    /// Nodes by name. Exactly one of nodeNames and labelSelector must be set. Nodes that are not edge nodes are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000))]
    pub node_names: Vec<String>,
    /// Nodes by label; {} for all edge nodes. Exactly one of nodeNames and labelSelector must be set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// Bytes a second that all pulls of a node together may download, such as 2Mi. At least 1Ki. Unset: the node's own cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(k|Ki|M|Mi|G|Gi|T|Ti)?$"))]
    pub max_download_rate: Option<String>,
    /// Bytes a second that all neighbours together may read from a node, such as 10Mi. At least 1Ki. Unset: the node's own
    /// cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(k|Ki|M|Mi|G|Gi|T|Ti)?$"))]
    pub peer_max_upload_rate: Option<String>,
    /// When nodes may download, for any job: while one of these windows is open, and one of the node's own, and one of the
    /// job's. Unset: only the others count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub windows: Vec<WindowSpec>,
    /// How full the image file system may become by a pull, in percent. Unset: the node's own threshold, which is 85 unless
    /// its configuration has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub image_gc_high_threshold: Option<i64>,
    /// Whether images that nothing needs are removed where one to be pulled doesn't fit otherwise. A node with makeRoom:
    /// false in its own configuration never removes any. Unset: as in the node's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub make_room: Option<bool>,
    /// How long nodes keep what unfinished pulls have fetched, once no job wants it, such as 72h; from 1m to 336h. A full disk
    /// ends it earlier. Unset: the node's own time, which is 24h unless its configuration has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^([0-9]+(h|m|s))+$"))]
    pub keep_unfinished: Option<String>,
}

/// What has become of the settings.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullSettingsStatus {
    /// The generation that this status is about.
    #[serde(default)]
    pub observed_generation: i64,
    /// Edge nodes that the settings choose.
    #[serde(default)]
    pub nodes: u32,
    /// Those of them with agents that are connected and have their settings in force.
    #[serde(default)]
    pub informed: u32,
    /// The condition Ready: whether every connected node that is chosen has its settings in force.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// The definition for the cluster.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = ImagePrePullSettings::crd();
    correct(&mut crd, |_| {});
    crd
}
