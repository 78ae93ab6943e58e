//! One look at a job: the job, and the sums of its reports.

use futures::{StreamExt, TryStreamExt};
use prepull_api::crd::job::ImagePrePullJob;

use super::tally::Tally;
use crate::cluster::Cluster;
use crate::jobs;

pub(crate) async fn read_progress(cluster: &Cluster, name: &str) -> anyhow::Result<(ImagePrePullJob, Tally)> {
    let job = jobs::get(cluster, name).await?;
    let tallies = jobs::reports(cluster, &job).map(|page| {
        page.map(|reports| Tally::sum(&reports.iter().map(Tally::of_report).collect::<Vec<_>>()))
    });
    let tallies: Vec<Tally> = tallies.try_collect().await?;
    Ok((job, Tally::sum(&tallies)))
}
