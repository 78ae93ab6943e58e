//! The open connections of each node, and the limit that all of them share.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use tokio::time::Instant;

use super::inbound::InboundLimit;

/// Fewer nodes than these are not worth a search for those at rest.
const MIN_SWEEP: usize = 64;

/// What a node may send, over all its sessions.
pub(super) type NodeLimit = Arc<Mutex<InboundLimit>>;

/// Counts the open connections of each node, and keeps what they may send. All clones share both.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeConnections {
    nodes: Arc<Mutex<ConnectedNodes>>,
}

#[derive(Debug, Default)]
struct ConnectedNodes {
    /// The nodes with a connection, and those that had one lately: a node that comes back at once must not send a whole
    /// burst again.
    nodes: HashMap<NodeName, ConnectedNode>,
    /// With this many nodes, those at rest without a connection are dropped.
    sweep_at: usize,
}

#[derive(Debug)]
struct ConnectedNode {
    open: usize,
    limit: NodeLimit,
}

impl ConnectedNode {
    fn is_needed(&self, now: Instant) -> bool {
        self.open > 0 || !self.limit.lock().is_full(now)
    }
}

impl NodeConnections {
    /// Counts one more connection of the node until the guard is dropped; `None` if the node has `max` already.
    pub(super) fn try_open(&self, node: &NodeName, max: usize) -> Option<OpenConnection> {
        let mut connected = self.nodes.lock();
        let ConnectedNodes { nodes, sweep_at } = &mut *connected;
        if nodes.len() >= (*sweep_at).max(MIN_SWEEP) && !nodes.contains_key(node) {
            let now = Instant::now();
            nodes.retain(|_, node| node.is_needed(now));
            *sweep_at = 2 * nodes.len();
        }
        let entry = nodes
            .entry(node.clone())
            .or_insert_with(|| ConnectedNode { open: 0, limit: Arc::new(Mutex::new(InboundLimit::new())) });
        if entry.open >= max {
            return None;
        }
        entry.open += 1;
        let limit = Arc::clone(&entry.limit);
        Some(OpenConnection { connections: self.clone(), node: node.clone(), limit })
    }
}

/// One counted connection of a node.
#[derive(Debug)]
pub(super) struct OpenConnection {
    connections: NodeConnections,
    node: NodeName,
    limit: NodeLimit,
}

impl OpenConnection {
    /// What the node may send.
    pub(super) fn limit(&self) -> NodeLimit {
        Arc::clone(&self.limit)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut connected = self.connections.nodes.lock();
        if let Some(node) = connected.nodes.get_mut(&self.node) {
            node.open -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_starts_no_new_burst() {
        let (connections, node) = (NodeConnections::default(), NodeName::from("edge-1"));
        let mut passed = 0;
        for _ in 0..20 {
            let limit = connections.try_open(&node, 4).unwrap().limit();
            let at_once = |_: &usize| limit.lock().count_message(30, true, Instant::now()).unwrap().is_zero();
            passed += (0..400).take_while(at_once).count();
        }
        assert_eq!(passed, 400);
        let owed = connections.try_open(&node, 4).unwrap().limit().lock().owed(Instant::now());
        assert!(!owed.is_zero());
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_at_rest_are_forgotten() {
        let connections = NodeConnections::default();
        let open = |n: usize| connections.try_open(&NodeName(format!("edge-{n}")), 4).unwrap();
        let kept = open(1000);
        let say = |n: usize| open(n).limit().lock().count_message(30, true, Instant::now()).unwrap();
        for n in 0..1000 {
            say(n);
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert!(connections.nodes.lock().nodes.len() <= MIN_SWEEP);
        assert!(connections.try_open(&kept.node, 1).is_none());
    }
}
