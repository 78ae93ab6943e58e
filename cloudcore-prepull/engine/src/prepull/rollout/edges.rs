//! The transitions of nodes by messages to and from their edges.

use std::ops::Range;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{NodePhase, Tristate};
use prepull_api::failure::FailureCode;
use prepull_api::task::{NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenPhase, TaskProgress};

use super::{AssignStage, Reattach, Rollout, Touched, record};
use crate::fleet::session::SessionId;
use crate::prepull::plan::NodePlan;
use crate::shared::writes::StartId;

/// How long the API server may take for the write of a start before that is no longer taken from the node's time.
const WRITE_SLACK: SignedDuration = SignedDuration::from_secs(1);

impl Rollout {
    /// The records of these places are being written, and with them the nodes' unrecorded starts.
    pub fn stamp_starts(&mut self, places: Range<usize>, now: Timestamp) {
        for &at in self.recording.range(places) {
            let member = &mut self.members[at];
            member.is_stamped = true;
            if !self.rechecking.contains(&at) {
                member.record.start_time = Some(Time(now));
            }
        }
    }

    /// The start of the node that waits to be recorded, if there is one.
    pub fn start_of(&self, node: &NodeName) -> Option<StartId> {
        let place = self.position(node).filter(|at| self.recording.contains(at))?;
        Some(StartId { place, number: self.members[place].start })
    }

    /// The node's withdrawn start, if the API server may still have it.
    pub fn withdrawn_start(&self, node: &NodeName) -> Option<StartId> {
        let place = self.position(node).filter(|at| self.withdrawn.contains(at))?;
        Some(StartId { place, number: self.members[place].start })
    }

    /// The API server has it that this start did not happen.
    pub fn forget_start(&mut self, start: StartId) {
        if self.members.get(start.place).is_some_and(|member| member.start == start.number) {
            self.withdrawn.remove(&start.place);
        }
    }

    /// Names the images in the record of a node that starts, so that it is complete even if the edge never answers.
    /// Images that an earlier attempt pulled under another reference don't count as present.
    pub fn name_images(&mut self, node: &NodeName, plan: &NodePlan) {
        let Some(at) = self.position(node) else { return };
        let images = &mut self.members[at].record.image_status;
        let fresh = record::fresh_images(plan);
        if images.len() != fresh.len() {
            *images = fresh;
            return;
        }
        for (image, fresh) in images.iter_mut().zip(fresh) {
            if image.pulled_image != fresh.pulled_image {
                *image = fresh;
            }
        }
    }

    /// The nodes in progress, each with its attempt.
    pub fn tasks_in_progress(&self) -> impl Iterator<Item = (NodeName, u32)> {
        self.in_progress.iter().map(|&at| (self.node_name(at), self.members[at].record.attempt))
    }

    /// The images that the node has pulled in an earlier attempt, by their index.
    pub fn pulled_images(&self, node: &NodeName) -> Vec<usize> {
        let images = self.record(node).map(|record| record.image_status.as_slice()).unwrap_or_default();
        let there = images.iter().enumerate().filter(|(_, image)| image.status == Tristate::True);
        there.map(|(index, _)| index).collect()
    }

    /// The start of the node is recorded: its task is being dispatched. Returns the time that is left for it, if any.
    pub fn begin_dispatch(&mut self, node: &NodeName, now: Timestamp) -> Option<Duration> {
        let at = self.in_progress(node)?;
        let again = match self.members[at].flight {
            AssignStage::Recording => false,
            AssignStage::Dispatching { again, .. } => again,
            AssignStage::Sent(_) | AssignStage::Accepted => true,
        };
        let session = self.members[at].online;
        self.members[at].flight = AssignStage::Dispatching { again, session, is_outdated: false };
        let is_first = self.recording.remove(&at);
        if self.rechecking.contains(&at) {
            let left = self.recheck_until?.duration_since(now);
            return Duration::try_from(left).ok().filter(|left| !left.is_zero());
        }
        if is_first {
            self.begin_time(at, now);
        }
        let started = self.members[at].record.start_time.as_ref()?.0;
        Some(self.time_left(at, started, now)).filter(|remaining| !remaining.is_zero())
    }

    /// The time of a node begins, with the write that has recorded its start.
    fn begin_time(&mut self, at: usize, now: Timestamp) {
        let record = &mut self.members[at].record;
        let is_late = |start: &Time| now.duration_since(start.0) > WRITE_SLACK;
        if record.start_time.as_ref().is_none_or(is_late) {
            record.start_time = Some(Time(now));
            self.touched.push(Touched { at, phase: false });
        }
        self.index_member(at);
    }

    /// The Assign was handed to a session. If the node has a newer one by now, or the settings have changed, the Assign must be
    /// sent again.
    pub fn mark_sent(&mut self, node: &NodeName, session: SessionId) -> Reattach {
        let Some(at) = self.in_progress(node) else { return Reattach::Leave };
        let member = &mut self.members[at];
        match member.online {
            Some(current) if current > session => Reattach::Dispatch,
            _ => match member.flight {
                AssignStage::Dispatching { is_outdated, .. } => {
                    member.flight = AssignStage::Sent(Some(session));
                    if is_outdated { Reattach::Dispatch } else { Reattach::Leave }
                }
                _ => Reattach::Leave,
            },
        }
    }

    /// The Assign could not be handed to a session, so the known session is dead even if its end was not reported yet.
    /// The node becomes pending again; if its edge may have the task already, it keeps its slot and is sent the Assign
    /// on its next session. If that session is there already, send the Assign now.
    pub fn mark_not_sent(&mut self, node: &NodeName) -> Reattach {
        let Some(at) = self.in_progress(node) else { return Reattach::Leave };
        let AssignStage::Dispatching { again, session, .. } = self.members[at].flight else {
            return Reattach::Leave;
        };
        if self.members[at].online.is_some_and(|online| Some(online) != session) {
            return Reattach::Dispatch;
        }
        self.set_online(at, None);
        if again {
            self.members[at].flight = AssignStage::Sent(None);
        } else {
            self.withdraw_start(at);
        }
        Reattach::Leave
    }

    /// The task of the node cannot be sent at all.
    pub fn fail_unsendable(&mut self, node: &NodeName, code: FailureCode, reason: &str, now: Timestamp) {
        if let Some(at) = self.in_progress(node) {
            self.end_without_result(at, (NodePhase::Failure, code), reason, now);
        }
    }

    /// The task of the node can no longer be made.
    pub fn mark_lost(&mut self, node: &NodeName, reason: &str, now: Timestamp) {
        if let Some(at) = self.in_progress(node) {
            self.end_without_result(at, (NodePhase::Unknown, FailureCode::NodeNotFound), reason, now);
        }
    }

    /// The edge has the task in its ledger.
    pub fn mark_accepted(&mut self, node: &NodeName, attempt: u32) {
        if let Some(at) = self.in_progress(node)
            && self.members[at].record.attempt == attempt
        {
            self.note_accepted(at);
        }
    }

    /// An unrecorded start was not sent, even if the edge claims otherwise. And what is being sent once more, or has to be,
    /// with other settings or credentials, isn't what the edge has.
    fn note_accepted(&mut self, at: usize) {
        let flight = &mut self.members[at].flight;
        let is_another = match *flight {
            AssignStage::Dispatching { again, is_outdated, .. } => again || is_outdated,
            _ => false,
        };
        if !self.recording.contains(&at) && !is_another {
            *flight = AssignStage::Accepted;
        }
    }

    /// The node has a session. `open`: this job's task in its `Hello`, if it is there.
    pub fn mark_online(
        &mut self,
        node: &NodeName,
        session: SessionId,
        open: Option<(u32, OpenPhase)>,
        now: Timestamp,
    ) -> Reattach {
        let Some(&at) = self.index.get(node) else { return Reattach::Cancel };
        if self.closed {
            return match open {
                Some((_, OpenPhase::Finished)) | None => Reattach::Leave,
                Some(_) => Reattach::Cancel,
            };
        }
        self.end_wait_at_return(at, now);
        self.set_online(at, Some(session));
        let record = &self.members[at].record;
        let current = open.filter(|(attempt, _)| *attempt == self.attempt_of(record));
        match (record.phase, current) {
            // Its result follows, and is acknowledged when it is written.
            (_, Some((_, OpenPhase::Finished))) => Reattach::Leave,
            (NodePhase::InProgress, Some((_, OpenPhase::Running | OpenPhase::Other))) => {
                self.note_accepted(at);
                if self.recording.contains(&at) { Reattach::Leave } else { Reattach::AtWork }
            }
            (NodePhase::InProgress, _) => match self.members[at].flight {
                // It will be sent to the session that is there then.
                AssignStage::Recording | AssignStage::Dispatching { .. } => Reattach::Leave,
                AssignStage::Sent(_) | AssignStage::Accepted => Reattach::Dispatch,
            },
            // A start is recorded before it is sent, so the record was lost (its report was deleted, edited, or
            // restored by hand), or the edge's claim is false. It goes on where it might start now, and is recorded
            // first.
            (NodePhase::Pending, Some((attempt, _))) => {
                let may_start = self.may_start() && self.startable.contains(&at);
                self.members[at].record.attempt = if may_start { attempt } else { attempt.saturating_add(1) };
                if may_start {
                    self.start(at, now);
                    return Reattach::Start;
                }
                // With the next number, messages about the cancelled task change nothing.
                self.touched.push(Touched { at, phase: true });
                Reattach::Cancel
            }
            (NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown, Some(_)) => Reattach::Cancel,
            (_, None) => Reattach::Leave,
        }
    }

    /// The node lost its session. A node in progress keeps its slot until its deadline: it may well be pulling.
    pub fn mark_offline(&mut self, node: &NodeName, session: SessionId) {
        if let Some(&at) = self.index.get(node)
            && self.members[at].online == Some(session)
        {
            self.set_online(at, None);
        }
    }

    /// Records the progress of the node. Returns whether anything changed.
    pub fn record_progress(
        &mut self,
        node: &NodeName,
        plan: &NodePlan,
        progress: &TaskProgress,
        now: Timestamp,
    ) -> bool {
        let Some(at) = self.in_progress(node) else { return false };
        if self.members[at].record.attempt != progress.task.attempt {
            return false;
        }
        self.note_accepted(at);
        if self.rechecking.contains(&at) {
            return false;
        }
        record::apply_progress(&mut self.members[at].record, plan, progress, now);
        self.touched.push(Touched { at, phase: false });
        true
    }

    /// Records the result of the node's task, also after its deadline and after the end of the job: it is the truth about
    /// the node. Returns whether anything changed.
    pub fn record_result(
        &mut self,
        node: &NodeName,
        plan: Option<&NodePlan>,
        result: &TaskResult,
        now: Timestamp,
    ) -> bool {
        let Some(&at) = self.index.get(node) else { return false };
        let before = self.members[at].record.phase;
        if self.attempt_of(&self.members[at].record) != result.task.attempt
            || matches!(before, NodePhase::Successful | NodePhase::Failure)
        {
            return false;
        }
        if self.take_look(at, result, now) {
            return true;
        }
        let needs_keys = self.needs_keys(at, result);
        let record = &mut self.members[at].record;
        // Where the record was lost, the task that this is the result of is not counted yet.
        record.attempt = result.task.attempt;
        record::apply_result(record, plan, result, now);
        if needs_keys {
            self.begin_with_keys(at);
            return true;
        }
        match (result.outcome, before) {
            (TaskOutcome::Succeeded, _) => self.set_phase(at, NodePhase::Successful, String::new()),
            // The answer to the Cancel that followed the deadline: its image states are kept.
            (TaskOutcome::Cancelled, NodePhase::Unknown) => {
                self.touched.push(Touched { at, phase: true });
            }
            (
                TaskOutcome::Failed
                | TaskOutcome::DeadlineExceeded
                | TaskOutcome::Cancelled
                | TaskOutcome::Other,
                _,
            ) => {
                let cause = (NodePhase::Failure, record::code_of(result));
                self.fail_node(at, cause, record::reason_of(result));
            }
        }
        true
    }
}
