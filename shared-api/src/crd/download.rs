//! The download terms of a job: the part of its spec that edges get with each task.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Limits of the download on each node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DownloadSpec {
    /// Bytes a second on each node, over all images of the job, such as 2Mi. A cap of the node itself holds as well. At
    /// least 1Ki. Unset: no cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(k|Ki|M|Mi|G|Gi|T|Ti)?$"))]
    pub max_rate: Option<String>,
    /// Whether the nodes of a site download each layer once and share it. The site is the value of their label
    /// topology.kubernetes.io/zone, or of the label in cloudcore-prepull's --site-label. Needs agents that listen for their
    /// neighbours (--peer-listen). Default: cloudcore-prepull's --share-within-site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_within_site: Option<bool>,
    /// Bytes a second that all nodes of a site together download over its uplink for this job, such as 4Mi; with
    /// shareWithinSite. What neighbours send each other does not count. At least 1Ki. Unset: no cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(k|Ki|M|Mi|G|Gi|T|Ti)?$"))]
    pub max_site_rate: Option<String>,
    /// Deltas: a node that has an earlier version of an image downloads what has changed, if the registry has a delta from
    /// that version (kubectl prepull delta makes them). Auto: where one fits, and otherwise the layers. Never: always the
    /// layers. Require: an image with more than 1 MiB to download fails without a delta, for links on which a whole image is
    /// too expensive. Needs agents of this release. Default: Auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^(Auto|Never|Require)$"))]
    pub deltas: Option<String>,
}

/// A recurring time in which nodes may download.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WindowSpec {
    /// Days on which the window opens: Mon, Tue, Wed, Thu, Fri, Sat, Sun. Unset: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), inner(regex(pattern = r"^(Mon|Tue|Wed|Thu|Fri|Sat|Sun)$")))]
    pub days: Vec<String>,
    /// When it opens, HH:MM by the clocks of its time zone. Where they skip this time, at the first moment after it; where
    /// they show it twice, at the first of both.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub start: String,
    /// How long it stays open, such as 4h, 90m or 1h30m. At most 168h.
    #[schemars(length(max = 32), regex(pattern = r"^([0-9]+(h|m|s))+$"))]
    pub duration: String,
    /// Time zone of start and days: a name of the IANA database such as Europe/Berlin, or Node for that of each node, which
    /// is UTC where the node does not know it.
    #[schemars(length(max = 64))]
    pub time_zone: String,
}

/// The signatures that the images must have.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifySpec {
    /// Where the public keys are. A signature by any of them is enough.
    #[schemars(length(min = 1, max = 8))]
    pub keys: Vec<VerifyKey>,
    /// Enforce: an image without a valid signature is not pulled, and fails. Warn: it is pulled, and the status has the
    /// reason. Default: Enforce.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^(Enforce|Warn)$"))]
    pub mode: Option<String>,
}

/// A place of public keys.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyKey {
    /// Secret, {namespace}/{name}, of any type: each of its data keys that ends in .pub is a cosign public key as PEM. Its
    /// owner has to allow the use, as for a registry secret.
    pub secret_ref: String,
}
