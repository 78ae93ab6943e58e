//! `kubectl prepull status`.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use prepull_api::crd::status::NodeStatus;
use serde::Serialize;

use crate::cluster::Cluster;
use crate::kruise;
use crate::kruise::follow::follow_kruise;
use crate::leader;
use crate::name::JobName;
use crate::progress::follow::follow_job;
use crate::progress::look::{read_progress, read_progress_with_nodes};
use crate::progress::render::render_view;
use crate::progress::view::JobView;
use crate::session::{CommandOutcome, Session};

/// The arguments of `status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl prepull status spring-release
  kubectl prepull status spring-release --watch --timeout 2h
  kubectl prepull status spring-release -o json | jq '.nodeStatus[] | select(.phase == \"Failure\") | .nodeName'
  kubectl prepull status imagepulljob/spring -n shop

On a terminal --watch shows bars that move, elsewhere a line for each change, with -o json a document for each change.
Without it the rate is the average since the start. -o wide adds the nodes at work; -o json and -o yaml all nodes, in
nodeStatus as in the API, but not with --watch.

Exit status: 0; with --watch also 1 if the job is a Failure, 3 after --timeout, 130 after Ctrl-C.")]
pub(crate) struct StatusArgs {
    /// The job; imagepulljob/NAME or imagelistpulljob/NAME for one of OpenKruise's.
    job: JobName,
    /// Follow the job until it is over.
    #[arg(short, long)]
    watch: bool,
    /// Follow it for at most this time.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "watch")]
    timeout: Option<Duration>,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &StatusArgs,
) -> anyhow::Result<CommandOutcome> {
    let (view, nodes) = match &args.job {
        JobName::Own(name) if args.watch => return follow_job(session, cluster, name, args.timeout).await,
        JobName::Kruise(name) if args.watch => {
            return follow_kruise(session, cluster, name, args.timeout).await;
        }
        JobName::Own(name) => {
            let (job, tally, nodes) = if session.is_for_programs() {
                read_progress_with_nodes(cluster, name).await?
            } else {
                let (job, tally) = read_progress(cluster, name).await?;
                (job, tally, Vec::new())
            };
            let gone = leader::check_leader(cluster).await;
            let view = JobView::new(&job, &tally, None, Timestamp::now()).without_leader(gone.as_ref());
            (view, nodes)
        }
        JobName::Kruise(name) => {
            let seen = kruise::read_job(cluster, name).await?;
            (seen.view(Timestamp::now()), seen.jobs.into_iter().flat_map(|(_, nodes)| nodes).collect())
        }
    };
    let names = [view.full_name()];
    let all = StatusDocument { view: &view, node_status: nodes };
    session.print(&all, names, |is_wide| render_view(&view, session.screen, is_wide))?;
    Ok(CommandOutcome::Done)
}

/// The job for programs: also each of its nodes.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatusDocument<'a> {
    #[serde(flatten)]
    view: &'a JobView,
    node_status: Vec<NodeStatus>,
}
