//! `kubectl prepull resume`.

use clap::Args;
use prepull_api::crd::job::ImagePrePullJob;
use serde_json::json;

use super::cancel;
use crate::cluster::Cluster;
use crate::jobs;
use crate::name::parse_own;
use crate::output::print_changed;
use crate::run::{Ended, Session};

/// The arguments of `resume`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kubectl prepull resume spring-release")]
pub(crate) struct ResumeArgs {
    /// The job.
    #[arg(value_parser = parse_own)]
    job: String,
}

pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &ResumeArgs) -> anyhow::Result<Ended> {
    let job = jobs::get(cluster, &args.job).await?;
    cancel::refuse_cancelled(&job, "no node starts")?;
    if !job.spec.suspend {
        print_changed(&job, "is not suspended", session.global.output)?;
        return Ok(Ended::Done);
    }
    let job = resume(cluster, &args.job).await?;
    print_changed(&job, "resumed", session.global.output)?;
    Ok(Ended::Done)
}

pub(crate) async fn resume(cluster: &Cluster, name: &str) -> anyhow::Result<ImagePrePullJob> {
    jobs::patch(cluster, name, &json!({"spec": {"suspend": false}})).await
}
