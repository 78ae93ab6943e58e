//! The nodes of all sites, by a small number.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use prepull_api::task::NodeName;

use super::Time;

/// The place of a node in [`Nodes`]. It is used again once nothing refers to the node.
pub(super) type NodeId = u32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    by_name: HashMap<NodeName, NodeId>,
    all: Vec<Node>,
    free: Vec<NodeId>,
}

/// A node, and what counts over all of its blobs.
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) name: NodeName,
    /// The value of its label. `None`: it shares with no other node.
    pub(super) site: Option<Arc<str>>,
    pub(super) is_listed: bool,
    pub(super) is_online: bool,
    /// Until when it is expected back, if it has lost its session just now.
    pub(super) back_until: Time,
    /// Where it serves its neighbours.
    pub(super) addresses: Option<Arc<[String]>>,
    /// Whether it serves blobs that are still arriving, and can read them.
    pub(super) streams: bool,
    pub(super) reads_streams: bool,
    /// The books of its site that it is in.
    pub(super) books: BTreeSet<u32>,
    /// Blobs that it waits for.
    pub(super) waiting: usize,
    pub(super) has_reminder: bool,
    /// Downloads over the uplink.
    pub(super) carries: usize,
    /// Readers, and those of them whose blob is still arriving here.
    pub(super) serves: usize,
    pub(super) streamed: usize,
    pub(super) is_offered: bool,
    pub(super) next_book: u32,
    pub(super) trust: NodeTrust,
}

/// What others have found out about a node. Everything in it ends with its time.
#[derive(Debug, Default)]
pub(super) struct NodeTrust {
    /// It reaches no neighbour.
    pub(super) loner_until: Time,
    /// Its blobs aren't offered.
    pub(super) no_holder_until: Time,
    /// It gets no lease while another node can have it.
    pub(super) no_lease_until: Time,
    /// The last lost lease with blame.
    pub(super) lost_at: Option<Time>,
    /// The last node that complained about wrong bytes.
    pub(super) damaged: Option<(NodeId, Time)>,
    /// A neighbour has got something from it.
    pub(super) is_reached: bool,
    /// It is in a pair of nodes that can't reach each other.
    pub(super) has_unreachable: bool,
}

impl Node {
    /// Whether a neighbour can be sent to it.
    pub(super) fn serves_now(&self) -> bool {
        self.is_online && self.addresses.is_some()
    }

    /// Whether it serves, and is worth waiting for while its session is gone.
    pub(super) fn is_awaited(&self, now: Time) -> bool {
        !self.is_online && self.addresses.is_some() && self.back_until > now
    }
}

impl Nodes {
    pub(super) fn id(&self, name: &NodeName) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    pub(super) fn id_or_new(&mut self, name: &NodeName) -> NodeId {
        if let Some(id) = self.id(name) {
            return id;
        }
        let node = Node { name: name.clone(), ..Node::default() };
        let id = self.free.pop().unwrap_or_else(|| {
            self.all.push(Node::default());
            NodeId::try_from(self.all.len() - 1).unwrap_or(NodeId::MAX)
        });
        self[id] = node;
        self.by_name.insert(name.clone(), id);
        id
    }

    /// Forgets a node that no site refers to.
    pub(super) fn remove(&mut self, id: NodeId) {
        let node = std::mem::take(&mut self[id]);
        self.by_name.remove(&node.name);
        self.free.push(id);
    }

    pub(super) fn listed(&self) -> impl Iterator<Item = NodeId> {
        self.by_name.values().copied().filter(|id| self[*id].is_listed)
    }

    /// Bytes of memory, roughly.
    pub(super) fn cost(&self) -> usize {
        self.all.len() * (size_of::<Node>() + 150)
    }
}

impl std::ops::Index<NodeId> for Nodes {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        &self.all[id as usize]
    }
}

impl std::ops::IndexMut<NodeId> for Nodes {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.all[id as usize]
    }
}
