//! `kubectl prepull cancel`.
//!
//! `spec.cancel` ends a job for good, and its record stays.

use anyhow::bail;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::{Value, json};

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
    let job = cancel(cluster, &args.job).await?;
    print_changed(&job, "cancelled", session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn cancel(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    let changed = jobs::change(cluster, name, |job| cancellation(job).map(Some)).await?;
    Ok(changed.into_job())
}

fn cancellation(job: &ImagePrePullJob) -> anyhow::Result<Value> {
    if jobs::is_over(job) {
        bail!("job {} has ended already", job.name_any());
    }
    Ok(json!({"spec": {"cancel": true}}))
}

/// Fails if the job was cancelled, since what is asked for can't begin any more.
pub(crate) fn refuse_cancelled(job: &ImagePrePullJob, what: &str) -> anyhow::Result<()> {
    if job.spec.cancel {
        bail!(
            "job {} was cancelled, which is for good: {what}. Create a new job, such as with `kubectl prepull run`",
            job.name_any()
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
    fn nothing_but_cancel_is_set() {
        let mut job = ImagePrePullJob::default();
        job.spec.suspend = true;
        assert_eq!(cancellation(&job).unwrap(), json!({"spec": {"cancel": true}}));
        job.status = Some(ImagePrePullJobStatus { phase: JobPhase::Failure, ..Default::default() });
        assert!(cancellation(&job).unwrap_err().to_string().contains("has ended already"));
    }
}
