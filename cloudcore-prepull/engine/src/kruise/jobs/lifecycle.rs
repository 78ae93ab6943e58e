//! The life cycle of a job of either kind: from the first sight of its object to the write of its final status.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::finished::FinishedJob;
use super::kind::{self, JobKind, KruiseJobObject};
use super::{Effects, metadata, status};
use crate::shared::objects::ObjectId;
use crate::shared::outcomes::WriteOutcome;
use crate::shared::writes::{PacedWrites, WritePace};

/// The gaps for results and for progress, where they are longer than a second: these statuses have none, since each of
/// their writes is urgent.
const NO_LONGER_GAPS: (Duration, Duration) = (Duration::ZERO, Duration::ZERO);

#[derive(Debug)]
pub(super) struct Lifecycle<K: JobKind> {
    id: ObjectId,
    /// metadata.generation of the last spec.
    generation: i64,
    /// The last spec; `None` while the object is unreadable.
    spec: Option<K::Spec>,
    /// Why the last spec is refused, cut to the length of an event's note; `None` if it is valid.
    refusal: Option<String>,
    /// `status.startTime`
    start: Option<Timestamp>,
    /// The final status, once the job has ended by its last spec.
    end: Option<K::Status>,
    /// The status that the API server has; `None` if it has none, or if that is not known.
    stored: Option<K::Status>,
    /// The status write in flight, and the version of the state that it carries.
    in_flight: Option<(u64, K::Status)>,
    writes: PacedWrites,
}

impl<K: JobKind> Lifecycle<K> {
    pub(super) fn new(object: &KruiseJobObject<K>) -> Self {
        let (status, start) = match object {
            Ok(job) => (job.status().cloned(), job.status().and_then(K::start_time)),
            Err(unreadable) => (None, unreadable.start_time.as_ref()),
        };
        Self {
            id: kind::id_of(object),
            generation: kind::generation_of(object),
            spec: None,
            refusal: None,
            start: start.map(|time| time.0),
            end: None,
            stored: status,
            in_flight: None,
            writes: PacedWrites::default(),
        }
    }

    pub(super) fn id(&self) -> &ObjectId {
        &self.id
    }

    pub(super) fn start_time(&self) -> Option<Timestamp> {
        self.start
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refusal.is_some()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Whether the job is neither refused nor over.
    pub(super) fn is_under_way(&self) -> bool {
        !self.is_refused() && !self.has_ended()
    }

    /// Takes over an object without an end. Returns its spec, or why it cannot be read, if the job must react: not for an
    /// unchanged spec. By another one it goes on, even if it had ended: no write of that end can succeed any more.
    pub(super) fn take_object(&mut self, object: KruiseJobObject<K>) -> Option<Result<&K::Spec, String>> {
        self.generation = kind::generation_of(&object);
        let spec = match object {
            Ok(job) if self.spec.as_ref() == Some(job.spec()) => return None,
            Ok(job) => Ok(job.into_spec()),
            Err(unreadable) => Err(unreadable.error),
        };
        self.end = None;
        self.spec = None;
        Some(spec.map(|spec| &*self.spec.insert(spec)))
    }

    pub(super) fn clear_refusal(&mut self) {
        self.refusal = None;
    }

    /// Refuses the spec: the reason goes into the status, and into an event unless the status had it before.
    pub(super) fn refuse(&mut self, reason: String, fx: &mut Effects<'_>) {
        let reason = status::cut_note(reason);
        let known = self.refusal.as_deref().or(self.stored.as_ref().map(K::message));
        if known != Some(&*reason) {
            fx.emit(status::invalid_event(K::KIND, &self.id, &reason));
        }
        self.refusal = Some(reason);
    }

    /// Starts the job unless it was started before. Returns its start time.
    pub(super) fn start_once(&mut self, now: Timestamp) -> Timestamp {
        *self.start.get_or_insert_with(|| metadata::whole_seconds(now))
    }

    pub(super) fn end_with(&mut self, status: K::Status) {
        self.end = Some(status);
    }

    /// The status of a job that has ended or is refused, which does not depend on its nodes.
    pub(super) fn fixed_status(&self) -> Option<K::Status> {
        let refused = || Some(K::refused(self.start.map(Time), self.refusal.as_ref()?));
        self.end.clone().or_else(refused)
    }

    /// Whether the status may be written now, if it has changed. The end of a job is written without delay.
    pub(super) fn is_write_due(&mut self, now: Timestamp) -> bool {
        self.writes.note_change(if self.end.is_some() { WritePace::AtOnce } else { WritePace::Now });
        self.write_due().is_some_and(|due| due <= now)
    }

    /// Writes the status if the API server has another one. To be called when [`Self::is_write_due`].
    pub(super) fn write_status(&mut self, status: K::Status, fx: &mut Effects<'_>) {
        if self.stored.as_ref() == Some(&status) {
            return self.writes.mark_clean();
        }
        self.in_flight = Some((self.writes.begin_next(fx.now), status.clone()));
        fx.emit(K::write_status(&self.id, self.generation, status));
    }

    /// Ends a write of the status. A failed write may have reached the API server, so the stored status is unknown
    /// after it. Returns what is left of the job once its final status is written.
    pub(super) fn end_write(&mut self, outcome: WriteOutcome, now: Timestamp) -> Option<FinishedJob> {
        let (version, status) = self.in_flight.take()?;
        if outcome == WriteOutcome::Done {
            self.writes.note_stored(version);
            self.stored = Some(status);
        } else {
            self.writes.note_failure(now);
            self.stored = None;
        }
        let end = self.end.as_ref().filter(|end| self.stored.as_ref() == Some(*end))?;
        let completed = K::completion_time(end)?.0;
        let ttl = self.spec.as_ref().and_then(kind::ttl::<K>);
        Some(FinishedJob::new(self.id.clone(), self.generation, completed, ttl))
    }

    pub(super) fn is_write_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// When the status may be written next; `None` without a change, or with a write in flight.
    pub(super) fn write_due(&self) -> Option<Timestamp> {
        self.writes.next_due(NO_LONGER_GAPS)
    }
}
