//! What a list keeps of its ImagePullJobs.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use prepull_api::crd::kruise::{ImagePullJob, PullJobTemplate};
use prepull_api::task::{JobUid, PullPolicy};

use crate::kruise::jobs::objects;
use crate::kruise::rules::{self, Completion, DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT};
use crate::shared::objects::ObjectId;

/// What a template says, in few bytes: a list of nodes may be long, and each child has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) whole: u64,
    /// Of the part that cannot be changed.
    pub(super) secrets: u64,
}

impl Fingerprint {
    /// Of a template, with the defaults that an API server may have filled in.
    pub(super) fn of(template: &PullJobTemplate) -> Self {
        let mut full = template.clone();
        full.completion_policy.type_.get_or_insert_with(|| "Always".to_owned());
        let limits = full.pull_policy.get_or_insert_default();
        limits.timeout_seconds.get_or_insert(i32::try_from(DEFAULT_TIMEOUT).unwrap_or(i32::MAX));
        limits.backoff_limit.get_or_insert(i32::try_from(DEFAULT_BACKOFF_LIMIT).unwrap_or(i32::MAX));
        full.image_pull_policy.get_or_insert_with(|| PullPolicy::IfNotPresent.to_string());
        let text = serde_json::to_string(&full).unwrap_or_default();
        Self { whole: hash(&text), secrets: hash(&template.pull_secrets) }
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // Kruise's four counts, and these overlap
pub(super) struct Child {
    pub(in super::super) id: ObjectId,
    pub(in super::super) image: String,
    pub(super) template: Fingerprint,
    pub(super) deleting: bool,
    pub(super) active: bool,
    pub(super) completed: bool,
    /// Nothing moves it any more.
    pub(super) over: bool,
    pub(super) succeeded: bool,
    pub(super) failed: bool,
}

impl Child {
    /// Judged as Kruise judges it. A job that is refused after it began has not ended, whatever its numbers are.
    pub(in super::super) fn of(job: &ImagePullJob) -> Self {
        let status = job.status.clone().unwrap_or_default();
        let never =
            matches!(rules::pull_job(&job.spec), Ok(job) if job.template.completion == Completion::Never);
        let started = status.start_time.is_some();
        let counts = started && (status.completion_time.is_some() || never);
        Self {
            id: objects::id(&job.metadata),
            image: job.spec.image.clone(),
            template: Fingerprint::of(&job.spec.template),
            deleting: objects::is_being_deleted(&job.metadata),
            active: started && status.active > 0,
            over: status.completion_time.is_some(),
            completed: counts && status.desired == status.succeeded.saturating_add(status.failed),
            succeeded: counts && status.desired == status.succeeded,
            failed: started && status.failed > 0,
        }
    }
}

/// Those of one list.
#[derive(Debug, Default)]
pub(super) struct Children(BTreeMap<JobUid, Child>);

impl Children {
    pub(super) fn put(&mut self, child: Child) {
        self.0.insert(child.id.uid.clone(), child);
    }

    pub(super) fn remove(&mut self, uid: &JobUid) -> Option<Child> {
        self.0.remove(uid)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn uids(&self) -> impl Iterator<Item = &JobUid> {
        self.0.keys()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Child> {
        self.0.values()
    }
}
