//! A bound on concurrent NodeImage writes, and the queue of nodes that wait for their turn.

use std::collections::{HashSet, VecDeque};

use prepull_api::task::NodeName;

/// Writes under way, over all nodes: enough for the API server to be busy. Each of them holds a whole spec or status until
/// it is made, so that a job over ten thousand nodes must not ask for all of its writes at once. What is held back is
/// written later, as it is then.
const WRITES: usize = 256;

#[derive(Debug, Default)]
pub(super) struct WriteRoom {
    under_way: usize,
    /// In the order in which they came. None of them waits while there is room.
    waiting: VecDeque<NodeName>,
    known: HashSet<NodeName>,
}

impl WriteRoom {
    pub(super) fn has_room(&self) -> bool {
        self.under_way < WRITES
    }

    pub(super) fn begin_write(&mut self) {
        self.under_way += 1;
    }

    pub(super) fn end_write(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    pub(super) fn queue_node(&mut self, node: &NodeName) {
        if self.known.insert(node.clone()) {
            self.waiting.push_back(node.clone());
        }
    }

    /// Takes the node that has waited for the longest time, if there is room.
    pub(super) fn pop(&mut self) -> Option<NodeName> {
        let node = if self.has_room() { self.waiting.pop_front()? } else { return None };
        self.known.remove(&node);
        Some(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_bounded_and_in_turn() {
        let mut room = WriteRoom::default();
        (0..WRITES).for_each(|_| room.begin_write());
        for node in ["b", "a", "b"] {
            room.queue_node(&node.into());
        }
        assert!(!room.has_room());
        assert_eq!(room.pop(), None);
        room.end_write();
        assert_eq!([room.pop(), room.pop(), room.pop()], [Some("b".into()), Some("a".into()), None]);
    }
}
