//! The nodes of all sites, each with a small number.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use prepull_api::task::NodeName;

use super::Time;

/// The index of a node in [`SiteNodes`]. Another node may get it once the site has forgotten this one. Timers and places in a
/// round may still name it: they only lead to a look.
pub(super) type NodeId = u32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct SiteNodes {
    by_name: HashMap<NodeName, NodeId>,
    all: Vec<SiteNode>,
    free: Vec<NodeId>,
}

/// A node, with its counts over all blobs.
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Debug, Default)]
pub(super) struct SiteNode {
    pub(super) name: NodeName,
    /// The value of its site label. `None`: it shares with no other node.
    pub(super) site: Option<Arc<str>>,
    pub(super) is_listed: bool,
    pub(super) is_online: bool,
    /// When its session began.
    pub(super) online_since: Time,
    /// A node without a session is expected back until then.
    pub(super) back_until: Time,
    /// Its addresses for neighbours.
    pub(super) addresses: Option<Arc<[String]>>,
    /// Whether it serves blobs that are still arriving, and can read them.
    pub(super) streams: bool,
    pub(super) reads_streams: bool,
    /// The books of its site that it is in.
    pub(super) books: BTreeSet<u32>,
    /// Blobs that it waits for.
    pub(super) waiting: usize,
    /// Downloads over the uplink.
    pub(super) carries: usize,
    /// Its readers.
    pub(super) serves: usize,
    /// Readers of blobs that are still arriving.
    pub(super) streamed: usize,
    pub(super) next_book: u32,
    pub(super) trust: NodeTrust,
}

/// Findings of other nodes about a node.
#[derive(Debug, Default)]
pub(super) struct NodeTrust {
    /// It reaches no neighbour, until then.
    pub(super) loner_until: Time,
    /// Its blobs aren't offered before.
    pub(super) no_holder_until: Time,
    /// Before, it gets a lease only if no other node can.
    pub(super) no_lease_until: Time,
    /// The last lost lease with blame.
    pub(super) lost_at: Option<Time>,
    /// The last node that complained about wrong bytes.
    pub(super) damaged: Option<(NodeName, Time)>,
    /// A neighbour got bytes from it.
    pub(super) is_reached: bool,
    /// A reader has found that it hasn't a blob.
    pub(super) has_gone: bool,
    /// It is in a pair of nodes that can't reach each other.
    pub(super) has_unreachable: bool,
}

impl SiteNode {
    /// The site that lacks it: its Node is there, and it has no session.
    pub(super) fn missing_at(&self) -> Option<Arc<str>> {
        self.site.clone().filter(|_| self.is_listed && !self.is_online)
    }

    /// Whether a neighbour can be sent to it.
    pub(super) fn serves_now(&self) -> bool {
        self.is_online && self.addresses.is_some()
    }

    /// The same, unless its blobs aren't offered now.
    pub(super) fn is_source(&self, now: Time) -> bool {
        self.serves_now() && self.trust.no_holder_until <= now
    }

    /// Whether it gets leases that other nodes can have too.
    pub(super) fn may_carry(&self, now: Time) -> bool {
        self.trust.no_lease_until <= now
    }

    /// Whether it's worth waiting for while its session is gone.
    pub(super) fn is_awaited(&self, now: Time) -> bool {
        !self.is_online && self.addresses.is_some() && self.back_until > now
    }
}

impl SiteNodes {
    pub(super) fn id(&self, name: &NodeName) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    pub(super) fn id_or_new(&mut self, name: &NodeName) -> NodeId {
        if let Some(id) = self.id(name) {
            return id;
        }
        let node = SiteNode { name: name.clone(), ..SiteNode::default() };
        let id = self.free.pop().unwrap_or_else(|| {
            self.all.push(SiteNode::default());
            NodeId::try_from(self.all.len() - 1).unwrap_or(NodeId::MAX)
        });
        self[id] = node;
        self.by_name.insert(name.clone(), id);
        id
    }

    /// Removes a node that no site refers to.
    pub(super) fn remove(&mut self, id: NodeId) {
        let node = std::mem::take(&mut self[id]);
        self.by_name.remove(&node.name);
        self.free.push(id);
    }

    pub(super) fn listed_ids(&self) -> impl Iterator<Item = NodeId> {
        self.by_name.values().copied().filter(|id| self[*id].is_listed)
    }

    /// Bytes of memory, roughly.
    pub(super) fn cost(&self) -> usize {
        self.all.len() * (size_of::<SiteNode>() + 150)
    }
}

impl std::ops::Index<NodeId> for SiteNodes {
    type Output = SiteNode;

    fn index(&self, id: NodeId) -> &SiteNode {
        &self.all[id as usize]
    }
}

impl std::ops::IndexMut<NodeId> for SiteNodes {
    fn index_mut(&mut self, id: NodeId) -> &mut SiteNode {
        &mut self.all[id as usize]
    }
}
