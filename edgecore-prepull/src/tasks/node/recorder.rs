//! Writer of task records, one after the other, on a thread that may block.

use prepull_api::task::TaskId;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::tasks::agent::TaskRecord;
use crate::tasks::ledger::{LedgerError, Store};

/// Outcome of a write that the agent has to know.
#[derive(Debug)]
pub(super) enum WriteOutcome {
    /// The record of this task is on the disk.
    Saved(TaskId),
    /// The record of this task could not be written.
    SaveFailed(TaskId, LedgerError),
    /// The record of this task could not be removed.
    RemoveFailed(TaskId, LedgerError),
}

enum Write {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

/// Handle of the writer.
#[derive(Debug)]
pub(super) struct Recorder {
    // The queue needs no bound of its own: the agent has at most one write per task under way, and a removal is the
    // last write of a task.
    writes: Option<mpsc::UnboundedSender<Write>>,
    outcomes: mpsc::UnboundedReceiver<WriteOutcome>,
    worker: JoinHandle<()>,
}

impl Recorder {
    /// Starts the writer, and returns the records that the store has.
    pub(super) async fn start(mut store: impl Store) -> Result<(Self, Vec<TaskRecord>), LedgerError> {
        // Reading cannot panic. The only other error is that the tokio runtime shuts down, and this task with it.
        let (mut store, records) = match spawn_blocking(move || (store.load(), store)).await {
            Ok((records, store)) => (store, records?),
            Err(_) => std::future::pending().await,
        };
        let (writes, mut queue) = mpsc::unbounded_channel();
        let (sender, outcomes) = mpsc::unbounded_channel();
        let worker = tokio::spawn(async move {
            while let Some(write) = queue.recv().await {
                let done = spawn_blocking(move || {
                    let outcome = carry_out(&mut store, write);
                    (store, outcome)
                });
                let Ok((back, outcome)) = done.await else { return };
                store = back;
                if let Some(outcome) = outcome {
                    // The node may be stopping and no longer listen; the remaining writes are still made.
                    let _ = sender.send(outcome);
                }
            }
        });
        Ok((Self { writes: Some(writes), outcomes, worker }, records))
    }

    pub(super) fn save(&self, record: Box<TaskRecord>) {
        self.push(Write::Save(record));
    }

    pub(super) fn remove(&self, task: TaskId) {
        self.push(Write::Remove(task));
    }

    fn push(&self, write: Write) {
        if let Some(writes) = &self.writes {
            let _ = writes.send(write);
        }
    }

    /// Waits for the outcome of the next write. Cancel-safe.
    pub(super) async fn next_outcome(&mut self) -> WriteOutcome {
        match self.outcomes.recv().await {
            Some(outcome) => outcome,
            None => std::future::pending().await,
        }
    }

    /// Makes the writes that are still queued, then ends.
    pub(super) async fn finish(mut self) {
        self.writes = None;
        let _ = self.worker.await;
    }
}

fn carry_out(store: &mut impl Store, write: Write) -> Option<WriteOutcome> {
    match write {
        Write::Save(record) => {
            let task = record.id().clone();
            Some(match store.save(&record) {
                Ok(()) => WriteOutcome::Saved(task),
                Err(error) => WriteOutcome::SaveFailed(task, error),
            })
        }
        Write::Remove(task) => store.remove(&task).err().map(|error| WriteOutcome::RemoveFailed(task, error)),
    }
}
