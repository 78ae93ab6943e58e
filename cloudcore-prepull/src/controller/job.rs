//! One job: its rollout, what waits for a write, and what people are told.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, SkippedNode};
use prepull_api::task::{JobUid, NodeName, TaskId, TaskResult};
use prepull_api::wire::{CloudMessage, OpenPhase, Progress, bounded_reason};

use super::writes::{Deferred, Writes};
use super::{Action, Dispatch, DispatchOutcome, JobEvent, JobObject, cancel};
use crate::aggregate::{self, Parts};
use crate::plan::NodePlan;
use crate::rollout::{Decision, Reattach, Rollout, Verdict};
use crate::tunnel::SessionId;
use crate::validate::ValidatedJob;

mod start;

/// Events about single nodes, per job and life of cloudcore: the status names them all, the events are for the
/// one who watches, and a fleet that fails as a whole must not flood the API server.
const NODE_EVENTS: u32 = 20;

/// A job with nodes.
#[derive(Debug)]
struct Run {
    /// None for a job that was over before this life of cloudcore: nothing starts in it any more.
    job: Option<Arc<ValidatedJob>>,
    plans: HashMap<NodeName, Arc<NodePlan>>,
    rollout: Rollout,
    start_time: Timestamp,
    completion_time: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct Job {
    name: String,
    uid: JobUid,
    generation: i64,
    spec: Option<ImagePrePullJobSpec>,
    phase: JobPhase,
    reason: String,
    /// Why the last change of the spec was not taken over.
    refusal: Option<String>,
    run: Option<Run>,
    skipped: Vec<SkippedNode>,
    /// May be more than `skipped` holds after a restart.
    skipped_total: u32,
    conditions: Vec<Condition>,
    node_events: u32,
    writes: Writes,
}

pub(super) fn uid_of(object: &JobObject) -> JobUid {
    match object {
        Ok(job) => JobUid(job.metadata.uid.clone().unwrap_or_default()),
        Err(unreadable) => unreadable.uid.clone(),
    }
}

impl Job {
    pub(super) fn attach_sessions(&mut self, sessions: &HashMap<NodeName, SessionId>, now: Timestamp) {
        let Some(run) = &mut self.run else { return };
        for node in run.plans.keys() {
            if let Some(session) = sessions.get(node) {
                // No task of this job can be open on a session that is older than the job's arrival here.
                let _ = run.rollout.online(node, *session, None, now);
            }
        }
    }

    pub(super) fn online(
        &mut self,
        node: &NodeName,
        session: SessionId,
        open: Option<(u32, OpenPhase)>,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let Some(run) = &mut self.run else { return };
        let Some(before) = run.rollout.record(node).map(|record| record.phase) else { return };
        if run.rollout.online(node, session, open, now) == Reattach::Dispatch {
            self.dispatch(node, now, actions);
        }
        let changed =
            self.run.as_ref().and_then(|run| run.rollout.record(node)).is_some_and(|r| r.phase != before);
        if before == NodePhase::Pending || changed {
            self.touch(false);
        }
    }

    /// Whether the edge is to go on with this task.
    pub(super) fn wants(&self, node: &NodeName, attempt: u32) -> bool {
        let record = self.run.as_ref().and_then(|run| run.rollout.record(node));
        record.is_some_and(|record| record.phase == NodePhase::InProgress && record.attempt == attempt)
    }

    pub(super) fn offline(&mut self, node: &NodeName, session: SessionId) {
        let Some(run) = &mut self.run else { return };
        run.rollout.offline(node, session);
        if run.rollout.record(node).is_some_and(|record| record.phase == NodePhase::Pending) {
            self.touch(false);
        }
    }

    pub(super) fn node_deleted(&mut self, node: &NodeName) {
        if self.run.as_mut().is_some_and(|run| run.completion_time.is_none() && run.rollout.deleted(node)) {
            self.touch(true);
        }
    }

    pub(super) fn accepted(&mut self, node: &NodeName, attempt: u32) {
        if let Some(run) = &mut self.run {
            run.rollout.accepted(node, attempt);
        }
    }

    pub(super) fn progress(&mut self, node: &NodeName, progress: &Progress, now: Timestamp) {
        let Some(run) = &mut self.run else { return };
        if let Some(plan) = run.plans.get(node).cloned()
            && run.rollout.progress(node, &plan, progress, now)
        {
            self.touch(false);
        }
    }

    pub(super) fn result(
        &mut self,
        node: &NodeName,
        result: &TaskResult,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        if let Some(run) = &mut self.run {
            let plan = run.plans.get(node).cloned();
            if run.rollout.result(node, plan.as_deref(), result, now) {
                let failed = run.rollout.record(node).filter(|record| record.phase == NodePhase::Failure);
                if let Some(note) = failed.map(|record| format!("{node}: {}", record.reason)) {
                    self.node_event(actions, "NodeFailed", &note);
                }
                self.touch(true);
            }
        }
        // Also for a result that changed nothing: it may be in memory and not yet in the API server.
        self.after_write(Deferred::Ack(node.clone(), result.task.clone()), now, actions);
    }

    pub(super) fn dispatched(
        &mut self,
        node: &NodeName,
        attempt: u32,
        outcome: &DispatchOutcome,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let current = self.wants(node, attempt);
        let Some(run) = &mut self.run else { return };
        match outcome {
            // Its time ran out in between.
            DispatchOutcome::Sent(_) if !current => {
                let task = TaskId { job: self.uid.clone(), attempt };
                actions.push(cancel(node, task, super::OVER));
            }
            DispatchOutcome::Sent(session) => {
                if run.rollout.sent(node, *session) == Reattach::Dispatch {
                    self.dispatch(node, now, actions);
                }
            }
            DispatchOutcome::Offline => {
                run.rollout.not_sent(node);
                self.touch(true);
            }
            DispatchOutcome::Unsendable(reason) => {
                run.rollout.refused(node, reason, now);
                self.node_event(actions, "NodeFailed", &format!("{node}: {reason}"));
                self.touch(true);
            }
        }
    }

    pub(super) fn running(&self) -> Vec<(NodeName, u32)> {
        self.run.as_ref().map(|run| run.rollout.running().collect()).unwrap_or_default()
    }

    pub(super) fn phase(&self) -> JobPhase {
        self.phase
    }

    /// Expires, starts, and ends the job where it is over.
    pub(super) fn advance(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = self.run.as_mut().filter(|run| run.job.is_some() && run.completion_time.is_none())
        else {
            return;
        };
        let decisions = run.rollout.advance(now);
        if !decisions.is_empty() {
            self.touch(true);
        }
        for decision in decisions {
            match decision {
                Decision::Start(node) => self.after_write(Deferred::Dispatch(node), now, actions),
                Decision::Expire(node) => {
                    let record = self.run.as_ref().and_then(|run| run.rollout.record(&node));
                    let (attempt, reason) = record.map(|r| (r.attempt, r.reason.clone())).unwrap_or_default();
                    actions.push(cancel(&node, TaskId { job: self.uid.clone(), attempt }, &reason));
                    self.node_event(actions, "NodeUnknown", &format!("{node}: {reason}"));
                }
            }
        }
        self.conclude(now, actions);
    }

    fn conclude(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        let summary = run.rollout.summary().clone();
        let bad = summary.failure + summary.unknown;
        let tolerate = self
            .spec
            .as_ref()
            .map(|spec| spec.image_pre_pull_template.failure_tolerate.clone())
            .unwrap_or_default();
        let excess =
            format!("{bad} of {} nodes failed, more than failureTolerate {tolerate} allows", summary.desired);
        let (phase, warning, reason, note) = match run.rollout.verdict() {
            Verdict::Running => {
                let offline = run.rollout.waiting_offline();
                self.reason =
                    if offline > 0 && summary.in_progress == 0 && summary.pending as usize == offline {
                        format!("waiting for {offline} nodes that are offline")
                    } else {
                        String::new()
                    };
                return;
            }
            Verdict::Draining => {
                if self.reason != excess {
                    self.reason.clone_from(&excess);
                    self.event(
                        actions,
                        true,
                        "ToleranceExceeded",
                        &format!("{excess}; no further node starts"),
                    );
                    self.touch(true);
                }
                return;
            }
            Verdict::Completed if bad == 0 => (JobPhase::Completed, false, "Completed", String::new()),
            Verdict::Completed => (
                JobPhase::Completed,
                false,
                "Completed",
                format!("{bad} of {} nodes failed, within failureTolerate {tolerate}", summary.desired),
            ),
            Verdict::Failed if summary.pending > 0 => (
                JobPhase::Failure,
                true,
                "Failed",
                format!("{excess}; {} nodes were not started", summary.pending),
            ),
            Verdict::Failed => (JobPhase::Failure, true, "Failed", excess),
        };
        run.rollout.abandon_pending("not started: more nodes failed than failureTolerate allows");
        run.completion_time = Some(now);
        self.phase = phase;
        self.reason.clone_from(&note);
        let counted = format!(
            "{} successful, {} failed, {} unknown",
            summary.successful, summary.failure, summary.unknown
        );
        self.event(
            actions,
            warning,
            reason,
            &if note.is_empty() { counted } else { format!("{note} ({counted})") },
        );
        self.touch(true);
    }

    /// Emits the write if there is something to write and it may be now.
    pub(super) fn write_if_due(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.writes.due().is_none_or(|due| due > now) {
            return;
        }
        let status = self.status(now);
        self.conditions.clone_from(&status.conditions);
        let version = self.writes.begin(now);
        let (job, name) = (self.uid.clone(), self.name.clone());
        actions.push(Action::Write { job, name, version, status: Box::new(status) });
    }

    /// A write ended; what waited for it goes out.
    pub(super) fn written(&mut self, version: u64, done: bool, now: Timestamp, actions: &mut Vec<Action>) {
        if done {
            for deferred in self.writes.done(version) {
                self.release(deferred, now, actions);
            }
        } else {
            self.writes.failed(now);
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        let running = self.run.as_ref().filter(|run| run.job.is_some() && run.completion_time.is_none());
        let deadline = running.and_then(|run| run.rollout.next_deadline());
        [deadline, self.writes.due()].into_iter().flatten().min()
    }

    fn after_write(&mut self, deferred: Deferred, now: Timestamp, actions: &mut Vec<Action>) {
        if let Some(deferred) = self.writes.after(deferred) {
            self.release(deferred, now, actions);
        }
    }

    fn release(&mut self, deferred: Deferred, now: Timestamp, actions: &mut Vec<Action>) {
        match deferred {
            Deferred::Ack(node, task) => actions.push(Action::Send(node, CloudMessage::ResultAck { task })),
            Deferred::Dispatch(node) => self.dispatch(&node, now, actions),
        }
    }

    fn dispatch(&mut self, node: &NodeName, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        let (Some(job), Some(plan)) = (&run.job, run.plans.get(node)) else { return };
        let Some(remaining) = run.rollout.dispatching(node, now) else { return };
        let attempt = run.rollout.record(node).map_or(1, |record| record.attempt);
        let (job, plan, node) = (job.clone(), plan.clone(), node.clone());
        actions.push(Action::Dispatch(Dispatch { job, node, attempt, plan, remaining }));
    }

    fn touch(&mut self, urgent: bool) {
        self.writes.touch(urgent);
    }

    fn status(&self, now: Timestamp) -> ImagePrePullJobStatus {
        let mut summary = self.run.as_ref().map(|run| run.rollout.summary().clone()).unwrap_or_default();
        summary.skipped = self.skipped_total;
        let parts = Parts {
            generation: Some(self.generation),
            phase: self.phase,
            reason: self.reason.clone(),
            start_time: self.run.as_ref().map(|run| run.start_time),
            completion_time: self.run.as_ref().and_then(|run| run.completion_time),
            summary,
            conditions: &self.conditions,
            facts: aggregate::facts(self.phase, self.run.is_some(), self.refusal.as_deref(), &self.reason),
            skipped: &self.skipped,
        };
        aggregate::status(parts, self.run.iter().flat_map(|run| run.rollout.records()), now)
    }

    fn event(&self, actions: &mut Vec<Action>, warning: bool, reason: &'static str, note: &str) {
        let note = bounded_reason(note);
        actions.push(Action::Event(JobEvent {
            job: self.uid.clone(),
            name: self.name.clone(),
            warning,
            reason,
            note,
        }));
    }

    fn node_event(&mut self, actions: &mut Vec<Action>, reason: &'static str, note: &str) {
        if self.node_events < NODE_EVENTS {
            self.node_events += 1;
            self.event(actions, true, reason, note);
        }
    }
}
