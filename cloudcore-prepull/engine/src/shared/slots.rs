//! Nodes are shared by jobs: each works on as many tasks as its edge says, by default one.

use std::collections::HashMap;

use prepull_api::task::{JobUid, NodeName};

#[derive(Debug, Default)]
pub(crate) struct Slots {
    nodes: HashMap<NodeName, Slot>,
}

#[derive(Debug)]
struct Slot {
    /// Tasks at a time.
    limit: u32,
    /// In progress, over all jobs.
    taken: u32,
    /// That count on the node.
    jobs: Vec<JobUid>,
}

impl Default for Slot {
    fn default() -> Self {
        Self { limit: 1, taken: 0, jobs: Vec::new() }
    }
}

impl Slot {
    fn is_busy(&self) -> bool {
        self.taken >= self.limit
    }

    /// Whether it is busy, where that has changed.
    fn change(&mut self, change: impl FnOnce(&mut Self)) -> Option<bool> {
        let before = self.is_busy();
        change(self);
        Some(self.is_busy()).filter(|busy| *busy != before)
    }
}

impl Slots {
    /// The job counts on the node. `false` where it did so before.
    pub(crate) fn attach(&mut self, node: &NodeName, job: &JobUid) -> bool {
        let jobs = &mut self.nodes.entry(node.clone()).or_default().jobs;
        let new = !jobs.contains(job);
        if new {
            jobs.push(job.clone());
        }
        new
    }

    /// The job is gone.
    pub(crate) fn detach(&mut self, job: &JobUid) {
        self.nodes.retain(|_, slot| {
            slot.jobs.retain(|known| known != job);
            !slot.jobs.is_empty() || slot.taken > 0 || slot.limit != 1
        });
    }

    /// The jobs that count on the node.
    pub(crate) fn jobs(&self, node: &NodeName) -> Vec<JobUid> {
        self.nodes.get(node).map(|slot| slot.jobs.clone()).unwrap_or_default()
    }

    pub(crate) fn is_busy(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_some_and(Slot::is_busy)
    }

    /// The node's edge says how many tasks it takes. Whether the node is busy, where that has changed.
    pub(crate) fn limit(&mut self, node: &NodeName, limit: u32) -> Option<bool> {
        if limit == 1 && !self.nodes.contains_key(node) {
            return None;
        }
        self.nodes.entry(node.clone()).or_default().change(|slot| slot.limit = limit.max(1))
    }

    /// A task took or gave back a slot. Whether the node is busy, where that has changed.
    pub(crate) fn moved(&mut self, node: &NodeName, took: bool) -> Option<bool> {
        let slot = self.nodes.entry(node.clone()).or_default();
        slot.change(|slot| slot.taken = if took { slot.taken + 1 } else { slot.taken.saturating_sub(1) })
    }
}
