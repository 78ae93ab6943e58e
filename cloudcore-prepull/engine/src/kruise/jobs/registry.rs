//! The jobs of one kind: those that run, those that have finished, and which of them need attention when.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use prepull_api::task::JobUid;

use super::Effects;
use super::finished::FinishedJob;
use super::kind::{self, JobKind, KruiseJobObject};
use super::lifecycle::Lifecycle;
use super::metadata;
use crate::shared::agenda::Agenda;
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;

/// A job, until its final status is written.
pub(super) trait RunningJob {
    type Kind: JobKind;

    fn lifecycle(&mut self) -> &mut Lifecycle<Self::Kind>;
}

#[derive(Debug)]
pub(super) struct JobRegistry<R> {
    pub(super) running: HashMap<JobUid, R>,
    /// Never in `running` as well.
    finished: HashMap<JobUid, FinishedJob>,
    /// Jobs that a write found deleted, until the watch reports their deletion: before that it may deliver earlier
    /// changes.
    deleted: HashSet<JobUid>,
    pub(super) agenda: Agenda,
}

impl<R> Default for JobRegistry<R> {
    fn default() -> Self {
        Self {
            running: HashMap::new(),
            finished: HashMap::new(),
            deleted: HashSet::new(),
            agenda: Agenda::default(),
        }
    }
}

/// The next step for a job after the watch has delivered it, or a write of it has ended.
#[derive(Debug)]
pub(super) enum RegistryVerdict {
    Ignore,
    /// It is deleted, or about to be: [`JobRegistry::remove`] it.
    Remove,
    /// It has finished, and the API server knows: [`JobRegistry::finish`] it.
    Finish(FinishedJob),
    /// It is running: it takes over the object.
    Run,
}

impl<R: RunningJob> JobRegistry<R> {
    pub(super) fn is_finished(&self, uid: &JobUid) -> bool {
        self.finished.contains_key(uid)
    }

    pub(super) fn finished_id(&self, uid: &JobUid) -> Option<&ObjectId> {
        self.finished.get(uid).map(FinishedJob::id)
    }

    pub(super) fn is_deleted(&self, uid: &JobUid) -> bool {
        self.deleted.contains(uid)
    }

    /// Forgets the deleted jobs that a new list does not name: the list is the last word about them.
    pub(super) fn retain_deleted(&mut self, existing: &HashSet<JobUid>) {
        self.deleted.retain(|uid| existing.contains(uid));
    }

    pub(super) fn known_uids(&self) -> impl Iterator<Item = &JobUid> {
        self.running.keys().chain(self.finished.keys())
    }

    pub(super) fn observe(&mut self, object: &KruiseJobObject<R::Kind>, now: Timestamp) -> RegistryVerdict {
        let uid = kind::id_of(object).uid;
        let readable = object.as_ref().ok();
        if self.deleted.contains(&uid) {
            return RegistryVerdict::Ignore;
        }
        if readable.is_some_and(|job| metadata::is_being_deleted(job.metadata())) {
            return RegistryVerdict::Remove;
        }
        if let Some(finished) = self.finished.get_mut(&uid) {
            finished.set_generation(kind::generation_of(object));
            if let Some(job) = readable {
                finished.set_ttl(kind::ttl::<R::Kind>(job.spec()));
            }
            self.agenda.mark(&uid);
            return RegistryVerdict::Ignore;
        }
        if !self.running.contains_key(&uid) {
            self.agenda.add(&uid, metadata::creation_time(readable.map(|job| job.metadata()), now));
        }
        FinishedJob::from_object(object).map_or(RegistryVerdict::Run, RegistryVerdict::Finish)
    }

    pub(super) fn end_write(
        &mut self,
        uid: &JobUid,
        outcome: WriteOutcome,
        now: Timestamp,
    ) -> RegistryVerdict {
        if outcome == WriteOutcome::Gone {
            // Once the watch has said so, it does not deliver the job again.
            if self.running.contains_key(uid) || self.finished.contains_key(uid) {
                self.deleted.insert(uid.clone());
            }
            return RegistryVerdict::Remove;
        }
        self.agenda.mark(uid);
        if let Some(finished) = self.finished.get_mut(uid) {
            finished.end_write();
            return RegistryVerdict::Ignore;
        }
        let running = self.running.get_mut(uid);
        let finished = running.and_then(|job| job.lifecycle().end_write(outcome, now));
        finished.map_or(RegistryVerdict::Ignore, RegistryVerdict::Finish)
    }

    /// Keeps of a job no more than its end. Returns the job if it was running.
    pub(super) fn finish(&mut self, uid: &JobUid, mut finished: FinishedJob) -> Option<R> {
        let mut running = self.running.remove(uid);
        if running.as_mut().is_some_and(|job| job.lifecycle().is_write_in_flight()) {
            finished.wait_for_status_write();
        }
        self.agenda.mark(uid);
        self.finished.insert(uid.clone(), finished);
        running
    }

    /// Forgets a job. Returns it if it was running.
    pub(super) fn remove(&mut self, uid: &JobUid) -> Option<R> {
        self.agenda.remove(uid);
        self.finished.remove(uid);
        self.running.remove(uid)
    }

    /// The watch reports the deletion of the job, which is its last event about it.
    pub(super) fn forget_deleted(&mut self, uid: &JobUid) {
        self.deleted.remove(uid);
    }

    /// Deletes a finished job if its time to live has passed.
    pub(super) fn delete_if_due(&mut self, uid: &JobUid, fx: &mut Effects<'_>) {
        let Some(finished) = self.finished.get_mut(uid) else { return };
        if let Some((id, generation)) = finished.begin_delete_if_due(fx.now) {
            fx.emit(R::Kind::delete(id, generation));
        }
        self.agenda.wake_at(uid, finished.delete_due());
    }
}
