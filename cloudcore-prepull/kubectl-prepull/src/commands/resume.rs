//! `kubectl prepull resume`.

use prepull_api::crd::job::ImagePrePullJob;
use serde_json::{Value, json};

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
    let (job, what) = match resume(cluster, &args.job).await? {
        Changed::Now(job) => (job, "resumed"),
        Changed::Before(job) => (job, "is neither suspended nor paused"),
    };
    print_changed(&job, what, session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn resume(cluster: &Cluster, name: &str) -> anyhow::Result<Changed> {
    jobs::change(cluster, name, resumption).await
}

/// The patch that lets the job go on; none if nothing holds it.
fn resumption(job: &ImagePrePullJob) -> anyhow::Result<Option<Value>> {
    cancel::refuse_cancelled(job, "no node starts")?;
    let is_held = job.spec.suspend || job.spec.pause;
    Ok(is_held.then(|| json!({"spec": {"suspend": false, "pause": null}})))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_a_held_job_is_resumed() {
        let mut job = ImagePrePullJob::default();
        assert_eq!(resumption(&job).unwrap(), None);
        job.spec.pause = true;
        assert_eq!(resumption(&job).unwrap(), Some(json!({"spec": {"suspend": false, "pause": null}})));
        job.spec.cancel = true;
        assert!(resumption(&job).unwrap_err().to_string().contains("was cancelled"));
    }
}
