//! The slots of nodes that the other engine takes, for the tasks of NodeImages.

use prepull_api::task::NodeName;

use super::Controller;

impl Controller {
    /// Takes a slot of the node, if one is free.
    pub fn take_place(&mut self, node: &NodeName) -> bool {
        let is_free = !self.slots.is_busy(node);
        if is_free {
            self.place_moved(node, true);
        }
        is_free
    }

    /// A slot of the node was taken, whether or not one was free, or given back: its jobs, and the other engine, learn when
    /// that makes it busy or free.
    pub fn place_moved(&mut self, node: &NodeName, took: bool) {
        if let Some(busy) = self.slots.count_taken(node, took) {
            self.announce_busy(node, busy);
        }
    }

    /// The nodes that have got a free slot since the last call.
    pub fn take_freed(&mut self) -> Vec<NodeName> {
        std::mem::take(&mut self.freed)
    }
}
