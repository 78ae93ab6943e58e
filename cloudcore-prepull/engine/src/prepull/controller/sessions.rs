//! Messages of edges, and the outcome of the tasks that were sent to them.

use std::num::NonZeroU64;

use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, OpenPhase};

use super::{Action, Controller, DELETED, OVER, cancel_message};
use crate::fleet::in_hand::TaskInHand;
use crate::fleet::session::{SessionEvent, SessionId};
use crate::prepull::download::{clock_of, texts_of};
use crate::shared::access::{KeysSent, LayerAccess};
use crate::shared::outcomes::DispatchOutcome;
use crate::sites::BlobSharing;

impl Controller {
    pub(super) fn apply_session(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Up { node, session, hello } => self.start_session(&node, session, &hello),
            SessionEvent::Down { node, session } => {
                if self.sessions.get(&node) == Some(&session) {
                    self.sessions.remove(&node);
                    self.pinning.remove(&node);
                    self.clocks.remove(&node);
                    for uid in self.slots.jobs(&node) {
                        self.change_job(&uid, |job, _| job.mark_offline(&node, session));
                    }
                    self.forget_slots_unless_there(&node);
                }
            }
            SessionEvent::Message { node, session: _, message } => self.apply_message(&node, message),
        }
    }

    pub(crate) fn session(&self, node: &NodeName) -> Option<SessionId> {
        self.sessions.get(node).copied()
    }

    /// The jobs with another limit of bytes a second over the uplink of a site.
    pub(crate) fn take_new_rates(&mut self) -> Vec<(JobUid, Option<NonZeroU64>)> {
        std::mem::take(&mut self.new_rates)
    }

    /// What a task shares, if the node carries it out or has done so, and its job shares layers within sites.
    pub(crate) fn shared_by(
        &self,
        node: &NodeName,
        task: &TaskId,
        by_default: bool,
    ) -> Option<(BlobSharing, LayerAccess)> {
        self.jobs.get(&task.job)?.shared_by(node, task.attempt, by_default)
    }

    pub(crate) fn in_hand(&self, node: &NodeName, task: &TaskId) -> Option<TaskInHand> {
        self.jobs.get(&task.job)?.in_hand(node, task.attempt)
    }

    fn start_session(&mut self, node: &NodeName, session: SessionId, hello: &Hello) {
        if self.sessions.get(node).is_some_and(|current| *current > session) {
            return;
        }
        self.sessions.insert(node.clone(), session);
        let clock = clock_of(hello);
        self.clocks.insert(node.clone(), clock.clone());
        if let Some(busy) = self.slots.set_limit(node, hello.max_tasks.unwrap_or(1)) {
            self.announce_busy(node, busy);
        }
        // Before a task may be sent again: what it pins must stay.
        self.reconcile_pins(node, hello);
        // The jobs that are registered for the node, and those that it has a task of.
        let mut concerned = self.slots.jobs(node);
        concerned.extend(hello.open.iter().map(|open| open.task.job.clone()));
        concerned.sort_unstable();
        concerned.dedup();
        for uid in concerned {
            // Only the latest attempt counts; earlier ones are cancelled below.
            let of_job = hello.open.iter().filter(|open| open.task.job == uid);
            let open = of_job.max_by_key(|open| open.task.attempt);
            self.change_job(&uid, |job, effects| job.mark_online(node, session, &clock, open, effects));
        }
        for open in hello.open.iter().filter(|open| open.phase != OpenPhase::Finished) {
            let job = self.jobs.get(&open.task.job);
            if !job.is_some_and(|job| job.is_in_progress(node, open.task.attempt)) {
                let reason = if job.is_some() { OVER } else { DELETED };
                self.actions.push(cancel_message(node, open.task.clone(), reason));
            }
        }
    }

    fn apply_message(&mut self, node: &NodeName, message: EdgeMessage) {
        match message {
            // The session layer takes the first Hello and refuses any other.
            EdgeMessage::Hello(_)
            | EdgeMessage::Trusts { .. }
            | EdgeMessage::State(_)
            // The tracker of sites has got it.
            | EdgeMessage::Blobs(_)
            | EdgeMessage::Other => {}
            EdgeMessage::Configured { settings: _, windows } => {
                let Some(clock) = self.clocks.get_mut(node) else { return };
                let windows = texts_of(&windows);
                if clock.windows == windows {
                    return;
                }
                clock.windows = windows;
                let clock = clock.clone();
                for uid in self.slots.jobs(node) {
                    self.change_job(&uid, |job, _| job.set_clock(node, &clock));
                }
            }
            EdgeMessage::Accepted { task } => {
                let mut wanted = false;
                let known = self.change_job(&task.job.clone(), |job, _| {
                    wanted = job.mark_accepted(node, task.attempt);
                });
                if !wanted {
                    self.actions.push(cancel_message(node, task, if known { OVER } else { DELETED }));
                }
            }
            EdgeMessage::Progress(progress) => {
                if !self.change_job(&progress.task.job, |job, effects| {
                    job.record_progress(node, &progress, effects.now);
                }) {
                    self.actions.push(cancel_message(node, progress.task, DELETED));
                }
            }
            EdgeMessage::Result(result) => {
                self.unpin_late(node, &result);
                if !self
                    .change_job(&result.task.job, |job, effects| job.record_result(node, &result, effects))
                {
                    // The job was deleted, or has been over for long: nothing is written any more.
                    let ack = CloudMessage::ResultAck { task: result.task };
                    self.actions.push(Action::Send(node.clone(), ack));
                }
            }
        }
    }

    pub(super) fn finish_dispatch(
        &mut self,
        node: &NodeName,
        task: TaskId,
        outcome: &DispatchOutcome,
        keys: Option<KeysSent>,
    ) {
        let is_sent = matches!(outcome, DispatchOutcome::Sent(_) | DispatchOutcome::SentWithoutKeys(_));
        let known = self.change_job(&task.job, |job, effects| {
            if is_sent {
                job.note_keys(node, task.attempt, keys);
            }
            job.finish_dispatch(node, task.attempt, outcome, effects);
        });
        if !known && is_sent {
            // Deleted while the keys were being resolved.
            self.actions.push(cancel_message(node, task, DELETED));
        }
    }
}
