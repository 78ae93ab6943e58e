//! The state of one task in memory, and its transitions.

use std::time::{Duration, Instant};

use prepull_api::failure::FailureCode;
use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{Assign, OpenPhase, OpenTask, truncate_reason};

use super::io::{AgentEffect, Execution, TaskEnd, send_accepted, send_result};
use super::record::{TaskRecord, summarize_results};
use super::time::Now;
use super::windows::TaskTerms;
use super::windows::{LOOK_AT_CLOCK, NodeWindows};
use crate::tasks::removal::RemovalRecord;

/// Wait before we retry a failed write of a record: a full disk takes a while to empty, and a write costs next to
/// nothing.
pub(super) const PERSIST_RETRY: Duration = Duration::from_secs(5);

/// One task: its record, its stage, and the state of the record on disk.
#[derive(Debug)]
pub(super) struct TaskEntry {
    record: TaskRecord,
    /// Time of the acceptance. `None` for a task from before a restart: then only the wall clock gives its age.
    accepted: Option<Instant>,
    stage: TaskStage,
    saving: Saving,
    /// Whether the last assignment had download terms.
    limited: bool,
    /// Whether the executor waits until the choice of the images to remove is written.
    removal_waits: bool,
}

/// Stages of a task in the agent; the diagram is in [`super`].
#[derive(Debug)]
pub(super) enum TaskStage {
    /// The first record is being written. The cloud doesn't know yet that the task arrived.
    Storing(TaskTerms),
    /// The task is from before a restart and waits for an `Assign` with the keys.
    NeedsKeys {
        /// Deadline of the wait. `None` for a task with windows, because only the cloud knows its remaining time.
        deadline: Option<Instant>,
    },
    /// The task is accepted and waits for its turn.
    Queued {
        /// Deadline and keys for the executor.
        terms: TaskTerms,
        /// Position in the queue: the lowest starts first.
        turn: u64,
    },
    /// An executor works on the task.
    Running,
    /// The record with the result is being written. If the write fails, the result is sent anyway: a full disk must not
    /// silence the node.
    Ending,
    /// The result is on disk.
    Ended,
}

impl TaskStage {
    /// The stage for a person.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Storing(_) => "is being stored",
            Self::NeedsKeys { .. } => "waits for the cloud, which has its credentials",
            Self::Queued { .. } => "waits for its turn",
            Self::Running => "runs",
            Self::Ending | Self::Ended => "has ended, and the cloud has not taken the result yet",
        }
    }
}

/// The state of the record on disk.
#[derive(Debug, PartialEq, Eq)]
enum Saving {
    /// Both are the same.
    Saved,
    /// A write is under way.
    Writing {
        /// Whether the record has changed since the write began.
        outdated: bool,
    },
    /// The last write failed.
    Failed {
        /// Moment of the next write.
        retry_at: Instant,
    },
}

impl TaskEntry {
    /// Creates a task from its first assignment.
    pub(super) fn from_assignment(
        assign: Assign,
        clock: &NodeWindows,
        now: Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Self {
        let mut record = TaskRecord::new(assign.task.clone(), assign.remaining, now);
        let terms = TaskTerms::of_assignment(&record.task, assign, clock, now);
        record.has_windows = terms.has_windows();
        let accepted = Some(now.monotonic);
        let limited = !terms.download.is_default();
        let stage = TaskStage::Storing(terms);
        let mut entry =
            Self { record, accepted, stage, saving: Saving::Saved, limited, removal_waits: false };
        entry.save(effects);
        entry
    }

    /// Restores a task from the ledger after a restart.
    pub(super) fn from_record(record: TaskRecord, now: Now, effects: &mut Vec<AgentEffect>) -> Self {
        let stage = if record.result.is_some() {
            TaskStage::Ended
        } else {
            TaskStage::NeedsKeys {
                deadline: (!record.has_windows).then(|| now.moment_after(record.time_left(now))),
            }
        };
        let all_ended = record.result.is_none()
            && record.task.removal.is_none()
            && record.images.iter().all(Option::is_some);
        let (saving, limited, removal_waits) = (Saving::Saved, false, false);
        let mut entry = Self { record, accepted: None, stage, saving, limited, removal_waits };
        if all_ended {
            // The agent stopped between the last image and the result: no image needs a key any more.
            let images: Vec<_> = entry.record.images.iter().flatten().cloned().collect();
            let (outcome, reason) = summarize_results(&entry.record.task, &images);
            let check = entry.record.check.clone();
            entry.record_result(TaskEnd { outcome, reason, check, images, removal: None }, now, effects);
        }
        entry
    }

    pub(super) fn id(&self) -> &TaskId {
        self.record.id()
    }

    pub(super) fn record(&self) -> &TaskRecord {
        &self.record
    }

    pub(super) fn stage(&self) -> &TaskStage {
        &self.stage
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.stage, TaskStage::Running)
    }

    /// Describes the task for `Hello`. `None` if it isn't on disk yet: the cloud must assign it again.
    pub(super) fn open_task(&self) -> Option<OpenTask> {
        let phase = match self.stage {
            TaskStage::Storing(_) => return None,
            TaskStage::NeedsKeys { .. } => OpenPhase::NeedsKeys,
            // A queued task counts as running, because the cloud needs to do nothing for it.
            TaskStage::Queued { .. } | TaskStage::Running => OpenPhase::Running,
            TaskStage::Ending if self.result_to_send().is_none() => OpenPhase::Running,
            TaskStage::Ending | TaskStage::Ended => OpenPhase::Finished,
        };
        let limited = self.limited && phase == OpenPhase::Running;
        Some(OpenTask { task: self.record.id().clone(), phase, limited })
    }

    /// Returns the result to send: one that's on disk, or one that the disk has refused. During a write there's none,
    /// and an acknowledgement is ignored: the write must not bring back a removed task.
    pub(super) fn result_to_send(&self) -> Option<&TaskResult> {
        match (&self.stage, &self.saving) {
            (TaskStage::Ended, _) | (TaskStage::Ending, Saving::Failed { .. }) => self.record.result.as_ref(),
            _ => None,
        }
    }

    /// Returns the moment at which the task needs a tick.
    pub(super) fn next_tick(&self, now: Now) -> Option<Instant> {
        let deadline = match &self.stage {
            TaskStage::NeedsKeys { deadline } => *deadline,
            TaskStage::Queued { terms, .. } if terms.has_windows() => {
                Some(terms.deadline_at(now).min(now.moment_after(LOOK_AT_CLOCK)))
            }
            TaskStage::Queued { terms, .. } => Some(terms.deadline),
            _ => None,
        };
        let retry = match self.saving {
            Saving::Failed { retry_at } => Some(retry_at),
            _ => None,
        };
        deadline.into_iter().chain(retry).min()
    }

    /// Whether its result is known. For an ending task, it's sent as soon as the write has succeeded or failed.
    pub(super) fn has_result(&self) -> bool {
        matches!(self.stage, TaskStage::Ending | TaskStage::Ended)
    }

    /// Takes the deadline of a repeated `Assign`, and returns all of its terms.
    pub(super) fn read_terms(&mut self, assign: Assign, clock: &NodeWindows, now: Now) -> TaskTerms {
        self.record.set_deadline(assign.remaining, now);
        TaskTerms::of_assignment(&self.record.task, assign, clock, now)
    }

    /// The node has other windows. The executor of a running task gets them from the caller.
    pub(super) fn reclock(&mut self, clock: &NodeWindows, now: Now, effects: &mut Vec<AgentEffect>) {
        match &mut self.stage {
            TaskStage::Storing(terms) | TaskStage::Queued { terms, .. } => {
                *terms = terms.under_clock(clock, now);
            }
            TaskStage::NeedsKeys { .. } | TaskStage::Running => {}
            TaskStage::Ending | TaskStage::Ended => return,
        }
        if !self.record.has_windows && !clock.own_openings().is_always() {
            self.record.has_windows = true;
            self.save(effects);
        }
    }

    /// Continues with the terms of a repeated `Assign`. A task that waited for its keys gets `new_turn`.
    pub(super) fn renew(&mut self, new_terms: TaskTerms, new_turn: u64, effects: &mut Vec<AgentEffect>) {
        self.record.has_windows = new_terms.has_windows();
        self.limited = !new_terms.download.is_default();
        self.save(effects);
        match &mut self.stage {
            TaskStage::Storing(terms) => *terms = new_terms,
            TaskStage::Queued { terms, .. } => {
                *terms = new_terms;
                effects.push(send_accepted(self.record.id().clone()));
            }
            TaskStage::NeedsKeys { .. } => {
                self.stage = TaskStage::Queued { terms: new_terms, turn: new_turn };
                effects.push(send_accepted(self.record.id().clone()));
            }
            TaskStage::Running => {
                effects.push(AgentEffect::Renew(self.record.id().clone(), new_terms));
                effects.push(send_accepted(self.record.id().clone()));
            }
            TaskStage::Ending | TaskStage::Ended => {}
        }
    }

    /// Ends the task, or has its executor end it.
    pub(super) fn cancel(&mut self, reason: &str, connected: bool, now: Now, effects: &mut Vec<AgentEffect>) {
        match self.stage {
            TaskStage::Storing(_) | TaskStage::NeedsKeys { .. } | TaskStage::Queued { .. } => {
                self.end_unstarted(TaskOutcome::Cancelled, &format!("cancelled: {reason}"), now, effects);
            }
            TaskStage::Running => {
                let reason = truncate_reason(reason);
                effects.push(AgentEffect::Stop { task: self.record.id().clone(), reason });
            }
            TaskStage::Ending | TaskStage::Ended => self.send_result(connected, effects),
        }
    }

    /// Continues after a successful write. Returns whether the task has just been accepted.
    pub(super) fn on_persisted(
        &mut self,
        turn: u64,
        connected: bool,
        effects: &mut Vec<AgentEffect>,
    ) -> bool {
        let outdated = matches!(self.saving, Saving::Writing { outdated: true });
        self.saving = Saving::Saved;
        if outdated {
            self.save(effects);
        } else {
            self.let_remove(effects);
        }
        match std::mem::replace(&mut self.stage, TaskStage::Running) {
            TaskStage::Storing(terms) => {
                self.stage = TaskStage::Queued { terms, turn };
                return true;
            }
            // The written record doesn't have the result yet; the next one does.
            TaskStage::Ending if outdated => self.stage = TaskStage::Ending,
            TaskStage::Ending => {
                self.stage = TaskStage::Ended;
                self.send_result(connected, effects);
            }
            other => self.stage = other,
        }
        false
    }

    /// Schedules a retry of the failed write, and sends the result if that's what couldn't be written.
    pub(super) fn on_persist_failed(&mut self, connected: bool, now: Now, effects: &mut Vec<AgentEffect>) {
        self.saving = Saving::Failed { retry_at: now.moment_after(PERSIST_RETRY) };
        // A full disk is the very reason to remove images.
        self.let_remove(effects);
        self.send_result(connected, effects);
    }

    /// Handles timeouts: ends a wait for keys, and retries a failed write.
    pub(super) fn on_tick(&mut self, now: Now, effects: &mut Vec<AgentEffect>) {
        if let TaskStage::NeedsKeys { deadline: Some(deadline) } = self.stage
            && deadline <= now.monotonic
        {
            let reason = "the deadline passed while the restarted agent waited for the credentials";
            self.end_unstarted(TaskOutcome::DeadlineExceeded, reason, now, effects);
        }
        if let Saving::Failed { retry_at } = self.saving
            && retry_at <= now.monotonic
        {
            self.saving = Saving::Saved;
            self.save(effects);
        }
    }

    /// Hands a queued task to an executor.
    pub(super) fn start(&mut self, effects: &mut Vec<AgentEffect>) {
        let terms = match std::mem::replace(&mut self.stage, TaskStage::Running) {
            TaskStage::Queued { terms, .. } => terms,
            other => {
                self.stage = other;
                return;
            }
        };
        effects.push(AgentEffect::Start(Box::new(Execution {
            task: self.record.task.clone(),
            check: self.record.check.clone(),
            done: self.record.images.clone(),
            removal: self.record.removal.clone(),
            terms,
        })));
    }

    pub(super) fn set_check(&mut self, outcome: CheckOutcome, effects: &mut Vec<AgentEffect>) {
        self.record.check = Some(outcome);
        self.save(effects);
    }

    /// Stores the result of an image. An image that has ended keeps its first result. If the image was worked on, the
    /// result gets the time of its end.
    pub(super) fn set_image_result(
        &mut self,
        index: usize,
        mut result: ImageResult,
        now: Now,
        effects: &mut Vec<AgentEffect>,
    ) {
        result.ended = result.took.map(|_| self.age(now));
        if let Some(slot @ None) = self.record.images.get_mut(index) {
            *slot = Some(result);
            self.save(effects);
        }
    }

    /// Stores how far the removal has come. Once that is on the disk, images may be removed.
    pub(super) fn set_removal(&mut self, record: RemovalRecord, effects: &mut Vec<AgentEffect>) {
        self.record.removal = Some(record);
        self.removal_waits = true;
        self.save(effects);
        if matches!(self.saving, Saving::Failed { .. }) {
            self.let_remove(effects);
        }
    }

    fn let_remove(&mut self, effects: &mut Vec<AgentEffect>) {
        if std::mem::take(&mut self.removal_waits) && self.is_running() {
            effects.push(AgentEffect::MayRemove(self.record.id().clone()));
        }
    }

    /// Fails the task after a crash of its executor.
    pub(super) fn crash(&mut self, reason: String, now: Now, effects: &mut Vec<AgentEffect>) {
        let mut images = self.record.results_if_stopped(&reason, FailureCode::Internal);
        for image in &mut images {
            if image.outcome == ImageOutcome::Stopped {
                image.outcome = ImageOutcome::Failed;
            }
        }
        let (check, removal) = (self.record.check.clone(), self.record.removal_result());
        self.record_result(
            TaskEnd { outcome: TaskOutcome::Failed, reason, check, images, removal },
            now,
            effects,
        );
    }

    /// Ends a task that has no executor.
    pub(super) fn end_unstarted(
        &mut self,
        outcome: TaskOutcome,
        reason: &str,
        now: Now,
        effects: &mut Vec<AgentEffect>,
    ) {
        let code = match outcome {
            TaskOutcome::DeadlineExceeded => FailureCode::Timeout,
            _ => FailureCode::Cancelled,
        };
        let images = self.record.results_if_stopped(reason, code);
        let (check, removal) = (self.record.check.clone(), self.record.removal_result());
        self.record_result(
            TaskEnd { outcome, reason: reason.to_owned(), check, images, removal },
            now,
            effects,
        );
    }

    /// Puts the result into the record and writes it.
    pub(super) fn record_result(&mut self, end: TaskEnd, now: Now, effects: &mut Vec<AgentEffect>) {
        let TaskEnd { outcome, reason, check, mut images, removal } = end;
        // The executor doesn't know when the task was accepted; take the times from the record.
        for (image, known) in images.iter_mut().zip(&self.record.images) {
            if let Some(known) = known {
                (image.took, image.ended) = (known.took, known.ended);
            }
        }
        let took = self.age(now);
        let task = self.record.id().clone();
        let reason = truncate_reason(&reason);
        self.record.result = Some(TaskResult { task, outcome, reason, check, images, removal, took });
        self.record.images = Vec::new();
        self.record.removal = None;
        self.record.check = None;
        self.stage = TaskStage::Ending;
        self.save(effects);
    }

    /// Time since the acceptance.
    fn age(&self, now: Now) -> Duration {
        self.accepted.map_or_else(|| self.record.age(now.wall()), |then| now.monotonic.duration_since(then))
    }

    pub(super) fn send_result(&self, connected: bool, effects: &mut Vec<AgentEffect>) {
        if connected && let Some(result) = self.result_to_send() {
            effects.push(send_result(result.clone()));
        }
    }

    fn save(&mut self, effects: &mut Vec<AgentEffect>) {
        match &mut self.saving {
            Saving::Saved => {
                self.saving = Saving::Writing { outdated: false };
                effects.push(AgentEffect::Persist(Box::new(self.record.clone())));
            }
            Saving::Writing { outdated } => *outdated = true,
            // The retry writes the current record.
            Saving::Failed { .. } => {}
        }
    }
}
