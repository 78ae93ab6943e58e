//! Places on nodes that something else than jobs takes: the tasks of NodeImages.

use prepull_api::task::NodeName;

use super::Controller;

impl Controller {
    /// Takes a place on the node, if one is free.
    pub fn take_place(&mut self, node: &NodeName) -> bool {
        let is_free = !self.slots.is_busy(node);
        if is_free {
            self.place_moved(node, true);
        }
        is_free
    }

    /// A place on the node was taken, free or not, or given back.
    pub fn place_moved(&mut self, node: &NodeName, took: bool) {
        if let Some(busy) = self.slots.moved(node, took) {
            self.announce_busy(node, busy);
        }
    }

    /// The nodes that have had a place to give since this was asked last.
    pub fn take_freed(&mut self) -> Vec<NodeName> {
        std::mem::take(&mut self.freed)
    }
}
