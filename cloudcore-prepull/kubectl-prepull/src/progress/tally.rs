//! Sums over the reports of a job, of constant size however many nodes there are.

use std::collections::BTreeMap;

use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::crd::status::{ImageBytes, NodePhase, NodeStatus, Tristate};
use prepull_api::failure::FailureCode;
use prepull_api::task::KubeletRecord;
use serde::Serialize;

use crate::screen::sanitize_line;

/// Nodes that are named where there are many alike.
pub(crate) const EXAMPLES: usize = 3;
/// Different reasons that are counted in one group. Of more, those that come later are counted only in the group.
const REASONS: usize = 50;
/// Nodes at work that are shown, of all.
const AT_WORK: usize = 20;

/// Nodes that have something in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeGroup {
    pub(crate) nodes: u64,
    pub(crate) examples: Vec<String>,
    reasons: BTreeMap<String, u64>,
}

impl NodeGroup {
    pub(crate) fn add(&mut self, node: &str) {
        self.nodes += 1;
        if self.examples.len() < EXAMPLES {
            self.examples.push(node.to_owned());
        }
    }

    fn count_reason(&mut self, reason: &str, nodes: u64) {
        if self.reasons.len() < REASONS || self.reasons.contains_key(reason) {
            *self.reasons.entry(reason.to_owned()).or_default() += nodes;
        }
    }

    fn merge(&mut self, other: &Self) {
        self.nodes += other.nodes;
        let missing = EXAMPLES.saturating_sub(self.examples.len());
        self.examples.extend(other.examples.iter().take(missing).cloned());
        for (reason, nodes) in &other.reasons {
            self.count_reason(reason, *nodes);
        }
    }

    /// The most frequent reason, and how many nodes have it.
    pub(crate) fn main_reason(&self) -> Option<(&str, u64)> {
        // The first one in the alphabet, of those that are equally frequent.
        let most = self.reasons.iter().rev().max_by_key(|(_, nodes)| **nodes);
        most.map(|(reason, nodes)| (reason.as_str(), *nodes))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeAtWork {
    pub(crate) node: String,
    /// Its bytes of all images, as far as they are known.
    pub(crate) bytes: ImageBytes,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Bytes of the images with a known size, on all nodes.
    pub(crate) bytes: ImageBytes,
    /// Bytes of these that nodes didn't download, thanks to deltas.
    pub(crate) delta_saved: u64,
    /// Progress of the nodes at work, in whole nodes: three nodes, each half done, are 1.5.
    pub(crate) done_at_work: f64,
    /// Nodes in Failure and Unknown by code.
    pub(crate) failures: BTreeMap<FailureCode, NodeGroup>,
    /// Nodes that wait and say why, by reason.
    pub(crate) waiting: BTreeMap<String, NodeGroup>,
    pub(crate) at_work: Vec<NodeAtWork>,
    /// Nodes with an image that the kubelet will ask the registry for, although it's there, by the first such reason.
    pub(crate) asking: BTreeMap<String, NodeGroup>,
}

impl Tally {
    pub(crate) fn of_report(report: &ImagePrePullReport) -> Self {
        Self::of_nodes(&report.body.node_status)
    }

    pub(crate) fn of_nodes(nodes: &[NodeStatus]) -> Self {
        let mut tally = Self::default();
        for node in nodes {
            tally.add(node);
        }
        tally
    }

    pub(crate) fn sum<'a>(tallies: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for Self { bytes, delta_saved, done_at_work, failures, waiting, at_work, asking } in tallies {
            all.add_bytes(*bytes, *delta_saved);
            all.done_at_work += done_at_work;
            for (code, group) in failures {
                all.failures.entry(*code).or_default().merge(group);
            }
            for (reason, group) in waiting {
                all.waiting.entry(reason.clone()).or_default().merge(group);
            }
            for (reason, group) in asking {
                all.asking.entry(reason.clone()).or_default().merge(group);
            }
            let room = AT_WORK.saturating_sub(all.at_work.len());
            all.at_work.extend(at_work.iter().take(room).cloned());
        }
        all
    }

    /// Saturates: two nodes that lie reach the end of the range.
    fn add_bytes(&mut self, bytes: ImageBytes, delta_saved: u64) {
        self.bytes.done = self.bytes.done.saturating_add(bytes.done);
        self.bytes.total = self.bytes.total.saturating_add(bytes.total);
        self.delta_saved = self.delta_saved.saturating_add(delta_saved);
    }

    fn add(&mut self, node: &NodeStatus) {
        let bytes = bytes_of(node);
        let saved = node.image_status.iter().filter_map(|image| image.facts.delta_saved_bytes);
        self.add_bytes(bytes, saved.fold(0, u64::saturating_add));
        if let Some(reason) = ask_reason_of(node).filter(|reason| {
            // Reasons hold the names of files and repositories, so there may be as many as nodes.
            self.asking.len() < REASONS || self.asking.contains_key(reason)
        }) {
            self.asking.entry(reason).or_default().add(&node.node_name);
        }
        match node.phase {
            NodePhase::Failure | NodePhase::Unknown => {
                let group = self.failures.entry(node.code.unwrap_or(FailureCode::Other)).or_default();
                group.add(&node.node_name);
                group.count_reason(&reason_of(node), 1);
            }
            NodePhase::Pending if !node.reason.is_empty() => {
                self.waiting.entry(sanitize_line(&node.reason)).or_default().add(&node.node_name);
            }
            NodePhase::InProgress => {
                if bytes.total > 0 {
                    self.done_at_work += fraction(bytes.done, bytes.total);
                }
                if self.at_work.len() < AT_WORK {
                    let (node, reason) = (node.node_name.clone(), sanitize_line(&node.reason));
                    self.at_work.push(NodeAtWork { node, bytes, reason });
                }
            }
            NodePhase::Pending | NodePhase::Successful => {}
        }
    }
}

/// Why the kubelet will ask the registry for an image of the node. That pods without the recorded secrets have to ask is how
/// it should be for a private image, and doesn't count.
fn ask_reason_of(node: &NodeStatus) -> Option<String> {
    let is_there = node.image_status.iter().filter(|image| image.status == Tristate::True);
    let mut asking = is_there.filter(|image| {
        image.facts.kubelet_record.is_some_and(|record| record != KubeletRecord::SomeCredentials)
    });
    Some(sanitize_line(&asking.next()?.facts.kubelet_record_reason))
}

/// A part of a whole, from 0 to 1.
pub(crate) fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    #[allow(clippy::cast_precision_loss)] // it becomes a bar of some columns
    (part.min(whole) as f64 / whole as f64)
}

/// Bytes of a node's images with a known size.
pub(crate) fn bytes_of(node: &NodeStatus) -> ImageBytes {
    let known = node.image_status.iter().filter_map(|image| image.bytes);
    known.fold(ImageBytes::default(), |sum, bytes| ImageBytes {
        done: sum.done.saturating_add(bytes.done),
        total: sum.total.saturating_add(bytes.total.max(bytes.done)),
        from_peers: [sum.from_peers, bytes.from_peers].into_iter().flatten().reduce(u64::saturating_add),
    })
}

/// The reason of a failed node: its own, or that of its first image with one.
pub(crate) fn reason_of(node: &NodeStatus) -> String {
    let of_images = node.image_status.iter().map(|image| image.reason.as_str());
    let mut reasons = std::iter::once(node.reason.as_str()).chain(of_images);
    sanitize_line(reasons.find(|reason| !reason.is_empty()).unwrap_or_default())
}
