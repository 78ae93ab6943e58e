//! The children of a list: what it keeps of its ImagePullJobs.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use prepull_api::crd::kruise::{CompletionPolicy, ImagePullJob, PullJobTemplate};
use prepull_api::task::{JobUid, PullPolicy};

use crate::kruise::jobs::metadata;
use crate::kruise::rules::{self, Completion, DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT};
use crate::shared::objects::ObjectId;

/// Hashes of a template. A template may name thousands of nodes, and each child has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SpecFingerprint {
    pub(super) whole: u64,
    /// Hash of what is pulled and where. A child that has finished by another one runs again.
    pub(super) work: u64,
    /// Hash of `pullSecrets`, which are immutable.
    pub(super) secrets: u64,
}

impl SpecFingerprint {
    /// The fingerprint of a template, the same whether or not the API server has filled in its defaults.
    pub(super) fn of_template(template: &PullJobTemplate) -> Self {
        let mut full = template.clone();
        full.completion_policy.type_.get_or_insert_with(|| "Always".to_owned());
        let limits = full.pull_policy.get_or_insert_default();
        limits.timeout_seconds.get_or_insert(i32::try_from(DEFAULT_TIMEOUT).unwrap_or(i32::MAX));
        limits.backoff_limit.get_or_insert(i32::try_from(DEFAULT_BACKOFF_LIMIT).unwrap_or(i32::MAX));
        full.image_pull_policy.get_or_insert_with(|| PullPolicy::IfNotPresent.to_string());
        let text = |template: &PullJobTemplate| serde_json::to_string(template).unwrap_or_default();
        let whole = hash(&text(&full));
        // The rest says how fast, and for how long.
        (full.parallelism, full.pull_policy) = Default::default();
        let kind = full.completion_policy.type_.take();
        full.completion_policy = CompletionPolicy { type_: kind, ..CompletionPolicy::default() };
        Self { whole, work: hash(&text(&full)), secrets: hash(&template.pull_secrets) }
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "what Kruise's status counts; a child may be several of these"
)]
pub(super) struct ListChild {
    pub(super) id: ObjectId,
    /// metadata.resourceVersion; `None` once the child cannot be read.
    pub(super) version: Option<String>,
    pub(super) image: String,
    pub(super) template: SpecFingerprint,
    pub(super) is_being_deleted: bool,
    /// Counts as active in the list's status: nodes are pulling.
    pub(super) is_active: bool,
    /// Counts as completed: each node has succeeded or failed. A Never job that is completed goes on the next day.
    pub(super) is_completed: bool,
    /// It has a completion time.
    pub(super) has_finished: bool,
    /// Counts as succeeded: each node has succeeded.
    pub(super) is_succeeded: bool,
    /// Counts as failed: a node has failed.
    pub(super) is_failed: bool,
}

impl ListChild {
    /// Reads a child's status as Kruise does. A job refused after its start hasn't ended, even if its numbers look like
    /// it.
    pub(super) fn from_job(job: &ImagePullJob) -> Self {
        let status = job.status.clone().unwrap_or_default();
        let is_never =
            matches!(rules::pull_job(&job.spec), Ok(job) if job.template.completion == Completion::Never);
        let started = status.start_time.is_some();
        let counts = started && (status.completion_time.is_some() || is_never);
        Self {
            id: metadata::object_id(&job.metadata),
            version: job.metadata.resource_version.clone(),
            image: job.spec.image.clone(),
            template: SpecFingerprint::of_template(&job.spec.template),
            is_being_deleted: metadata::is_being_deleted(&job.metadata),
            is_active: started && status.active > 0,
            has_finished: status.completion_time.is_some(),
            is_completed: counts && status.desired == status.succeeded.saturating_add(status.failed),
            is_succeeded: counts && status.desired == status.succeeded,
            is_failed: started && status.failed > 0,
        }
    }
}

/// The children of one list, by UID.
#[derive(Debug, Default)]
pub(super) struct Children(BTreeMap<JobUid, ListChild>);

impl Children {
    pub(super) fn put(&mut self, child: ListChild) {
        self.0.insert(child.id.uid.clone(), child);
    }

    pub(super) fn remove(&mut self, uid: &JobUid) -> Option<ListChild> {
        self.0.remove(uid)
    }

    pub(super) fn note_unreadable(&mut self, uid: &JobUid) {
        if let Some(child) = self.0.get_mut(uid) {
            child.version = None;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn uids(&self) -> impl Iterator<Item = &JobUid> {
        self.0.keys()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &ListChild> {
        self.0.values()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn children_are_counted_until_removed() {
        let mut children = Children::default();
        children.put(ListChild::from_job(&ImagePullJob::default()));
        assert!(!children.is_empty() && children.remove(&JobUid::default()).is_some());
        assert!(children.is_empty());
    }

    #[test]
    fn only_an_ended_child_counts() {
        let start = "2026-11-22T10:00:00Z";
        for (start, end, type_, counts) in [
            (Some(start), None, "Always", false),
            (None, None, "Always", false),
            (Some(start), Some(start), "Always", true),
            (Some(start), None, "Never", true),
            (None, None, "Never", false),
        ] {
            let job: ImagePullJob = serde_json::from_value(json!({
                "metadata": { "name": "child", "uid": "child" },
                "spec": { "image": "nginx:1.25", "completionPolicy": { "type": type_ } },
                "status": { "desired": 2, "succeeded": 2, "startTime": start, "completionTime": end },
            }))
            .unwrap();
            let child = ListChild::from_job(&job);
            let seen = (child.is_completed, child.is_succeeded, child.has_finished);
            assert_eq!(seen, (counts, counts, end.is_some()), "{start:?} {end:?} {type_}");
        }
    }
}
