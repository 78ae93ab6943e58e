//! Writes of one object under its UID: the JSON patch, the deletion, their deadline, and the kinds of failure.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use kube::api::{Api, DeleteParams, PartialObjectMeta, Patch, Preconditions};
use kube::{Error, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::kube_api::field_manager::patch_params;
use crate::kube_api::refusal::{explain_error, is_unserved};

/// The API server answers a write within its own 60 s or never; half of that leaves time for another try before a
/// node's deadline.
const DEADLINE: Duration = Duration::from_secs(30);

/// The object that a write is meant for, as opposed to a later object of the same name.
#[derive(Clone, Copy, Debug)]
pub(super) struct PatchTarget<'a> {
    pub(super) name: &'a str,
    pub(super) uid: &'a str,
    /// The resourceVersion that the write replaces; `None` writes over any version.
    pub(super) version: Option<&'a str>,
}

/// The endpoint to which a patch goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum PatchEndpoint {
    /// The object itself, without its status.
    Object,
    Status,
}

/// Why the outcome of a write is not known, or why it was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// The write may still have been made.
    #[error("the API server has not answered within {DEADLINE:?}")]
    Deadline,
    /// As the client returned it.
    #[error(transparent)]
    Api(#[from] Error),
}

impl WriteError {
    /// What is wrong, and the remedy, if retrying does not help by itself. `K` is the kind that was written.
    pub(super) fn explain<K: Resource<DynamicType = ()>>(&self) -> Option<String> {
        match self {
            Self::Deadline => None,
            Self::Api(error) => explain_error::<K>(error),
        }
    }
}

/// The state of the object by a failed write. The names are those of Kubernetes' status reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteFailure {
    NotFound,
    /// Another object or another version has the name. For a patch without a version: a race inside the API server.
    Conflict,
    /// A test of the patch failed, or the definition does not accept the content.
    Invalid,
    /// Unknown: the kind is not served, a right is missing, or the API server is in trouble.
    Other,
}

impl WriteFailure {
    pub(super) fn from_error(error: &Error) -> Self {
        match error {
            // If the kind is not served, no object can be read or written, and so none is gone.
            Error::Api(answer) if is_unserved(answer) => Self::Other,
            Error::Api(answer) if answer.code == 404 => Self::NotFound,
            Error::Api(answer) if answer.code == 409 => Self::Conflict,
            Error::Api(answer) if answer.code == 422 => Self::Invalid,
            _ => Self::Other,
        }
    }
}

/// Waits for the outcome of a write, but not for ever.
pub(super) async fn in_time<T>(write: impl Future<Output = Result<T, Error>>) -> Result<T, WriteError> {
    match tokio::time::timeout(DEADLINE, write).await {
        Ok(outcome) => outcome.map_err(WriteError::Api),
        Err(_) => Err(WriteError::Deadline),
    }
}

/// Replaces the values at these paths, whole.
pub(super) async fn patch<K: Clone + DeserializeOwned + Debug>(
    api: &Api<K>,
    target: PatchTarget<'_>,
    endpoint: PatchEndpoint,
    values: impl IntoIterator<Item = (&'static str, Value)>,
) -> Result<K, Error> {
    let operations = serde_json::from_value(patch_operations(target, values)).map_err(Error::SerdeError)?;
    let (patch, params) = (Patch::<()>::Json(operations), patch_params());
    match endpoint {
        PatchEndpoint::Object => api.patch(target.name, &params, &patch).await,
        PatchEndpoint::Status => api.patch_status(target.name, &params, &patch).await,
    }
}

/// Tests instead of a merge patch with the UID in its metadata: in a write of a custom resource's status the API server
/// ignores the metadata.
fn patch_operations(target: PatchTarget, values: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let PatchTarget { name: _, uid, version } = target;
    let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
    if let Some(version) = version {
        operations.push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
    }
    // `add` also replaces a value that is there.
    let add = |(path, value)| json!({ "op": "add", "path": path, "value": value });
    operations.extend(values.into_iter().map(add));
    Value::Array(operations)
}

/// Deletes the object if it still has this metadata.generation: it may have been edited while the deletion waited. Succeeds if it
/// is gone already, or stays.
pub(super) async fn delete_unedited<K>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    generation: i64,
) -> Result<(), Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    match read_metadata(api, name, uid).await? {
        Some(found) if found.metadata.generation.unwrap_or_default() == generation => {
            delete(api, name, uid, found.metadata.resource_version).await
        }
        _ => Ok(()),
    }
}

/// Deletes the object at this version, or at any. Succeeds if it is gone already.
pub(super) async fn delete<K>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    resource_version: Option<String>,
) -> Result<(), Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let only = Preconditions { uid: Some(uid.to_owned()), resource_version };
    match api.delete(name, &DeleteParams::background().preconditions(only)).await {
        // A conflict: another object has the name by now, or it has changed.
        Err(error)
            if matches!(
                WriteFailure::from_error(&error),
                WriteFailure::NotFound | WriteFailure::Conflict
            ) =>
        {
            Ok(())
        }
        deleted => deleted.map(drop),
    }
}

/// The metadata of the object, unless it is gone or another object has its name.
pub(super) async fn read_metadata<K>(
    api: &Api<K>,
    name: &str,
    uid: &str,
) -> Result<Option<PartialObjectMeta<K>>, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let found = api.get_metadata_opt(name).await?;
    Ok(found.filter(|found| found.uid().as_deref() == Some(uid)))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_patch_tests_uid_and_version_first() {
        let target = PatchTarget { name: "nginx", uid: "u", version: Some("42") };
        let with_version = patch_operations(target, [("/status", json!({ "phase": "Init" }))]);
        assert_eq!(
            with_version,
            json!([
                { "op": "test", "path": "/metadata/uid", "value": "u" },
                { "op": "test", "path": "/metadata/resourceVersion", "value": "42" },
                { "op": "add", "path": "/status", "value": { "phase": "Init" } },
            ])
        );
        let any_version = patch_operations(PatchTarget { version: None, ..target }, [("/spec", json!(1))]);
        assert_eq!(
            any_version,
            json!([
                { "op": "test", "path": "/metadata/uid", "value": "u" },
                { "op": "add", "path": "/spec", "value": 1 },
            ])
        );
    }

    #[test]
    fn an_unserved_kind_is_not_a_missing_object() {
        let failure = |answer: Value| {
            let answer: Status = serde_json::from_value(answer).unwrap();
            WriteFailure::from_error(&Error::Api(answer.boxed()))
        };
        assert_eq!(failure(json!({ "code": 404, "message": "404 page not found" })), WriteFailure::Other);
        assert_eq!(failure(json!({ "code": 404, "details": { "name": "nginx" } })), WriteFailure::NotFound);
        assert_eq!(failure(json!({ "code": 409 })), WriteFailure::Conflict);
        assert_eq!(failure(json!({ "code": 422 })), WriteFailure::Invalid);
        for code in [401, 403, 410, 429, 500] {
            assert_eq!(failure(json!({ "code": code })), WriteFailure::Other, "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_write_ends_at_its_deadline() {
        let began = tokio::time::Instant::now();
        let error = in_time(std::future::pending::<Result<(), Error>>()).await.unwrap_err();
        assert!(matches!(error, WriteError::Deadline), "{error}");
        assert_eq!(began.elapsed(), DEADLINE);
        assert_eq!(error.to_string(), "the API server has not answered within 30s");
    }
}
