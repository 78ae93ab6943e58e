//! `kubectl prepull cancel`.
//!
//! A job is ended by a deadline that has passed: so its record stays, and `retry` can take it up again. The deadline that it
//! had is kept in an annotation until then.

use anyhow::bail;
use clap::Args;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::jobs;
use crate::name::parse_own;
use crate::output::print_changed;
use crate::run::{Ended, Session};

/// Annotation of a job that was cancelled: its activeDeadlineSeconds before, or nothing.
const CANCELLED: &str = "prepull.kubeedge.io/deadline-before-cancel";
/// The shortest deadline. It counts from the start of the job, so that it has passed for one that runs.
const PASSED: i64 = 1;

/// The arguments of `cancel`.
#[derive(Debug, Args)]
#[command(after_help = "\
The job becomes a Failure with the reason DeadlineExceeded, within a second or two, and keeps its record; `retry` takes it
up again. What nodes have downloaded of an unfinished image is kept for a day. `kubectl delete ippj JOB` deletes the record
as well.

Example:
  kubectl prepull cancel spring-release")]
pub(crate) struct CancelArgs {
    /// The job.
    #[arg(value_parser = parse_own)]
    job: String,
}

/// Runs the command.
pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &CancelArgs) -> anyhow::Result<Ended> {
    let job = cancel(cluster, &args.job).await?;
    print_changed(&job, "cancelled", session.global.output)?;
    Ok(Ended::Done)
}

/// Ends a job now.
pub(crate) async fn cancel(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    let job = jobs::get(cluster, name).await?;
    jobs::patch(cluster, name, &cancellation(&job)?).await
}

fn cancellation(job: &ImagePrePullJob) -> anyhow::Result<Value> {
    let name = job.name_any();
    if jobs::is_over(job) {
        bail!("job {name} has ended already");
    }
    // Time does not count while a job is suspended.
    let mut patch = json!({"spec": {"activeDeadlineSeconds": PASSED, "suspend": false}});
    if !job.annotations().contains_key(CANCELLED) {
        let before = job.spec.active_deadline_seconds.map(|seconds| seconds.to_string()).unwrap_or_default();
        patch["metadata"] = json!({"annotations": {CANCELLED: before}});
    }
    Ok(patch)
}

/// Adds to a patch what gives a job that was cancelled its own deadline again.
pub(crate) fn undo(job: &ImagePrePullJob, patch: &mut Value) {
    if let Some(before) = job.annotations().get(CANCELLED) {
        patch["spec"]["activeDeadlineSeconds"] = before.parse::<i64>().map_or(Value::Null, Value::from);
        patch["metadata"] = json!({"annotations": {CANCELLED: null}});
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_job_that_was_cancelled_gets_its_own_deadline_back() {
        for deadline in [None, Some(3600)] {
            let mut job = ImagePrePullJob::default();
            job.spec.active_deadline_seconds = deadline;
            let patch = cancellation(&job).unwrap();
            assert_eq!(patch["spec"], json!({"activeDeadlineSeconds": 1, "suspend": false}));
            let kept = patch["metadata"]["annotations"][CANCELLED].as_str().unwrap().to_owned();
            job.annotations_mut().insert(CANCELLED.to_owned(), kept);
            job.spec.active_deadline_seconds = Some(PASSED);
            assert!(
                cancellation(&job).unwrap().get("metadata").is_none(),
                "the second one forgets the deadline"
            );
            let mut patch = json!({"spec": {"retry": 1}});
            undo(&job, &mut patch);
            let annotations = json!({CANCELLED: null});
            let expected = json!({"spec": {"retry": 1, "activeDeadlineSeconds": deadline}, "metadata": {"annotations": annotations}});
            assert_eq!(patch, expected);
        }
    }
}
