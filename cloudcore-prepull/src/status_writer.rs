//! The one place that writes the status of jobs.
//!
//! The whole status is replaced by a JSON patch that tests the object's UID first: it cannot conflict with a user
//! who edits the spec, and it cannot hit another object that has the name by now. (The UID in a merge patch is no
//! such test: in a write of a custom resource's status the API server ignores the metadata.) When to write, and
//! what, the controller decides; a write that fails comes back to it, and is made again with what is true by then.

use std::time::Duration;

use kube::api::{Api, PartialObjectMeta, Patch, PatchParams};
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

/// Of the answers only the metadata is read: what else is in them was just sent.
type Jobs = Api<PartialObjectMeta<ImagePrePullJob>>;

/// Writes one status once.
pub async fn write(client: Client, job: &JobUid, name: &str, status: &ImagePrePullJobStatus) -> WriteOutcome {
    let api: Jobs = Api::all(client);
    match tokio::time::timeout(WRITE_DEADLINE, patch(&api, job, name, status)).await {
        Ok(Ok(())) => {
            debug!(job = name, phase = ?status.phase, "status written");
            WriteOutcome::Done
        }
        Ok(Err(Error::Api(answer))) if answer.code == 404 => WriteOutcome::Gone,
        // The test of the UID failed, or the definition refuses the status: the answer does not say which.
        Ok(Err(Error::Api(answer))) if answer.code == 422 && is_another(&api, job, name).await => {
            WriteOutcome::Gone
        }
        Ok(Err(Error::Api(answer))) => {
            let (code, message) = (answer.code, &answer.message);
            error!(job = name, code, message, "the API server refuses the status; trying again");
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

async fn patch(api: &Jobs, job: &JobUid, name: &str, status: &ImagePrePullJobStatus) -> Result<(), Error> {
    let patch = serde_json::from_value(operations(job, status)).map_err(Error::SerdeError)?;
    api.patch_status(name, &PatchParams::default(), &Patch::<()>::Json(patch)).await.map(drop)
}

fn operations(job: &JobUid, status: &ImagePrePullJobStatus) -> Value {
    json!([
        { "op": "test", "path": "/metadata/uid", "value": job.0 },
        // Replaces the whole value where there is one.
        { "op": "add", "path": "/status", "value": status },
    ])
}

/// Whether the name is another object's by now, or nobody's. `false` where that is not known.
async fn is_another(api: &Jobs, job: &JobUid, name: &str) -> bool {
    let found = tokio::time::timeout(WRITE_DEADLINE, api.get_opt(name)).await;
    matches!(found, Ok(Ok(found)) if found.as_ref().and_then(|found| found.metadata.uid.as_deref()) != Some(&job.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uid_is_tested_before_the_whole_status_is_replaced() {
        let operations = operations(&JobUid("u".to_owned()), &ImagePrePullJobStatus::default());
        assert_eq!(operations[0], json!({ "op": "test", "path": "/metadata/uid", "value": "u" }));
        assert_eq!((&operations[1]["op"], &operations[1]["path"]), (&json!("add"), &json!("/status")));
        assert_eq!(operations[1]["value"]["phase"], "Init");
        // What is empty is not in the value, and so not in the object afterwards.
        assert_eq!(operations[1]["value"].get("nodeStatus"), None);
    }
}
