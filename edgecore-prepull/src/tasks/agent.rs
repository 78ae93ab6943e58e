//! The node's tasks as a state machine without IO: it takes events and returns effects, and uses no socket, no file and
//! no clock.
//!
//! ```text
//!           Assign            persisted           a place is free        executor ended          persisted         ResultAck
//!  (unknown) ─────▶ Storing ────────────▶ Queued ────────────────▶ Running ────────────▶ Ending ────────▶ Ended ─────────▶ (unknown)
//!                     persist   Accepted    ▲        start                    persist      ▲     Result           forget
//!                                           │ Assign brings the keys                       │ cancel or deadline
//!                          restart ▶ NeedsKeys                        Storing, Queued, NeedsKeys
//! ```
//!
//! # Guarantees
//! - `Accepted` is sent only for a task that's on disk.
//! - A `Result` is written to disk before it's sent, and stays there until `ResultAck`. If the write fails, the result
//!   is sent from memory, and the write is retried.
//! - An image that has ended keeps its result, also after a restart.
//! - A message that arrives twice or late changes only deadline and keys.
//! - No more tasks run than `max_tasks`; the others start in the order in which they were accepted.

mod entry;
mod io;
#[cfg(test)]
mod model;
mod queue;
mod record;
mod refusal;
mod terms;
#[cfg(test)]
mod tests;
mod time;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Instant;

use prepull_api::task::{TaskId, TaskOutcome};
use prepull_api::wire::{Assign, EdgeMessage, MAX_IMAGES, MAX_OPEN_TASKS, OpenTask};

use self::entry::{TaskEntry, TaskStage};
use self::io::{send_accepted, send_result};
use self::queue::TaskQueue;
use self::refusal::refuse;
pub use io::{AgentEffect, AgentEvent, Execution, TaskEnd};
pub(crate) use record::RECORD_FORMAT;
pub use record::{TaskRecord, summarize_results};
pub use time::{Now, WallClock};

pub use crate::boot::BootTime;
pub use windows::TaskTerms;
pub use windows::{CountedWindows, NodeWindows};
pub(crate) use windows::{LOOK_AT_CLOCK, OpenClock};

/// All tasks of the node.
#[derive(Debug)]
pub struct TaskAgent {
    tasks: BTreeMap<TaskId, TaskEntry>,
    queue: TaskQueue,
    clock: NodeWindows,
    /// Time of the last event.
    now: Option<Now>,
    connected: bool,
    /// Tasks that were accepted without a session. An earlier `Hello` doesn't list them, so we send `Accepted` in the
    /// next session.
    accepted_offline: BTreeSet<TaskId>,
}

impl TaskAgent {
    /// An agent without tasks, which runs at most `max_tasks` at a time. [`AgentEvent::Loaded`] adds the tasks of the
    /// ledger.
    pub fn new(max_tasks: NonZeroU32) -> Self {
        Self {
            tasks: BTreeMap::new(),
            queue: TaskQueue::new(max_tasks),
            clock: NodeWindows::default(),
            now: None,
            connected: false,
            accepted_offline: BTreeSet::new(),
        }
    }

    /// Adds the node's time zone and windows.
    #[must_use]
    pub fn with_clock(mut self, clock: NodeWindows) -> Self {
        self.clock = clock;
        self
    }

    /// The node's time zone and windows.
    pub fn clock(&self) -> &NodeWindows {
        &self.clock
    }

    /// Largest number of tasks that run at the same time.
    pub fn max_tasks(&self) -> NonZeroU32 {
        self.queue.max_tasks()
    }

    /// Lists the tasks that are on the disk, for `Hello`.
    pub fn open_tasks(&self) -> Vec<OpenTask> {
        let open = self.tasks.values().filter_map(TaskEntry::open_task);
        open.take(MAX_OPEN_TASKS).collect()
    }

    /// The records of the tasks, each with its stage in words.
    pub(crate) fn records(&self) -> impl Iterator<Item = (&TaskRecord, &'static str)> {
        self.tasks.values().map(|entry| (entry.record(), entry.stage().as_str()))
    }

    /// Number of tasks.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Moment of the next [`AgentEvent::Tick`], if one is needed.
    pub fn next_tick(&self) -> Option<Instant> {
        let now = self.now?;
        self.tasks.values().filter_map(|entry| entry.next_tick(now)).min()
    }

    /// Reacts to an event.
    pub fn handle(&mut self, event: AgentEvent, now: Now) -> Vec<AgentEffect> {
        let mut effects = Vec::new();
        self.now = Some(now);
        match event {
            AgentEvent::Loaded(records) => {
                for record in records {
                    let entry = TaskEntry::from_record(record, now, &mut effects);
                    self.tasks.insert(entry.id().clone(), entry);
                }
            }
            AgentEvent::Connected => self.on_connected(&mut effects),
            AgentEvent::Disconnected => self.connected = false,
            AgentEvent::Assign(assign) => self.assign(assign, now, &mut effects),
            AgentEvent::Windows(windows) => {
                self.clock.cloud_windows = windows;
                for entry in self.tasks.values_mut() {
                    entry.reclock(&self.clock, now, &mut effects);
                }
            }
            AgentEvent::ResultAck(task) => {
                if self.tasks.get(&task).is_some_and(|entry| entry.result_to_send().is_some()) {
                    self.tasks.remove(&task);
                    effects.push(AgentEffect::Forget(task));
                }
            }
            AgentEvent::Cancel { task, reason } => {
                if let Some(entry) = self.tasks.get_mut(&task) {
                    entry.cancel(&reason, self.connected, now, &mut effects);
                }
            }
            AgentEvent::Persisted(task) => self.on_persisted(task, &mut effects),
            AgentEvent::PersistFailed { task, reason } => {
                self.on_persist_failed(&task, &reason, now, &mut effects);
            }
            AgentEvent::Checked(task, outcome) => {
                if let Some(entry) = self.running(&task) {
                    entry.set_check(outcome, &mut effects);
                }
            }
            AgentEvent::Progress(progress) => {
                if self.connected && self.running(&progress.task).is_some() {
                    effects.push(AgentEffect::Send(EdgeMessage::Progress(progress)));
                }
            }
            AgentEvent::ImageEnded { task, index, result } => {
                if let Some(entry) = self.running(&task) {
                    entry.set_image_result(index, result, now, &mut effects);
                }
            }
            AgentEvent::Removal(task, record) => {
                if let Some(entry) = self.running(&task) {
                    entry.set_removal(*record, &mut effects);
                }
            }
            AgentEvent::Ended(task, end) => {
                if let Some(entry) = self.running(&task) {
                    entry.record_result(end, now, &mut effects);
                }
            }
            AgentEvent::Crashed { task, reason } => {
                if let Some(entry) = self.running(&task) {
                    entry.crash(reason, now, &mut effects);
                }
            }
            AgentEvent::Tick => {
                for entry in self.tasks.values_mut() {
                    entry.on_tick(now, &mut effects);
                }
            }
        }
        self.queue.start_next(&mut self.tasks, now, &mut effects);
        effects
    }

    fn running(&mut self, task: &TaskId) -> Option<&mut TaskEntry> {
        self.tasks.get_mut(task).filter(|entry| entry.is_running())
    }

    /// Sends everything that the cloud may have missed: acceptances, and unacknowledged results.
    fn on_connected(&mut self, effects: &mut Vec<AgentEffect>) {
        self.connected = true;
        for task in std::mem::take(&mut self.accepted_offline) {
            let stage = self.tasks.get(&task).map(TaskEntry::stage);
            if matches!(stage, Some(TaskStage::Queued { .. } | TaskStage::Running)) {
                effects.push(send_accepted(task));
            }
        }
        let results = self.tasks.values().filter_map(TaskEntry::result_to_send);
        effects.extend(results.cloned().map(send_result));
    }

    fn assign(&mut self, assign: Assign, now: Now, effects: &mut Vec<AgentEffect>) {
        let new_turn = self.queue.take_turn();
        match self.tasks.get_mut(&assign.task.id) {
            Some(entry) if entry.has_result() => entry.send_result(self.connected, effects),
            Some(entry) => {
                let terms = entry.read_terms(assign, &self.clock, now);
                entry.renew(terms, new_turn, effects);
            }
            None => self.assign_new(assign, now, effects),
        }
    }

    fn assign_new(&mut self, assign: Assign, now: Now, effects: &mut Vec<AgentEffect>) {
        let id = assign.task.id.clone();
        let attempts = self.tasks.keys().filter(|task| task.job == id.job).map(|task| task.attempt);
        if let Some(later) = attempts.filter(|attempt| *attempt > id.attempt).max() {
            let reason = format!("attempt {} is replaced by attempt {later}", id.attempt);
            return effects.push(refuse(&assign.task, TaskOutcome::Cancelled, &reason));
        }
        let images = assign.task.images.len();
        if images > MAX_IMAGES {
            let reason = format!("the task has {images} images; a node accepts at most {MAX_IMAGES}");
            return effects.push(refuse(&assign.task, TaskOutcome::Failed, &reason));
        }
        // Refused without a record, because the bound keeps the ledger small. If the answer is lost, no `Hello` lists
        // the task, so the cloud assigns it again.
        if self.tasks.len() >= MAX_OPEN_TASKS {
            let reason = format!(
                "the node has {MAX_OPEN_TASKS} tasks whose results the cloud has not acknowledged, and accepts no more"
            );
            return effects.push(refuse(&assign.task, TaskOutcome::Failed, &reason));
        }
        for (_, earlier) in self.tasks.iter_mut().filter(|(task, _)| task.job == id.job) {
            earlier.cancel(&format!("replaced by attempt {}", id.attempt), self.connected, now, effects);
        }
        self.tasks.insert(id, TaskEntry::from_assignment(assign, &self.clock, now, effects));
    }

    fn on_persisted(&mut self, task: TaskId, effects: &mut Vec<AgentEffect>) {
        let turn = self.queue.take_turn();
        let Some(entry) = self.tasks.get_mut(&task) else { return };
        if entry.on_persisted(turn, self.connected, effects) {
            if self.connected {
                effects.push(send_accepted(task));
            } else {
                self.accepted_offline.insert(task);
            }
        }
    }

    fn on_persist_failed(&mut self, task: &TaskId, reason: &str, now: Now, effects: &mut Vec<AgentEffect>) {
        let Some(entry) = self.tasks.get_mut(task) else { return };
        if !matches!(entry.stage(), TaskStage::Storing(_)) {
            return entry.on_persist_failed(self.connected, now, effects);
        }
        // The task was never accepted, so we don't keep it. `Forget` removes the leftovers of the failed write.
        if self.connected {
            let reason = format!("the node cannot store the task: {reason}");
            effects.push(refuse(&entry.record().task, TaskOutcome::Failed, &reason));
        }
        effects.push(AgentEffect::Forget(task.clone()));
        self.tasks.remove(task);
    }
}
