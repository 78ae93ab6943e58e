//! Writer of task records, one after the other, on a thread of its own.

use std::thread;

use prepull_api::task::TaskId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::tasks::agent::TaskRecord;
use crate::tasks::ledger::{LedgerError, RecordStore};

/// Outcome of a write that the agent must handle.
#[derive(Debug)]
pub(super) enum WriteOutcome {
    /// The record of this task is on the disk.
    Saved(TaskId),
    /// The record of this task could not be written.
    SaveFailed(TaskId, LedgerError),
    /// The record of this task could not be removed.
    RemoveFailed(TaskId, LedgerError),
}

enum RecordWrite {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

/// Handle of the writer.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    // The queue needs no bound of its own: the agent has at most one pending write per task, and a removal is the last
    // write of a task.
    writes: Option<UnboundedSender<RecordWrite>>,
    outcomes: UnboundedReceiver<WriteOutcome>,
}

impl RecordWriter {
    /// Starts the writer, and returns the records that the store has.
    pub(crate) async fn start(mut store: impl RecordStore) -> Result<(Self, Vec<TaskRecord>), LedgerError> {
        let (loaded, records) = oneshot::channel();
        let (recorder, mut queue, sender) = Self::new();
        let work = move || {
            // The receivers are gone when the node stops; the writes are still made.
            let _ = loaded.send(store.load());
            while let Some(write) = queue.blocking_recv() {
                if let Some(outcome) = carry_out(&mut store, write) {
                    let _ = sender.send(outcome);
                }
            }
        };
        // Not a thread of the async runtime's pool: those may all hang in name resolution or on a dead file system.
        thread::Builder::new().name("ledger".to_owned()).spawn(work).map_err(LedgerError::Thread)?;
        match records.await {
            Ok(records) => Ok((recorder, records?)),
            // The thread has panicked, and has logged that.
            Err(_) => std::future::pending().await,
        }
    }

    /// Starts a writer as an async task, because tokio's paused clock doesn't wait for a thread. The store must not
    /// block.
    #[cfg(test)]
    pub(super) fn within_the_runtime(mut store: impl RecordStore) -> (Self, Vec<TaskRecord>) {
        let (recorder, mut queue, sender) = Self::new();
        let records = store.load().unwrap_or_default();
        tokio::spawn(async move {
            while let Some(write) = queue.recv().await {
                if let Some(outcome) = carry_out(&mut store, write) {
                    let _ = sender.send(outcome);
                }
            }
        });
        (recorder, records)
    }

    fn new() -> (Self, UnboundedReceiver<RecordWrite>, UnboundedSender<WriteOutcome>) {
        let (writes, queue) = unbounded_channel();
        let (sender, outcomes) = unbounded_channel();
        (Self { writes: Some(writes), outcomes }, queue, sender)
    }

    pub(super) fn save(&self, record: Box<TaskRecord>) {
        self.push(RecordWrite::Save(record));
    }

    pub(super) fn remove(&self, task: TaskId) {
        self.push(RecordWrite::Remove(task));
    }

    fn push(&self, write: RecordWrite) {
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

    /// Completes the queued writes, then ends.
    pub(super) async fn finish(mut self) {
        self.writes = None;
        while self.outcomes.recv().await.is_some() {}
    }
}

fn carry_out(store: &mut impl RecordStore, write: RecordWrite) -> Option<WriteOutcome> {
    match write {
        RecordWrite::Save(record) => {
            let task = record.id().clone();
            Some(match store.save(&record) {
                Ok(()) => WriteOutcome::Saved(task),
                Err(error) => WriteOutcome::SaveFailed(task, error),
            })
        }
        RecordWrite::Remove(task) => {
            store.remove(&task).err().map(|error| WriteOutcome::RemoveFailed(task, error))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::tasks::ledger::memory::MemoryStore;

    #[test]
    fn writes_need_no_blocking_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(1)
            .build()
            .unwrap();
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        runtime.block_on(async {
            let (mut recorder, _) = RecordWriter::start(MemoryStore::default()).await.unwrap();
            // Simulates a name lookup that gets no answer.
            tokio::task::spawn_blocking(move || hangs.recv());
            let task = TaskId { job: prepull_api::task::JobUid("a".to_owned()), attempt: 1 };
            recorder.save(Box::new(crate::tasks::ledger::memory::empty_record(&task)));
            let outcome = tokio::time::timeout(Duration::from_secs(20), recorder.next_outcome()).await;
            assert!(matches!(outcome.unwrap(), WriteOutcome::Saved(saved) if saved == task));
            recorder.finish().await;
        });
        drop(release);
    }
}
