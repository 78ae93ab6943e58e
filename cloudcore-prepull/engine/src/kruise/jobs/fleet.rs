//! The nodes that have a NodeImage, and which of them can be reached.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::task::NodeName;

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
    /// While it is offline.
    since: Timestamp,
}

#[derive(Debug, Default)]
pub(super) struct Fleet {
    nodes: HashMap<NodeName, Known>,
    /// When a node that is offline is away.
    fading: BTreeSet<(Timestamp, Node)>,
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
            self.fading.insert((away_at(now), name.clone()));
            Known { name, labels: Arc::default(), presence: Presence::Fading, since: now }
        });
        known.labels = labels;
        known
    }

    pub(super) fn remove(&mut self, node: &NodeName) {
        if let Some(known) = self.nodes.remove(node) {
            self.fading.remove(&(away_at(known.since), known.name));
        }
    }

    /// It has a session, or none. Its presence, where that has changed.
    pub(super) fn online(&mut self, node: &NodeName, online: bool, now: Timestamp) -> Option<Presence> {
        let known = self.nodes.get_mut(node)?;
        if online == (known.presence == Presence::Online) {
            return None;
        }
        if online {
            self.fading.remove(&(away_at(known.since), known.name.clone()));
            known.presence = Presence::Online;
        } else {
            self.fading.insert((away_at(now), known.name.clone()));
            (known.presence, known.since) = (Presence::Fading, now);
        }
        Some(known.presence)
    }

    /// A node that is away by now.
    pub(super) fn next_away(&mut self, now: Timestamp) -> Option<Node> {
        let (_, node) = self.fading.first().filter(|(at, _)| *at <= now).cloned()?;
        self.fading.pop_first();
        if let Some(known) = self.nodes.get_mut(&*node) {
            known.presence = Presence::Away;
        }
        Some(node)
    }

    /// When [`Self::next_away`] has one.
    pub(super) fn wakeup(&self) -> Option<Timestamp> {
        self.fading.first().map(|(at, _)| *at)
    }
}

fn away_at(since: Timestamp) -> Timestamp {
    since.checked_add(OFFLINE_GRACE).unwrap_or(Timestamp::MAX)
}
