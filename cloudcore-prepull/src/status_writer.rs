//! The one place that writes the status of jobs.
//!
//! The whole status is replaced by a merge patch that carries the object's UID: it cannot conflict with a user
//! who edits the spec, and it cannot hit another object that has the name by now. When to write, and what, the
//! controller decides; a write that fails comes back to it, and is made again with what is true by then.

use std::time::Duration;

use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::JobUid;
use serde_json::{Value, json};
use tracing::{debug, error, warn};

use crate::controller::WriteOutcome;

/// The API server answers a write within its own 60 s or never; half of that leaves time for another try
/// before anybody's deadline.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// What `ImagePrePullJobStatus` leaves out when it is empty: a merge patch must name it to remove it.
const OPTIONAL: [&str; 5] = ["startTime", "completionTime", "conditions", "nodeStatus", "skippedNodes"];

/// Writes one status once.
pub async fn write(client: Client, job: &JobUid, name: &str, status: &ImagePrePullJobStatus) -> WriteOutcome {
    let api: Api<ImagePrePullJob> = Api::all(client);
    let patch = Patch::Merge(body(job, status));
    let params = PatchParams::default();
    let write = api.patch_status(name, &params, &patch);
    match tokio::time::timeout(WRITE_DEADLINE, write).await {
        Ok(Ok(_)) => {
            debug!(job = name, phase = ?status.phase, "status written");
            WriteOutcome::Done
        }
        // 404: deleted. 409: the UID is another one, so the object was deleted and made again.
        Ok(Err(Error::Api(answer))) if matches!(answer.code, 404 | 409) => WriteOutcome::Gone,
        Ok(Err(error @ Error::Api(_))) => {
            error!(job = name, %error, "the API server refuses the status; trying again");
            WriteOutcome::Failed
        }
        Ok(Err(error)) => {
            warn!(job = name, %error, "status not written; trying again");
            WriteOutcome::Failed
        }
        Err(_) => {
            warn!(job = name, deadline = ?WRITE_DEADLINE, "status not written in time; trying again");
            WriteOutcome::Failed
        }
    }
}

fn body(job: &JobUid, status: &ImagePrePullJobStatus) -> Value {
    let mut status = json!(status);
    if let Value::Object(fields) = &mut status {
        for field in OPTIONAL {
            fields.entry(field).or_insert(Value::Null);
        }
    }
    json!({ "metadata": { "uid": job.0 }, "status": status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_is_removed() {
        let body = body(&JobUid("u".to_owned()), &ImagePrePullJobStatus::default());
        assert_eq!(body["metadata"]["uid"], "u");
        for field in OPTIONAL {
            assert_eq!(body["status"].get(field), Some(&Value::Null), "{field}");
        }
        assert_eq!(body["status"]["phase"], "Init");
    }
}
