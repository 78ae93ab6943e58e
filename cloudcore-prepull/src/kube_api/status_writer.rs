//! The only writer of the status of ImagePrePullJobs and of their reports; deletes jobs whose TTL is over.
//!
//! Every write names the version of the object that it replaces: another writer, such as a deposed leader that has not
//! noticed yet, cannot undo it, and cannot be undone by it without notice. A status is replaced by a JSON patch, a report
//! is put whole. When to write, and what, the controller decides; a failed write comes back to it, and is made again
//! with what is true by then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::header::HeaderValue;
use jiff::Timestamp;
use kube::api::{Api, ListParams, PartialObjectMeta};
use kube::{Client, Error, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL, ReportBody};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{Content, JobObject, Object, needs_reports, rest_of};
use prepull_engine::shared::objects::Unreadable;
use prepull_engine::shared::outcomes::WriteOutcome;
use serde_json::json;
use tracing::{debug, warn};

use crate::kube_api::cluster::read_with_retry;
use crate::kube_api::events::Events;
use crate::kube_api::field_manager::post_params;
use crate::kube_api::guarded::{Guarded, readable};
use crate::kube_api::object_write::{self, Endpoint, Failure, Target};
use crate::kube_api::refusal::explain;
use crate::kube_api::stored_job::StoredJob;

mod refused;
mod report;

use refused::Refused;
pub(crate) use report::report_id;
use report::{report_name, report_object};

/// Jobs or reports in one answer: each may be a megabyte, and is a tenth of that mostly.
const PAGE: u32 = 100;
/// Jobs whose reports are read with one request: 4 KiB of its URL, where proxies take 8.
const JOBS_IN_SELECTOR: usize = 100;

/// The answer to a written report: not the whole of it again.
const METADATA_ONLY: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json;q=0.9";

/// Of the answers only the metadata is read: the rest was just sent.
type Jobs = Api<PartialObjectMeta<ImagePrePullJob>>;

/// Writes jobs and reports. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Writer {
    client: Client,
    /// The version of each object as this process last wrote or read it.
    versions: Arc<Mutex<HashMap<(JobUid, Object), String>>>,
    refused: Refused,
}

impl Writer {
    /// Writes with the rights of this client. A job whose writes are refused for good gets an event.
    pub(crate) fn new(client: Client, events: Events) -> Self {
        Self { client, versions: Arc::default(), refused: Refused::new(events) }
    }

    /// Reads the reports of all jobs that need them, and retries until it has them. By the label of their jobs: of the
    /// reports of jobs that are over, of which there may be thousands, none is transferred. For many jobs at a time,
    /// because the API server has no index of labels, and looks at all reports for each request.
    pub(crate) async fn read_reports(&self, now: Timestamp) -> Vec<ImagePrePullReport> {
        let jobs: Vec<String> =
            read_with_retry("jobs", explain::<ImagePrePullJob>, || self.list_jobs_that_need_reports(now))
                .await;
        let mut reports = Vec::new();
        for jobs in jobs.chunks(JOBS_IN_SELECTOR) {
            let labelled = format!("{JOB_UID_LABEL} in ({})", jobs.join(","));
            // Anybody may set the label.
            let is_owned = |report: &ImagePrePullReport| {
                report.owner_references().first().is_some_and(|owner| jobs.contains(&owner.uid))
            };
            reports.extend(self.list_reports(ListParams::default().labels(&labelled), is_owned).await);
        }
        for report in &reports {
            if let Some(owner) = report.owner_references().first() {
                self.note_version(&JobUid(owner.uid.clone()), report);
            }
        }
        reports
    }

    /// Reads the reports of a job, and retries until it has them.
    pub(crate) async fn read_reports_of(&self, job: &JobUid) -> Vec<ImagePrePullReport> {
        let labelled = ListParams::default().labels(&format!("{JOB_UID_LABEL}={job}"));
        // Anybody may set the label.
        let is_owned =
            |report: &ImagePrePullReport| report.owner_references().iter().any(|owner| owner.uid == job.0);
        let reports = self.list_reports(labelled, is_owned).await;
        for report in &reports {
            self.note_version(job, report);
        }
        reports
    }

    async fn list_reports(
        &self,
        params: ListParams,
        is_wanted: impl Fn(&ImagePrePullReport) -> bool,
    ) -> Vec<ImagePrePullReport> {
        let api = Api::<Guarded<ImagePrePullReport>>::all(self.client.clone());
        let take = |report| match readable(report) {
            Ok(report) => Some(*report).filter(&is_wanted),
            Err(Unreadable { id, error, .. }) => {
                warn!(
                    report = id.name,
                    error,
                    "a report cannot be read: its nodes are taken from the status, and it is written again"
                );
                None
            }
        };
        let read = || list_pages(&api, params.clone(), take);
        read_with_retry("reports", explain::<ImagePrePullReport>, read).await
    }

    fn note_version(&self, job: &JobUid, report: &ImagePrePullReport) {
        if let Some(version) = report.resource_version() {
            self.versions().insert((job.clone(), Object::Report(report.body.index)), version);
        }
    }

    /// Reads a job, and retries until it has an answer. `None` if the job is gone.
    pub(crate) async fn read_job(&self, job: &JobUid, name: &str) -> Option<JobObject> {
        let api = Api::<StoredJob>::all(self.client.clone());
        let found = read_with_retry("job", explain::<ImagePrePullJob>, || api.get_opt(name)).await?;
        (found.uid().as_ref() == Some(&job.0) && !found.is_kubeedges).then_some(found.job)
    }

    async fn list_jobs_that_need_reports(&self, now: Timestamp) -> Result<Vec<String>, Error> {
        let api = Api::<StoredJob>::all(self.client.clone());
        let take = |stored: StoredJob| stored.uid().filter(|_| needs_reports(&stored.job, now));
        list_pages(&api, ListParams::default(), take).await
    }

    /// Writes an object. If it has another version than the known one, because somebody edited the spec or the answer
    /// to the last write was lost, that version is read, and the write made once more.
    pub(crate) async fn write(&self, job: &JobUid, name: &str, content: &Content) -> WriteOutcome {
        let object = content.object();
        match object_write::in_time(self.write_or_reread(job, name, content)).await {
            Ok(outcome) => {
                debug!(job = name, ?object, ?outcome, "written");
                self.refused.clear(job, object);
                outcome
            }
            Err(error) => {
                self.refused.record(job, name, object, &error);
                WriteOutcome::Failed
            }
        }
    }

    async fn write_or_reread(
        &self,
        job: &JobUid,
        name: &str,
        content: &Content,
    ) -> Result<WriteOutcome, Error> {
        let object = content.object();
        let Err(error) = self.write_once(job, name, content).await else { return Ok(WriteOutcome::Done) };
        match (Failure::of(&error), object) {
            (Failure::Other, _) => return Err(error),
            (Failure::NotFound, Object::Status) => {}
            // A report that somebody deleted or that this process did not know, or another version.
            _ => {
                if self.reread_version(job, name, object).await? {
                    self.write_once(job, name, content).await?;
                    return Ok(WriteOutcome::Done);
                }
            }
        }
        self.forget(job);
        Ok(WriteOutcome::Gone)
    }

    async fn write_once(&self, job: &JobUid, name: &str, content: &Content) -> Result<(), Error> {
        let key = (job.clone(), content.object());
        let version = self.versions().get(&key).cloned();
        let written = match content {
            Content::Status(status) => self.write_status(job, name, version.as_deref(), status).await?,
            Content::Report(report) => self.write_report(job, name, version, report).await?,
        };
        if let Some(version) = written {
            self.versions().insert(key, version);
        }
        Ok(())
    }

    /// Deletes a job. A failure is only logged; the controller asks again.
    pub(crate) async fn delete(&self, job: &JobUid, name: &str) {
        let jobs = self.jobs();
        if let Err(error) = object_write::in_time(object_write::delete(&jobs, name, &job.0)).await {
            self.refused.record_deletion(name, &error);
        }
    }

    /// Takes the version of a job that the watch has delivered, for the first write of its status to replace. From
    /// then on the versions that this process has written count, because the watch may be behind.
    pub(crate) fn note_job(&self, job: &JobObject) {
        let job = rest_of(job);
        if let (Some(uid), Some(version)) = (job.uid(), job.resource_version()) {
            self.versions().entry((JobUid(uid), Object::Status)).or_insert(version);
        }
    }

    /// Drops what is known about a job of which nothing more is written.
    pub(crate) fn forget(&self, job: &JobUid) {
        self.versions().retain(|(known, _), _| known != job);
        self.refused.forget(job);
    }

    /// Returns the new version.
    async fn write_status(
        &self,
        job: &JobUid,
        name: &str,
        version: Option<&str>,
        status: &ImagePrePullJobStatus,
    ) -> Result<Option<String>, Error> {
        let target = Target { name, uid: &job.0, version };
        let values = [("/status", json!(status))];
        let written = object_write::patch(&self.jobs(), target, Endpoint::Status, values).await?;
        Ok(written.resource_version())
    }

    /// Returns the new version. A request of our own, because kube has no `create` and no `replace` that return the
    /// metadata only.
    async fn write_report(
        &self,
        job: &JobUid,
        name: &str,
        version: Option<String>,
        body: &ReportBody,
    ) -> Result<Option<String>, Error> {
        let params = post_params();
        let exists = version.is_some();
        let report = report_object(job, name, version, body);
        let bytes = serde_json::to_vec(&report).map_err(Error::SerdeError)?;
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

    /// Takes the object's version after a write that was refused. `false` if the job is gone, or another one has its
    /// name by now.
    async fn reread_version(&self, job: &JobUid, name: &str, object: Object) -> Result<bool, Error> {
        let version = match object {
            Object::Status => {
                let Some(found) = object_write::read_metadata(&self.jobs(), name, &job.0).await? else {
                    return Ok(false);
                };
                found.resource_version()
            }
            Object::Report(index) => {
                let found = self.reports().get_metadata_opt(&report_name(job, name, index)).await?;
                found.and_then(|found| found.resource_version())
            }
        };
        let key = (job.clone(), object);
        match version {
            Some(version) => _ = self.versions().insert(key, version),
            None => _ = self.versions().remove(&key),
        }
        Ok(true)
    }

    fn jobs(&self) -> Jobs {
        Api::all(self.client.clone())
    }

    fn reports(&self) -> Api<ImagePrePullReport> {
        Api::all(self.client.clone())
    }

    fn versions(&self) -> MutexGuard<'_, HashMap<(JobUid, Object), String>> {
        // Nothing that holds the lock can leave the map half changed.
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What `take` makes of the objects, read page by page.
async fn list_pages<K, T>(
    api: &Api<K>,
    params: ListParams,
    take: impl Fn(K) -> Option<T>,
) -> Result<Vec<T>, Error>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let mut params = params.limit(PAGE);
    let mut wanted = Vec::new();
    loop {
        let list = match api.list(&params).await {
            // All pages are of the version of the first one, which is too old by now. A single answer cannot be.
            Err(Error::Api(answer)) if answer.code == 410 && params.continue_token.is_some() => {
                wanted.clear();
                params = ListParams { limit: None, continue_token: None, ..params };
                continue;
            }
            list => list?,
        };
        wanted.extend(list.items.into_iter().filter_map(&take));
        match list.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(wanted),
        }
    }
}

#[cfg(test)]
mod tests;
