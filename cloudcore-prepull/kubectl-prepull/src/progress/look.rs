//! One look at a job: the job, and the sums of its reports.

use futures::{StreamExt, TryStreamExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::crd::status::NodeStatus;

use super::tally::Tally;
use crate::cluster::Cluster;
use crate::jobs;

pub(crate) async fn read_progress(cluster: &Cluster, name: &str) -> anyhow::Result<(ImagePrePullJob, Tally)> {
    read_pages(cluster, name, drop).await
}

/// The same with all nodes, by name: the sums are those of these nodes, since each report is read once.
pub(crate) async fn read_progress_with_nodes(
    cluster: &Cluster,
    name: &str,
) -> anyhow::Result<(ImagePrePullJob, Tally, Vec<NodeStatus>)> {
    let mut nodes = Vec::new();
    let keep = |reports: Vec<ImagePrePullReport>| {
        nodes.extend(reports.into_iter().flat_map(|report| report.body.node_status));
    };
    let (job, tally) = read_pages(cluster, name, keep).await?;
    nodes.sort_by(|one: &NodeStatus, other| one.node_name.cmp(&other.node_name));
    Ok((job, tally, nodes))
}

/// `take`: what becomes of the reports of a page.
async fn read_pages(
    cluster: &Cluster,
    name: &str,
    mut take: impl FnMut(Vec<ImagePrePullReport>),
) -> anyhow::Result<(ImagePrePullJob, Tally)> {
    let job = jobs::get(cluster, name).await?;
    let tallies = jobs::reports(cluster, &job).map(|page| {
        page.map(|reports| {
            let tally = Tally::sum(&reports.iter().map(Tally::of_report).collect::<Vec<_>>());
            take(reports);
            tally
        })
    });
    let tallies: Vec<Tally> = tallies.try_collect().await?;
    Ok((job, Tally::sum(&tallies)))
}
