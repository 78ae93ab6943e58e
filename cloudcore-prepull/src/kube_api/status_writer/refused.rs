//! Writes that are refused until somebody does something: said once a minute in the log, and once on the job.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kube::Error;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{JobEvent, Object};
use tracing::{error, warn};

use crate::kube_api::events::Events;
use crate::kube_api::refusal::{Said, explain, with_causes};

/// What is refused now. Cheap to clone.
#[derive(Clone)]
pub(super) struct Refused {
    said: Arc<Said>,
    events: Events,
    objects: Arc<Mutex<HashSet<(JobUid, Object)>>>,
}

impl Refused {
    pub(super) fn new(events: Events) -> Self {
        Self { said: Arc::default(), events, objects: Arc::default() }
    }

    /// A write failed. Where that lasts the job cannot go on, and who looks at the job is told so.
    pub(super) fn failed(&self, job: &JobUid, name: &str, object: Object, error: &Error) {
        let (what, problem) = match object {
            Object::Status => ("status", explain::<ImagePrePullJob>(error)),
            Object::Report(_) => ("report", explain::<ImagePrePullReport>(error)),
        };
        let Some(problem) = problem else {
            return warn!(job = name, ?object, error = with_causes(error), "not written; trying again");
        };
        self.log(what, name, &problem);
        let is_first = {
            let mut objects = self.objects();
            let is_first = !objects.iter().any(|(known, _)| known == job);
            objects.insert((job.clone(), object));
            is_first
        };
        if is_first {
            self.events.send(JobEvent {
                job: job.clone(),
                name: name.to_owned(),
                warning: true,
                reason: "NotWritten",
                note: note(what, &problem),
            });
        }
    }

    /// As above, of a job whose time is over: nobody looks at it any more.
    pub(super) fn not_deleted(&self, name: &str, error: &Error) {
        let Some(problem) = explain::<ImagePrePullJob>(error) else {
            return warn!(job = name, error = with_causes(error), "the job was not deleted; trying again");
        };
        self.log("deletion", name, &problem);
    }

    fn log(&self, what: &'static str, name: &str, problem: &str) {
        if self.said.is_due(what, problem, Instant::now()) {
            error!(job = name, what, problem, "refused, of this job and maybe of others; trying again");
        }
    }

    /// The write was not refused.
    pub(super) fn no_more(&self, job: &JobUid, object: Object) {
        self.objects().remove(&(job.clone(), object));
    }

    pub(super) fn forget(&self, job: &JobUid) {
        self.objects().retain(|(known, _)| known != job);
    }

    fn objects(&self) -> MutexGuard<'_, HashSet<(JobUid, Object)>> {
        // Nothing that holds the lock can leave the set half changed.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The API server's limit for an event's message is 1,024 bytes; what it says itself is cut.
fn note(what: &str, problem: &str) -> String {
    let mut note = format!("the job waits, because its {what} cannot be written: {problem}");
    note.truncate(note.floor_char_boundary(1024));
    note
}
