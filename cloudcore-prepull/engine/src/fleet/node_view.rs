//! The part of a Node that the engines know.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use prepull_api::crd::EDGE_LABEL;
use prepull_api::task::NodeName;
use serde::{Deserialize, Serialize};

const NOT_EDGE: &str = "not an edge node";
pub(crate) const NOT_READY: &str = "NotReady";

/// What planning needs to know of a Node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// The Node's name.
    pub name: NodeName,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether its condition Ready is True.
    pub ready: bool,
}

impl NodeView {
    /// Reads the part of a Node object that matters.
    pub fn from_node(node: &Node) -> Self {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        Self {
            name: NodeName(node.metadata.name.clone().unwrap_or_default()),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            ready: conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True"),
        }
    }

    /// Whether the node has KubeEdge's label for edge nodes. The label's value does not matter.
    pub fn is_edge(&self) -> bool {
        self.labels.contains_key(EDGE_LABEL)
    }

    /// Why a job leaves the node out, if it does.
    pub(crate) fn why_unfit(&self) -> Option<&'static str> {
        if !self.is_edge() {
            Some(NOT_EDGE)
        } else if !self.ready {
            Some(NOT_READY)
        } else {
            None
        }
    }
}
