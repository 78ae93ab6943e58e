//! The nodes that have a NodeImage, and which of them can be reached.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::task::NodeName;

use crate::shared::delay_queue::DelayQueue;

/// How long an offline node keeps its slots: the longest wait of an edge before it connects again. After a start of
/// cloudcore no node is online yet; without this grace as many others would begin beside those that are at work.
pub(super) const OFFLINE_GRACE: Duration = Duration::from_secs(60);

/// A node's name, shared by all jobs that have the node.
pub(super) type SharedName = Arc<NodeName>;
type NodeLabels = BTreeMap<String, String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Online,
    /// It has had no session for less than [`OFFLINE_GRACE`].
    RecentlyOffline,
    /// It has had no session for longer.
    Offline,
}

#[derive(Debug)]
pub(super) struct FleetNode {
    pub(super) name: SharedName,
    pub(super) labels: Arc<NodeLabels>,
    pub(super) presence: Presence,
}

#[derive(Debug, Default)]
pub(super) struct KruiseFleet {
    nodes: HashMap<NodeName, FleetNode>,
    /// When the grace of each recently offline node ends.
    grace_ends: DelayQueue<SharedName>,
}

impl KruiseFleet {
    pub(super) fn get(&self, node: &NodeName) -> Option<&FleetNode> {
        self.nodes.get(node)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &FleetNode> {
        self.nodes.values()
    }

    /// Adds a node, or replaces its labels.
    pub(super) fn put(&mut self, node: &NodeName, labels: Arc<NodeLabels>, now: Timestamp) -> &FleetNode {
        let known = self.nodes.entry(node.clone()).or_insert_with(|| {
            let name = Arc::new(node.clone());
            self.grace_ends.set(&name, Some(grace_end(now)));
            FleetNode { name, labels: Arc::default(), presence: Presence::RecentlyOffline }
        });
        known.labels = labels;
        known
    }

    pub(super) fn remove(&mut self, node: &NodeName) {
        if let Some(known) = self.nodes.remove(node) {
            self.grace_ends.set(&known.name, None);
        }
    }

    /// Sets whether the node has a session. Returns its presence if that has changed.
    pub(super) fn set_online(&mut self, node: &NodeName, online: bool, now: Timestamp) -> Option<Presence> {
        let known = self.nodes.get_mut(node)?;
        if online == (known.presence == Presence::Online) {
            return None;
        }
        known.presence = if online { Presence::Online } else { Presence::RecentlyOffline };
        self.grace_ends.set(&known.name, (!online).then(|| grace_end(now)));
        Some(known.presence)
    }

    /// Takes the next node with an expired grace: it is [`Presence::Offline`] from now on.
    pub(super) fn pop_offline(&mut self, now: Timestamp) -> Option<SharedName> {
        let node = self.grace_ends.pop_due(now)?;
        if let Some(known) = self.nodes.get_mut(&*node) {
            known.presence = Presence::Offline;
        }
        Some(node)
    }

    /// When [`Self::pop_offline`] has a node to take.
    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        self.grace_ends.next_due()
    }
}

fn grace_end(since: Timestamp) -> Timestamp {
    since.checked_add(OFFLINE_GRACE).unwrap_or(Timestamp::MAX)
}
