//! The count of open connections per node.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use prepull_api::task::NodeName;

/// Counts the open connections of each node. All clones share the counts.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeConnections {
    counts: Arc<Mutex<HashMap<NodeName, usize>>>,
}

impl NodeConnections {
    /// Counts one more connection of the node until the guard is dropped; `None` if the node has `max` already.
    pub(super) fn try_open(&self, node: &NodeName, max: usize) -> Option<OpenConnection> {
        let mut counts = self.counts.lock();
        let count = counts.entry(node.clone()).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(OpenConnection { connections: self.clone(), node: node.clone() })
    }
}

/// One counted connection of a node.
#[derive(Debug)]
pub(super) struct OpenConnection {
    connections: NodeConnections,
    node: NodeName,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut counts = self.connections.counts.lock();
        if let Some(count) = counts.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.node);
            }
        }
    }
}
