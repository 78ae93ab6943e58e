//! One job: its rollout, what waits for a write, and what people are told.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{JobPhase, NodePhase, NodeStatus, SkippedNode};
use prepull_api::task::{JobUid, NodeName, TaskId, TaskResult};
use prepull_api::wire::{CloudMessage, OpenPhase, Progress};

use super::{Action, Dispatch, JobObject, cancel};
use crate::prepull::plan::{self, NodePlan};
use crate::prepull::rollout::{Reattach, Rollout};
use crate::prepull::validate::{self, ValidatedJob};
use crate::shared::node_view::NodeView;
use crate::shared::outcomes::DispatchOutcome;
use crate::shared::reasons;
use crate::shared::session::SessionId;
use crate::shared::writes::{Deferred, Pace, Writes};

mod course;
mod output;
mod shards;
mod start;
mod stored;

use shards::Shards;

/// The nodes that there are.
type Nodes = BTreeMap<NodeName, NodeView>;

/// A job with nodes.
#[derive(Debug)]
struct Run {
    /// None for a job that was over before this life of cloudcore: nothing starts in it any more.
    job: Option<Arc<ValidatedJob>>,
    plans: HashMap<NodeName, Arc<NodePlan>>,
    rollout: Rollout,
    shards: Shards,
    start_time: Timestamp,
    /// From when activeDeadlineSeconds counts.
    active_since: Timestamp,
    completion_time: Option<Timestamp>,
    /// Rounds of spec.retry that have begun.
    retry: u32,
    /// Of what must not change, as it was at the start.
    spec_hash: String,
    /// What must not change, as it was at the start: see [`stored::fixed_part`].
    started: ImagePrePullJobSpec,
    /// The spec is another one by now; the job goes on with `started`.
    diverged: bool,
    /// It was changed while no cloudcore ran: what the job began with is not known any more.
    held: bool,
}

impl Run {
    fn is_over(&self) -> bool {
        self.completion_time.is_some()
    }

    /// Whether the status may be written. It says that a job has begun when there is a report of every node, and
    /// that it is over when the reports say how each of them ended.
    fn status_may_follow(&self) -> bool {
        if self.is_over() { self.shards.all_written() } else { self.shards.all_exist() }
    }
}

#[derive(Debug)]
pub(super) struct Job {
    name: String,
    uid: JobUid,
    generation: i64,
    /// As the spec has it, for people.
    tolerate: String,
    pace: validate::Pace,
    phase: JobPhase,
    reason: String,
    /// Why a Failure is one, for the condition.
    ended_as: Option<&'static str>,
    /// Why the spec, or its last change, was not taken over.
    refusal: Option<String>,
    run: Option<Run>,
    skipped: Vec<SkippedNode>,
    /// May be more than `skipped` holds after a restart.
    skipped_total: u32,
    conditions: Vec<Condition>,
    node_events: u32,
    /// Nodes in a report, at most.
    report_capacity: usize,
    /// Of the status.
    writes: Writes,
    /// When the deletion was asked for, and is asked for again.
    delete_at: Option<Timestamp>,
}

pub(super) fn uid_of(object: &JobObject) -> JobUid {
    match object {
        Ok(job) => JobUid(job.metadata.uid.clone().unwrap_or_default()),
        Err(unreadable) => unreadable.id.uid.clone(),
    }
}

impl Job {
    /// Whether nothing of the job is left to do but what it is asked anew.
    pub(super) fn is_over(&self) -> bool {
        self.run.as_ref().is_none_or(Run::is_over)
    }

    /// The nodes that this job may still start or is waiting for.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeName> {
        let run = self.run.iter().filter(|run| !run.is_over());
        run.flat_map(|run| run.rollout.records().map(|record| NodeName(record.node_name.clone())))
    }

    /// Nodes that took (`true`) or gave back a slot since the last call.
    pub(super) fn take_moves(&mut self) -> Vec<(NodeName, bool)> {
        self.run.as_mut().map(|run| run.rollout.take_moves()).unwrap_or_default()
    }

    /// The node works on as many tasks of other jobs as it can, or has room again.
    pub(super) fn busy(&mut self, node: &NodeName, busy: bool) {
        let run = self.run.as_mut().filter(|run| !run.is_over());
        if run.is_some_and(|run| run.rollout.busy(node, busy)) {
            self.writes.touch(Pace::Slow);
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
        let (reattach, over) = (run.rollout.online(node, session, open, now), run.is_over());
        if reattach == Reattach::Dispatch {
            self.dispatch(node, now, actions);
        }
        if before == NodePhase::Pending && !over {
            self.writes.touch(Pace::Slow);
        }
        self.collect();
    }

    /// Whether the edge is to go on with this task.
    pub(super) fn wants(&self, node: &NodeName, attempt: u32) -> bool {
        let record = self.run.as_ref().and_then(|run| run.rollout.record(node));
        record.is_some_and(|record| record.phase == NodePhase::InProgress && record.attempt == attempt)
    }

    pub(super) fn offline(&mut self, node: &NodeName, session: SessionId) {
        let Some(run) = &mut self.run else { return };
        run.rollout.offline(node, session);
        if run.rollout.record(node).is_some_and(|record| record.phase == NodePhase::Pending) && !run.is_over()
        {
            self.writes.touch(Pace::Slow);
        }
    }

    pub(super) fn node_deleted(&mut self, node: &NodeName) {
        if let Some(run) = self.run.as_mut().filter(|run| !run.is_over()) {
            run.rollout.deleted(node);
            self.collect();
        }
    }

    /// A node is new or changed: it joins where the job wants that. Says whether it did.
    pub(super) fn node_changed(&mut self, node: &NodeView) -> bool {
        let Some(run) = self.run.as_mut().filter(|run| !run.is_over() && !run.held) else { return false };
        let Some(job) = run.job.as_ref().filter(|_| self.pace.follow_nodes) else { return false };
        if run.rollout.position(&node.name).is_some() || !plan::chooses(job, node) {
            return false;
        }
        // What an overrider makes impossible for this node does not concern the others.
        let Ok(plan) = plan::plan_one(job, node) else { return false };
        run.rollout.add(fresh_record(&node.name));
        run.plans.insert(node.name.clone(), plan);
        run.shards.grow(run.rollout.len());
        let skipped = self.skipped.len();
        self.skipped.retain(|skipped| skipped.node_name != node.name.0);
        self.skipped_total = self.skipped_total.saturating_sub(u32::from(self.skipped.len() < skipped));
        self.writes.touch(Pace::Soon);
        true
    }

    /// The edge has the task. Says whether it is to go on with it.
    pub(super) fn accepted(&mut self, node: &NodeName, attempt: u32) -> bool {
        if let Some(run) = &mut self.run {
            run.rollout.accepted(node, attempt);
        }
        self.wants(node, attempt)
    }

    pub(super) fn progress(&mut self, node: &NodeName, progress: &Progress, now: Timestamp) {
        let Some(run) = &mut self.run else { return };
        if let Some(plan) = run.plans.get(node).cloned() {
            run.rollout.progress(node, &plan, progress, now);
            self.collect();
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
                    self.node_event(actions, reasons::NODE_FAILED, &note);
                }
                self.collect();
            }
        }
        // Also for a result that changed nothing: it may be in memory and not yet in the API server.
        self.after_write(node, Deferred::Ack(node.clone(), result.task.clone()), now, actions);
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
            // Of an attempt that is over.
            _ if !current => {}
            DispatchOutcome::Sent(session) => {
                if run.rollout.sent(node, *session) == Reattach::Dispatch {
                    self.dispatch(node, now, actions);
                }
            }
            DispatchOutcome::Offline => {
                if run.rollout.not_sent(node) == Reattach::Dispatch {
                    self.dispatch(node, now, actions);
                }
            }
            DispatchOutcome::Unsendable(reason) => {
                run.rollout.refused(node, reason, now);
                self.node_event(actions, reasons::NODE_FAILED, &format!("{node}: {reason}"));
            }
        }
        self.collect();
    }

    pub(super) fn running(&self) -> Vec<(NodeName, u32)> {
        self.run.as_ref().map(|run| run.rollout.running().collect()).unwrap_or_default()
    }

    pub(super) fn phase(&self) -> JobPhase {
        self.phase
    }

    fn attempt(&self, node: &NodeName) -> u32 {
        let record = self.run.as_ref().and_then(|run| run.rollout.record(node));
        record.map_or(1, |record| record.attempt)
    }

    fn dispatch(&mut self, node: &NodeName, now: Timestamp, actions: &mut Vec<Action>) {
        let attempt = self.attempt(node);
        let Some(run) = &mut self.run else { return };
        let (Some(job), Some(plan)) = (&run.job, run.plans.get(node)) else {
            if run.job.is_some() && !run.held {
                let reason =
                    "there is nothing to send: the Node is gone, or its overriders have become impossible";
                run.rollout.lost(node, reason, now);
                actions.push(cancel(node, TaskId { job: self.uid.clone(), attempt }, reason));
                self.collect();
            }
            return;
        };
        let Some(remaining) = run.rollout.dispatching(node, now) else { return };
        let there = if attempt > 1 { run.rollout.there(node) } else { Vec::new() };
        let (job, plan, node) = (job.clone(), plan.clone(), node.clone());
        actions.push(Action::Dispatch(Dispatch { job, node, attempt, plan, there, remaining }));
    }
}

fn fresh_record(node: &NodeName) -> NodeStatus {
    NodeStatus { node_name: node.0.clone(), ..NodeStatus::default() }
}

/// What an edge is sent when its result has been written.
fn ack(node: NodeName, task: TaskId) -> Action {
    Action::Send(node, CloudMessage::ResultAck { task })
}
