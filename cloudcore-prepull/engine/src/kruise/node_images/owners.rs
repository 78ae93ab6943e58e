//! The owners of a tag: the jobs that asked for it, by rounds of one namespace each.

use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::GROUP;
use prepull_api::task::JobUid;

use crate::kruise::Liveness;
use crate::shared::events::ObjectKind;

/// Whether no owner waits for a tag any more: its round is for jobs, and all of them have finished.
pub(super) fn is_abandoned(owners: &[ObjectReference], liveness: &dyn Fn(&JobUid) -> Liveness) -> bool {
    let waits = |owner: &ObjectReference| {
        let has_finished = || job_of(owner).is_some_and(|job| liveness(&job) == Liveness::Finished);
        !is_job(owner) || is_in_round(owners, owner) && !has_finished()
    };
    !owners.is_empty() && !owners.iter().any(waits)
}

/// Whether an owner is an ImagePullJob. Owners of other kinds are not ours to judge, and stay.
pub(super) fn is_job(owner: &ObjectReference) -> bool {
    let group =
        owner.api_version.as_deref().and_then(|version| version.split_once('/')).map(|(group, _)| group);
    group == Some(GROUP) && owner.kind.as_deref() == Some(ObjectKind::ImagePullJob.as_str())
}

/// The namespace that a tag with these owners is pulled for in its present version: that of the job which asked last.
/// Secrets belong to a namespace, so a pull with those of one proves nothing to the jobs of another; their rounds come
/// before or after this one. `None` if no job owns the tag.
pub(super) fn round_namespace(owners: &[ObjectReference]) -> Option<&str> {
    owners.iter().rfind(|owner| is_job(owner)).map(namespace)
}

/// Whether the tag is pulled for this job in its present version.
pub(super) fn is_in_round(owners: &[ObjectReference], job: &ObjectReference) -> bool {
    round_namespace(owners) == Some(namespace(job))
}

/// The owners that a tag is pulled for in its present version.
pub(super) fn round_jobs(owners: &[ObjectReference]) -> impl Iterator<Item = &ObjectReference> {
    owners.iter().filter(|owner| is_job(owner) && is_in_round(owners, owner))
}

pub(super) fn namespace(owner: &ObjectReference) -> &str {
    owner.namespace.as_deref().unwrap_or_default()
}

/// The job that an owner is.
pub(super) fn job_of(owner: &ObjectReference) -> Option<JobUid> {
    owner.uid.clone().map(JobUid)
}

pub(super) fn jobs_of(owners: &[ObjectReference]) -> impl Iterator<Item = JobUid> {
    owners.iter().filter(|owner| is_job(owner)).filter_map(job_of)
}
