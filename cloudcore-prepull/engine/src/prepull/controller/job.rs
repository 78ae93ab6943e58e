//! One job: its inputs from nodes, edges and writes.
//!
//! ```text
//! ┌ spec: the spec as seen, and as accepted
//!            ├ course: phase, times, rounds ◀────────┐ judge
//!  Job ─────▶├ members: rollout and plans ───────────┘
//!            ├ output: status and reports, and what waits for their writes
//! └ events: the Kubernetes Events
//! ```
//!
//! Each part has a state of its own that only it can touch. This module and `start` (load, begin), `edit` (take a
//! change of the spec), `lifecycle` (advance, end, retry, delete) and `status` tie them together.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{JobPhase, NodeClock, NodePhase, NodeStatus, Summary};
use prepull_api::failure::FailureCode;
use prepull_api::task::{JobUid, NodeName, TaskId, TaskResult};
use prepull_api::wire::{CloudMessage, OpenTask, TaskProgress};

use super::{Action, Content, Effects, JobObject, WriteEnd, cancel_message, rest_of};
use crate::fleet::in_hand::TaskInHand;
use crate::fleet::node_view::NodeView;
use crate::fleet::session::SessionId;
use crate::prepull::aggregate::{self, FIRST_ATTEMPT};
use crate::prepull::plan;
use crate::prepull::rollout::Reattach;
use crate::prepull::validate::ValidatedJob;
use crate::shared::access::{KeysSent, LayerAccess};
use crate::shared::outcomes::DispatchOutcome;
use crate::shared::reasons;
use crate::shared::writes::{Deferred, WritePace};
use crate::sites::BlobSharing;

mod course;
mod edit;
mod events;
mod lifecycle;
mod members;
mod output;
mod shards;
mod spec;
mod start;
mod status;
mod stored;

use course::Course;
use events::JobEvents;
use members::{Members, PreparedDispatch};
use output::JobOutput;
use spec::SpecState;

type NodeViews = BTreeMap<NodeName, NodeView>;

#[derive(Debug)]
pub(super) struct PrepullJob {
    /// What the job begins with once a node of it is Ready, while none is; it ends once none can become Ready.
    waiting: Option<WaitingJob>,
    /// The job's next run: its images or nodes were edited after it had begun.
    next: Option<Box<ImagePrePullJob>>,
    spec: SpecState,
    course: Course,
    members: Members,
    output: JobOutput,
    events: JobEvents,
}

/// A job that could begin if one of its nodes were Ready.
#[derive(Debug)]
struct WaitingJob {
    object: Box<ImagePrePullJob>,
    job: Arc<ValidatedJob>,
}

pub(super) fn uid_of(object: &JobObject) -> JobUid {
    JobUid(rest_of(object).metadata.uid.clone().unwrap_or_default())
}

pub(super) fn generation_of(object: &JobObject) -> i64 {
    rest_of(object).metadata.generation.unwrap_or_default()
}

impl PrepullJob {
    pub(super) fn phase(&self) -> JobPhase {
        self.course.phase()
    }

    pub(super) fn name_and_summary(&self) -> (&str, &Summary) {
        (self.events.name(), self.members.rollout().summary())
    }

    /// Whether nodes were chosen, at any time.
    pub(super) fn has_begun(&self) -> bool {
        self.course.has_begun()
    }

    /// The run that has begun, if any, by the number of its first attempt.
    pub(super) fn run(&self) -> Option<u32> {
        self.has_begun().then(|| self.course.first_attempt())
    }

    /// Whether what the job has pinned on the node can only be of an earlier run, if none of its tasks is open there.
    pub(super) fn has_only_older_pins(&self, node: &NodeName) -> bool {
        let Some(first) = self.run().filter(|first| *first > FIRST_ATTEMPT) else { return false };
        let is_open = |phase| matches!(phase, NodePhase::Pending | NodePhase::InProgress);
        match self.members.rollout().record(node) {
            Some(record) => record.attempt < first || (record.attempt == first && is_open(record.phase)),
            None => !self.course.has_lost_records(),
        }
    }

    /// Whether nothing of the job is left to do unless a person asks for more.
    pub(super) fn is_over(&self) -> bool {
        !self.course.is_running()
    }

    /// Whether the job waits for a Ready node, and would take this one.
    pub(super) fn waits_for(&self, node: &NodeView) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| plan::chooses_node(&waiting.job, node))
    }

    /// Whether the job waits for a Ready node, and may have to end once this one is gone or has other labels.
    pub(super) fn waits_with(&self, node: &NodeView) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| plan::asks_for(&waiting.job, node))
    }

    /// Whether the accepted spec is unknown: an earlier version of cloudcore had not stored it, and the present spec is
    /// unusable. Nothing starts, expires or ends before that is corrected; results that arrive are recorded.
    fn is_held(&self) -> bool {
        self.course.is_running() && self.spec.accepted().is_none()
    }

    /// The nodes that this job may still start or is waiting for.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeName> {
        let records = self.course.is_running().then(|| self.members.rollout().records());
        records.into_iter().flatten().map(|record| NodeName(record.node_name.clone()))
    }

    /// The nodes in progress, each with its attempt.
    pub(super) fn tasks_in_progress(&self) -> Vec<(NodeName, u32)> {
        self.members.rollout().tasks_in_progress().collect()
    }

    /// Whether the edge is to go on with this task.
    pub(super) fn is_in_progress(&self, node: &NodeName, attempt: u32) -> bool {
        self.members.is_in_progress(node, attempt) || self.may_be_lost(node, attempt)
    }

    /// Whether the node may be one whose report is lost, with the attempt that it would make first. While the spec can't be
    /// read, that isn't known, and what the node has is left to it. Attempts of later rounds aren't spared.
    fn may_be_lost(&self, node: &NodeName, attempt: u32) -> bool {
        let is_held = self.course.lost_reports_status().is_some_and(|kept| kept.completion_time.is_none());
        is_held && attempt == self.course.first_attempt() && self.members.rollout().position(node).is_none()
    }

    /// What the node's task shares, while the job runs.
    pub(super) fn shared_by(
        &self,
        node: &NodeName,
        attempt: u32,
        by_default: bool,
    ) -> Option<(BlobSharing, LayerAccess)> {
        self.members.shared_by(node, attempt, by_default)
    }

    /// Bytes a second over the uplink of each site.
    pub(super) fn site_rate(&self) -> Option<NonZeroU64> {
        self.members.accepted_job()?.download.max_site_rate
    }

    pub(super) fn in_hand(&self, node: &NodeName, attempt: u32) -> Option<TaskInHand> {
        let (images, started) = self.members.in_hand(node, attempt)?;
        Some(TaskInHand { job: Some(self.events.name().to_owned()), images, started })
    }

    /// Nodes that took (`true`) or gave back a slot since the last call.
    pub(super) fn take_moves(&mut self) -> Vec<(NodeName, bool)> {
        self.members.rollout_mut().take_moves()
    }

    pub(super) fn set_busy(&mut self, node: &NodeName, busy: bool) {
        if self.course.is_running() && self.members.rollout_mut().set_busy(node, busy) {
            self.output.touch_status(WritePace::Slow);
        }
    }

    /// The node's edge counts its time by another clock from now on.
    pub(super) fn set_clock(&mut self, node: &NodeName, clock: &NodeClock) {
        if self.members.phase_of(node).is_some() {
            self.members.rollout_mut().set_clock(node, clock);
        }
    }

    /// The node has a session. `open`: this job's task in its `Hello`, if it is there.
    pub(super) fn mark_online(
        &mut self,
        node: &NodeName,
        session: SessionId,
        clock: &NodeClock,
        open: Option<&OpenTask>,
        effects: &mut Effects<'_>,
    ) {
        let Some(before) = self.members.phase_of(node) else { return };
        let is_running = self.course.is_running();
        self.members.rollout_mut().set_clock(node, clock);
        let said = open.map(|open| (open.task.attempt, open.phase));
        match self.members.rollout_mut().mark_online(node, session, said, effects.now) {
            Reattach::Dispatch => self.dispatch(node, effects),
            Reattach::Start => self.record_start(node, effects),
            // The terms may have changed while it was away, or another cloudcore gave it keys that we don't know.
            // Without a plan, since its Node is gone, it goes on with what it was sent.
            Reattach::AtWork
                if self.members.has_plan(node)
                    && (self.members.limits_downloads()
                        || self.members.has_unknown_keys(node)
                        || open.is_some_and(|open| open.limited)) =>
            {
                self.dispatch(node, effects);
            }
            // The controller cancels tasks of nodes that are not in progress.
            Reattach::Cancel | Reattach::Leave | Reattach::AtWork => {}
        }
        if before == NodePhase::Pending && is_running {
            self.output.touch_status(WritePace::Slow);
        }
        self.collect_changes();
    }

    pub(super) fn mark_offline(&mut self, node: &NodeName, session: SessionId) {
        self.members.rollout_mut().mark_offline(node, session);
        if self.course.is_running() && self.members.phase_of(node) == Some(NodePhase::Pending) {
            self.output.touch_status(WritePace::Slow);
        }
    }

    /// The Node object is gone. Returns whether the node has left the job by that.
    pub(super) fn remove_node(&mut self, node: &NodeName) -> bool {
        let has_left = self.course.is_running() && self.members.remove_node(node);
        self.collect_changes();
        if has_left {
            self.output.touch_status(WritePace::Now);
        }
        has_left
    }

    /// Nodes in progress lost their Node objects before, and may wait again since. Returns those that have left by that.
    pub(super) fn remove_nodeless(&mut self, nodes: &NodeViews) -> Vec<NodeName> {
        let left = if self.course.is_running() { self.members.remove_nodeless(nodes) } else { Vec::new() };
        self.collect_changes();
        if !left.is_empty() {
            self.output.touch_status(WritePace::Now);
        }
        left
    }

    /// Whether nodes that are new or changed may join.
    fn takes_nodes(&self) -> bool {
        self.course.is_running() && !self.course.is_rechecking() && self.course.policy().follow_nodes
    }

    /// A node is new or changed: it joins if the job wants that. Returns whether it did.
    pub(super) fn add_if_chosen(&mut self, node: &NodeView) -> bool {
        let joins = self.takes_nodes() && self.members.add_if_chosen(node);
        if joins {
            self.output.shards.grow(self.members.rollout().len());
            self.output.touch_status(WritePace::Soon);
        }
        joins
    }

    /// The labels of a node have changed: an attempt that it has not begun goes by the new ones.
    pub(super) fn replan_waiting(&mut self, node: &NodeView) {
        if self.course.is_running() {
            self.members.replan_waiting(node);
        }
    }

    /// The edge has the task. Returns whether it is to go on with it.
    pub(super) fn mark_accepted(&mut self, node: &NodeName, attempt: u32) -> bool {
        self.members.rollout_mut().mark_accepted(node, attempt);
        self.is_in_progress(node, attempt)
    }

    pub(super) fn record_progress(&mut self, node: &NodeName, progress: &TaskProgress, now: Timestamp) {
        self.members.record_progress(node, progress, now);
        self.collect_changes();
    }

    pub(super) fn record_result(&mut self, node: &NodeName, result: &TaskResult, effects: &mut Effects<'_>) {
        if self.members.record_result(node, result, effects.now) {
            self.warn_of_failure(node, effects);
            self.collect_changes();
        }
        if self.may_be_lost(node, result.task.attempt) {
            return;
        }
        // Also for a result that changed nothing: it may be in memory and not yet in the API server.
        self.after_write(node, Deferred::Ack(node.clone(), result.task.clone()), effects);
    }

    /// Notes the keys that went out with a task, if the node still carries it out.
    pub(super) fn note_keys(&mut self, node: &NodeName, attempt: u32, keys: Option<KeysSent>) {
        if self.is_in_progress(node, attempt) {
            self.members.note_keys(node, keys);
        }
    }

    pub(super) fn finish_dispatch(
        &mut self,
        node: &NodeName,
        attempt: u32,
        outcome: &DispatchOutcome,
        effects: &mut Effects<'_>,
    ) {
        if !self.course.has_begun() {
            return;
        }
        let is_current = self.is_in_progress(node, attempt);
        match outcome {
            // The node's time ran out in between.
            DispatchOutcome::Sent(_) | DispatchOutcome::SentWithoutKeys(_) if !is_current => {
                let task = TaskId { job: self.events.uid().clone(), attempt };
                effects.emit(cancel_message(node, task, super::OVER));
            }
            // The attempt is over.
            _ if !is_current => {}
            DispatchOutcome::Sent(session) | DispatchOutcome::SentWithoutKeys(session) => {
                let rollout = self.members.rollout_mut();
                if rollout.mark_sent(node, *session) == Reattach::Dispatch {
                    self.dispatch(node, effects);
                } else if matches!(outcome, DispatchOutcome::SentWithoutKeys(_)) {
                    rollout.mark_asked(node);
                }
            }
            DispatchOutcome::Offline => {
                if self.members.rollout_mut().mark_not_sent(node) == Reattach::Dispatch {
                    self.dispatch(node, effects);
                }
            }
            DispatchOutcome::Postponed(reason) => self.postpone(node, reason, &[], effects),
            DispatchOutcome::Withheld { secrets, reason } => {
                self.events.emit_withheld(reason, effects);
                self.postpone(node, reason, secrets, effects);
            }
            DispatchOutcome::TooOld(reason) => {
                let rollout = self.members.rollout_mut();
                rollout.fail_unsendable(node, FailureCode::AgentTooOld, reason, effects.now);
                self.warn_of_failure(node, effects);
            }
            DispatchOutcome::Unsendable(reason) => {
                let rollout = self.members.rollout_mut();
                rollout.fail_unsendable(node, FailureCode::Internal, reason, effects.now);
                self.warn_of_failure(node, effects);
            }
        }
        self.collect_changes();
        if let Some(start) = self.members.rollout().withdrawn_start(node) {
            self.after_write(node, Deferred::Withdraw(start), effects);
        }
    }

    fn postpone(&mut self, node: &NodeName, reason: &str, withheld: &[String], effects: &mut Effects<'_>) {
        if !self.members.rollout_mut().postpone(node, reason, withheld, effects.now) {
            self.warn_of_failure(node, effects);
        }
    }

    /// The owner of a secret has allowed its use: the nodes that wait for that go on.
    pub(super) fn end_waits_for(&mut self, secret: &str, now: Timestamp) {
        self.members.rollout_mut().end_waits_for(secret, now);
    }

    fn warn_of_failure(&mut self, node: &NodeName, effects: &mut Effects<'_>) {
        let record = self.members.rollout().record(node);
        if let Some(note) = record.filter(|record| record.phase == NodePhase::Failure).map(note_of) {
            self.events.emit_node_warning(reasons::NODE_FAILED, &note, effects);
        }
    }

    /// Rewrites reports that a user has deleted.
    pub(super) fn rewrite_reports(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.output.shards.rewrite(is_gone);
    }

    pub(super) fn write_if_due(&mut self, effects: &mut Effects<'_>) {
        self.collect_changes();
        let (rollout, is_over) = (self.members.rollout(), self.course.end_time().is_some());
        let any_in_progress = |places| rollout.any_in_progress(places);
        for report in self.output.begin_reports(effects.now, any_in_progress) {
            self.members.rollout_mut().stamp_starts(report.nodes.clone(), effects.now);
            let rollout = self.members.rollout();
            let records = rollout.records_of(report.nodes);
            let (first, rounds) = (self.course.first_attempt(), self.course.all_rounds());
            let body = aggregate::make_report(self.events.name(), report.index, first, rounds, records);
            let write = self.write_action(report.version, Content::Report(Box::new(body)));
            effects.emit(write);
        }
        let status_due = self.output.next_status(is_over);
        if status_due.is_none_or(|due| due > effects.now) {
            return;
        }
        let status = self.status(effects.now);
        let version = self.output.begin_status(&status.conditions, effects.now);
        effects.emit(self.write_action(version, Content::Status(Box::new(status))));
    }

    fn write_action(&self, version: u64, content: Content) -> Action {
        let (job, name) = (self.events.uid().clone(), self.events.name().to_owned());
        let replaces = self.output.stored_version(content.object());
        Action::Write { job, name, version, replaces, content }
    }

    /// A write ended; what waited for it goes out.
    pub(super) fn finish_write(&mut self, end: WriteEnd, effects: &mut Effects<'_>) {
        for deferred in self.output.finish_write(end, effects.now) {
            self.release_deferred(deferred, effects);
        }
    }

    /// The job is gone, so its unwritten results are no longer needed.
    pub(super) fn abandon(&mut self, effects: &mut Effects<'_>) {
        for deferred in self.output.abandon() {
            if let Deferred::Ack(node, task) = deferred {
                effects.emit(ack_message(node, task));
            }
        }
    }

    /// Marks the reports of changed records, and the status, for a write.
    fn collect_changes(&mut self) {
        let touched = self.members.rollout_mut().take_touched();
        self.output.touch_records(&touched);
    }

    /// Does the deferred work once the node's present record is written.
    fn after_write(&mut self, node: &NodeName, deferred: Deferred, effects: &mut Effects<'_>) {
        let ready = match self.members.rollout().position(node) {
            Some(place) => self.output.shards.defer_until_written(place, deferred),
            // A node that the job does not know: nothing will ever be written of it. It may be one of an earlier run, which
            // the next leader goes on with unless this one is written.
            None => self.output.defer_to_beginning(deferred),
        };
        if let Some(deferred) = ready {
            self.release_deferred(deferred, effects);
        }
    }

    fn release_deferred(&mut self, deferred: Deferred, effects: &mut Effects<'_>) {
        match deferred {
            Deferred::Ack(node, task) => effects.emit(ack_message(node, task)),
            Deferred::Dispatch(node, start) if self.members.rollout().start_of(&node) == Some(start) => {
                self.dispatch(&node, effects);
            }
            Deferred::Withdraw(start) => self.members.rollout_mut().forget_start(start),
            // What was written has ended in the meantime, or was put back. Another start waits for its turn.
            Deferred::Dispatch(..) => {}
        }
    }

    fn dispatch(&mut self, node: &NodeName, effects: &mut Effects<'_>) {
        // The next step stops the node.
        if self.course.is_cancelled() {
            return;
        }
        let attempt = self.members.attempt(node);
        match self.members.prepare_dispatch(node, effects.now) {
            PreparedDispatch::Dispatch(dispatch) => effects.emit(Action::Dispatch(dispatch)),
            PreparedDispatch::Nothing => {}
            PreparedDispatch::Impossible(reason) => {
                effects.emit(cancel_message(
                    node,
                    TaskId { job: self.events.uid().clone(), attempt },
                    reason,
                ));
                self.collect_changes();
            }
        }
    }
}

/// The text of the event about a failed node: its name, its code and its reason.
fn note_of(record: &NodeStatus) -> String {
    let code = record.code.unwrap_or(FailureCode::Other);
    format!("{}: {code}: {}", record.node_name, record.reason)
}

/// What an edge is sent when its result has been written.
fn ack_message(node: NodeName, task: TaskId) -> Action {
    Action::Send(node, CloudMessage::ResultAck { task })
}
