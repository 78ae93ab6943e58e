//! The records and Nodes in memory, which decide about handshakes.

use std::collections::HashMap;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use tokio::sync::Notify;

use crate::edges::pki::KeyHash;
use prepull_admission::records::record::{NodeRecord, NodeRefusal, Recorded, Standing};
use prepull_admission::records::shard::{SHARDS, Shard, ShardId};

#[derive(Debug)]
pub(super) struct RosterView {
    known: Mutex<KnownRecords>,
    /// Woken when a session may have to end.
    changed: Notify,
    /// Woken when a Node has come.
    arrived: Notify,
}

#[derive(Debug)]
struct KnownRecords {
    shards: Vec<Shard>,
    /// The Nodes, and whether each is an edge node. None where there is no API server, in tests: any may exist then.
    nodes: Option<HashMap<NodeName, bool>>,
}

impl RosterView {
    pub(super) fn new() -> Self {
        let shards = vec![Shard::default(); SHARDS];
        Self {
            known: Mutex::new(KnownRecords { shards, nodes: None }),
            changed: Notify::new(),
            arrived: Notify::new(),
        }
    }

    pub(super) fn shard(&self, id: ShardId) -> Shard {
        self.known.lock().shards[id.index()].clone()
    }

    /// Takes over a stored shard unless we know a newer one: the watch shows our own writes late.
    pub(super) fn take_over(&self, id: ShardId, shard: Shard) {
        let known = &mut self.known.lock().shards[id.index()];
        if is_newer(shard.version.as_deref(), known.version.as_deref()) {
            // Keys that are recorded end no session of a node that isn't revoked. While a fleet connects they change
            // several times a second, and then all sessions would be looked at.
            let may_end_sessions = shard
                .records
                .iter()
                .any(|(node, record)| record.revoked.is_some() && known.records.get(node) != Some(record));
            *known = shard;
            if may_end_sessions {
                self.changed.notify_one();
            }
        }
    }

    /// Whether this version of a shard, or a newer one, is known.
    pub(super) fn is_known(&self, id: ShardId, version: Option<&str>) -> bool {
        !is_newer(version, self.known.lock().shards[id.index()].version.as_deref())
    }

    /// Forgets the version of a shard after its ConfigMap was deleted, and keeps the records. Returns whether there are
    /// any.
    pub(super) fn forget_version(&self, id: ShardId) -> bool {
        let known = &mut self.known.lock().shards[id.index()];
        known.version = None;
        !known.records.is_empty()
    }

    /// Takes over the list of all Nodes.
    pub(super) fn set_nodes(&self, nodes: HashMap<NodeName, bool>) {
        self.known.lock().nodes = Some(nodes);
        self.changed.notify_one();
        self.arrived.notify_waiters();
    }

    /// Takes over a Node; none if it was deleted.
    pub(super) fn set_node(&self, node: &NodeName, is_edge: Option<bool>) {
        let mut known = self.known.lock();
        let nodes = known.nodes.get_or_insert_default();
        if let Some(is_edge) = is_edge {
            if nodes.insert(node.clone(), is_edge).is_none() {
                self.arrived.notify_waiters();
            }
        } else {
            nodes.remove(node);
            self.changed.notify_one();
        }
    }

    /// Waits until a session may have to end.
    pub(super) async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Whether the holder of a valid certificate of this key is served, and how the key stands to the node's record.
    pub(super) fn key_standing(&self, node: &NodeName, key: KeyHash) -> Result<Standing, NodeRefusal> {
        let known = self.known.lock();
        let empty = NodeRecord::default();
        let record = known.shards[ShardId::for_node(node).index()].records.get(node).unwrap_or(&empty);
        // Check revocation first: re-creating the Node must not readmit a revoked key.
        let standing = record.check_standing(node, key)?;
        known.find_node(node)?;
        Ok(standing)
    }

    pub(super) fn recorded(&self, node: &NodeName) -> Recorded {
        let known = self.known.lock();
        let record = known.shards[ShardId::for_node(node).index()].records.get(node);
        record.map(NodeRecord::for_display).unwrap_or_default()
    }

    pub(super) fn find_node(&self, node: &NodeName) -> Result<(), NodeRefusal> {
        self.known.lock().find_node(node).map(drop)
    }

    /// Waits until the cluster has the Node.
    pub(super) async fn node_arrives(&self, node: &NodeName) {
        loop {
            let mut arrived = std::pin::pin!(self.arrived.notified());
            // Before the look, so that nothing is missed between the two.
            arrived.as_mut().enable();
            if self.find_node(node).is_ok() {
                return;
            }
            arrived.await;
        }
    }

    /// Whether the cluster has the Node, and it is an edge node.
    pub(super) fn find_edge(&self, node: &NodeName) -> Result<(), NodeRefusal> {
        let is_edge = self.known.lock().find_node(node)?;
        if is_edge { Ok(()) } else { Err(NodeRefusal::NotAnEdge { node: node.clone() }) }
    }
}

impl KnownRecords {
    fn find_node(&self, node: &NodeName) -> Result<bool, NodeRefusal> {
        let Some(nodes) = &self.nodes else { return Ok(true) };
        nodes.get(node).copied().ok_or_else(|| NodeRefusal::NoNode { node: node.clone() })
    }
}

/// Whether a version replaces the known one. Every API server makes versions of growing numbers; where they are not
/// numbers, what comes last counts, and the watch puts it right.
fn is_newer(version: Option<&str>, known: Option<&str>) -> bool {
    let number = |version: &str| version.parse::<u64>().ok();
    match (version.and_then(number), known.and_then(number)) {
        (Some(version), Some(known)) => version > known,
        _ => true,
    }
}
