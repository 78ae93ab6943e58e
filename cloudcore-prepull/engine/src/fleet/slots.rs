//! The slots of nodes, over all jobs. Each edge sets how many tasks its node works on at a time, by default one.

use std::collections::{HashMap, HashSet};

use prepull_api::task::{JobUid, NodeName};

#[derive(Debug, Default)]
pub(crate) struct NodeSlots {
    nodes: HashMap<NodeName, NodeSlot>,
}

#[derive(Debug)]
struct NodeSlot {
    /// How many tasks the node works on at a time.
    limit: u32,
    /// How many tasks are in progress, over all jobs.
    taken: u32,
    /// The jobs that are to learn when the node becomes busy or free.
    jobs: Vec<JobUid>,
}

impl Default for NodeSlot {
    fn default() -> Self {
        Self { limit: 1, taken: 0, jobs: Vec::new() }
    }
}

impl NodeSlot {
    fn is_busy(&self) -> bool {
        self.taken >= self.limit
    }

    /// Changes the slot. Returns whether the node is busy, if that has changed.
    fn change(&mut self, change: impl FnOnce(&mut Self)) -> Option<bool> {
        let before = self.is_busy();
        change(self);
        Some(self.is_busy()).filter(|busy| *busy != before)
    }
}

impl NodeSlots {
    /// Registers a job for the node. Returns `false` if it was registered already.
    pub(crate) fn attach(&mut self, node: &NodeName, job: &JobUid) -> bool {
        let jobs = &mut self.nodes.entry(node.clone()).or_default().jobs;
        let new = !jobs.contains(job);
        if new {
            jobs.push(job.clone());
        }
        new
    }

    pub(crate) fn detach(&mut self, jobs: &HashSet<JobUid>) {
        self.nodes.retain(|_, slot| {
            slot.jobs.retain(|known| !jobs.contains(known));
            !slot.jobs.is_empty() || slot.taken > 0 || slot.limit != 1
        });
    }

    pub(crate) fn detach_from(&mut self, node: &NodeName, job: &JobUid) {
        if let Some(slot) = self.nodes.get_mut(node) {
            slot.jobs.retain(|known| known != job);
        }
    }

    /// Forgets how many tasks a node works on at a time that's gone, unless it has one.
    pub(crate) fn forget_idle(&mut self, node: &NodeName) {
        if self.nodes.get(node).is_some_and(|slot| slot.jobs.is_empty() && slot.taken == 0) {
            self.nodes.remove(node);
        }
    }

    pub(crate) fn jobs(&self, node: &NodeName) -> Vec<JobUid> {
        self.nodes.get(node).map(|slot| slot.jobs.clone()).unwrap_or_default()
    }

    pub(crate) fn is_busy(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_some_and(NodeSlot::is_busy)
    }

    /// Sets how many tasks the node works on at a time. Returns whether it is busy, if that has changed.
    pub(crate) fn set_limit(&mut self, node: &NodeName, limit: u32) -> Option<bool> {
        if limit == 1 && !self.nodes.contains_key(node) {
            return None;
        }
        self.nodes.entry(node.clone()).or_default().change(|slot| slot.limit = limit.max(1))
    }

    /// A task took or gave back a slot. Returns whether the node is busy, if that has changed.
    pub(crate) fn count_taken(&mut self, node: &NodeName, took: bool) -> Option<bool> {
        let slot = self.nodes.entry(node.clone()).or_default();
        slot.change(|slot| slot.taken = if took { slot.taken + 1 } else { slot.taken.saturating_sub(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_slots_outlive_their_waiting_jobs() {
        let (idle, at_work, wide) =
            (NodeName::from("idle"), NodeName::from("at-work"), NodeName::from("wide"));
        let job = JobUid("job".to_owned());
        let mut slots = NodeSlots::default();
        for node in [&idle, &at_work, &wide] {
            assert!(slots.attach(node, &job) && !slots.attach(node, &job));
        }
        // A task of the other engine.
        assert_eq!(slots.count_taken(&at_work, true), Some(true));
        assert_eq!(slots.set_limit(&wide, 2), None);
        slots.detach(&HashSet::from([job]));
        assert!(slots.is_busy(&at_work) && slots.jobs(&at_work).is_empty());
        assert_eq!((slots.count_taken(&wide, true), slots.count_taken(&wide, true)), (None, Some(true)));
        assert_eq!((slots.nodes.len(), slots.count_taken(&at_work, false)), (2, Some(false)));
        slots.forget_idle(&wide);
        assert_eq!((slots.count_taken(&wide, false), slots.set_limit(&wide, 1)), (Some(false), Some(true)));
        slots.count_taken(&wide, false);
        slots.forget_idle(&wide);
        assert!(!slots.nodes.contains_key(&wide));
    }
}
