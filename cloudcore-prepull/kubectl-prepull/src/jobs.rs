//! Jobs and their reports in the cluster: reads and patches.

use anyhow::{Context, anyhow};
use futures::{Stream, StreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};
use prepull_api::crd::status::JobPhase;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::name::{KruiseKind, KruiseName};
use crate::pages::pages;
use crate::problem;

/// Reports of one page. Each has at most 1 MiB, and several times that while it is parsed: a job of 10,000 nodes must not
/// take 100 MiB.
pub(crate) const REPORTS_OF_A_PAGE: u32 = 4;

pub(crate) async fn get(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    let read = api(cluster).get(name).await.with_context(|| format!("job {name} cannot be read"));
    match read {
        Err(error) if is_missing(&error) => Err(anyhow!(missing(cluster, name).await)),
        read => read,
    }
}

/// Changes a job by a JSON merge patch.
pub(crate) async fn patch(cluster: &Cluster, name: &str, patch: &Value) -> anyhow::Result<ImagePrePullJob> {
    let patched = api(cluster).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
    patched.with_context(|| format!("job {name} cannot be changed"))
}

pub(crate) fn api(cluster: &Cluster) -> Api<ImagePrePullJob> {
    Api::all(cluster.client())
}

pub(crate) fn reports_api(cluster: &Cluster) -> Api<ImagePrePullReport> {
    Api::all(cluster.client())
}

/// What selects the reports of a job.
pub(crate) fn of_job(job: &ImagePrePullJob) -> String {
    format!("{JOB_UID_LABEL}={}", job.metadata.uid.as_deref().unwrap_or_default())
}

/// Reads the reports of a job, one after another: never are all of them in memory.
pub(crate) fn reports(
    cluster: &Cluster,
    job: &ImagePrePullJob,
) -> impl Stream<Item = anyhow::Result<Vec<ImagePrePullReport>>> {
    let asked = ListParams::default().labels(&of_job(job)).limit(REPORTS_OF_A_PAGE);
    let name = job.metadata.name.clone().unwrap_or_default();
    let first_attempt = job.status.as_ref().and_then(|status| status.first_attempt);
    pages(reports_api(cluster), asked).map(move |page| {
        let mut page = page.with_context(|| format!("the reports of job {name} cannot be read"))?;
        page.retain(|report| report.body.first_attempt == first_attempt);
        Ok(page)
    })
}

/// Whether the job has ended, and nothing that was asked of it is still to begin: a further round, or a new run.
pub(crate) fn is_over(job: &ImagePrePullJob) -> bool {
    let Some(status) = &job.status else { return false };
    let is_seen = status.observed_generation >= job.metadata.generation;
    let goes_on = |condition: &Condition| condition.type_ == "Progressing" && condition.status == "True";
    let has_ended = matches!(status.phase, JobPhase::Completed | JobPhase::Failure);
    is_seen && has_ended && !status.conditions.iter().any(goes_on)
}

fn is_missing(error: &anyhow::Error) -> bool {
    let named = |details: &kube::core::response::StatusDetails| !details.name.is_empty();
    problem::answer(error)
        .is_some_and(|answer| answer.code == 404 && answer.details.as_ref().is_some_and(named))
}

async fn missing(cluster: &Cluster, name: &str) -> String {
    let namespace = cluster.namespace();
    let kruise = |kind: KruiseKind| {
        let name = KruiseName { kind, name: name.to_owned() };
        format!(
            "there is no ImagePrePullJob {}, but one of OpenKruise: name it {name} -n {namespace}",
            name.name
        )
    };
    // Where Kruise's API is not there, or may not be read, the job is not one of its.
    if Api::<ImagePullJob>::namespaced(cluster.client(), namespace).get(name).await.is_ok() {
        return kruise(KruiseKind::Pull);
    }
    if Api::<ImageListPullJob>::namespaced(cluster.client(), namespace).get(name).await.is_ok() {
        return kruise(KruiseKind::List);
    }
    format!("there is no ImagePrePullJob {name}: `kubectl prepull list` shows those that there are")
}
