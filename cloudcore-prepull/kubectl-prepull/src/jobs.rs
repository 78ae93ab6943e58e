//! Jobs and their reports in the cluster: reads and patches.

use anyhow::{Context, anyhow, bail};
use futures::{Stream, StreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use kube::{Api, Resource, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};
use prepull_api::crd::status::JobPhase;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::name::{KruiseKind, KruiseName};
use crate::pages::pages;
use crate::problem;

/// Reports of one page. Each has at most 1 MiB, and several times that while it is parsed: a job of 10,000 nodes must not
/// take 100 MiB.
pub(crate) const REPORTS_OF_A_PAGE: u32 = 4;

/// Reads a job.
///
/// # Errors
/// [`NoSuchJob`], or the API server's answer.
pub(crate) async fn get(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    let read = api(cluster).get(name).await.with_context(|| format!("job {name} cannot be read"));
    match read {
        Err(error) if is_missing(&error) => Err(NoSuchJob(explain_missing(cluster, name).await).into()),
        read => read,
    }
}

/// Makes a job. A field that the definitions of the cluster lack is an error: without it, it would be another job.
pub(crate) async fn create(cluster: &Cluster, job: &ImagePrePullJob) -> anyhow::Result<ImagePrePullJob> {
    let made = async {
        let body = serde_json::to_vec(job).map_err(kube::Error::SerdeError)?;
        let request = Request::new(ImagePrePullJob::url_path(&(), None)).create(&PostParams::default(), body);
        let mut request = request.map_err(kube::Error::BuildRequest)?;
        // `PostParams` doesn't have it.
        let strict = format!("{}&fieldValidation=Strict", request.uri());
        *request.uri_mut() =
            strict.parse().map_err(|error| kube::Error::HttpError(http::Error::from(error)))?;
        cluster.client().request(request).await
    };
    let made: ImagePrePullJob =
        made.await.with_context(|| format!("job {} cannot be made", job.name_any()))?;
    let name = made.name_any();
    let whole = refuse_dropped(&json!(job.spec), &made);
    whole.map_err(|error| {
        anyhow!("{error}. It isn't the job that was asked for: kubectl delete ippj {name}")
    })?;
    Ok(made)
}

/// Changes a job by a JSON merge patch. A field that the definitions of the cluster lack is an error.
pub(crate) async fn patch(cluster: &Cluster, name: &str, patch: &Value) -> anyhow::Result<ImagePrePullJob> {
    let strict = PatchParams::default().validation_strict();
    let patched = api(cluster).patch(name, &strict, &Patch::Merge(patch)).await;
    let patched = patched.with_context(|| format!("job {name} cannot be changed"))?;
    refuse_dropped(&patch["spec"], &patched)?;
    Ok(patched)
}

/// How often [`change`] reads a job and decides: while nodes are at work, the status is written again and again.
const TRIES: usize = 8;

/// A job after [`change`].
pub(crate) enum Changed {
    Now(ImagePrePullJob),
    /// It was as asked for before.
    Before(ImagePrePullJob),
}

impl Changed {
    pub(crate) fn into_job(self) -> ImagePrePullJob {
        let (Self::Now(job) | Self::Before(job)) = self;
        job
    }
}

/// Changes a job by the patch that its state asks for, unless there is none. The patch is for the version that was read: a job that
/// has ended since would keep for ever what was meant for a running one. Where the job has changed, we read and decide again.
pub(crate) async fn change(
    cluster: &Cluster,
    name: &str,
    decide: impl Fn(&ImagePrePullJob) -> anyhow::Result<Option<Value>>,
) -> anyhow::Result<Changed> {
    let mut tries = 1;
    loop {
        let job = get(cluster, name).await?;
        let Some(mut asked) = decide(&job)? else { return Ok(Changed::Before(job)) };
        if let Some(version) = &job.metadata.resource_version {
            asked["metadata"]["resourceVersion"] = json!(version);
        }
        match patch(cluster, name, &asked).await {
            Err(error) if is_conflict(&error) && tries < TRIES => tries += 1,
            patched => return patched.map(Changed::Now),
        }
    }
}

fn is_conflict(error: &anyhow::Error) -> bool {
    problem::server_answer(error).is_some_and(|answer| answer.code == 409)
}

/// Fails if a field was dropped: API servers before 1.25 don't refuse those that their definitions lack.
fn refuse_dropped(asked: &Value, stored: &ImagePrePullJob) -> anyhow::Result<()> {
    let mut dropped = Vec::new();
    collect_dropped(asked, &json!(stored.spec), "spec", &mut dropped);
    if !dropped.is_empty() {
        bail!(
            "job {} was stored without {}: the definitions of the cluster are of an older version. Update cloudcore-prepull with \
             them (kubectl apply -f manifests/crds)",
            stored.name_any(),
            dropped.join(", ")
        );
    }
    Ok(())
}

/// The paths of the fields that are set in one and missing in the other. What is false, zero or empty isn't stored.
fn collect_dropped(asked: &Value, stored: &Value, path: &str, dropped: &mut Vec<String>) {
    match (asked, stored) {
        (Value::Object(fields), _) => {
            for (field, value) in fields {
                collect_dropped(value, &stored[field], &format!("{path}.{field}"), dropped);
            }
        }
        (Value::Null | Value::Bool(false), _) => {}
        (Value::Number(number), Value::Null) if number.as_f64() == Some(0.0) => {}
        (Value::String(text), Value::Null) if text.is_empty() => {}
        (Value::Array(values), Value::Null) if values.is_empty() => {}
        (_, Value::Null) => dropped.push(path.to_owned()),
        _ => {}
    }
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

/// What tells the runs of a job apart: the number of the run's first attempt, which its reports have as well. Others are of an
/// earlier run, and their nodes don't count.
pub(crate) fn run_of(job: &ImagePrePullJob) -> Option<u32> {
    job.status.as_ref().and_then(|status| status.first_attempt)
}

/// Reads the reports of a job, one after another: never are all of them in memory.
pub(crate) fn reports(
    cluster: &Cluster,
    job: &ImagePrePullJob,
) -> impl Stream<Item = anyhow::Result<Vec<ImagePrePullReport>>> {
    let asked = ListParams::default().labels(&of_job(job)).limit(REPORTS_OF_A_PAGE);
    let name = job.metadata.name.clone().unwrap_or_default();
    let run = run_of(job);
    pages(reports_api(cluster), asked).map(move |page| {
        let mut page = page.with_context(|| format!("the reports of job {name} cannot be read"))?;
        page.retain(|report| report.body.first_attempt == run);
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

/// There is no job of this name. The text says what there is instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoSuchJob(String);

fn is_missing(error: &anyhow::Error) -> bool {
    let named = |details: &kube::core::response::StatusDetails| !details.name.is_empty();
    problem::server_answer(error)
        .is_some_and(|answer| answer.code == 404 && answer.details.as_ref().is_some_and(named))
}

async fn explain_missing(cluster: &Cluster, name: &str) -> String {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_dropped_field_is_noticed() {
        let stored = ImagePrePullJob::new("web", prepull_api::crd::job::ImagePrePullJobSpec::default());
        let said = |asked: Value| refuse_dropped(&asked, &stored).map_err(|error| error.to_string());
        for asked in [
            json!({}),
            json!(stored.spec),
            json!({"pause": false, "windows": [], "download": {"maxRate": null}}),
        ] {
            assert_eq!(said(asked), Ok(()));
        }
        let error = said(json!({"cancel": true, "download": {"maxRate": "1Mi"}})).unwrap_err();
        let words = "job web was stored without spec.cancel, spec.download.maxRate: the definitions";
        assert!(error.starts_with(words), "{error}");
    }
}
