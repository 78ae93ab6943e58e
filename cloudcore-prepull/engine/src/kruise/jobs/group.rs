//! The slots of jobs that share one parallelism: an ImagePullJob by itself, or all those of an ImageListPullJob.
//!
//! What is bounded is nodes, not pulls: a node that is busy with one image of a list may be asked for the others.

use std::collections::{BTreeSet, HashMap};

use prepull_api::task::JobUid;

use super::fleet::Node;

/// How many of the jobs have to do with a node.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// It holds a slot for them.
    busy: u32,
    /// They would ask it.
    wanted: u32,
}

#[derive(Debug, Default)]
pub(super) struct Group {
    /// The jobs.
    pub(super) members: BTreeSet<JobUid>,
    loads: HashMap<Node, Load>,
    /// Nodes that are busy with any of the jobs.
    busy: usize,
    /// Wanted and busy: asking them takes no slot.
    joining: BTreeSet<Node>,
    /// Wanted and not busy.
    starting: BTreeSet<Node>,
}

impl Group {
    /// One of the jobs takes (`true`) or gives back a slot for the node.
    pub(super) fn busy(&mut self, node: &Node, takes: bool) {
        self.change(node, |load| count(&mut load.busy, takes));
    }

    /// One of the jobs would ask the node, or would not any more.
    pub(super) fn wanted(&mut self, node: &Node, wanted: bool) {
        self.change(node, |load| count(&mut load.wanted, wanted));
    }

    /// The node to be asked next: by each of the jobs that wants it.
    pub(super) fn next(&self, parallelism: u32) -> Option<Node> {
        if parallelism == 0 {
            return None;
        }
        let free = usize::try_from(parallelism).is_ok_and(|slots| self.busy < slots);
        self.joining.first().or_else(|| self.starting.first().filter(|_| free)).cloned()
    }

    fn change(&mut self, node: &Node, change: impl FnOnce(&mut Load)) {
        let load = self.loads.entry(node.clone()).or_default();
        let before = *load;
        change(load);
        let after = *load;
        if after.busy == 0 && after.wanted == 0 {
            self.loads.remove(node);
        }
        self.busy = self.busy + usize::from(after.busy > 0) - usize::from(before.busy > 0);
        if before.wanted > 0 {
            if before.busy > 0 {
                self.joining.remove(node)
            } else {
                self.starting.remove(node)
            };
        }
        if after.wanted > 0 {
            if after.busy > 0 {
                self.joining.insert(node.clone())
            } else {
                self.starting.insert(node.clone())
            };
        }
    }
}

pub(super) fn count(number: &mut u32, up: bool) {
    *number = if up { *number + 1 } else { number.saturating_sub(1) };
}
