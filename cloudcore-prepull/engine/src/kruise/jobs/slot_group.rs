//! The slots of jobs that share one parallelism: an ImagePullJob by itself, or all children of an ImageListPullJob.
//!
//! Parallelism bounds nodes, not pulls: a node that is busy with one image of a list may be asked for the others too.

use std::collections::{BTreeSet, HashMap};

use prepull_api::task::JobUid;

use super::fleet::SharedName;
use super::tally::{count, put};

/// What the jobs of a group have to do with a node.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// Jobs for which the node holds a slot.
    busy: u32,
    /// Jobs that would ask the node.
    wanted: u32,
}

#[derive(Debug, Default)]
pub(super) struct SlotGroup {
    /// The jobs.
    pub(super) members: BTreeSet<JobUid>,
    loads: HashMap<SharedName, Load>,
    /// How many nodes hold a slot.
    busy: u32,
    /// Nodes that are wanted and hold a slot already: asking them takes none.
    joining: BTreeSet<SharedName>,
    /// Nodes that are wanted and hold no slot.
    starting: BTreeSet<SharedName>,
}

impl SlotGroup {
    /// One more job has the node busy (`true`), or one less.
    pub(super) fn count_busy(&mut self, node: &SharedName, add: bool) {
        self.change(node, |load| count(&mut load.busy, add));
    }

    /// One more job would ask the node (`true`), or one less.
    pub(super) fn count_wanted(&mut self, node: &SharedName, add: bool) {
        self.change(node, |load| count(&mut load.wanted, add));
    }

    /// The node to be asked next, by each of the jobs that want it.
    pub(super) fn next_node(&self, parallelism: u32) -> Option<SharedName> {
        if parallelism == 0 {
            return None;
        }
        let has_free_slot = self.busy < parallelism;
        self.joining.first().or_else(|| self.starting.first().filter(|_| has_free_slot)).cloned()
    }

    fn change(&mut self, node: &SharedName, change: impl FnOnce(&mut Load)) {
        let load = self.loads.entry(node.clone()).or_default();
        let before = *load;
        change(load);
        let after = *load;
        if after.busy == 0 && after.wanted == 0 {
            self.loads.remove(node);
        }
        self.tally(node, before, false);
        self.tally(node, after, true);
    }

    /// Adds a node's load to the totals (`add`), or takes it out.
    fn tally(&mut self, node: &SharedName, load: Load, add: bool) {
        if load.busy > 0 {
            count(&mut self.busy, add);
        }
        if load.wanted > 0 {
            let wanted = if load.busy > 0 { &mut self.joining } else { &mut self.starting };
            put(wanted, node.clone(), add);
        }
    }
}
