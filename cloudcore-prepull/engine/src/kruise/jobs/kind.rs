//! The common part of ImagePullJob and ImageListPullJob, so that one life cycle serves both.

use std::fmt::Debug;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use prepull_api::crd::kruise::{
    CompletionPolicy, ImageListPullJob, ImageListPullJobSpec, ImageListPullJobStatus, ImagePullJob,
    ImagePullJobSpec, ImagePullJobStatus,
};

use super::{Action, JobWrite, metadata};
use crate::shared::events::ObjectKind;
use crate::shared::objects::{ObjectId, Unreadable};

/// A job as the watch delivers it.
pub(super) type KruiseJobObject<K> = Result<Box<K>, Unreadable>;

pub(super) trait JobKind {
    const KIND: ObjectKind;
    type Spec: Clone + Debug + PartialEq;
    type Status: Clone + Debug + PartialEq;

    fn metadata(&self) -> &ObjectMeta;
    fn spec(&self) -> &Self::Spec;
    fn into_spec(self) -> Self::Spec;
    fn status(&self) -> Option<&Self::Status>;

    fn completion_policy(spec: &Self::Spec) -> &CompletionPolicy;
    fn start_time(status: &Self::Status) -> Option<&Time>;
    fn completion_time(status: &Self::Status) -> Option<&Time>;
    fn message(status: &Self::Status) -> &str;

    /// The status of a job with a refused spec: nothing but its start and the reason.
    fn refused(start_time: Option<Time>, reason: &str) -> Self::Status;
    fn write_status(id: &ObjectId, generation: i64, status: Self::Status) -> Action;
    fn delete(id: &ObjectId, generation: i64) -> Action;
}

/// The fields have the same names and types in both kinds; only the types around them differ.
macro_rules! job_kind {
    ($kind:ident, $spec:ty, $status:ident, $write:ident, $delete:ident) => {
        impl JobKind for $kind {
            const KIND: ObjectKind = ObjectKind::$kind;
            type Spec = $spec;
            type Status = $status;

            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn spec(&self) -> &Self::Spec {
                &self.spec
            }

            fn into_spec(self) -> Self::Spec {
                self.spec
            }

            fn status(&self) -> Option<&Self::Status> {
                self.status.as_ref()
            }

            fn completion_policy(spec: &Self::Spec) -> &CompletionPolicy {
                &spec.template.completion_policy
            }

            fn start_time(status: &Self::Status) -> Option<&Time> {
                status.start_time.as_ref()
            }

            fn completion_time(status: &Self::Status) -> Option<&Time> {
                status.completion_time.as_ref()
            }

            fn message(status: &Self::Status) -> &str {
                &status.message
            }

            fn refused(start_time: Option<Time>, reason: &str) -> Self::Status {
                $status { start_time, message: reason.to_owned(), ..$status::default() }
            }

            fn write_status(id: &ObjectId, generation: i64, status: Self::Status) -> Action {
                Action::Write(JobWrite::$write(id.clone(), generation, Box::new(status)))
            }

            fn delete(id: &ObjectId, generation: i64) -> Action {
                Action::Write(JobWrite::$delete(id.clone(), generation))
            }
        }
    };
}

job_kind!(ImagePullJob, ImagePullJobSpec, ImagePullJobStatus, PullJobStatus, DeletePullJob);
job_kind!(ImageListPullJob, ImageListPullJobSpec, ImageListPullJobStatus, ListJobStatus, DeleteListJob);

pub(super) fn id_of<K: JobKind>(object: &KruiseJobObject<K>) -> ObjectId {
    match object {
        Ok(job) => metadata::object_id(job.metadata()),
        Err(unreadable) => unreadable.id.clone(),
    }
}

/// metadata.generation of a job, which an edit of its spec raises.
pub(super) fn generation_of<K: JobKind>(object: &KruiseJobObject<K>) -> i64 {
    match object {
        Ok(job) => job.metadata().generation.unwrap_or_default(),
        Err(unreadable) => unreadable.generation,
    }
}

/// `ttlSecondsAfterFinished` of a job.
pub(super) fn ttl<K: JobKind>(spec: &K::Spec) -> Option<i32> {
    K::completion_policy(spec).ttl_seconds_after_finished
}

/// The slot group of a job: its list, or the job itself.
pub(super) fn slot_group_of(object: &KruiseJobObject<ImagePullJob>) -> ObjectId {
    let list = object.as_ref().ok().and_then(|job| metadata::list_of(job));
    list.unwrap_or_else(|| id_of(object))
}
