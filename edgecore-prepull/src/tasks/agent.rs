//! The edge's memory of its tasks, as a state machine without IO: it takes events and returns effects, and
//! neither knows a socket, a file nor a clock.
//!
//! ```text
//!           Assign            persisted           a place is free        executor ended          persisted         ResultAck
//!  (unknown) ─────▶ Storing ────────────▶ Queued ────────────────▶ Running ────────────▶ Ending ────────▶ Ended ─────────▶ (unknown)
//!                     persist   Accepted    ▲        start                    persist      ▲     Result           forget
//!                                           │ Assign brings the keys                       │ cancel or deadline
//!                          restart ▶ NeedsKeys                        Storing, Queued, NeedsKeys
//! ```
//!
//! The order is what counts:
//! - `Accepted` is said only of a task that is on the disk.
//! - A `Result` is sent only from the disk, and stays there until `ResultAck`.
//! - An image that ended stays as it ended, also over a restart.
//! - Whatever arrives twice or late changes nothing but deadline and keys.
//! - No more tasks run than the node has places for; the others start in the order in which they were accepted.

mod assign;
mod entry;
#[cfg(test)]
mod model;
mod queue;
mod record;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, Task, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{Assign, EdgeMessage, Key, MAX_OPEN_TASKS, OpenPhase, OpenTask, Progress};

use assign::refuse;
use entry::{Entry, Saving, Stage};
pub use record::{RECORD_FORMAT, TaskRecord, WallClock, summary};

/// A record that could not be written is tried again after this: a full disk takes a while to empty, and a
/// try costs next to nothing.
pub const PERSIST_RETRY: Duration = Duration::from_secs(5);

/// The time, passed in with every event.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// For deadlines while the agent runs.
    pub monotonic: Instant,
    /// For what must survive a restart.
    pub wall: SystemTime,
}

impl Now {
    fn wall(self) -> WallClock {
        WallClock::of(self.wall)
    }

    fn after(self, duration: Duration) -> Instant {
        // A deadline too far away for the clock is as good as a year.
        const FAR: Duration = Duration::from_secs(365 * 24 * 3600);
        self.monotonic + duration.min(FAR)
    }
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// First of all: what the ledger holds.
    Loaded(Vec<TaskRecord>),
    /// The cloud has welcomed a session.
    Connected,
    /// The session is over.
    Disconnected,
    /// The cloud wants this done.
    Assign(Assign),
    /// The cloud has the result where it belongs.
    ResultAck(TaskId),
    /// The cloud wants this stopped.
    Cancel {
        /// Which.
        task: TaskId,
        /// For the result.
        reason: String,
    },
    /// The record of the last [`Effect::Persist`] for this task is on the disk.
    Persisted(TaskId),
    /// It could not be written.
    PersistFailed {
        /// Which.
        task: TaskId,
        /// Why.
        reason: String,
    },
    /// The executor's checks ended.
    Checked(TaskId, CheckOutcome),
    /// How far the images of a task are.
    Progress(Progress),
    /// One image ended for good.
    ImageEnded {
        /// Which task.
        task: TaskId,
        /// Index into its images.
        index: usize,
        /// How.
        result: ImageResult,
    },
    /// The executor is through with a task.
    Ended(TaskId, TaskEnd),
    /// The executor of a task died.
    Crashed {
        /// Which.
        task: TaskId,
        /// What is known of it.
        reason: String,
    },
    /// The moment that [`Agent::next_tick`] named has come.
    Tick,
}

/// How the executor left a task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskEnd {
    /// How.
    pub outcome: TaskOutcome,
    /// One sentence where it did not succeed.
    pub reason: String,
    /// Absent where the checks did not come to an end.
    pub check: Option<CheckOutcome>,
    /// One for each image of the task.
    pub images: Vec<ImageResult>,
}

/// What changes with each `Assign` of the same task.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
    /// When to stop.
    pub deadline: Instant,
    /// One for each image of the task.
    pub keys: Vec<Arc<Key>>,
}

/// What the executor is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// The task.
    pub task: Task,
    /// The outcome of its checks, where they ran before.
    pub check: Option<CheckOutcome>,
    /// The images that ended before: not to be touched.
    pub done: Vec<Option<ImageResult>>,
    /// Keys and deadline to begin with.
    pub terms: Terms,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Write the record, flush it to the disk, and say [`Event::Persisted`]. There is at most one under way for
    /// each task.
    Persist(Box<TaskRecord>),
    /// Remove the record. Follows every `Persist` of that task.
    Forget(TaskId),
    /// Hand the task to an executor.
    Start(Box<Work>),
    /// Give the task's executor new terms.
    Renew(TaskId, Terms),
    /// Have the task's executor stop. It answers with [`Event::Ended`].
    Stop {
        /// Which.
        task: TaskId,
        /// For the results.
        reason: String,
    },
    /// Tell the cloud.
    Send(EdgeMessage),
}

/// All tasks of the node.
#[derive(Debug)]
pub struct Agent {
    tasks: BTreeMap<TaskId, Entry>,
    connected: bool,
    /// Accepted while there was no session. A `Hello` made before that does not name them, so that the cloud would not
    /// know what is being done for it.
    unheard: BTreeSet<TaskId>,
    max_tasks: NonZeroU32,
    /// Of the next task that is queued.
    turn: u64,
}

impl Agent {
    /// No tasks; [`Event::Loaded`] brings them. At most `max_tasks` will run at a time.
    pub fn new(max_tasks: NonZeroU32) -> Self {
        Self { tasks: BTreeMap::new(), connected: false, unheard: BTreeSet::new(), max_tasks, turn: 0 }
    }

    /// For the `Hello`.
    pub fn max_tasks(&self) -> NonZeroU32 {
        self.max_tasks
    }

    /// What a `Hello` says of the tasks: all that are on the disk. A queued one is as good as running: there is
    /// nothing that the cloud would have to do.
    pub fn open_tasks(&self) -> Vec<OpenTask> {
        let phase = |entry: &Entry| match entry.stage {
            Stage::Storing(_) => None,
            Stage::NeedsKeys { .. } => Some(OpenPhase::NeedsKeys),
            Stage::Queued { .. } | Stage::Running | Stage::Ending => Some(OpenPhase::Running),
            Stage::Ended => Some(OpenPhase::Finished),
        };
        let open = self
            .tasks
            .iter()
            .filter_map(|(task, entry)| Some(OpenTask { task: task.clone(), phase: phase(entry)? }));
        open.take(MAX_OPEN_TASKS).collect()
    }

    /// How many tasks there are.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// When the next [`Event::Tick`] is due, if any is.
    pub fn next_tick(&self) -> Option<Instant> {
        let due = |entry: &Entry| {
            let deadline = match &entry.stage {
                Stage::NeedsKeys { deadline } => Some(*deadline),
                Stage::Queued { terms, .. } => Some(terms.deadline),
                _ => None,
            };
            let retry = match entry.saving {
                Saving::Failed(at) => Some(at),
                _ => None,
            };
            deadline.into_iter().chain(retry).min()
        };
        self.tasks.values().filter_map(due).min()
    }

    /// Takes one event.
    pub fn handle(&mut self, event: Event, now: Now) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Loaded(records) => {
                for record in records {
                    self.loaded(record, now, &mut effects);
                }
            }
            Event::Connected => {
                self.connected = true;
                for task in std::mem::take(&mut self.unheard) {
                    let stage = self.tasks.get(&task).map(|entry| &entry.stage);
                    if matches!(stage, Some(Stage::Queued { .. } | Stage::Running)) {
                        effects.push(Effect::Send(EdgeMessage::Accepted { task }));
                    }
                }
                let ended = self.tasks.values().filter(|entry| matches!(entry.stage, Stage::Ended));
                effects.extend(ended.filter_map(|entry| entry.record.result.clone()).map(send_result));
            }
            Event::Disconnected => self.connected = false,
            Event::Assign(assign) => self.assign(assign, now, &mut effects),
            Event::ResultAck(task) => {
                if self.tasks.get(&task).is_some_and(|entry| matches!(entry.stage, Stage::Ended)) {
                    self.tasks.remove(&task);
                    effects.push(Effect::Forget(task));
                }
            }
            Event::Cancel { task, reason } => self.cancel(&task, &reason, now, &mut effects),
            Event::Persisted(task) => self.persisted(&task, &mut effects),
            Event::PersistFailed { task, reason } => self.persist_failed(&task, &reason, now, &mut effects),
            Event::Checked(task, outcome) => {
                if let Some(entry) = self.running(&task) {
                    entry.record.check = Some(outcome);
                    entry.save(&mut effects);
                }
            }
            Event::Progress(progress) => {
                if self.connected && self.running(&progress.task).is_some() {
                    effects.push(Effect::Send(EdgeMessage::Progress(progress)));
                }
            }
            Event::ImageEnded { task, index, result } => {
                if let Some(entry) = self.running(&task)
                    && let Some(slot @ None) = entry.record.images.get_mut(index)
                {
                    *slot = Some(result);
                    entry.save(&mut effects);
                }
            }
            Event::Ended(task, end) => {
                if let Some(entry) = self.running(&task) {
                    entry.end(end, now, &mut effects);
                }
            }
            Event::Crashed { task, reason } => {
                if let Some(entry) = self.running(&task) {
                    let mut images = entry.record.images_stopped(&reason);
                    for image in &mut images {
                        if image.outcome == ImageOutcome::Stopped {
                            image.outcome = ImageOutcome::Failed;
                        }
                    }
                    let check = entry.record.check.clone();
                    let end = TaskEnd { outcome: TaskOutcome::Failed, reason, check, images };
                    entry.end(end, now, &mut effects);
                }
            }
            Event::Tick => self.tick(now, &mut effects),
        }
        self.start_next(now, &mut effects);
        effects
    }

    fn running(&mut self, task: &TaskId) -> Option<&mut Entry> {
        self.tasks.get_mut(task).filter(|entry| matches!(entry.stage, Stage::Running))
    }

    fn loaded(&mut self, record: TaskRecord, now: Now, effects: &mut Vec<Effect>) {
        let stage = if record.result.is_some() {
            Stage::Ended
        } else {
            Stage::NeedsKeys { deadline: now.after(record.left(now.wall())) }
        };
        let complete = record.result.is_none() && record.images.iter().all(Option::is_some);
        let mut entry = Entry { record, accepted: None, stage, saving: Saving::Clean };
        if complete {
            // Stopped between the last image and the result: nothing is left that would take a key.
            let images: Vec<_> = entry.record.images.iter().flatten().cloned().collect();
            let (outcome, reason) = summary(&entry.record.task, &images);
            entry.end(TaskEnd { outcome, reason, check: entry.record.check.clone(), images }, now, effects);
        }
        self.tasks.insert(entry.record.id().clone(), entry);
    }

    fn persisted(&mut self, task: &TaskId, effects: &mut Vec<Effect>) {
        let (connected, turn) = (self.connected, self.take_turn());
        let Some(entry) = self.tasks.get_mut(task) else { return };
        let stale = matches!(entry.saving, Saving::Writing { stale: true });
        entry.saving = Saving::Clean;
        if stale {
            entry.save(effects);
        }
        match std::mem::replace(&mut entry.stage, Stage::Running) {
            Stage::Storing(terms) => {
                if connected {
                    effects.push(Effect::Send(EdgeMessage::Accepted { task: task.clone() }));
                } else {
                    self.unheard.insert(task.clone());
                }
                entry.stage = Stage::Queued { terms, turn };
            }
            // What has been written is older than the result.
            Stage::Ending if stale => entry.stage = Stage::Ending,
            Stage::Ending => {
                entry.stage = Stage::Ended;
                if connected && let Some(result) = &entry.record.result {
                    effects.push(send_result(result.clone()));
                }
            }
            other => entry.stage = other,
        }
    }

    fn persist_failed(&mut self, task: &TaskId, reason: &str, now: Now, effects: &mut Vec<Effect>) {
        let connected = self.connected;
        let Some(entry) = self.tasks.get_mut(task) else { return };
        if matches!(entry.stage, Stage::Storing(_)) {
            // Never accepted, so there is nothing to keep. Whatever the failed write left is removed.
            if connected {
                let reason = format!("the node cannot store the task: {reason}");
                refuse(&entry.record.task, TaskOutcome::Failed, &reason, effects);
            }
            effects.push(Effect::Forget(task.clone()));
            self.tasks.remove(task);
        } else {
            entry.saving = Saving::Failed(now.after(PERSIST_RETRY));
        }
    }

    fn tick(&mut self, now: Now, effects: &mut Vec<Effect>) {
        for entry in self.tasks.values_mut() {
            if let Stage::NeedsKeys { deadline } = entry.stage
                && deadline <= now.monotonic
            {
                let reason = "the deadline passed while the restarted agent waited for the credentials";
                entry.stop(TaskOutcome::DeadlineExceeded, reason, now, effects);
            }
            if let Saving::Failed(at) = entry.saving
                && at <= now.monotonic
            {
                entry.saving = Saving::Clean;
                entry.save(effects);
            }
        }
    }
}

fn send_result(result: TaskResult) -> Effect {
    Effect::Send(EdgeMessage::Result(result))
}
