//! The only writer of the status of ImagePrePullJobs and of their reports; deletes jobs after their TTL.
//!
//! Every write names the version of the object that it replaces: another writer, such as a deposed leader that has not
//! noticed yet, cannot undo it, and cannot be undone by it without notice. A status is replaced by a JSON patch, a report
//! is put whole. When to write, and what, the controller decides; a failed write comes back to it, and is made again
//! with what is true by then.

use std::collections::HashSet;
use std::sync::Arc;

use hyper::header::HeaderValue;
use kube::api::{Api, PartialObjectMeta};
use kube::{Client, Error, ResourceExt};
use parking_lot::Mutex;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, ReportBody};
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{Content, JobObject, rest_of};
use prepull_engine::shared::outcomes::WriteOutcome;
use serde_json::json;
use tokio::sync::Semaphore;
use tracing::debug;

use crate::kube_api::events::Events;
use crate::kube_api::field_manager::post_params;
use crate::kube_api::object_write::{self, PatchEndpoint, PatchTarget, WriteFailure};
use crate::kube_api::recall::read_job;
use crate::kube_api::report_object::{report_name, report_object};

mod refused;

use refused::RefusedWrites;

/// The answer to a written report: not the whole of it again.
const METADATA_ONLY: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json;q=0.9";

/// Reports under way, of some 100 KiB each, and as many statuses. More would wait in the API server, the renewal of our
/// Lease behind them, and hold their bytes here.
const WRITES: usize = 16;
/// Deletions under way: after a long outage thousands of jobs are due at once, and none of them is urgent.
const DELETIONS: usize = 4;

/// Of the answers only the metadata is read: the rest was just sent.
type JobMetadataApi = Api<PartialObjectMeta<ImagePrePullJob>>;

/// Writes jobs and reports. Cheap to clone.
#[derive(Clone)]
pub(crate) struct StatusWriter {
    client: Client,
    refused: RefusedWrites,
    reports: Arc<Semaphore>,
    /// Its own: what people wait for doesn't queue behind reports.
    statuses: Arc<Semaphore>,
    deletions: Arc<Semaphore>,
    /// The jobs that are being deleted, or wait for that: the controller asks again every 30 s.
    deleting: Arc<Mutex<HashSet<JobUid>>>,
}

#[derive(Debug)]
pub(crate) struct WrittenObject {
    pub(crate) outcome: WriteOutcome,
    /// The resourceVersion that the object has by the write.
    pub(crate) stored: Option<String>,
    /// The job, if the write has met a spec that the written status is not about: the watch may be behind, or deaf.
    pub(crate) edited: Option<JobObject>,
}

impl WrittenObject {
    /// Nothing was written, as far as is known.
    pub(crate) fn nothing(outcome: WriteOutcome) -> Self {
        Self { outcome, stored: None, edited: None }
    }
}

/// An object that has another version than the known one.
struct Other {
    /// `None` for a report that does not exist.
    version: Option<String>,
    edited: Option<JobObject>,
}

impl StatusWriter {
    /// Writes with the rights of this client. A job gets an event if its writes are refused for good.
    pub(crate) fn new(client: Client, events: Events) -> Self {
        let permits = || Arc::new(Semaphore::new(WRITES));
        Self {
            client,
            refused: RefusedWrites::new(events),
            reports: permits(),
            statuses: permits(),
            deletions: Arc::new(Semaphore::new(DELETIONS)),
            deleting: Arc::default(),
        }
    }

    /// Writes an object. If it has another version than `replaces`, because the spec was edited or the answer to the
    /// last write was lost, that version is read, and the write made once more.
    pub(crate) async fn write(
        &self,
        job: &JobUid,
        name: &str,
        replaces: Option<&str>,
        content: &Content,
    ) -> WrittenObject {
        let object = content.object();
        // Before the time of the write begins. The semaphore is never closed.
        let _permit = match content {
            Content::Report(_) => self.reports.acquire().await,
            Content::Status(_) => self.statuses.acquire().await,
        };
        match object_write::in_time(self.write_or_reread(job, name, replaces, content)).await {
            Ok(written) => {
                debug!(job = name, ?object, outcome = ?written.outcome, "written");
                self.refused.clear(job, object);
                written
            }
            Err(error) => {
                self.refused.record(job, name, object, &error);
                WrittenObject::nothing(WriteOutcome::Failed)
            }
        }
    }

    async fn write_or_reread(
        &self,
        job: &JobUid,
        name: &str,
        replaces: Option<&str>,
        content: &Content,
    ) -> Result<WrittenObject, Error> {
        let done = |stored, edited| WrittenObject { outcome: WriteOutcome::Done, stored, edited };
        let error = match self.write_once(job, name, replaces, content).await {
            Ok(stored) => return Ok(done(stored, None)),
            Err(error) => error,
        };
        match (WriteFailure::from_error(&error), content) {
            (WriteFailure::Other, _) => return Err(error),
            (WriteFailure::NotFound, Content::Status(_)) => {}
            // The report was deleted, or unknown to this process, or the version has changed.
            _ => {
                if let Some(Other { version, edited }) = self.reread(job, name, content).await? {
                    let stored = self.write_once(job, name, version.as_deref(), content).await?;
                    return Ok(done(stored, edited));
                }
            }
        }
        self.forget(job);
        Ok(WrittenObject::nothing(WriteOutcome::Gone))
    }

    /// Returns the new version.
    async fn write_once(
        &self,
        job: &JobUid,
        name: &str,
        replaces: Option<&str>,
        content: &Content,
    ) -> Result<Option<String>, Error> {
        match content {
            Content::Status(status) => {
                let target = PatchTarget { name, uid: &job.0, version: replaces };
                let values = [("/status", json!(status))];
                let written =
                    object_write::patch(&self.jobs(), target, PatchEndpoint::Status, values).await?;
                Ok(written.resource_version())
            }
            Content::Report(report) => self.write_report(job, name, replaces, report).await,
        }
    }

    /// Deletes a job of this generation, unless that's under way. A job that was edited meanwhile stays. A failure is only
    /// logged; the controller asks again.
    pub(crate) async fn delete(&self, job: &JobUid, name: &str, generation: i64) {
        if !self.deleting.lock().insert(job.clone()) {
            return;
        }
        let jobs = Api::<ImagePrePullJob>::all(self.client.clone());
        // It's never closed.
        let turn = self.deletions.acquire().await;
        let deletion = object_write::delete_unedited(&jobs, name, &job.0, generation);
        if let Err(error) = object_write::in_time(deletion).await {
            self.refused.record_deletion(name, &error);
        }
        drop(turn);
        self.deleting.lock().remove(job);
    }

    /// Forgets a job after its last write.
    pub(crate) fn forget(&self, job: &JobUid) {
        self.refused.forget(job);
    }

    /// Returns the new version. A request of our own, because kube has no `create` and no `replace` that return the
    /// metadata only.
    async fn write_report(
        &self,
        job: &JobUid,
        name: &str,
        version: Option<&str>,
        body: &ReportBody,
    ) -> Result<Option<String>, Error> {
        let params = post_params();
        let exists = version.is_some();
        let bytes = serde_json::to_vec(&report_object(job, name, version.map(str::to_owned), body))
            .map_err(Error::SerdeError)?;
        let request = kube::core::Request::new(self.reports().resource_url());
        let request = if exists {
            request.replace(&report_name(job, name, body.index), &params, bytes)
        } else {
            request.create(&params, bytes)
        };
        let mut request = request.map_err(Error::BuildRequest)?;
        request.headers_mut().insert("accept", HeaderValue::from_static(METADATA_ONLY));
        let written: PartialObjectMeta<ImagePrePullReport> = self.client.request(request).await?;
        Ok(written.resource_version())
    }

    /// Reads the object after a write that was refused. `None` if the job is gone, or another one has its name by now.
    async fn reread(&self, job: &JobUid, name: &str, content: &Content) -> Result<Option<Other>, Error> {
        match content {
            Content::Status(status) => {
                let Some(found) = read_job(&self.client, job, name).await? else { return Ok(None) };
                let (version, is_ours) = (found.resource_version(), !found.is_kubeedges);
                let edited = Some(found.job)
                    .filter(|job| is_ours && rest_of(job).metadata.generation != status.observed_generation);
                Ok(Some(Other { version, edited }))
            }
            Content::Report(report) => {
                let found = self.reports().get_metadata_opt(&report_name(job, name, report.index)).await?;
                let version = found.and_then(|found| found.resource_version());
                Ok(Some(Other { version, edited: None }))
            }
        }
    }

    fn jobs(&self) -> JobMetadataApi {
        Api::all(self.client.clone())
    }

    fn reports(&self) -> Api<ImagePrePullReport> {
        Api::all(self.client.clone())
    }
}

#[cfg(test)]
mod tests;
