//! The part of a job that upgrades agents.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Upgrades the agents of the nodes to the version in the image of the job, which is that of the DaemonSet. Each machine
/// checks the signature with its own key, tries the new version, and goes back by itself if that one doesn't connect.
/// Agents in containers are left to Kubernetes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeSpec {
    /// Time that the new version has on each node to connect, with a container runtime that answers, such as 90s; from 10s
    /// to 24h, and shorter than timeoutSeconds, which has the download too. 2m by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^([0-9]+(h|m|s))+$"))]
    pub within: Option<String>,
    /// Whether agents that a package of the operating system installed are upgraded too. They fail by default: upgrade
    /// their package.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packages: bool,
}
