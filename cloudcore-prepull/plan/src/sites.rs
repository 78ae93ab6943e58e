//! The sites of the nodes, and what the uplink of each would carry.

use std::collections::BTreeMap;
use std::sync::Arc;

use prepull_api::task::NodeName;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::plan::{JobPlan, NodePlan};
use prepull_engine::prepull::validate::DownloadPolicy;
use prepull_engine::sites::SiteSettings;
use serde::Serialize;

use super::KeyedPlans;
use super::nodes::Receiver;
use super::sizes::{SiteSize, Sizes};

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SiteReport {
    /// The value of the label.
    pub(super) site: String,
    pub(super) nodes: Vec<String>,
    pub(super) shared: bool,
    /// With `--sizes`: what its uplink carries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) size: Option<SiteSize>,
    /// With `--sizes`, where the nodes share and the job limits the uplink: the time that all takes at that limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) least_seconds: Option<u64>,
}

/// A node of the plan, with its place in it.
type Placed<'a> = (usize, &'a (NodeName, Arc<NodePlan>));

/// The sites by their names. `sizes`: with the receiver of each node.
pub(super) fn report(
    policy: &DownloadPolicy,
    settings: &SiteSettings,
    plan: &JobPlan,
    nodes: &BTreeMap<NodeName, NodeView>,
    keyed: &KeyedPlans<'_>,
    sizes: Option<(&Sizes, &[Receiver])>,
) -> Vec<SiteReport> {
    let mut by_site: BTreeMap<&str, Vec<Placed<'_>>> = BTreeMap::new();
    for (index, node) in plan.nodes.iter().enumerate() {
        if let Some(site) = site_of(&node.0, settings, nodes) {
            by_site.entry(site).or_default().push((index, node));
        }
    }
    let shared = policy.share.unwrap_or(settings.share_by_default);
    let report = |(site, nodes): (&str, Vec<Placed<'_>>)| {
        let size = sizes.map(|(sizes, receivers)| {
            sizes.of_site(nodes.iter().filter_map(|(index, (_, node))| {
                Some((node.as_ref(), keyed.images_of(node), receivers.get(*index)?))
            }))
        });
        let rate = policy.max_site_rate.filter(|_| shared);
        SiteReport {
            site: site.to_owned(),
            nodes: nodes.into_iter().map(|(_, (name, _))| name.0.clone()).collect(),
            shared,
            size,
            least_seconds: size.zip(rate).map(|(size, rate)| size.shared_bytes.div_ceil(rate.get())),
        }
    };
    by_site.into_iter().map(report).collect()
}

/// Nodes that would share if it were known which site they are at.
pub(super) fn warning(
    policy: &DownloadPolicy,
    settings: &SiteSettings,
    plan: &JobPlan,
    nodes: &BTreeMap<NodeName, NodeView>,
) -> Option<String> {
    let without = || plan.nodes.iter().filter(|(name, _)| site_of(name, settings, nodes).is_none());
    let (first, _) = without().next()?;
    policy.share.unwrap_or(settings.share_by_default).then(|| {
        format!(
            "{} of {} nodes, such as {first}, would each download for itself: their Nodes have no label {}",
            without().count(),
            plan.nodes.len(),
            settings.label
        )
    })
}

fn site_of<'a>(
    node: &NodeName,
    settings: &SiteSettings,
    nodes: &'a BTreeMap<NodeName, NodeView>,
) -> Option<&'a str> {
    settings.site_of(&nodes.get(node)?.labels)
}
