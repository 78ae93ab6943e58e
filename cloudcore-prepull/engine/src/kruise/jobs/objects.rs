//! What is read from the metadata of the objects.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use prepull_api::crd::kruise::{GROUP, ImageListPullJob, ImagePullJob};
use prepull_api::task::JobUid;

use crate::shared::events::ObjectKind;
use crate::shared::objects::{ObjectId, Unreadable};

pub(super) type PullJobObject = Result<Box<ImagePullJob>, Unreadable>;
pub(super) type ListJobObject = Result<Box<ImageListPullJob>, Unreadable>;

pub(super) fn pull_job_id(object: &PullJobObject) -> ObjectId {
    match object {
        Ok(job) => id(&job.metadata),
        Err(unreadable) => unreadable.id.clone(),
    }
}

pub(super) fn list_job_id(object: &ListJobObject) -> ObjectId {
    match object {
        Ok(job) => id(&job.metadata),
        Err(unreadable) => unreadable.id.clone(),
    }
}

pub(super) fn id(metadata: &ObjectMeta) -> ObjectId {
    ObjectId {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        uid: JobUid(metadata.uid.clone().unwrap_or_default()),
    }
}

/// The list that a job belongs to.
pub(super) fn list_of(job: &ImagePullJob) -> Option<JobUid> {
    let is_list = |owner: &&OwnerReference| {
        let group = owner.api_version.split('/').next();
        owner.controller == Some(true)
            && owner.kind == ObjectKind::ImageListPullJob.as_str()
            && group == Some(GROUP)
    };
    let owner = job.metadata.owner_references.iter().flatten().find(is_list)?;
    Some(JobUid(owner.uid.clone()))
}

/// With which others a job shares its slots.
pub(super) fn group(object: &PullJobObject) -> JobUid {
    let list = object.as_ref().ok().and_then(|job| list_of(job));
    list.unwrap_or_else(|| pull_job_id(object).uid)
}

pub(super) fn is_being_deleted(metadata: &ObjectMeta) -> bool {
    metadata.deletion_timestamp.is_some()
}

/// When an object was made; now, for one that does not say.
pub(super) fn created(metadata: Option<&ObjectMeta>, now: Timestamp) -> Timestamp {
    metadata.and_then(|metadata| metadata.creation_timestamp.as_ref()).map_or(now, |time| time.0)
}

/// Kubernetes' times have no fractions; one that is read back is to be the same.
pub(super) fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}
