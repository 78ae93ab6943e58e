//! Deletion of jobs: the object is gone immediately, and its work on the edges stops.

use std::time::Duration;

use prepull_e2e::prelude::*;

use crate::mid_pull::LARGE;

type MidPull = crate::mid_pull::MidPull<Job>;

/// The rest of its large layer takes half a minute.
async fn mid_pull() -> Result<MidPull> {
    let mid = MidPull::start(Site::start().await?, "deleted", async |site, reference| {
        site.job("deleted").images([reference]).on(["edge-1"]).apply().await
    })
    .await?;
    mid.site.link.throttle(Some(MIB / 4));
    Ok(mid)
}

impl MidPull {
    /// Deletes the job. No edge can delay this.
    async fn delete(&self) -> Result<()> {
        self.job.delete().await?;
        self.job.clone().within(Duration::from_secs(2)).is_gone().await
    }

    /// Waits until the pull has stopped for good, and checks that its content is gone.
    async fn pull_has_stopped(&self) -> Result<()> {
        self.node.forgets_all_tasks().await?;
        eventually("containerd forgets the half of a layer", SOON, async || {
            let ingests = self.node.containerd().ingests().await?;
            ensure!(ingests.is_empty(), "it has {ingests:?}");
            Ok(())
        })
        .await?;
        let before = self.site.link.bytes();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = self.site.link.bytes();
        assert_eq!(before, after, "it is still pulling");
        ensure!(after < LARGE, "it pulled {after} bytes before it stopped");
        assert_eq!(self.node.containerd().ingests().await?.len(), 0, "it pulls again");
        ensure!(!self.node.has_image(&self.reference).await?, "the image is there");
        Ok(())
    }

    /// Checks that the node completes another job.
    async fn node_takes_another_job(&self) -> Result<()> {
        self.site.link.throttle(None);
        self.site.job("another").images([&self.reference]).on(["edge-1"]).completes().await?;
        ensure!(self.node.has_image(&self.reference).await?);
        Ok(())
    }
}

#[tokio::test]
async fn deletion_stops_pulls_immediately() -> Result<()> {
    let mid = mid_pull().await?;
    mid.delete().await?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_job_deleted_without_the_agent_stops() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.node.kill9_agent()?;
    mid.delete().await?;
    mid.node.restart_agent()?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_job_deleted_during_an_outage_stops() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.site.cloud.kill9()?;
    mid.delete().await?;
    mid.site.link_carries(MIB).await?;
    mid.site.cloud.restart().await?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_deleted_jobs_result_is_acknowledged() -> Result<()> {
    let mid = mid_pull().await?;
    mid.tunnel.refuse();
    mid.site.link.throttle(None);
    mid.node.ends_a_task().await?;
    mid.delete().await?;
    mid.tunnel.accept_again()?;
    mid.node.forgets_all_tasks().await?;
    ensure!(mid.node.has_image(&mid.reference).await?, "what is pulled stays");
    Ok(())
}
