//! `kubectl prepull retry`.

use anyhow::bail;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::{Value, json};

use super::cancel;
use crate::cluster::Cluster;
use crate::jobs;
use crate::name::OwnJob;
use crate::output::print_changed;
use crate::session::{CommandOutcome, Session};

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &OwnJob,
) -> anyhow::Result<CommandOutcome> {
    let job = retry(cluster, &args.job).await?;
    print_changed(&job, &describe(&job), session.global.output)?;
    Ok(CommandOutcome::Done)
}

fn describe(job: &ImagePrePullJob) -> String {
    let text = format!("is tried again, round {}", next_round(job));
    let held = match (job.spec.suspend, job.spec.pause) {
        (true, _) => "suspended",
        (_, true) => "paused",
        _ => return text,
    };
    format!("{text}; it is {held}: kubectl prepull resume {} lets it begin", job.name_any())
}

/// The round that begins. It isn't `spec.retry` where the job ended before all of its rounds were used.
fn next_round(job: &ImagePrePullJob) -> u32 {
    job.status.as_ref().map_or(0, |status| status.retry).saturating_add(1)
}

pub(crate) async fn retry(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    let job = jobs::get(cluster, name).await?;
    jobs::patch(cluster, name, &another_round(&job)?).await
}

fn another_round(job: &ImagePrePullJob) -> anyhow::Result<Value> {
    let name = job.name_any();
    let status = job.status.as_ref();
    if !jobs::is_over(job) {
        bail!(
            "job {name} has not ended: retry is for the nodes that have failed by its end. `kubectl prepull status {name}` \
             shows how far it is, `kubectl prepull cancel {name}` ends it"
        );
    }
    cancel::refuse_cancelled(job, "no node is tried again")?;
    if status.is_some_and(|status| status.start_time.is_none()) {
        let reason = status.map(|status| status.reason.as_str()).unwrap_or_default();
        bail!(
            "job {name} was refused, and so there is nothing to try again: {reason}. Correct it: kubectl edit ippj {name}"
        );
    }
    let summary = status.map(|status| status.summary.clone()).unwrap_or_default();
    // With followNodes, nodes that were chosen since may join.
    if summary.successful == summary.desired && !job.spec.follow_nodes {
        bail!(
            "all {} nodes of job {name} succeeded: nothing to try again; `kubectl prepull verify {name}` asks the nodes what \
             is still there",
            summary.desired
        );
    }
    Ok(json!({"spec": {"retry": job.spec.retry + 1}}))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, Summary};

    use super::*;

    #[test]
    fn a_retry_needs_an_ended_job() {
        let mut job = ImagePrePullJob::new(
            "web",
            prepull_api::crd::job::ImagePrePullJobSpec { retry: 2, ..Default::default() },
        );
        assert!(another_round(&job).unwrap_err().to_string().contains("has not ended"));
        let mut status = ImagePrePullJobStatus {
            phase: JobPhase::Failure,
            reason: "images: none".to_owned(),
            ..Default::default()
        };
        job.status = Some(status.clone());
        assert!(another_round(&job).unwrap_err().to_string().contains("images: none. Correct it"));
        status.start_time = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        status.summary = Summary { desired: 3, successful: 3, ..Summary::default() };
        job.status = Some(status.clone());
        let refusal = another_round(&job).unwrap_err().to_string();
        assert!(refusal.starts_with("all 3 nodes of job web succeeded: nothing to try again"), "{refusal}");
        job.spec.follow_nodes = true;
        another_round(&job).unwrap();
        job.spec.follow_nodes = false;
        status.summary = Summary { desired: 3, successful: 2, unknown: 1, ..Summary::default() };
        job.status = Some(status);
        assert_eq!(another_round(&job).unwrap(), json!({"spec": {"retry": 3}}));
        assert_eq!(next_round(&job), 1, "no round was needed before its end");
        assert_eq!(describe(&job), "is tried again, round 1");
        job.spec.suspend = true;
        let said = describe(&job);
        assert!(said.ends_with("; it is suspended: kubectl prepull resume web lets it begin"), "{said}");
        job.spec.cancel = true;
        let refusal = another_round(&job).unwrap_err().to_string();
        assert!(refusal.starts_with("job web was cancelled, which is for good"), "{refusal}");
        job.spec.cancel = false;
        // Another user was faster, and cloudcore has not seen it yet.
        job.metadata.generation = Some(2);
        another_round(&job).unwrap_err();
    }
}
