//! ImagePrePullJobs of a test: applying them and waiting for their states.

mod builder;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Event;
use kube::Resource;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobImageStatus, JobPhase, NodeStatus};

pub use builder::JobBuilder;

use crate::cleanup::{SOON, eventually};
use crate::cluster::{Cluster, documents};
use crate::place::Place;

/// Default limit for a state that a test expects, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Programs with logs that are shown if a job doesn't reach the expected state.
const LOGS: [&str; 3] = ["cloudcore-prepull", "agent-", "kube-apiserver"];

/// The reason why the API server has refused an object, by its schema or by a rule of the definition. `None` for other
/// errors.
pub fn refused(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| match cause.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) if status.code == 422 => Some(status.message.clone()),
        _ => None,
    })
}

/// A job in the cluster.
#[derive(Clone)]
pub struct Job {
    place: Arc<Place>,
    api: Api<ImagePrePullJob>,
    name: String,
    limit: Duration,
}

impl Cluster {
    /// Builds a job, which [`JobBuilder::apply`] applies.
    pub fn job(&self, name: &str) -> JobBuilder<'_> {
        JobBuilder::new(self, name)
    }

    /// Applies a job that is given as YAML, in any version.
    pub async fn apply_job(&self, yaml: &str) -> Result<Job> {
        let objects = documents(yaml)?;
        let name = objects.iter().find(|object| object["kind"] == "ImagePrePullJob");
        let name = name
            .and_then(|job| job["metadata"]["name"].as_str())
            .context("the YAML has no ImagePrePullJob")?;
        self.apply(yaml).await?;
        Ok(self.existing_job(name))
    }

    /// A job that something else applies.
    pub fn existing_job(&self, name: &str) -> Job {
        Job {
            place: Arc::clone(self.place()),
            api: Api::all(self.client()),
            name: name.to_owned(),
            limit: LIMIT,
        }
    }
}

impl Job {
    pub(crate) async fn create(cluster: &Cluster, job: &ImagePrePullJob) -> Result<Self> {
        let handle = cluster.existing_job(job.metadata.name.as_deref().unwrap_or_default());
        let created = handle.api.create(&PostParams::default(), job).await;
        created.with_context(|| format!("cannot create job {}", handle.name))?;
        Ok(handle)
    }

    /// Name of the job.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the limit of later waits, instead of two minutes.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Reads the job from the API server.
    pub async fn get(&self) -> Result<ImagePrePullJob> {
        self.api.get(&self.name).await.with_context(|| format!("cannot get job {}", self.name))
    }

    /// Reads the current status, which is the default one if the job has none yet.
    pub async fn status(&self) -> Result<ImagePrePullJobStatus> {
        Ok(self.get().await?.status.unwrap_or_default())
    }

    /// Reads the current status of one node.
    pub async fn node_status(&self, node: &str) -> Result<NodeStatus> {
        let status = self.status().await?;
        status
            .node(node)
            .cloned()
            .with_context(|| format!("the status of {} has no node {node}: {status:#?}", self.name))
    }

    /// Waits until the job is Completed. Fails at once if it becomes a Failure.
    pub async fn completes(&self) -> Result<ImagePrePullJobStatus> {
        self.reaches(JobPhase::Completed).await
    }

    /// Waits until the job is a Failure. Fails at once if it becomes Completed.
    pub async fn fails(&self) -> Result<ImagePrePullJobStatus> {
        self.reaches(JobPhase::Failure).await
    }

    /// Waits until the job is in the given phase. Fails at once if it reaches another final one.
    pub async fn reaches(&self, phase: JobPhase) -> Result<ImagePrePullJobStatus> {
        let is_final = |phase| matches!(phase, JobPhase::Completed | JobPhase::Failure);
        let there = |status: &ImagePrePullJobStatus| status.phase == phase || is_final(status.phase);
        let status = self.until(&format!("is {phase:?}"), there).await?;
        if status.phase != phase {
            bail!("job {} is {:?}, not {phase:?}\n{}", self.name, status.phase, self.diagnosis(&status));
        }
        Ok(status)
    }

    /// Waits until the status satisfies a condition; `what` names it in errors. After the limit, the error shows the
    /// last status and the logs.
    pub async fn until(
        &self,
        what: &str,
        mut is_met: impl FnMut(&ImagePrePullJobStatus) -> bool,
    ) -> Result<ImagePrePullJobStatus> {
        let mut last = ImagePrePullJobStatus::default();
        let found = tokio::time::timeout(
            self.limit,
            self.watch(|status| {
                last = status;
                is_met(&last)
            }),
        );
        match found.await {
            Ok(Ok(())) => Ok(last),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                bail!("job {}: not «{what}» within {:?}\n{}", self.name, self.limit, self.diagnosis(&last))
            }
        }
    }

    /// Passes each status to `enough`, beginning with the current one, until it returns true. Survives restarts of the
    /// API server.
    pub async fn watch(&self, mut enough: impl FnMut(ImagePrePullJobStatus) -> bool) -> Result<()> {
        let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
        while let Some(change) = changes.next().await {
            // After an error, the watch tries again.
            let Ok(Some(job)) = change else { continue };
            if enough(job.status.unwrap_or_default()) {
                return Ok(());
            }
        }
        bail!("the watch of job {} ended", self.name)
    }

    /// Waits until the job exists.
    pub async fn exists(&self) -> Result<()> {
        let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
        let there = async { while !matches!(changes.next().await, Some(Ok(Some(_))) | None) {} };
        tokio::time::timeout(self.limit, there)
            .await
            .with_context(|| format!("job {} does not exist", self.name))
    }

    /// Waits until the job no longer exists.
    pub async fn is_gone(&self) -> Result<()> {
        let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
        let gone = async { while !matches!(changes.next().await, Some(Ok(None)) | None) {} };
        tokio::time::timeout(self.limit, gone)
            .await
            .with_context(|| format!("job {} still exists", self.name))
    }

    /// Changes the job by a JSON merge patch, `{"spec": …}`.
    pub async fn patch(&self, patch: serde_json::Value) -> Result<ImagePrePullJob> {
        Ok(self.api.patch(&self.name, &PatchParams::default(), &Patch::Merge(patch)).await?)
    }

    /// Writes a status like another program.
    pub async fn set_status(&self, status: &serde_json::Value) -> Result<()> {
        let patch = Patch::Merge(serde_json::json!({ "status": status }));
        self.api.patch_status(&self.name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Deletes the job.
    pub async fn delete(&self) -> Result<()> {
        self.api.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Reads the events about the job: type, reason and message of each.
    pub async fn events(&self) -> Result<Vec<(String, String, String)>> {
        let api: Api<Event> = Api::namespaced(self.api.clone().into_client(), "default");
        let fields = format!("involvedObject.uid={}", self.uid().await?);
        let mut events = api.list(&ListParams::default().fields(&fields)).await?.items;
        events.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name)); // their names end in the time
        let text = Option::unwrap_or_default;
        Ok(events.into_iter().map(|e| (text(e.type_), text(e.reason), text(e.message))).collect())
    }

    /// Waits for an event with this reason, and returns its type and message. Events may come after the status.
    pub async fn event(&self, reason: &str) -> Result<(String, String)> {
        eventually(&format!("event {reason} on job {}", self.name), SOON, async || {
            let events = self.events().await?;
            let found = events.iter().find(|(_, found, _)| found == reason);
            let (kind, _, message) = found.with_context(|| format!("there are {events:?}"))?;
            Ok((kind.clone(), message.clone()))
        })
        .await
    }

    /// Reads the reports of the job, in order.
    pub async fn reports(&self) -> Result<Vec<ImagePrePullReport>> {
        let api: Api<ImagePrePullReport> = Api::all(self.api.clone().into_client());
        let labels = format!("{JOB_UID_LABEL}={}", self.uid().await?);
        let mut reports = api.list(&ListParams::default().labels(&labels)).await?.items;
        reports.sort_by_key(|report| report.body.index);
        Ok(reports)
    }

    /// Changes the spec, as `kubectl patch --type=merge` does.
    pub async fn patch_spec(&self, spec: serde_json::Value) -> Result<()> {
        let patch = Patch::Merge(serde_json::json!({ "spec": spec }));
        self.api.patch(&self.name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Reads the UID of the job.
    pub async fn uid(&self) -> Result<String> {
        Ok(self.get().await?.meta().uid.clone().unwrap_or_default())
    }

    fn diagnosis(&self, status: &ImagePrePullJobStatus) -> String {
        let status = serde_saphyr::to_string(status).unwrap_or_else(|error| error.to_string());
        format!("--- status:\n{status}\n{}", self.place.log_tails(&LOGS))
    }
}

/// Access to the parts of a status that tests look at.
pub trait StatusExt {
    /// Status of a node.
    fn node(&self, name: &str) -> Option<&NodeStatus>;
    /// Status of an image on a node, by the name that the job gives the image.
    fn image(&self, node: &str, image: &str) -> Option<&JobImageStatus>;
    /// Why a node was skipped.
    fn skipped(&self, node: &str) -> Option<&str>;
}

impl StatusExt for ImagePrePullJobStatus {
    fn node(&self, name: &str) -> Option<&NodeStatus> {
        self.node_status.iter().find(|node| node.node_name == name)
    }

    fn image(&self, node: &str, image: &str) -> Option<&JobImageStatus> {
        self.node(node)?.image_status.iter().find(|status| status.image == image)
    }

    fn skipped(&self, node: &str) -> Option<&str> {
        self.skipped_nodes
            .iter()
            .find(|skipped| skipped.node_name == node)
            .map(|skipped| skipped.reason.as_str())
    }
}
