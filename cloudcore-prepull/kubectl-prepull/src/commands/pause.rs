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
use crate::session::{Ended, Session};

pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &OwnJob) -> anyhow::Result<Ended> {
    let job = jobs::get(cluster, &args.job).await?;
    if !wants_pause(&job)? {
        print_changed(&job, "is paused already", session.global.output)?;
        return Ok(Ended::Done);
    }
    let job = jobs::patch(cluster, &args.job, &json!({"spec": {"pause": true}})).await?;
    is_stored(&job)?;
    print_changed(&job, "paused: its downloads stop within seconds", session.global.output)?;
    Ok(Ended::Done)
}

fn wants_pause(job: &ImagePrePullJob) -> anyhow::Result<bool> {
    cancel::refuse_cancelled(job, "nothing is downloaded")?;
    if jobs::is_over(job) {
        bail!("job {} has ended: there is nothing to pause", job.name_any());
    }
    Ok(!job.spec.pause)
}

/// Fails if the API server has dropped the field, which it does not know.
fn is_stored(job: &ImagePrePullJob) -> anyhow::Result<()> {
    let name = job.name_any();
    if !job.spec.pause {
        bail!(
            "job {name} goes on: cloudcore-prepull is too old, its definition of jobs has no spec.pause. Update it with its \
             definitions (manifests/crds), or let no further node start (kubectl prepull suspend {name})"
        );
    }
    Ok(())
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
        assert!(is_stored(&job).unwrap_err().to_string().contains("cloudcore-prepull is too old"));
        job.spec.pause = true;
        assert!(!wants_pause(&job).unwrap() && is_stored(&job).is_ok());
        job.status = Some(ImagePrePullJobStatus { phase: JobPhase::Completed, ..Default::default() });
        assert!(wants_pause(&job).unwrap_err().to_string().contains("has ended"));
        job.spec.cancel = true;
        assert!(wants_pause(&job).unwrap_err().to_string().contains("was cancelled"));
    }
}
