//! `kubectl prepull pause`.

use anyhow::bail;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::json;

use super::cancel;
use crate::cluster::Cluster;
use crate::jobs::{self, Changed};
use crate::name::OwnJob;
use crate::output::print_changed;
use crate::session::{CommandOutcome, Session};

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &OwnJob,
) -> anyhow::Result<CommandOutcome> {
    let (job, what) = match pause(cluster, &args.job).await? {
        Changed::Now(job) => (job, "paused: its downloads stop within seconds"),
        Changed::Before(job) => (job, "is paused already"),
    };
    print_changed(&job, what, session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn pause(cluster: &Cluster, name: &str) -> anyhow::Result<Changed> {
    let pausing = |job: &ImagePrePullJob| Ok(wants_pause(job)?.then(|| json!({"spec": {"pause": true}})));
    jobs::change(cluster, name, pausing).await
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
