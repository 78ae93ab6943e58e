//! What leaves a job: writes, when they are due; what waited for them; events.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::NodeName;
use prepull_api::wire::truncate_reason;

use super::super::{Action, Content, Object};
use super::{Job, Run, ack};
use crate::prepull::aggregate::{self, Parts};
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::objects::ObjectId;
use crate::shared::writes::{Deferred, Pace};

/// Events about single nodes, per job and life of cloudcore: the reports name them all, the events are for the
/// one who watches, and a fleet that fails as a whole must not flood the API server.
const NODE_EVENTS: u32 = 20;

impl Job {
    /// Emits the writes that are due.
    pub(in crate::prepull::controller) fn write_if_due(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.collect();
        if let Some(run) = &mut self.run {
            let rollout = &run.rollout;
            for report in run.shards.begin(now, |places| rollout.any_in_progress(places)) {
                let body = aggregate::report(&self.name, report.index, rollout.records_of(report.nodes));
                let content = Content::Report(Box::new(body));
                let (job, name) = (self.uid.clone(), self.name.clone());
                actions.push(Action::Write { job, name, version: report.version, content });
            }
        }
        if self.next_status().is_none_or(|due| due > now) {
            return;
        }
        let status = self.status(now);
        self.conditions.clone_from(&status.conditions);
        let version = self.writes.begin(now);
        let (job, name) = (self.uid.clone(), self.name.clone());
        actions.push(Action::Write { job, name, version, content: Content::Status(Box::new(status)) });
    }

    /// A write ended; what waited for it goes out.
    pub(in crate::prepull::controller) fn written(
        &mut self,
        object: Object,
        version: u64,
        done: bool,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let ready = match (object, &mut self.run) {
            (Object::Status, _) if done => self.writes.done(version),
            (Object::Status, _) => {
                self.writes.failed(now);
                return;
            }
            (Object::Report(index), Some(run)) => run.shards.written(index, version, done, now),
            (Object::Report(_), None) => return,
        };
        for deferred in ready {
            self.release(deferred, now, actions);
        }
    }

    /// When [`Self::write_if_due`] may have something to do although nothing happened.
    pub(super) fn next_write(&self) -> Option<Timestamp> {
        let reports = self.run.as_ref().and_then(|run| run.shards.due());
        reports.into_iter().chain(self.next_status()).min()
    }

    fn next_status(&self) -> Option<Timestamp> {
        let may = self.run.as_ref().is_none_or(Run::status_may_follow);
        self.writes.due((Duration::ZERO, Duration::ZERO)).filter(|_| may)
    }

    /// Takes note of the records that changed: their reports, and the status, are to be written.
    pub(super) fn collect(&mut self) {
        let Some(run) = &mut self.run else { return };
        let touched = run.rollout.take_touched();
        for touched in &touched {
            run.shards.touch(touched.at, if touched.phase { Pace::Soon } else { Pace::Slow });
        }
        if !touched.is_empty() {
            self.writes.touch(Pace::Slow);
        }
    }

    /// The job is gone: results that were to be written concern nobody any more, and may be forgotten.
    pub(in crate::prepull::controller) fn abandon(&mut self, actions: &mut Vec<Action>) {
        let waiting = self.run.iter_mut().flat_map(|run| run.shards.abandon());
        actions.extend(waiting.filter_map(|deferred| match deferred {
            Deferred::Ack(node, task) => Some(ack(node, task)),
            Deferred::Dispatch(..) => None,
        }));
    }

    pub(super) fn after_write(
        &mut self,
        node: &NodeName,
        deferred: Deferred,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let ready = match &mut self.run {
            Some(run) => match run.rollout.position(node) {
                Some(place) => run.shards.after(place, deferred),
                // A node that the job does not know: nothing will ever be written of it.
                None => Some(deferred),
            },
            None => Some(deferred),
        };
        if let Some(deferred) = ready {
            self.release(deferred, now, actions);
        }
    }

    fn release(&mut self, deferred: Deferred, now: Timestamp, actions: &mut Vec<Action>) {
        match deferred {
            Deferred::Ack(node, task) => actions.push(ack(node, task)),
            // What is written may be an attempt that ended in the meantime, and another one waits for its turn.
            Deferred::Dispatch(node, attempt) if attempt == self.attempt(&node) => {
                self.dispatch(&node, now, actions);
            }
            Deferred::Dispatch(..) => {}
        }
    }

    fn status(&self, now: Timestamp) -> ImagePrePullJobStatus {
        let run = self.run.as_ref();
        let mut summary = run.map(|run| run.rollout.summary().clone()).unwrap_or_default();
        summary.skipped = self.skipped_total;
        let parts = Parts {
            generation: Some(self.generation),
            phase: self.phase,
            reason: self.reason.clone(),
            start_time: run.map(|run| run.start_time),
            completion_time: run.and_then(|run| run.completion_time),
            active_since: run.map(|run| run.active_since),
            rollout: run.and_then(|run| run.rollout.waves()),
            retry: run.map(|run| run.retry).unwrap_or_default(),
            spec_hash: run.map(|run| run.spec_hash.as_str()).unwrap_or_default(),
            started_spec: run.filter(|run| run.diverged && !run.held).map(|run| &run.started),
            summary,
            conditions: &self.conditions,
            facts: aggregate::facts(
                self.phase,
                run.is_some(),
                self.pace.suspend,
                self.ended_as,
                self.refusal.as_deref(),
                &self.reason,
            ),
            skipped: &self.skipped,
        };
        aggregate::status(parts, run.iter().flat_map(|run| run.rollout.records()), now)
    }

    pub(super) fn event(&self, actions: &mut Vec<Action>, warning: bool, reason: &'static str, note: &str) {
        actions.push(Action::Event(ObjectEvent {
            kind: ObjectKind::ImagePrePullJob,
            object: ObjectId { namespace: String::new(), name: self.name.clone(), uid: self.uid.clone() },
            warning,
            reason,
            note: truncate_reason(note),
        }));
    }

    pub(super) fn node_event(&mut self, actions: &mut Vec<Action>, reason: &'static str, note: &str) {
        if self.node_events < NODE_EVENTS {
            self.node_events += 1;
            self.event(actions, true, reason, note);
        }
    }
}
