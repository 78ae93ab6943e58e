//! Pins: the jobs that keep their images on the nodes, and the edges to notify when one no longer does.
//!
//! Every `Hello` lists the jobs that the edge has pinned images for. So we don't keep track of those nodes: an edge
//! that is away catches up in its next session. A further run of a job has the same UID: while the job is in memory, an
//! edge that has ended nothing of this run can only have the pins of an earlier one.

use std::sync::Arc;

use prepull_api::task::{JobUid, NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, Hello, MAX_PINNING_JOBS};

use super::{Action, Controller};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnpinReason {
    /// The job wants no pins any more, or is gone.
    Unwanted,
    /// The job pins the images of its next run.
    Replaced,
}

impl Controller {
    /// A session of the node begins: sends it its pins that no job wants.
    pub(super) fn reconcile_pins(&mut self, node: &NodeName, hello: &Hello) {
        let Some(pins) = &hello.pins else {
            self.pinning.remove(node);
            return;
        };
        self.pinning.insert(node.clone(), !pins.is_empty());
        let has_open = |uid: &JobUid| hello.open.iter().any(|open| open.task.job == *uid);
        let are_older = |uid: &JobUid| {
            !has_open(uid) && self.jobs.get(uid).is_some_and(|job| job.has_only_older_pins(node))
        };
        let is_over = |uid: &&JobUid| !self.wants_pins(uid) || are_older(uid);
        let over: Vec<JobUid> = pins.iter().take(MAX_PINNING_JOBS).filter(is_over).cloned().collect();
        if !over.is_empty() {
            self.actions.push(unpin_message(node, over.into()));
        }
    }

    /// A task has ended that may have pinned images after its job gave up its pins: an earlier assignment may have
    /// overtaken the unpin message.
    pub(super) fn unpin_late(&mut self, node: &NodeName, result: &TaskResult) {
        let may_have_pinned = result.outcome == TaskOutcome::Cancelled
            || result.images.iter().any(|image| image.pinned.is_some());
        let Some(has_pins) = self.pinning.get_mut(node).filter(|_| may_have_pinned) else { return };
        *has_pins = true;
        if !self.wants_pins(&result.task.job) {
            self.actions.push(unpin_message(node, Arc::new([result.task.job.clone()])));
        }
    }

    /// Whether there is such a job, and it wants its images pinned.
    pub(super) fn wants_pins(&self, uid: &JobUid) -> bool {
        let of_parked = || self.parked.get(uid).is_some_and(|parked| parked.pins);
        self.jobs.get(uid).map_or_else(of_parked, super::PrepullJob::wants_pins)
    }

    /// Notes whether this job, which wanted pins if `before`, wants none any more.
    pub(super) fn unpin_unless_wanted(&mut self, uid: &JobUid, before: bool) {
        if before && !self.wants_pins(uid) {
            self.unpinned.entry(uid.clone()).or_insert(UnpinReason::Unwanted);
        }
    }

    /// Nothing that this job has pinned so far is wanted.
    pub(super) fn unpin_replaced(&mut self, uid: &JobUid) {
        self.unpinned.insert(uid.clone(), UnpinReason::Replaced);
    }

    /// Sends the edges that may have pins the jobs that want none any more. All such edges, since the nodes of a job
    /// that ended long ago are not in memory. One message for all of the jobs: people delete hundreds of them at once,
    /// and a message for each would fill the queues of ten thousand sessions.
    pub(super) fn tell_unpinned(&mut self) {
        let unpinned = std::mem::take(&mut self.unpinned).into_iter();
        let is_so =
            |(uid, why): &(JobUid, UnpinReason)| *why == UnpinReason::Replaced || !self.wants_pins(uid);
        let over: Vec<JobUid> = unpinned.filter(is_so).map(|(uid, _)| uid).collect();
        for jobs in over.chunks(MAX_PINNING_JOBS) {
            let jobs: Arc<[JobUid]> = jobs.into();
            let edges = self.pinning.iter().filter(|(_, has_pins)| **has_pins);
            self.actions.extend(edges.map(|(node, _)| unpin_message(node, Arc::clone(&jobs))));
        }
    }
}

fn unpin_message(node: &NodeName, jobs: Arc<[JobUid]>) -> Action {
    Action::Send(node.clone(), CloudMessage::Unpin { jobs })
}
