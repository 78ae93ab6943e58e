//! `kubectl prepull pause`.

use anyhow::bail;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::json;

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
    let job = jobs::get(cluster, &args.job).await?;
    if !wants_pause(&job)? {
        print_changed(&job, "is paused already", session.global.output)?;
        return Ok(CommandOutcome::Done);
    }
    let job = pause(cluster, &args.job).await?;
    print_changed(&job, "paused: its downloads stop within seconds", session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn pause(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    jobs::patch(cluster, name, &json!({"spec": {"pause": true}})).await
}

fn wants_pause(job: &ImagePrePullJob) -> anyhow::Result<bool> {
    cancel::refuse_cancelled(job, "nothing is downloaded")?;
    if jobs::is_over(job) {
        bail!("job {} has ended: there is nothing to pause", job.name_any());
    }
    Ok(!job.spec.pause)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

    use super::*;

    #[test]
    fn only_a_running_job_is_paused() {
        let mut job = ImagePrePullJob::default();
        assert!(wants_pause(&job).unwrap());
        job.spec.pause = true;
        assert!(!wants_pause(&job).unwrap());
        job.status = Some(ImagePrePullJobStatus { phase: JobPhase::Completed, ..Default::default() });
        assert!(wants_pause(&job).unwrap_err().to_string().contains("has ended"));
        job.spec.cancel = true;
        assert!(wants_pause(&job).unwrap_err().to_string().contains("was cancelled"));
    }
}
