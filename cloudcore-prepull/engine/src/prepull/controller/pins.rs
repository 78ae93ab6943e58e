//! Pins: which jobs want their images kept on the nodes, and which edges are told that one no longer does.
//!
//! The edges know for which jobs they have pinned images, and say so in every `Hello`. So nothing is kept here of which
//! nodes those are: an edge that is away learns in its next session what it has missed.

use prepull_api::task::{JobUid, NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, Hello, MAX_PINNING_JOBS};

use super::{Action, Controller};

impl Controller {
    /// A session of the node begins: it is told which of the pins that it has nobody wants.
    pub(super) fn reconcile_pins(&mut self, node: &NodeName, hello: &Hello) {
        let Some(pins) = &hello.pins else {
            self.pinning.remove(node);
            return;
        };
        self.pinning.insert(node.clone());
        let is_over = |uid: &&JobUid| !self.wants_pins(uid);
        let over: Vec<JobUid> = pins.iter().take(MAX_PINNING_JOBS).filter(is_over).cloned().collect();
        if !over.is_empty() {
            self.actions.push(unpin(node, over));
        }
    }

    /// A task has ended which may have pinned images after its job wanted them pinned no more: the message that says so may
    /// have been overtaken by an assignment from before.
    pub(super) fn unpin_late(&mut self, node: &NodeName, result: &TaskResult) {
        let may_have_pinned = result.outcome == TaskOutcome::Cancelled
            || result.images.iter().any(|image| image.pinned.is_some());
        if may_have_pinned && self.pinning.contains(node) && !self.wants_pins(&result.task.job) {
            self.actions.push(unpin(node, vec![result.task.job.clone()]));
        }
    }

    /// Whether there is such a job, and it wants its images pinned.
    pub(super) fn wants_pins(&self, uid: &JobUid) -> bool {
        let of_parked = || self.parked.get(uid).is_some_and(|parked| parked.pins);
        self.jobs.get(uid).map_or_else(of_parked, super::Job::wants_pins)
    }

    /// Tells all edges if this job, which wanted pins if `before`, wants none any more. Not only those of its nodes: of a
    /// job that has been over for long they are not in memory.
    pub(super) fn unpin_unless_wanted(&mut self, uid: &JobUid, before: bool) {
        if before && !self.wants_pins(uid) {
            self.unpin(uid);
        }
    }

    /// Tells all edges that nothing that this job has pinned so far is wanted.
    pub(super) fn unpin(&mut self, uid: &JobUid) {
        let edges = self.pinning.iter().map(|node| unpin(node, vec![uid.clone()]));
        self.actions.extend(edges);
    }
}

fn unpin(node: &NodeName, jobs: Vec<JobUid>) -> Action {
    Action::Send(node.clone(), CloudMessage::Unpin { jobs })
}
