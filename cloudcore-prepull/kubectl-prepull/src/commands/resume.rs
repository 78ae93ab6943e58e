//! `kubectl prepull resume`.

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
    cancel::refuse_cancelled(&job, "no node starts")?;
    if !job.spec.suspend && !job.spec.pause {
        print_changed(&job, "is neither suspended nor paused", session.global.output)?;
        return Ok(CommandOutcome::Done);
    }
    let job = resume(cluster, &args.job).await?;
    print_changed(&job, "resumed", session.global.output)?;
    Ok(CommandOutcome::Done)
}

pub(crate) async fn resume(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    jobs::patch(cluster, name, &json!({"spec": {"suspend": false, "pause": null}})).await
}
