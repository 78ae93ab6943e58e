//! Reads a job that goes on, and then its reports: by their names, because the API server has no index of labels, and would
//! look at all reports that were ever written.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kube::api::Api;
use kube::core::Request;
use kube::core::params::GetParams;
use kube::{Client, Error, Resource, ResourceExt};
use parking_lot::Mutex;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, MAX_NODES_IN_REPORT};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{JobObject, rest_of};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::warn;

use crate::kube_api::cluster::read_with_retry;
use crate::kube_api::object_write::WriteFailure;
use crate::kube_api::refusal::explain_error;
use crate::kube_api::report_object::report_name;
use crate::kube_api::stored_job::StoredJob;

/// Requests at the same time: a leader that starts may read thousands of objects, and some have a megabyte.
const AT_ONCE: usize = 32;
/// Reports that are asked for together, once those that a job is sure to have are read.
const BATCH: u32 = 16;
/// Reports without a gap in their indexes are all that there are if they hold all nodes. Where some don't, this many missing
/// ones in a row are the end, once every report was asked for that a job of this size must have. People who delete reports make
/// gaps, and so does a leader that ends while it writes the first ones.
const END: u32 = 8;
/// A report that the API server has failed to read for this long without a break, while it reads the job, counts as
/// unreadable: one object that can't be decoded must not keep every edge out. Longer than a server takes to find a new leader
/// of its etcd.
const UNREADABLE_AFTER: Duration = Duration::from_secs(60);

const UNREADABLE: &str =
    "a report cannot be read: its nodes are taken from the status, and it is written again";

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Recalls {
    client: Client,
    permits: Arc<Semaphore>,
}

impl Recalls {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Reads a job and its reports, and retries until it has them. No job if it is gone, or left to KubeEdge.
    pub(crate) async fn read_with_reports(
        &self,
        job: &JobUid,
        name: &str,
    ) -> (Option<JobObject>, Vec<ImagePrePullReport>) {
        let found = read_with_retry(name, explain_error::<ImagePrePullJob>, || async {
            let _permit = self.permits.acquire().await;
            read_job(&self.client, job, name).await
        });
        let Some(found) = found.await.filter(|found| !found.is_kubeedges) else { return (None, Vec::new()) };
        let status = rest_of(&found.job).status.clone().unwrap_or_default();
        let reports = self.read_reports(job, name, &status).await;
        (Some(found.job), reports)
    }

    async fn read_reports(
        &self,
        job: &JobUid,
        name: &str,
        status: &ImagePrePullJobStatus,
    ) -> Vec<ImagePrePullReport> {
        let desired = status.summary.desired as usize;
        // One more, to see that there are no more; the last one may be short.
        let least = u32::try_from(desired / MAX_NODES_IN_REPORT).unwrap_or(u32::MAX).saturating_add(2);
        let (mut reports, mut nodes, mut missing) = (Vec::new(), 0, 0);
        let (mut next, mut batch) = (0, least.min(BATCH));
        loop {
            let indexes = next..next + batch;
            for found in join_all(indexes.map(|index| self.read_report(job, name, index))).await {
                missing = if found.is_some() { 0 } else { missing + 1 };
                let Some(Ok(report)) = found else { continue };
                if report.body.first_attempt == status.first_attempt {
                    nodes += report.body.node_status.len();
                }
                reports.push(report);
            }
            next += batch;
            batch = BATCH;
            if missing >= END && next >= least || missing > 0 && nodes >= desired {
                return reports;
            }
        }
    }

    /// The report of the job with this index, if there is one, and if it can be read.
    async fn read_report(
        &self,
        job: &JobUid,
        name: &str,
        index: u32,
    ) -> Option<Result<ImagePrePullReport, ()>> {
        let (report, failures) = (report_name(job, name, index), FailureStreak::default());
        let found = read_with_retry(&report, explain_error::<ImagePrePullReport>, || async {
            let _permit = self.permits.acquire().await;
            let found = get::<ImagePrePullReport>(&self.client, &report).await;
            let has_failed = matches!(&found, Err(Error::Api(status)) if status.code == 500);
            if failures.note_read(has_failed) < UNREADABLE_AFTER {
                return found.map(|text| text.map(Ok));
            }
            // Where it fails to read anything, we go on waiting.
            read_job(&self.client, job, name).await?;
            warn!(report, error = found.err().map(tracing::field::display), "{UNREADABLE}");
            Ok(Some(Err(())))
        });
        let Ok(text) = found.await? else { return Some(Err(())) };
        match serde_json::from_str::<ImagePrePullReport>(&text) {
            // Anybody may give this name to a report of something else.
            Ok(report) => {
                report.owner_references().iter().any(|owner| owner.uid == job.0).then_some(Ok(report))
            }
            Err(error) => {
                let error = error.to_string();
                warn!(report, error, "{UNREADABLE}");
                Some(Err(()))
            }
        }
    }
}

/// When reads of an object began to fail, if the last one has.
#[derive(Debug, Default)]
struct FailureStreak(Mutex<Option<Instant>>);

impl FailureStreak {
    /// Notes how a read has ended. Returns for how long reads have failed without a break.
    fn note_read(&self, has_failed: bool) -> Duration {
        let mut since = self.0.lock();
        *since = since.filter(|_| has_failed);
        if has_failed { since.get_or_insert_with(Instant::now).elapsed() } else { Duration::ZERO }
    }
}

/// Reads a job with all that it has, unlike a list or a watch. `None` if it is gone, or another one has its name.
pub(super) async fn read_job(client: &Client, job: &JobUid, name: &str) -> Result<Option<StoredJob>, Error> {
    let Some(text) = get::<ImagePrePullJob>(client, name).await? else { return Ok(None) };
    let value: Value = serde_json::from_str(&text).map_err(Error::SerdeError)?;
    let found = StoredJob::parse_whole(&value).map_err(Error::SerdeError)?;
    Ok(Some(found).filter(|found| found.uid().as_ref() == Some(&job.0)))
}

/// The object as text, if there is one of this name.
async fn get<K>(client: &Client, name: &str) -> Result<Option<String>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let url = Api::<K>::all(client.clone()).resource_url().to_owned();
    let request = Request::new(url).get(name, &GetParams::default()).map_err(Error::BuildRequest)?;
    match client.request_text(request).await {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(WriteFailure::from_error(&error), WriteFailure::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
