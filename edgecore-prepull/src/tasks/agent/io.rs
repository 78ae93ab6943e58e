//! Input and output of the agent: events, and the effects that its caller carries out.

use prepull_api::download::Window;
use prepull_api::task::{CheckOutcome, ImageResult, RemovalResult, Task, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{Assign, EdgeMessage, TaskProgress};

use super::record::TaskRecord;
use super::windows::TaskTerms;
use crate::tasks::removal::RemovalRecord;

/// Something that happened to the node, which [`TaskAgent::handle`](super::TaskAgent::handle) reacts to.
#[derive(Debug)]
pub enum AgentEvent {
    /// The agent has started, and the ledger holds these records. Comes before all other events.
    Loaded(Vec<TaskRecord>),
    /// The cloud has welcomed a session.
    Connected,
    /// The session is over.
    Disconnected,
    /// The cloud has assigned a task, or has assigned it again.
    Assign(Assign),
    /// The cloud has set other windows for the node.
    Windows(Vec<Window>),
    /// The cloud has stored the result of this task.
    ResultAck(TaskId),
    /// The cloud has cancelled a task.
    Cancel {
        /// The task to stop.
        task: TaskId,
        /// Reason that the result will show.
        reason: String,
    },
    /// The record of the last [`AgentEffect::Persist`] of this task is on the disk.
    Persisted(TaskId),
    /// The record of the last [`AgentEffect::Persist`] of this task could not be written.
    PersistFailed {
        /// The task with the unwritten record.
        task: TaskId,
        /// Error of the write.
        reason: String,
    },
    /// The executor has completed the checks of this task.
    Checked(TaskId, CheckOutcome),
    /// The executor reports progress of the images of a task.
    Progress(TaskProgress),
    /// The executor has finished an image.
    ImageEnded {
        /// The task that the image belongs to.
        task: TaskId,
        /// Index into the images of the task.
        index: usize,
        /// Final result of the image.
        result: ImageResult,
    },
    /// The removal of this task has come further.
    Removal(TaskId, Box<RemovalRecord>),
    /// The executor has finished this task.
    Ended(TaskId, TaskEnd),
    /// The executor of a task has panicked.
    Crashed {
        /// The task that it was working on.
        task: TaskId,
        /// Description of the panic.
        reason: String,
    },
    /// The moment that [`TaskAgent::next_tick`](super::TaskAgent::next_tick) announced has come.
    Tick,
}

/// Something that the caller must do after an event, in the order of the returned effects.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentEffect {
    /// Write the record, flush it to the disk, and answer with [`AgentEvent::Persisted`] or
    /// [`AgentEvent::PersistFailed`]. At most one write per task is under way.
    Persist(Box<TaskRecord>),
    /// Remove the record of this task, after all writes that were ordered before.
    Forget(TaskId),
    /// Start an executor.
    Start(Box<Execution>),
    /// Give the executor of this task a new deadline, new keys and new download terms.
    Renew(TaskId, TaskTerms),
    /// The executor of this task may begin to remove images: its choice is on the disk, or the disk refuses it.
    MayRemove(TaskId),
    /// Stop the executor of a task, which answers with [`AgentEvent::Ended`].
    Stop {
        /// The task to stop.
        task: TaskId,
        /// Reason that the result will show.
        reason: String,
    },
    /// Send a message to the cloud.
    Send(EdgeMessage),
}

/// One run of an executor: the task, what of it is done already, and the terms at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    /// The task to carry out.
    pub task: Task,
    /// Outcome of the checks, if they ran before a restart: they do not run again.
    pub check: Option<CheckOutcome>,
    /// Results of the images, by index. An image that has one is not touched again.
    pub done: Vec<Option<ImageResult>>,
    /// How far the removal had come before a restart.
    pub removal: Option<RemovalRecord>,
    /// Deadline, keys and download terms at the start.
    pub terms: TaskTerms,
}

/// Final state of a task as the executor leaves it.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskEnd {
    /// Whether the task succeeded, and if not, how it ended.
    pub outcome: TaskOutcome,
    /// One sentence for a person. Empty if the task succeeded.
    pub reason: String,
    /// Outcome of the checks. `None` if the task ended before they did.
    pub check: Option<CheckOutcome>,
    /// Results of the images, one for each image of the task.
    pub images: Vec<ImageResult>,
    /// What became of the images that the task removes. `None` if they weren't chosen yet.
    pub removal: Option<RemovalResult>,
}

pub(super) fn send_accepted(task: TaskId) -> AgentEffect {
    AgentEffect::Send(EdgeMessage::Accepted { task })
}

pub(super) fn send_result(result: TaskResult) -> AgentEffect {
    AgentEffect::Send(EdgeMessage::Result(result))
}
