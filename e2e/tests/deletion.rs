//! Deletion of jobs: the object is gone immediately, and its work on the edges stops.

use std::time::Duration;

use prepull_e2e::prelude::*;

/// Size of a layer that takes half a minute over a link of 2 MiB/s.
const LARGE: u64 = 64 * MIB;

/// A site with one node that is in the middle of a long pull.
struct MidPull {
    site: Site,
    tunnel: Proxy,
    node: EdgeNode,
    job: Job,
    reference: String,
}

impl MidPull {
    async fn start() -> Result<Self> {
        let site = Site::start().await?;
        let tunnel = Proxy::for_tcp(site.cloud.tunnel_addr())?;
        let node = site.add_node("edge-1").await?.tunnel_through(&tunnel).await?;
        let (_, reference) = site.seed_image("large", &[LARGE])?;
        site.link.throttle(Some(2 * MIB));
        let job = site.job("large").images([&reference]).on(["edge-1"]).apply().await?;
        site.link_carries(MIB).await?;
        node.accepts_a_task().await?;
        Ok(Self { site, tunnel, node, job, reference })
    }

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
        ensure!(after < LARGE / 2, "it pulled {after} bytes before it stopped");
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
    let mid = MidPull::start().await?;
    mid.delete().await?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn an_offline_edge_learns_of_the_deletion() -> Result<()> {
    let mid = MidPull::start().await?;
    mid.tunnel.refuse();
    mid.delete().await?;
    // The edge doesn't know of the deletion yet.
    mid.site.link_carries(MIB).await?;
    assert_eq!(mid.node.read_ledger()?.len(), 1);

    mid.tunnel.accept_again()?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_job_deleted_without_the_agent_stops() -> Result<()> {
    let mut mid = MidPull::start().await?;
    mid.node.kill9_agent()?;
    mid.delete().await?;
    mid.node.restart_agent()?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_job_deleted_during_an_outage_stops() -> Result<()> {
    let mut mid = MidPull::start().await?;
    mid.site.cloud.kill9()?;
    mid.delete().await?;
    mid.site.link_carries(MIB).await?;
    mid.site.cloud.restart().await?;
    mid.pull_has_stopped().await?;
    mid.node_takes_another_job().await
}

#[tokio::test]
async fn a_deleted_jobs_result_is_acknowledged() -> Result<()> {
    let mid = MidPull::start().await?;
    mid.tunnel.refuse();
    mid.site.link.throttle(None);
    mid.node.ends_a_task().await?;
    mid.delete().await?;
    mid.tunnel.accept_again()?;
    mid.node.forgets_all_tasks().await?;
    ensure!(mid.node.has_image(&mid.reference).await?, "what is pulled stays");
    Ok(())
}
