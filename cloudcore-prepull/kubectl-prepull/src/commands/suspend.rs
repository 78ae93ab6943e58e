//! `kubectl prepull suspend`.

use anyhow::bail;
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
    let job = suspend(cluster, &args.job).await?;
    print_changed(&job, "suspended", session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn suspend(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    Ok(jobs::change(cluster, name, suspension).await?.into_job())
}

/// The patch that suspends the job; none if it is suspended.
fn suspension(job: &ImagePrePullJob) -> anyhow::Result<Option<Value>> {
    if jobs::is_over(job) {
        let name = job.metadata.name.as_deref().unwrap_or_default();
        bail!("job {name} has ended: there is nothing to suspend");
    }
    Ok((!job.spec.suspend).then(|| json!({"spec": {"suspend": true}})))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

    use super::*;

    #[test]
    fn only_a_running_job_is_suspended() {
        let mut job = ImagePrePullJob::default();
        assert_eq!(suspension(&job).unwrap(), Some(json!({"spec": {"suspend": true}})));
        job.spec.suspend = true;
        assert_eq!(suspension(&job).unwrap(), None);
        job.status = Some(ImagePrePullJobStatus { phase: JobPhase::Completed, ..Default::default() });
        assert!(suspension(&job).unwrap_err().to_string().contains("has ended"));
    }
}
