//! Writes records one after the other, on a thread that may block.

use prepull_api::task::TaskId;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::tasks::agent::TaskRecord;
use crate::tasks::ledger::{LedgerError, Store};

/// What became of a write.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It is on the disk.
    Saved(TaskId),
    /// It is not.
    NotSaved(TaskId, LedgerError),
    /// It is still on the disk.
    NotRemoved(TaskId, LedgerError),
}

enum Write {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

/// The way to the store.
#[derive(Debug)]
pub(super) struct Recorder {
    // Not bounded by itself: the agent has at most one write of each task under way, and a removal ends a task.
    writes: Option<mpsc::UnboundedSender<Write>>,
    outcomes: mpsc::UnboundedReceiver<Outcome>,
    worker: JoinHandle<()>,
}

impl Recorder {
    /// Reads all records, and is ready to write.
    pub(super) async fn start(mut store: impl Store) -> Result<(Self, Vec<TaskRecord>), LedgerError> {
        // Reading cannot panic, so that the only error to join is a runtime that shuts down, with us in it.
        let (mut store, records) = match spawn_blocking(move || (store.load(), store)).await {
            Ok((records, store)) => (store, records?),
            Err(_) => std::future::pending().await,
        };
        let (writes, mut queue) = mpsc::unbounded_channel();
        let (told, outcomes) = mpsc::unbounded_channel();
        let worker = tokio::spawn(async move {
            while let Some(write) = queue.recv().await {
                let done = spawn_blocking(move || {
                    let outcome = carry_out(&mut store, write);
                    (store, outcome)
                });
                let Ok((back, outcome)) = done.await else { return };
                store = back;
                if let Some(outcome) = outcome {
                    // The node may be stopping; the rest is still written.
                    let _ = told.send(outcome);
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

    /// The next write's outcome. Cancel-safe.
    pub(super) async fn next(&mut self) -> Outcome {
        match self.outcomes.recv().await {
            Some(outcome) => outcome,
            None => std::future::pending().await,
        }
    }

    /// Writes what is still to be written.
    pub(super) async fn finish(mut self) {
        self.writes = None;
        let _ = self.worker.await;
    }
}

fn carry_out(store: &mut impl Store, write: Write) -> Option<Outcome> {
    match write {
        Write::Save(record) => {
            let task = record.id().clone();
            Some(match store.save(&record) {
                Ok(()) => Outcome::Saved(task),
                Err(error) => Outcome::NotSaved(task, error),
            })
        }
        Write::Remove(task) => store.remove(&task).err().map(|error| Outcome::NotRemoved(task, error)),
    }
}
