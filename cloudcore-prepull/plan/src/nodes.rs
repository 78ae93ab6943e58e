//! The nodes of a plan, and the images that their kubelets list.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use prepull_api::image::Reference;
use prepull_api::task::NodeName;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::plan::{JobPlan, NodePlan};
use prepull_registry::manifest::Platform;

/// A Node, and the images that its kubelet lists in the status: at most 50 by default, the largest first.
#[derive(Clone, Debug)]
pub struct ListedNode {
    pub(super) view: NodeView,
    pub(super) images: Vec<Held>,
}

/// An image of a node, as a manifest or an index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Held {
    /// Without the registry, like `shop/web`.
    pub(super) repository: String,
    pub(super) digest: String,
}

/// A node that downloads, for the sizes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Receiver {
    pub(super) platform: Platform,
    /// Images of the planned repositories that the node has.
    pub(super) held: BTreeSet<Held>,
}

impl ListedNode {
    pub(super) fn from_node(node: &Node) -> Self {
        let listed = node.status.iter().flat_map(|status| status.images.iter().flatten());
        let names = listed.flat_map(|image| image.names.iter().flatten());
        let images = names.filter_map(|name| {
            let reference = Reference::parse(name).ok()?.normalized();
            let digest = reference.digest()?.to_owned();
            Some(Held { repository: reference.repository().to_owned(), digest })
        });
        Self { view: NodeView::from_node(node), images: images.collect() }
    }
}

/// The nodes of a plan, in its order.
pub(super) fn receivers(
    plan: &JobPlan,
    nodes: &BTreeMap<NodeName, NodeView>,
    images: &BTreeMap<NodeName, Vec<Held>>,
) -> Vec<Receiver> {
    let receiver = |(name, plan): &(NodeName, Arc<NodePlan>)| {
        let platform = nodes.get(name).map(|node| platform_of(&node.labels)).unwrap_or_default();
        let is_planned =
            |held: &&Held| plan.images.iter().any(|image| image.pull.repository() == held.repository);
        let held = images.get(name).into_iter().flatten().filter(is_planned).cloned().collect();
        Receiver { platform, held }
    };
    plan.nodes.iter().map(receiver).collect()
}

/// The platform of a node, by the labels that its kubelet sets. Without the label of its processor it's not known.
fn platform_of(labels: &BTreeMap<String, String>) -> Platform {
    let label = |name: &str| {
        let found = labels.get(&format!("kubernetes.io/{name}"));
        found.or_else(|| labels.get(&format!("beta.kubernetes.io/{name}"))).cloned().unwrap_or_default()
    };
    let os = Some(label("os")).filter(|os| !os.is_empty()).unwrap_or_else(|| "linux".to_owned());
    Platform { os, architecture: label("arch"), variant: String::new() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    #[test]
    fn the_platform_of_a_node_is_by_its_labels() {
        for (labels, os, architecture) in [
            (&[("kubernetes.io/arch", "arm64"), ("kubernetes.io/os", "linux")][..], "linux", "arm64"),
            (&[("beta.kubernetes.io/arch", "arm"), ("other/arch", "x")], "linux", "arm"),
            (&[("kubernetes.io/os", "windows")], "windows", ""),
            (&[], "linux", ""),
        ] {
            let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            let [os, architecture] = [os, architecture].map(str::to_owned);
            let expected = Platform { os, architecture, variant: String::new() };
            assert_eq!(platform_of(&labels), expected, "{labels:?}");
        }
    }

    #[test]
    fn a_node_has_what_its_kubelet_lists_by_digest() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        let names =
            [format!("r.io/shop/web@{digest}"), "r.io/shop/web:v1".to_owned(), "<none>@<none>".to_owned()];
        let node = json!({ "metadata": { "name": "edge-1" }, "status": { "images": [{ "names": names }] } });
        let held = Held { repository: "shop/web".to_owned(), digest };
        assert_eq!(ListedNode::from_node(&serde_json::from_value(node).unwrap()).images, [held]);
    }
}
