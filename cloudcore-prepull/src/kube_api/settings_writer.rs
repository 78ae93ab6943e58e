//! Writes of the statuses of `ImagePrePullSettings`.

use std::sync::Arc;

use kube::{Api, Client};
use prepull_api::crd::settings::{ImagePrePullSettings, ImagePrePullSettingsStatus};
use prepull_engine::shared::objects::ObjectId;
use serde_json::json;

use crate::kube_api::object_write::{self, PatchEndpoint, PatchTarget, WriteError, WriteFailure};
use crate::kube_api::refusal::FailureLog;

/// Its client is fenced, as that of every write.
#[derive(Clone)]
pub(crate) struct SettingsWriter {
    client: Client,
    log: Arc<FailureLog>,
}

impl SettingsWriter {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, log: Arc::default() }
    }

    /// Replaces a status. What fails is logged, and the engine asks again after a while.
    pub(crate) async fn write(&self, id: &ObjectId, status: &ImagePrePullSettingsStatus) {
        let api = Api::<ImagePrePullSettings>::all(self.client.clone());
        // Any version: the status depends on nothing that another writer changes.
        let target = PatchTarget { name: &id.name, uid: &id.uid.0, version: None };
        let patch = object_write::patch(&api, target, PatchEndpoint::Status, [("/status", json!(status))]);
        match object_write::in_time(patch).await {
            Ok(_) => {}
            Err(WriteError::Api(error)) if WriteFailure::from_error(&error) == WriteFailure::NotFound => {}
            Err(error) => {
                let problem = error.explain::<ImagePrePullSettings>();
                self.log.record("write", &id.name, problem.as_deref(), &error);
            }
        }
    }
}
