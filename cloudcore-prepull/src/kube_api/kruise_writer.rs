//! The writer of Kruise's objects. When to write, and what, the engine decides; nothing is retried here.
//!
//! A write of a NodeImage names the version that it replaces, because people edit NodeImages by hand and none of their
//! edits may be lost. A write of a job's status names it as well, and the generation of the spec that it's about: one that
//! timed out may still reach the server after the final status has been written, and a job may be edited as it ends.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::Api;
use kube::{Client, Error, Resource, ResourceExt};
use parking_lot::Mutex;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob, ImagePullJobSpec, NodeImage, NodeImageSpec};
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::kruise::jobs::{JobWrite, WriteTarget};
use prepull_engine::kruise::node_images::{CompactNodeImage, NodeImageWrite, SharedParts, WrittenNodeImage};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::shared::outcomes::WriteOutcome;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tracing::warn;

use crate::kube_api::field_manager::post_params;
use crate::kube_api::object_write::{self, PatchEndpoint, PatchTarget, WriteFailure};
use crate::kube_api::refusal::{FailureLog, is_too_large};

/// Writes under way. More would wait in the API server, and the renewal of our Lease with them: a write takes some 30 ms of
/// its CPU, so that with 64 of them and a third of a core, each renewal took longer than its 4 s, and one leader after the
/// other ended.
const WRITES: usize = 16;

/// The version of a job, and the generation of its spec.
type JobVersion = (String, i64);

/// The versions of jobs after their last write, which spare a read before the next one.
#[derive(Debug, Default)]
struct Versions(HashMap<JobUid, JobVersion>);

impl Versions {
    /// More jobs than run at a time. Those that were deleted while they ran would be kept for ever otherwise.
    const MOST: usize = 4096;

    fn take(&mut self, job: &JobUid) -> Option<JobVersion> {
        self.0.remove(job)
    }

    fn put(&mut self, job: &JobUid, version: JobVersion) {
        if self.0.len() >= Self::MOST {
            self.0.clear();
        }
        self.0.insert(job.clone(), version);
    }
}

/// Writes NodeImages, ImagePullJobs and ImageListPullJobs. Cheap to clone.
#[derive(Clone)]
pub(crate) struct KruiseWriter {
    client: Client,
    /// Shared: a problem that lasts is logged once a minute, and not for each of ten thousand nodes.
    log: Arc<FailureLog>,
    permits: Arc<Semaphore>,
    /// What the answers have in common.
    parts: Arc<Mutex<SharedParts>>,
    versions: Arc<Mutex<Versions>>,
}

impl KruiseWriter {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            log: Arc::default(),
            permits: Arc::new(Semaphore::new(WRITES)),
            parts: Arc::default(),
            versions: Arc::default(),
        }
    }

    pub(crate) async fn write_node_image(&self, node: &NodeName, write: NodeImageWrite) -> WrittenNodeImage {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        match object_write::in_time(self.try_node_image(node.as_str(), write)).await {
            Ok(written) => written,
            Err(error) => {
                let problem = error.explain::<NodeImage>();
                self.log.record("write a NodeImage", node.as_str(), problem.as_deref(), &error);
                WrittenNodeImage::Failed
            }
        }
    }

    async fn try_node_image(&self, name: &str, write: NodeImageWrite) -> Result<WrittenNodeImage, Error> {
        let api = Api::<NodeImage>::all(self.client.clone());
        let written = match write {
            NodeImageWrite::Create(labels) => {
                let metadata = ObjectMeta {
                    name: Some(name.to_owned()),
                    labels: Some((*labels).clone()),
                    ..ObjectMeta::default()
                };
                let object = NodeImage { metadata, spec: NodeImageSpec::default(), status: None };
                api.create(&post_params(), &object).await.map(Some)
            }
            NodeImageWrite::Delete { uid } => {
                object_write::delete(&api, name, &uid, None).await.map(|()| None)
            }
            NodeImageWrite::Labels { uid, version, labels } => {
                let target = PatchTarget { name, uid: &uid, version: Some(&version) };
                let values = [("/metadata/labels", json!(*labels))];
                object_write::patch(&api, target, PatchEndpoint::Object, values).await.map(Some)
            }
            NodeImageWrite::Spec { uid, version, spec } => {
                let target = PatchTarget { name, uid: &uid, version: Some(&version) };
                let values = [("/spec", json!(spec))];
                object_write::patch(&api, target, PatchEndpoint::Object, values).await.map(Some)
            }
            NodeImageWrite::Status { uid, version, status } => {
                let target = PatchTarget { name, uid: &uid, version: Some(&version) };
                let values = [("/status", json!(status))];
                object_write::patch(&api, target, PatchEndpoint::Status, values).await.map(Some)
            }
        };
        let error = match written {
            Ok(object) => {
                return Ok(WrittenNodeImage::Done(object.map(|object| Box::new(self.compact(object)))));
            }
            Err(error) => error,
        };
        match WriteFailure::from_error(&error) {
            WriteFailure::Other if is_too_large(&error) => {
                warn!(node = name, %error, "the NodeImage is too large for the API server");
                return Ok(WrittenNodeImage::TooLarge);
            }
            WriteFailure::Other => return Err(error),
            // A failed test, or a definition that does not accept what was written: only the message differs.
            WriteFailure::Invalid => warn!(node = name, %error, "the API server refused the NodeImage"),
            WriteFailure::NotFound | WriteFailure::Conflict => {}
        }
        Ok(WrittenNodeImage::Refused(api.get_opt(name).await?.map(|object| Box::new(self.compact(object)))))
    }

    /// Thousands of answers may wait for the engine: each is made as small as the engine keeps it.
    fn compact(&self, object: NodeImage) -> CompactNodeImage {
        let mut parts = self.parts.lock();
        CompactNodeImage::new(object, &mut parts)
    }

    pub(crate) async fn write_job(&self, write: JobWrite) -> WriteOutcome {
        let _permit = self.permits.acquire().await;
        let target = write.target();
        match object_write::in_time(self.try_job(write)).await {
            Ok(outcome) => outcome,
            Err(error) => {
                let (operation, problem) = match target {
                    WriteTarget::ListJob(_) => {
                        ("write an ImageListPullJob", error.explain::<ImageListPullJob>())
                    }
                    WriteTarget::PullJob(_) | WriteTarget::Child(..) => {
                        ("write an ImagePullJob", error.explain::<ImagePullJob>())
                    }
                };
                self.log.record(operation, &format!("{target:?}"), problem.as_deref(), &error);
                WriteOutcome::Failed
            }
        }
    }

    async fn try_job(&self, write: JobWrite) -> Result<WriteOutcome, Error> {
        match write {
            JobWrite::PullJobStatus(id, generation, status) => {
                let api = self.namespaced::<ImagePullJob>(&id);
                self.write_status(&api, &id, generation, json!(status)).await
            }
            JobWrite::ListJobStatus(id, generation, status) => {
                let api = self.namespaced::<ImageListPullJob>(&id);
                self.write_status(&api, &id, generation, json!(status)).await
            }
            JobWrite::UpdateChild { list: _, child: id, version, spec } => {
                let spec = json!(ImagePullJobSpec::from(spec));
                replace_spec(&self.namespaced(&id), &id, version.as_deref(), spec).await
            }
            JobWrite::DeleteChild { child: id, .. } => {
                let api = self.namespaced::<ImagePullJob>(&id);
                object_write::delete(&api, &id.name, &id.uid.0, None).await.map(|()| WriteOutcome::Done)
            }
            JobWrite::DeletePullJob(id, generation) => {
                let api = self.namespaced::<ImagePullJob>(&id);
                let deleted = object_write::delete_unedited(&api, &id.name, &id.uid.0, generation).await;
                deleted.map(|()| WriteOutcome::Done)
            }
            JobWrite::DeleteListJob(id, generation) => {
                let api = self.namespaced::<ImageListPullJob>(&id);
                let deleted = object_write::delete_unedited(&api, &id.name, &id.uid.0, generation).await;
                deleted.map(|()| WriteOutcome::Done)
            }
            JobWrite::CreateChild { list, name, spec } => self.create_child(&list, &name, spec.into()).await,
        }
    }

    /// Replaces the status of a job in the version that it has, if that has this generation. A write that comes too late
    /// fails on that version.
    async fn write_status<K>(
        &self,
        api: &Api<K>,
        id: &ObjectId,
        generation: i64,
        status: Value,
    ) -> Result<WriteOutcome, Error>
    where
        K: Resource + Clone + DeserializeOwned + Debug,
    {
        // Until the outcome is known, so is no version.
        let known = self.versions.lock().take(&id.uid);
        for known in [known, None] {
            let is_read = known.is_none();
            let (version, found) = match known {
                Some(known) => known,
                None => match object_write::read_metadata(api, &id.name, &id.uid.0).await? {
                    Some(found) => version_of(&found),
                    None => return Ok(WriteOutcome::Gone),
                },
            };
            if found != generation {
                continue;
            }
            let target = PatchTarget { name: &id.name, uid: &id.uid.0, version: Some(&version) };
            let values = [("/status", status.clone())];
            match object_write::patch(api, target, PatchEndpoint::Status, values).await {
                Ok(written) => {
                    // Of most jobs nothing is written any more once they have ended.
                    if status["completionTime"].is_null() {
                        self.versions.lock().put(&id.uid, version_of(&written));
                    }
                    return Ok(WriteOutcome::Done);
                }
                Err(error) => match WriteFailure::from_error(&error) {
                    WriteFailure::NotFound => return Ok(WriteOutcome::Gone),
                    // Another version, unless the definition does not accept what was written.
                    WriteFailure::Invalid | WriteFailure::Conflict if !is_read => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(WriteOutcome::Failed)
    }

    async fn create_child(
        &self,
        list: &ObjectId,
        name: &str,
        spec: ImagePullJobSpec,
    ) -> Result<WriteOutcome, Error> {
        let api = self.namespaced::<ImagePullJob>(list);
        let mut child = ImagePullJob::new(name, spec);
        child.metadata.owner_references = Some(vec![owner_reference(list)]);
        let Err(error) = api.create(&post_params(), &child).await else {
            return Ok(WriteOutcome::Done);
        };
        match WriteFailure::from_error(&error) {
            // The namespace is gone.
            WriteFailure::NotFound => Ok(WriteOutcome::Gone),
            WriteFailure::Conflict => Ok(api
                .get_opt(name)
                .await?
                .map_or(WriteOutcome::Failed, |found| judge_namesake(&found, list))),
            WriteFailure::Invalid | WriteFailure::Other => Err(error),
        }
    }

    fn namespaced<K>(&self, id: &ObjectId) -> Api<K>
    where
        K: Resource<Scope = kube::core::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &id.namespace)
    }
}

fn version_of(object: &impl ResourceExt) -> JobVersion {
    (object.resource_version().unwrap_or_default(), object.meta().generation.unwrap_or_default())
}

/// Replaces the spec of a list's job.
async fn replace_spec(
    api: &Api<ImagePullJob>,
    id: &ObjectId,
    version: Option<&str>,
    spec: Value,
) -> Result<WriteOutcome, Error> {
    let target = PatchTarget { name: &id.name, uid: &id.uid.0, version };
    let Err(error) = object_write::patch(api, target, PatchEndpoint::Object, [("/spec", spec)]).await else {
        return Ok(WriteOutcome::Done);
    };
    match WriteFailure::from_error(&error) {
        WriteFailure::NotFound => Ok(WriteOutcome::Gone),
        // A test failed, unless the definition does not accept what was written.
        WriteFailure::Invalid => match object_write::read_metadata(api, &id.name, &id.uid.0).await? {
            None => Ok(WriteOutcome::Gone),
            Some(found)
                if version.is_some_and(|version| found.resource_version().as_deref() != Some(version)) =>
            {
                Ok(WriteOutcome::Failed)
            }
            Some(_) => Err(error),
        },
        WriteFailure::Conflict | WriteFailure::Other => Err(error),
    }
}

/// What another object with the name of a list's child means for the creation of the child.
fn judge_namesake(found: &ImagePullJob, list: &ObjectId) -> WriteOutcome {
    let is_list = |owner: &&OwnerReference| owner.kind == ImageListPullJob::kind(&());
    let owners = || found.owner_references().iter().filter(is_list);
    if owners().any(|owner| owner.uid == list.uid.0) {
        // The answer to an earlier try was lost.
        WriteOutcome::Done
    } else if found.metadata.deletion_timestamp.is_some() || owners().any(|owner| owner.name == list.name) {
        // A child of a list of this name that was deleted: the garbage collector is about to remove it.
        WriteOutcome::Failed
    } else {
        WriteOutcome::Gone
    }
}

/// A list as the owner of its children.
fn owner_reference(list: &ObjectId) -> OwnerReference {
    OwnerReference {
        api_version: ImageListPullJob::api_version(&()).into_owned(),
        kind: ImageListPullJob::kind(&()).into_owned(),
        name: list.name.clone(),
        uid: list.uid.0.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use http_body_util::BodyExt;
    use hyper::{Method, Request, Response};
    use kube::client::Body;
    use prepull_api::crd::kruise::ImagePullJobStatus;
    use prepull_engine::kruise::jobs::ChildSpec;

    use super::*;

    /// An API server with one job. It does not answer the first patch, and may still apply it.
    #[derive(Debug, Default)]
    struct Server {
        version: u64,
        generation: i64,
        status: Value,
        late: Option<Value>,
    }

    impl Server {
        fn apply(&mut self, patch: &Value) -> bool {
            let value = |path: &str| {
                let operation = patch.as_array().unwrap().iter().find(|operation| operation["path"] == path);
                operation.map(|operation| operation["value"].clone())
            };
            let stored = self.version.to_string();
            let fits = value("/metadata/resourceVersion").is_none_or(|version| version == *stored);
            if fits {
                self.version += 1;
                self.generation += i64::from(value("/spec").is_some());
                self.status = value("/status").unwrap_or_else(|| self.status.clone());
            }
            fits
        }

        fn answer(&mut self, method: &Method, body: &[u8]) -> (u16, Value) {
            if method == Method::PATCH {
                let patch: Value = serde_json::from_slice(body).unwrap();
                if self.late.is_none() {
                    self.late = Some(patch);
                    return (500, json!({"kind": "Status", "code": 500}));
                }
                if !self.apply(&patch) {
                    return (422, json!({"kind": "Status", "code": 422}));
                }
            }
            let metadata = json!({
                "name": "job", "namespace": "shop", "uid": "uid", "resourceVersion": self.version.to_string(),
                "generation": self.generation,
            });
            let object = json!({
                "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ImagePullJob", "metadata": metadata,
                "spec": {"image": "nginx"}, "status": self.status,
            });
            (200, object)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn few_objects_are_written_at_a_time() {
        let begun = Arc::new(AtomicUsize::default());
        let seen = Arc::clone(&begun);
        let hang = move |_: Request<Body>| {
            seen.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<Result<Response<Body>, Infallible>>()
        };
        let writer = KruiseWriter::new(Client::new(tower::service_fn(hang), "default"));
        let node = NodeName::from("edge-1");
        let create = || writer.write_node_image(&node, NodeImageWrite::Create(Arc::default()));
        let mut writes = futures::future::join_all((0..2 * WRITES).map(|_| create()));
        for (seconds, expected) in [(29, WRITES), (2, 2 * WRITES)] {
            let ended = tokio::time::timeout(Duration::from_secs(seconds), &mut writes).await.is_ok();
            assert!(!ended, "each has 30 s from when it's sent");
            assert_eq!(begun.load(Ordering::Relaxed), expected);
        }
    }

    /// A server, its writer, and the job.
    fn served(server: Server) -> (Arc<Mutex<Server>>, KruiseWriter, ObjectId) {
        let server = Arc::new(Mutex::new(server));
        let at_server = Arc::clone(&server);
        let serve = move |request: Request<Body>| {
            let server = Arc::clone(&at_server);
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let (code, answer) = server.lock().answer(&head.method, &body);
                let body = Body::from(answer.to_string().into_bytes());
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        };
        let writer = KruiseWriter::new(Client::new(tower::service_fn(serve), "default"));
        let id =
            ObjectId { namespace: "shop".to_owned(), name: "job".to_owned(), uid: JobUid("uid".to_owned()) };
        (server, writer, id)
    }

    fn status_write(id: &ObjectId, generation: i64, message: &str) -> JobWrite {
        let status = ImagePullJobStatus { message: message.to_owned(), ..ImagePullJobStatus::default() };
        JobWrite::PullJobStatus(id.clone(), generation, Box::new(status))
    }

    #[tokio::test]
    async fn a_write_is_for_what_was_decided_on() {
        let (server, writer, id) = served(Server { late: Some(Value::Null), ..Server::default() });
        let update = |version: Option<&str>| JobWrite::UpdateChild {
            list: id.clone(),
            child: id.clone(),
            version: version.map(str::to_owned),
            spec: ChildSpec::default(),
        };
        assert_eq!(writer.write_job(status_write(&id, 0, "first")).await, WriteOutcome::Done);
        assert_eq!(
            writer.write_job(update(Some("0"))).await,
            WriteOutcome::Failed,
            "it may have ended since"
        );
        assert_eq!(writer.write_job(update(Some("1"))).await, WriteOutcome::Done);
        // The version is known from the last write, and then it's read.
        for _ in 0..2 {
            assert_eq!(writer.write_job(status_write(&id, 0, "of another spec")).await, WriteOutcome::Failed);
        }
        assert_eq!(server.lock().status["message"], "first");
        assert_eq!(writer.write_job(status_write(&id, 1, "second")).await, WriteOutcome::Done);
        assert_eq!(writer.write_job(update(None)).await, WriteOutcome::Done, "any version");
        assert_eq!(server.lock().generation, 2);
    }

    #[tokio::test]
    async fn a_late_write_of_a_status_fails() {
        let (server, writer, id) = served(Server { status: json!({}), ..Server::default() });
        let write = |message: &str| writer.write_job(status_write(&id, 0, message));
        assert_eq!(write("late").await, WriteOutcome::Failed);
        assert_eq!(write("last but one").await, WriteOutcome::Done);
        assert_eq!(write("last").await, WriteOutcome::Done);
        let mut server = server.lock();
        let late = server.late.clone().unwrap();
        assert!(!server.apply(&late));
        assert_eq!(server.status["message"], "last");
    }

    #[test]
    fn only_a_deleted_lists_children_make_way() {
        let list = |uid: &str| ObjectId {
            namespace: "shop".to_owned(),
            name: "list".to_owned(),
            uid: JobUid(uid.to_owned()),
        };
        let (new, job) = (list("new"), ImagePullJob::new("list-1", ImagePullJobSpec::default()));
        let owned_by = |owner: OwnerReference| {
            let mut job = job.clone();
            job.metadata.owner_references = Some(vec![owner]);
            job
        };
        assert_eq!(judge_namesake(&owned_by(owner_reference(&new)), &new), WriteOutcome::Done);
        assert_eq!(judge_namesake(&owned_by(owner_reference(&list("old"))), &new), WriteOutcome::Failed);
        let other = ObjectId { name: "other".to_owned(), ..list("old") };
        assert_eq!(judge_namesake(&owned_by(owner_reference(&other)), &new), WriteOutcome::Gone);
        assert_eq!(judge_namesake(&job, &new), WriteOutcome::Gone);
        let mut leaving = job.clone();
        leaving.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        assert_eq!(judge_namesake(&leaving, &new), WriteOutcome::Failed);
    }
}
