//! Jobs that cannot be written until an operator acts: an event on each such job, and one log line a minute.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::StatusOrReport;
use prepull_engine::shared::events::{ObjectEvent, ObjectKind};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::shared::reasons;

use crate::kube_api::events::Events;
use crate::kube_api::object_write::WriteError;
use crate::kube_api::refusal::FailureLog;

/// The objects with refused writes. Cheap to clone.
#[derive(Clone)]
pub(super) struct RefusedWrites {
    log: Arc<FailureLog>,
    events: Events,
    objects: Arc<Mutex<HashSet<(JobUid, StatusOrReport)>>>,
}

impl RefusedWrites {
    pub(super) fn new(events: Events) -> Self {
        Self { log: Arc::default(), events, objects: Arc::default() }
    }

    /// Logs a failed write. If the problem lasts, the job cannot go on: its first such write also becomes an event.
    pub(super) fn record(&self, job: &JobUid, name: &str, object: StatusOrReport, error: &WriteError) {
        let (what, operation, problem) = match object {
            StatusOrReport::Status => {
                ("status", "write the status of a job", error.explain::<ImagePrePullJob>())
            }
            StatusOrReport::Report(_) => {
                ("report", "write a report of a job", error.explain::<ImagePrePullReport>())
            }
        };
        self.log.record(operation, name, problem.as_deref(), error);
        let Some(problem) = problem else { return };
        let is_first = {
            let mut objects = self.objects.lock();
            let is_first = !objects.iter().any(|(known, _)| known == job);
            objects.insert((job.clone(), object));
            is_first
        };
        if is_first {
            self.events.send(ObjectEvent {
                kind: ObjectKind::ImagePrePullJob,
                object: ObjectId { namespace: String::new(), name: name.to_owned(), uid: job.clone() },
                warning: true,
                reason: reasons::NOT_WRITTEN,
                note: event_note(what, &problem),
            });
        }
    }

    /// Logs a failed deletion. No event: users don't look at a job after its TTL.
    pub(super) fn record_deletion(&self, name: &str, error: &WriteError) {
        let problem = error.explain::<ImagePrePullJob>();
        self.log.record("delete a job", name, problem.as_deref(), error);
    }

    /// The object was written: its next refusal is news again.
    pub(super) fn clear(&self, job: &JobUid, object: StatusOrReport) {
        self.objects.lock().remove(&(job.clone(), object));
    }

    pub(super) fn forget(&self, job: &JobUid) {
        self.objects.lock().retain(|(known, _)| known != job);
    }
}

/// The API server's limit for an event's message is 1,024 bytes; its own words come last and are cut.
fn event_note(what: &str, problem: &str) -> String {
    let mut note = format!("the job waits, because its {what} cannot be written: {problem}");
    note.truncate(note.floor_char_boundary(1024));
    note
}
