//! ImagePrePullJobs as they come from the API server, whether or not they can be read.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_engine::prepull::controller::{JobObject, UnreadableJob, drop_unread_fields, rest_of};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::kube_api::guarded::names_of;
use crate::kube_api::kubeedge;

/// A job, so that one with a field of the wrong type stops neither a list nor a watch. What can be read of such a job, its
/// metadata and its status, is kept: it may be running.
#[derive(Clone, Debug)]
pub(crate) struct StoredJob {
    pub(crate) job: JobObject,
    /// Whether KubeEdge has begun with it: then it isn't ours, and we don't read its status.
    pub(crate) is_kubeedges: bool,
}

impl<'de> Deserialize<'de> for StoredJob {
    /// From a list or a watch, which need not be kept [whole](Self::parse_whole): see [`drop_unread_fields`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut stored = Self::parse_whole(&Value::deserialize(deserializer)?).map_err(D::Error::custom)?;
        drop_unread_fields(&mut stored.job, Timestamp::now());
        Ok(stored)
    }
}

impl StoredJob {
    /// Reads a job with all that it has.
    pub(super) fn parse_whole(value: &Value) -> Result<Self, serde_json::Error> {
        let is_kubeedges = kubeedge::has_begun(value);
        let error = match serde_path_to_error::deserialize::<_, ImagePrePullJob>(value) {
            Ok(job) => return Ok(Self { job: Ok(Box::new(job)), is_kubeedges }),
            // With the path of the field.
            Err(error) => format!("the object cannot be read: {error}"),
        };
        let metadata = ObjectMeta::deserialize(&value["metadata"])?;
        let status = Option::deserialize(&value["status"]).unwrap_or_default();
        let rest = ImagePrePullJob { metadata, status, ..ImagePrePullJob::default() };
        Ok(Self { job: Err(UnreadableJob { rest: Box::new(rest), error }), is_kubeedges })
    }
}

impl Resource for StoredJob {
    type DynamicType = ();
    type Scope = <ImagePrePullJob as Resource>::Scope;

    names_of!(ImagePrePullJob);

    fn meta(&self) -> &ObjectMeta {
        &rest_of(&self.job).metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.job {
            Ok(job) => &mut job.metadata,
            Err(unreadable) => &mut unreadable.rest.metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::status::JobPhase;
    use serde_json::json;

    use super::*;

    fn read(spec: &Value, status: &Value) -> JobObject {
        let object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
            "metadata": {"name": "nginx", "uid": "u", "resourceVersion": "7", "generation": 2},
            "spec": spec, "status": status,
        });
        serde_json::from_value::<StoredJob>(object).unwrap().job
    }

    #[test]
    fn an_unreadable_job_keeps_metadata_and_status() {
        let status = json!({"phase": "InProgress", "startTime": "2026-11-21T09:00:00Z"});
        assert!(read(&json!({"retry": 1}), &status).is_ok());
        let unreadable = read(&json!({"retry": 1e20}), &status).unwrap_err();
        assert_eq!(
            unreadable.error,
            "the object cannot be read: spec.retry: invalid type: floating point `1e+20`, expected i64"
        );
        let rest = &unreadable.rest;
        assert_eq!((rest.metadata.uid.as_deref(), rest.metadata.generation), (Some("u"), Some(2)));
        let kept = rest.status.as_ref().unwrap();
        assert_eq!((kept.phase, kept.start_time.is_some()), (JobPhase::InProgress, true));
        let unreadable = read(&json!({"retry": 1e20}), &json!({"phase": 7})).unwrap_err();
        assert_eq!(
            (unreadable.rest.status, unreadable.rest.metadata.resource_version.as_deref()),
            (None, Some("7"))
        );
    }
}
