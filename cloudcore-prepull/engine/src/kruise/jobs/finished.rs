//! A finished job, until its time to live has passed and it is deleted. Finished jobs pile up in a cluster, so little
//! is kept of each.

use std::time::Duration;

use jiff::Timestamp;

use super::kind::{self, JobKind, KruiseJobObject};
use crate::shared::objects::ObjectId;

/// Wait before an ineffective deletion is requested again. Unlike the writes of children it has no backoff: that would
/// cost another field per finished job, and the deletion isn't urgent.
const DELETE_RETRY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct FinishedJob {
    id: ObjectId,
    /// metadata.generation of the last spec.
    generation: i64,
    /// `status.completionTime`
    completed: Timestamp,
    /// `ttlSecondsAfterFinished`
    ttl: Option<i32>,
    delete_requested: Option<Timestamp>,
    /// Whether the deletion is in flight, or the last write of the status is.
    in_flight: bool,
}

impl FinishedJob {
    pub(super) fn new(id: ObjectId, generation: i64, completed: Timestamp, ttl: Option<i32>) -> Self {
        Self { id, generation, completed, ttl, delete_requested: None, in_flight: false }
    }

    pub(super) fn id(&self) -> &ObjectId {
        &self.id
    }

    /// The job, if its status has a completion time. One that cannot be read is not deleted.
    pub(super) fn from_object<K: JobKind>(object: &KruiseJobObject<K>) -> Option<Self> {
        let (completed, ttl) = match object {
            Ok(job) => (K::completion_time(job.status()?)?, kind::ttl::<K>(job.spec())),
            Err(unreadable) => (unreadable.completion_time.as_ref()?, None),
        };
        Some(Self::new(kind::id_of(object), kind::generation_of(object), completed.0, ttl))
    }

    /// Takes over metadata.generation of an edit after the end.
    pub(super) fn set_generation(&mut self, generation: i64) {
        self.generation = generation;
    }

    /// Takes over `ttlSecondsAfterFinished`, which may be changed after the end.
    pub(super) fn set_ttl(&mut self, ttl: Option<i32>) {
        self.ttl = ttl;
    }

    /// When to request the deletion; `None` without a TTL or with a request in flight.
    pub(super) fn delete_due(&self) -> Option<Timestamp> {
        if self.in_flight {
            return None;
        }
        // A running job with a negative one is refused; one that is written after the end is ignored.
        let ttl = self.ttl.and_then(|ttl| u64::try_from(ttl).ok()).map(Duration::from_secs)?;
        let due = self.completed.checked_add(ttl).ok()?;
        let retry = self.delete_requested.and_then(|requested| requested.checked_add(DELETE_RETRY).ok());
        Some(retry.map_or(due, |retry| retry.max(due)))
    }

    /// Begins the deletion if it is due. Returns what to delete, and at which metadata.generation.
    pub(super) fn begin_delete_if_due(&mut self, now: Timestamp) -> Option<(&ObjectId, i64)> {
        if self.delete_due().is_none_or(|due| due > now) {
            return None;
        }
        (self.delete_requested, self.in_flight) = (Some(now), true);
        Some((&self.id, self.generation))
    }

    /// Holds the deletion back until the write of the status that is in flight has ended.
    pub(super) fn wait_for_status_write(&mut self) {
        self.in_flight = true;
    }

    pub(super) fn end_write(&mut self) {
        self.in_flight = false;
    }
}
