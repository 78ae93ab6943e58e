//! Store without a disk, for tests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use prepull_api::task::{Task, TaskId};

use super::{LedgerError, RecordStore};
use crate::tasks::agent::{Now, TaskRecord};

/// Records in memory. Clones share them, so that a test can restart a node with its records.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryStore {
    records: Arc<Mutex<Vec<TaskRecord>>>,
}

impl MemoryStore {
    fn with_records<T>(&self, change: impl FnOnce(&mut Vec<TaskRecord>) -> T) -> T {
        change(&mut self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl RecordStore for MemoryStore {
    fn load(&mut self) -> Result<Vec<TaskRecord>, LedgerError> {
        Ok(self.with_records(|records| records.clone()))
    }

    fn save(&mut self, record: &TaskRecord) -> Result<(), LedgerError> {
        self.with_records(|records| {
            records.retain(|other| other.id() != record.id());
            records.push(record.clone());
        });
        Ok(())
    }

    fn remove(&mut self, task: &TaskId) -> Result<(), LedgerError> {
        self.with_records(|records| records.retain(|other| other.id() != task));
        Ok(())
    }
}

/// The record of a task without images.
pub(crate) fn empty_record(id: &TaskId) -> TaskRecord {
    let task = Task {
        upgrade: None,
        removal: None,
        id: id.clone(),
        title: "t".to_owned(),
        checks: Vec::new(),
        images: Vec::new(),
    };
    let now = Now { monotonic: Instant::now(), wall: SystemTime::now(), boot: None };
    TaskRecord::new(task, Duration::from_secs(300), now)
}
