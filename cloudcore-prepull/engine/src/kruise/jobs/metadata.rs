//! The fields read from the metadata of jobs.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use prepull_api::crd::kruise::{GROUP, ImagePullJob};
use prepull_api::task::JobUid;

use crate::shared::events::ObjectKind;
use crate::shared::objects::ObjectId;

pub(super) fn object_id(metadata: &ObjectMeta) -> ObjectId {
    ObjectId {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        uid: JobUid(metadata.uid.clone().unwrap_or_default()),
    }
}

/// The ImageListPullJob that controls a job: if there is one of this name and UID in the job's own namespace. A job of another
/// namespace may name the same owner, and is none of its children.
pub(super) fn list_of(job: &ImagePullJob) -> Option<ObjectId> {
    let is_list = |owner: &&OwnerReference| {
        let group = owner.api_version.split('/').next();
        let is_kind = owner.kind == ObjectKind::ImageListPullJob.as_str();
        owner.controller == Some(true) && is_kind && group == Some(GROUP)
    };
    let owner = job.metadata.owner_references.iter().flatten().find(is_list)?;
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    Some(ObjectId { namespace, name: owner.name.clone(), uid: JobUid(owner.uid.clone()) })
}

pub(super) fn is_being_deleted(metadata: &ObjectMeta) -> bool {
    metadata.deletion_timestamp.is_some()
}

/// When an object was created; now, if it does not say so.
pub(super) fn creation_time(metadata: Option<&ObjectMeta>, now: Timestamp) -> Timestamp {
    metadata.and_then(|metadata| metadata.creation_timestamp.as_ref()).map_or(now, |time| time.0)
}

/// The time without fractions of a second, as Kubernetes stores it: a time that is read back must be equal.
pub(super) fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}
