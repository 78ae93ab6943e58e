//! The one place that writes the status of jobs and their reports, and deletes jobs whose time is over.
//!
//! Every write names the version of the object that it replaces: another writer, such as a leader that has been
//! deposed and does not know it yet, cannot undo it, and cannot be undone by it without notice. A status is
//! replaced by a JSON patch that tests UID and version (in a merge patch of a custom resource's status the API
//! server ignores the metadata, so there they would be no test); a report is put whole. When to write, and what,
//! the controller decides; a write that fails comes back to it, and is made again with what is true by then.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::HeaderValue;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{
    Api, DeleteParams, ListParams, PartialObjectMeta, Patch, PatchParams, PostParams, Preconditions,
};
use kube::core::DeserializeGuard;
use kube::{Client, Error, Resource, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_NAME_LABEL, JOB_UID_LABEL, ReportBody};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{Content, JobObject, Object, WriteOutcome, needs_reports};
use serde_json::{Value, json};
use tracing::{debug, warn};

use crate::kube_api::cluster::persistently;
use crate::kube_api::events::Events;
use crate::kube_api::refusal::{explain, is_unserved};

/// The API server answers a write within its own 60 s or never; half of that leaves time for another try
/// before anybody's deadline.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);
/// Jobs or reports in one answer: each may be a megabyte.
const PAGE: u32 = 20;
/// Of the job's name in the name of a report: with the UID's first part and the index it stays below 253 bytes.
const NAME_LENGTH: usize = 220;
/// Characters of a label's value, at most.
const LABEL_LENGTH: usize = 63;

/// What is asked for in return for a report: not the whole of it again.
const METADATA_ONLY: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json;q=0.9";

mod refused;

use refused::Refused;

/// Of the answers only the metadata is read: what else is in them was just sent.
type Jobs = Api<PartialObjectMeta<ImagePrePullJob>>;

/// Writes jobs and reports. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    /// The version of each object as this process wrote or read it last.
    versions: Arc<Mutex<HashMap<(JobUid, Object), String>>>,
    refused: Refused,
}

impl Writer {
    /// Writes with this client's rights. What it may not write, it tells in an event.
    pub fn new(client: Client, events: Events) -> Self {
        Self { client, versions: Arc::default(), refused: Refused::new(events) }
    }

    /// The reports of all jobs that need them. Tries until it has them. The API server has no index of labels, so all
    /// reports are read once, page by page, rather than for each job.
    pub async fn reports(&self, now: Timestamp) -> Vec<ImagePrePullReport> {
        let jobs: HashSet<String> =
            persistently("jobs", explain::<ImagePrePullJob>, || self.running(now)).await;
        if jobs.is_empty() {
            return Vec::new();
        }
        let needed = |report: &ImagePrePullReport| {
            report.owner_references().first().is_some_and(|owner| jobs.contains(&owner.uid))
        };
        let api = Api::<ImagePrePullReport>::all(self.client.clone());
        let page = || ListParams::default().limit(PAGE);
        let reports =
            persistently("reports", explain::<ImagePrePullReport>, || paged(&api, page(), needed)).await;
        for report in &reports {
            if let Some(owner) = report.owner_references().first() {
                self.read(&JobUid(owner.uid.clone()), report);
            }
        }
        reports
    }

    /// The reports of a job. Tries until it has them.
    pub async fn reports_of(&self, job: &JobUid) -> Vec<ImagePrePullReport> {
        let api = Api::<ImagePrePullReport>::all(self.client.clone());
        let page = || ListParams::default().limit(PAGE).labels(&format!("{JOB_UID_LABEL}={job}"));
        // The label may be anybody's.
        let of_job =
            |report: &ImagePrePullReport| report.owner_references().iter().any(|owner| owner.uid == job.0);
        let reports =
            persistently("reports", explain::<ImagePrePullReport>, || paged(&api, page(), of_job)).await;
        for report in &reports {
            self.read(job, report);
        }
        reports
    }

    /// Takes note of the version of a report.
    fn read(&self, job: &JobUid, report: &ImagePrePullReport) {
        if let Some(version) = report.resource_version() {
            self.versions().insert((job.clone(), Object::Report(report.body.index)), version);
        }
    }

    /// A job as it is now. Tries until it has it; none where it is gone, or cannot be read.
    pub async fn job(&self, job: &JobUid, name: &str) -> Option<Box<ImagePrePullJob>> {
        let api = Api::<DeserializeGuard<ImagePrePullJob>>::all(self.client.clone());
        let found = persistently("job", explain::<ImagePrePullJob>, || api.get_opt(name)).await?;
        found.0.ok().filter(|found| found.uid().as_ref() == Some(&job.0)).map(Box::new)
    }

    /// The jobs whose reports are needed.
    async fn running(&self, now: Timestamp) -> Result<HashSet<String>, Error> {
        // One that cannot be read has no use for them either.
        let api = Api::<DeserializeGuard<ImagePrePullJob>>::all(self.client.clone());
        let needs =
            |job: &DeserializeGuard<ImagePrePullJob>| job.0.as_ref().is_ok_and(|job| needs_reports(job, now));
        let jobs = paged(&api, ListParams::default().limit(PAGE), needs).await?;
        Ok(jobs.into_iter().filter_map(|DeserializeGuard(job)| job.ok()?.uid()).collect())
    }

    /// Writes an object. Where it has another version than we knew, because somebody edited the spec, or because the
    /// answer to our last write was lost, that version is read, and the write made once more.
    pub async fn write(&self, job: &JobUid, name: &str, content: &Content) -> WriteOutcome {
        let object = content.object();
        match tokio::time::timeout(WRITE_DEADLINE, self.write_or_reread(job, name, content)).await {
            Ok(Ok(outcome)) => {
                debug!(job = name, ?object, ?outcome, "written");
                self.refused.no_more(job, object);
                return outcome;
            }
            Ok(Err(error)) => self.refused.failed(job, name, object, &error),
            Err(_) => {
                warn!(job = name, ?object, deadline = ?WRITE_DEADLINE, "not written in time; trying again");
            }
        }
        WriteOutcome::Failed
    }

    async fn write_or_reread(
        &self,
        job: &JobUid,
        name: &str,
        content: &Content,
    ) -> Result<WriteOutcome, Error> {
        let refused = match self.write_once(job, name, content).await {
            Ok(()) => return Ok(WriteOutcome::Done),
            Err(error) => error,
        };
        let object = content.object();
        match &refused {
            // Where no job can be read or written, none is gone.
            Error::Api(answer) if is_unserved(answer) => return Err(refused),
            Error::Api(answer) if answer.code == 404 && object == Object::Status => {}
            // A report that somebody deleted, one that is there although we did not know, or another version. 422
            // is the test of UID and version, or a definition that does not have a field.
            Error::Api(answer) if matches!(answer.code, 404 | 409 | 422) => {
                if self.reread(job, name, object).await? {
                    self.write_once(job, name, content).await?;
                    return Ok(WriteOutcome::Done);
                }
            }
            _ => return Err(refused),
        }
        self.forget(job);
        Ok(WriteOutcome::Gone)
    }

    async fn write_once(&self, job: &JobUid, name: &str, content: &Content) -> Result<(), Error> {
        let key = (job.clone(), content.object());
        let version = self.versions().get(&key).cloned();
        let written = match content {
            Content::Status(status) => self.status(job, name, version.as_deref(), status).await?,
            Content::Report(report) => self.report(job, name, version, report).await?,
        };
        if let Some(version) = written {
            self.versions().insert(key, version);
        }
        Ok(())
    }

    /// Deletes a job, and no other one of its name. Failures are logged; the controller asks again.
    pub async fn delete(&self, job: &JobUid, name: &str) {
        let uid = Preconditions { uid: Some(job.0.clone()), resource_version: None };
        let params = DeleteParams::background().preconditions(uid);
        match tokio::time::timeout(WRITE_DEADLINE, self.jobs().delete(name, &params)).await {
            Ok(Ok(_)) => {}
            Ok(Err(Error::Api(answer))) if matches!(answer.code, 404 | 409) => {}
            Ok(Err(error)) => self.refused.not_deleted(name, &error),
            Err(_) => {
                warn!(job = name, deadline = ?WRITE_DEADLINE, "the job was not deleted in time; trying again");
            }
        }
    }

    /// The job was told of in this version: the first write of its status is to replace it, or what is newer. From
    /// then on what this process has written counts, for the watch may be behind.
    pub fn seen(&self, job: &JobObject) {
        let Ok(job) = job else { return };
        if let (Some(uid), Some(version)) = (job.uid(), job.resource_version()) {
            self.versions().entry((JobUid(uid), Object::Status)).or_insert(version);
        }
    }

    /// Nothing more is written of this job.
    pub fn forget(&self, job: &JobUid) {
        self.versions().retain(|(known, _), _| known != job);
        self.refused.forget(job);
    }

    async fn status(
        &self,
        job: &JobUid,
        name: &str,
        version: Option<&str>,
        status: &ImagePrePullJobStatus,
    ) -> Result<Option<String>, Error> {
        let patch = serde_json::from_value(operations(job, version, status)).map_err(Error::SerdeError)?;
        let written =
            self.jobs().patch_status(name, &PatchParams::default(), &Patch::<()>::Json(patch)).await?;
        Ok(written.resource_version())
    }

    async fn report(
        &self,
        job: &JobUid,
        name: &str,
        version: Option<String>,
        body: &ReportBody,
    ) -> Result<Option<String>, Error> {
        let api = self.partial_reports();
        let params = PostParams::default();
        let exists = version.is_some();
        let report = object(job, name, version, body);
        let bytes = serde_json::to_vec(&report).map_err(Error::SerdeError)?;
        let request = kube::core::Request::new(api.resource_url());
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

    /// After a write that was refused: takes note of the object's version. `false` where the job is gone, or is
    /// another one by now.
    async fn reread(&self, job: &JobUid, name: &str, object: Object) -> Result<bool, Error> {
        let found = match object {
            Object::Status => {
                let found = self.jobs().get_opt(name).await?;
                let Some(found) = found.filter(|found| found.uid().as_ref() == Some(&job.0)) else {
                    return Ok(false);
                };
                found.resource_version()
            }
            Object::Report(index) => {
                let found = self.partial_reports().get_opt(&report_name(job, name, index)).await?;
                found.and_then(|found| found.resource_version())
            }
        };
        let key = (job.clone(), object);
        match found {
            Some(version) => _ = self.versions().insert(key, version),
            None => _ = self.versions().remove(&key),
        }
        Ok(true)
    }

    fn jobs(&self) -> Jobs {
        Api::all(self.client.clone())
    }

    fn partial_reports(&self) -> Api<PartialObjectMeta<ImagePrePullReport>> {
        Api::all(self.client.clone())
    }

    fn versions(&self) -> MutexGuard<'_, HashMap<(JobUid, Object), String>> {
        // Nothing that holds the lock can leave the map half changed.
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The objects that are wanted, page by page.
async fn paged<K>(api: &Api<K>, mut page: ListParams, wanted: impl Fn(&K) -> bool) -> Result<Vec<K>, Error>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let mut found = Vec::new();
    loop {
        let list = api.list(&page).await?;
        found.extend(list.items.into_iter().filter(&wanted));
        match list.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => page = page.continue_token(&next),
            None => return Ok(found),
        }
    }
}

fn operations(job: &JobUid, version: Option<&str>, status: &ImagePrePullJobStatus) -> Value {
    let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": job.0 })];
    if let Some(version) = version {
        operations.push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
    }
    // Replaces the whole value where there is one.
    operations.push(json!({ "op": "add", "path": "/status", "value": status }));
    Value::Array(operations)
}

/// With a part of the UID: the reports of a job that was deleted may still be there when another of its name is
/// made.
fn report_name(job: &JobUid, name: &str, index: u32) -> String {
    let name = name.get(..NAME_LENGTH).unwrap_or(name).trim_end_matches(['.', '-']);
    let uid: String = job.0.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    format!("{name}-{}-{index}", uid.to_lowercase())
}

fn object(job: &JobUid, name: &str, version: Option<String>, body: &ReportBody) -> ImagePrePullReport {
    let mut labels = std::collections::BTreeMap::from([(JOB_UID_LABEL.to_owned(), job.0.clone())]);
    if name.len() <= LABEL_LENGTH {
        labels.insert(JOB_NAME_LABEL.to_owned(), name.to_owned());
    }
    let owner = OwnerReference {
        api_version: ImagePrePullJob::api_version(&()).into_owned(),
        kind: ImagePrePullJob::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: job.0.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    ImagePrePullReport {
        types: Some(ImagePrePullReport::types()),
        metadata: ObjectMeta {
            name: Some(report_name(job, name, body.index)),
            labels: Some(labels),
            owner_references: Some(vec![owner]),
            resource_version: version,
            ..ObjectMeta::default()
        },
        body: body.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> JobUid {
        JobUid("0f7c3a51-8a5c-4a3e-9d0b-111111111111".to_owned())
    }

    #[test]
    fn uid_and_version_are_tested_before_the_whole_status_is_replaced() {
        let status = ImagePrePullJobStatus::default();
        let operations = operations(&uid(), Some("42"), &status);
        assert_eq!(operations[0], json!({ "op": "test", "path": "/metadata/uid", "value": uid().0 }));
        assert_eq!(
            operations[1],
            json!({ "op": "test", "path": "/metadata/resourceVersion", "value": "42" })
        );
        assert_eq!((&operations[2]["op"], &operations[2]["path"]), (&json!("add"), &json!("/status")));
        assert_eq!(operations[2]["value"]["phase"], "Init");
        // What is empty is not in the value, and so not in the object afterwards.
        assert_eq!(operations[2]["value"].get("nodeStatus"), None);
        assert_eq!(super::operations(&uid(), None, &status).as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_report_has_a_valid_name_and_belongs_to_its_job() {
        assert_eq!(report_name(&uid(), "nginx", 12), "nginx-0f7c3a51-12");
        let long = report_name(&uid(), &format!("{}.{}", "a".repeat(219), "b".repeat(30)), u32::MAX);
        assert!(long.len() <= 253 && !long.contains(".-"), "{long}");
        let body = ReportBody { job_name: "nginx".to_owned(), index: 3, ..ReportBody::default() };
        let json = serde_json::to_value(object(&uid(), "nginx", Some("7".to_owned()), &body)).unwrap();
        assert_eq!(json["kind"], "ImagePrePullReport");
        assert_eq!(json["apiVersion"], "operations.kubeedge.io/v1alpha2");
        assert_eq!(json["metadata"]["ownerReferences"][0]["uid"], uid().0);
        assert_eq!(json["metadata"]["resourceVersion"], "7");
        assert_eq!(json["index"], 3);
    }
}
