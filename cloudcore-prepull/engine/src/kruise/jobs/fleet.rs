//! The nodes that have a NodeImage, and which of them can be reached.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::task::NodeName;

use crate::shared::delay_queue::DelayQueue;

/// So long an offline node keeps its slots: the longest wait of an edge before it connects again. After a start of
/// cloudcore no node is online, and those that are at work are not to be joined by as many others.
pub(super) const OFFLINE_GRACE: Duration = Duration::from_secs(60);

/// Shared by all jobs that count on the node.
pub(super) type Node = Arc<NodeName>;
type Labels = BTreeMap<String, String>;

/// Whether a node can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It has a session.
    Online,
    /// Not, for less than [`OFFLINE_GRACE`].
    Fading,
    /// Not for longer.
    Away,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) name: Node,
    pub(super) labels: Arc<Labels>,
    pub(super) presence: Presence,
}

#[derive(Debug, Default)]
pub(super) struct Fleet {
    nodes: HashMap<NodeName, Known>,
    /// When a node that is offline is away.
    fading: DelayQueue<Node>,
}

impl Fleet {
    pub(super) fn get(&self, node: &NodeName) -> Option<&Known> {
        self.nodes.get(node)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Known> {
        self.nodes.values()
    }

    /// It is there, with these labels.
    pub(super) fn add(&mut self, node: &NodeName, labels: Arc<Labels>, now: Timestamp) -> &Known {
        let known = self.nodes.entry(node.clone()).or_insert_with(|| {
            let name = Arc::new(node.clone());
            self.fading.set(&name, Some(away_at(now)));
            Known { name, labels: Arc::default(), presence: Presence::Fading }
        });
        known.labels = labels;
        known
    }

    pub(super) fn remove(&mut self, node: &NodeName) {
        if let Some(known) = self.nodes.remove(node) {
            self.fading.set(&known.name, None);
        }
    }

    /// It has a session, or none. Its presence, where that has changed.
    pub(super) fn online(&mut self, node: &NodeName, online: bool, now: Timestamp) -> Option<Presence> {
        let known = self.nodes.get_mut(node)?;
        if online == (known.presence == Presence::Online) {
            return None;
        }
        known.presence = if online { Presence::Online } else { Presence::Fading };
        self.fading.set(&known.name, (!online).then(|| away_at(now)));
        Some(known.presence)
    }

    /// A node that is away by now.
    pub(super) fn next_away(&mut self, now: Timestamp) -> Option<Node> {
        let node = self.fading.pop_due(now)?;
        if let Some(known) = self.nodes.get_mut(&*node) {
            known.presence = Presence::Away;
        }
        Some(node)
    }

    /// When [`Self::next_away`] has one.
    pub(super) fn wakeup(&self) -> Option<Timestamp> {
        self.fading.next_due()
    }
}

fn away_at(since: Timestamp) -> Timestamp {
    since.checked_add(OFFLINE_GRACE).unwrap_or(Timestamp::MAX)
}
