//! Makes the writes of Kruise's objects. When and what, the engine decides; here nothing is tried twice.
//!
//! A write of a NodeImage names the version that it replaces, since people edit NodeImages by hand, and nothing of
//! theirs may be lost. The statuses of jobs are cloudcore's alone: their writes name the object only.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error, Resource, ResourceExt};
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob, NodeImage, NodeImageSpec};
use prepull_api::task::NodeName;
use prepull_engine::kruise::ObjectId;
use prepull_engine::kruise::jobs::{Action, Object, Outcome};
use prepull_engine::kruise::node_images::{Write, Written};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tracing::{error, warn};

use crate::kube_api::refusal::{Said, explain, is_unserved, with_causes};

/// The API server answers a write within its own 60 s or never.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// Writes NodeImages, ImagePullJobs and ImageListPullJobs. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    /// What lasts is said once a minute, and not for each of ten thousand nodes.
    said: Arc<Said>,
}

impl Writer {
    /// Writes with this client's rights.
    pub fn new(client: Client) -> Self {
        Self { client, said: Arc::default() }
    }

    /// Writes a NodeImage.
    pub async fn node_image(&self, node: &NodeName, write: Write) -> Written {
        let outcome = tokio::time::timeout(WRITE_DEADLINE, self.write_node_image(node.as_str(), write)).await;
        match outcome {
            Ok(Ok(written)) => written,
            Ok(Err(error)) => {
                self.complain(&node.0, explain::<NodeImage>(&error), &error);
                Written::Failed
            }
            Err(_) => {
                warn!(%node, deadline = ?WRITE_DEADLINE, "the NodeImage was not written in time; trying again");
                Written::Failed
            }
        }
    }

    async fn write_node_image(&self, name: &str, write: Write) -> Result<Written, Error> {
        let api = Api::<NodeImage>::all(self.client.clone());
        let made = match write {
            Write::Create(labels) => {
                let metadata = ObjectMeta {
                    name: Some(name.to_owned()),
                    labels: Some((*labels).clone()),
                    ..ObjectMeta::default()
                };
                let object = NodeImage { metadata, spec: NodeImageSpec::default(), status: None };
                api.create(&PostParams::default(), &object).await.map(Some)
            }
            Write::Delete { uid } => delete(&api, name, &uid).await.map(|()| None),
            Write::Spec { uid, version, labels, spec } => {
                let replace = [("/metadata/labels", json!(*labels)), ("/spec", json!(spec))];
                patch(&api, name, &uid, Some(&version), replace, Part::Main).await.map(Some)
            }
            Write::Status { uid, version, status } => {
                let replace = [("/status", json!(status))];
                patch(&api, name, &uid, Some(&version), replace, Part::Status).await.map(Some)
            }
        };
        match made {
            Ok(object) => Ok(Written::Done(object.map(Box::new))),
            // 422 is what a failed test of a JSON patch is to some versions.
            Err(Error::Api(answer)) if matches!(answer.code, 404 | 409 | 422) && !is_unserved(&answer) => {
                let current = api.get_opt(name).await?;
                if answer.code == 422 {
                    warn!(node = name, error = answer.message, "the NodeImage was refused");
                }
                Ok(Written::Refused(current.map(Box::new)))
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a job's write.
    pub async fn job(&self, action: Action) -> Outcome {
        let object = written_object(&action);
        match tokio::time::timeout(WRITE_DEADLINE, self.write_job(action)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                let problem = match object {
                    Some(Object::ListJob(_)) => explain::<ImageListPullJob>(&error),
                    _ => explain::<ImagePullJob>(&error),
                };
                self.complain(&format!("{object:?}"), problem, &error);
                Outcome::Failed
            }
            Err(_) => {
                warn!(?object, deadline = ?WRITE_DEADLINE, "not written in time; trying again");
                Outcome::Failed
            }
        }
    }

    async fn write_job(&self, action: Action) -> Result<Outcome, Error> {
        let made = match action {
            Action::PullJobStatus(id, status) => {
                let api: Api<ImagePullJob> = self.of(&id);
                status_of(&api, &id, json!(status)).await
            }
            Action::ListJobStatus(id, status) => {
                let api: Api<ImageListPullJob> = self.of(&id);
                status_of(&api, &id, json!(status)).await
            }
            Action::DeletePullJob(id) | Action::DeleteChild { child: id, .. } => {
                delete(&self.of::<ImagePullJob>(&id), &id.name, &id.uid.0).await
            }
            Action::DeleteListJob(id) => delete(&self.of::<ImageListPullJob>(&id), &id.name, &id.uid.0).await,
            Action::ChangeChild { list: _, child, spec } => {
                let api: Api<ImagePullJob> = self.of(&child);
                let replace = [("/spec", json!(spec))];
                patch(&api, &child.name, &child.uid.0, None, replace, Part::Main).await.map(|_| ())
            }
            Action::MakeChild { list, name, spec } => {
                let owner = owner(&list);
                let mut child = ImagePullJob::new(&name, *spec);
                child.metadata.owner_references = Some(vec![owner]);
                let api: Api<ImagePullJob> = self.of(&list);
                match api.create(&PostParams::default(), &child).await {
                    // Ours, where the answer to an earlier try was lost.
                    Err(Error::Api(answer)) if answer.code == 409 => {
                        let found = api.get_opt(&name).await?;
                        let is_ours = found.is_some_and(|found| {
                            found.owner_references().iter().any(|owner| owner.uid == list.uid.0)
                        });
                        return Ok(if is_ours { Outcome::Done } else { Outcome::Gone });
                    }
                    made => made.map(|_| ()),
                }
            }
            Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => Ok(()),
        };
        match made {
            Ok(()) => Ok(Outcome::Done),
            // 410 is ours. A 409 is no answer to that: the API server has lost a race with another writer.
            Err(Error::Api(answer)) if matches!(answer.code, 404 | 410) && !is_unserved(&answer) => {
                Ok(Outcome::Gone)
            }
            Err(error) => Err(error),
        }
    }

    fn complain(&self, object: &str, problem: Option<String>, error: &Error) {
        match problem {
            Some(problem) if self.said.is_due("write", &problem, Instant::now()) => {
                error!(problem, object, "not written; trying again");
            }
            Some(_) => {}
            None => warn!(object, error = with_causes(error), "not written; trying again"),
        }
    }

    fn of<K>(&self, id: &ObjectId) -> Api<K>
    where
        K: Resource<Scope = kube::core::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &id.namespace)
    }
}

/// What an action writes. None for what is no write.
pub fn written_object(action: &Action) -> Option<Object> {
    Some(match action {
        Action::PullJobStatus(id, _) | Action::DeletePullJob(id) => Object::PullJob(id.uid.clone()),
        Action::ListJobStatus(id, _) | Action::DeleteListJob(id) => Object::ListJob(id.uid.clone()),
        Action::MakeChild { list, spec, .. } | Action::ChangeChild { list, spec, .. } => {
            Object::Child(list.uid.clone(), spec.image.clone())
        }
        Action::DeleteChild { list, image, .. } => Object::Child(list.uid.clone(), image.clone()),
        Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => return None,
    })
}

/// The list, as the owner of a child.
fn owner(list: &ObjectId) -> OwnerReference {
    OwnerReference {
        api_version: ImageListPullJob::api_version(&()).into_owned(),
        kind: ImageListPullJob::kind(&()).into_owned(),
        name: list.name.clone(),
        uid: list.uid.0.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// What a patch is of.
#[derive(Clone, Copy)]
enum Part {
    Main,
    Status,
}

async fn patch<K: Clone + DeserializeOwned + Debug>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    version: Option<&str>,
    replace: impl IntoIterator<Item = (&'static str, Value)>,
    part: Part,
) -> Result<K, Error> {
    let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
    if let Some(version) = version {
        operations.push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
    }
    // `add` replaces what is there.
    operations.extend(
        replace.into_iter().map(|(path, value)| json!({ "op": "add", "path": path, "value": value })),
    );
    let patch =
        Patch::<()>::Json(serde_json::from_value(Value::Array(operations)).map_err(Error::SerdeError)?);
    let params = PatchParams::default();
    match part {
        Part::Main => api.patch(name, &params, &patch).await,
        Part::Status => api.patch_status(name, &params, &patch).await,
    }
}

async fn status_of<K>(api: &Api<K>, id: &ObjectId, status: Value) -> Result<(), Error>
where
    K: Clone + DeserializeOwned + Debug + ResourceExt,
{
    match patch(api, &id.name, &id.uid.0, None, [("/status", status)], Part::Status).await {
        // The test of the UID, or a status that the definition does not take.
        Err(Error::Api(answer)) if answer.code == 422 => {
            let found = api.get_opt(&id.name).await?;
            if found.is_some_and(|found| found.uid().as_ref() == Some(&id.uid.0)) {
                return Err(Error::Api(answer));
            }
            // Another one of its name, or none.
            Err(Error::Api(Box::new(kube::core::Status { code: 410, ..*answer })))
        }
        made => made.map(|_| ()),
    }
}

async fn delete<K>(api: &Api<K>, name: &str, uid: &str) -> Result<(), Error>
where
    K: Clone + DeserializeOwned + Debug + Serialize,
{
    let uid = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
    match api.delete(name, &DeleteParams::background().preconditions(uid)).await {
        // Gone already, or another one of its name.
        Err(Error::Api(answer)) if matches!(answer.code, 404 | 409) && !is_unserved(&answer) => Ok(()),
        deleted => deleted.map(|_| ()),
    }
}
