//! `kubectl prepull cancel`.
//!
//! `spec.cancel` ends a job for good, and its record stays. The plugin of a version before it ended a job by a deadline in the
//! past, and kept the previous one in an annotation: see [`undo_deadline`].

use anyhow::bail;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::jobs;
use crate::name::OwnJob;
use crate::output::print_changed;
use crate::session::{CommandOutcome, Session};

/// Annotation of a job that a plugin of a version before `spec.cancel` has ended: its activeDeadlineSeconds before, or nothing.
const ENDED_BY_DEADLINE: &str = "prepull.kubeedge.io/deadline-before-cancel";

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

/// Adds to a patch what gives a job that was ended by a deadline its own one again.
pub(crate) fn undo_deadline(job: &ImagePrePullJob, patch: &mut Value) {
    if let Some(before) = job.annotations().get(ENDED_BY_DEADLINE) {
        patch["spec"]["activeDeadlineSeconds"] = before.parse::<i64>().map_or(Value::Null, Value::from);
        patch["metadata"] = json!({"annotations": {ENDED_BY_DEADLINE: null}});
    }
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

    #[test]
    fn a_deadline_before_spec_cancel_comes_back() {
        for deadline in [None, Some(3600)] {
            let mut job = ImagePrePullJob::default();
            job.spec.active_deadline_seconds = Some(1);
            let before: String = deadline.map(|seconds: i64| seconds.to_string()).unwrap_or_default();
            job.annotations_mut().insert(ENDED_BY_DEADLINE.to_owned(), before);
            let mut patch = json!({"spec": {"retry": 1}});
            undo_deadline(&job, &mut patch);
            let annotations = json!({ENDED_BY_DEADLINE: null});
            let expected = json!({"spec": {"retry": 1, "activeDeadlineSeconds": deadline}, "metadata": {"annotations": annotations}});
            assert_eq!(patch, expected);
        }
    }
}
