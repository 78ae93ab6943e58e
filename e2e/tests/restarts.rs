//! Every part is killed, stopped or terminated in the middle of a job. The job must complete, no complete layer may be
//! pulled twice, and no result may be lost.

use std::time::{Duration, Instant};

use prepull_e2e::prelude::*;

use crate::mid_pull::{LARGE, SLOW, SMALL};

type MidPull = crate::mid_pull::MidPull<Job>;

async fn mid_pull() -> Result<MidPull> {
    let site = Site::with_cloud_args(&["--heartbeat", "1s"]).await?;
    MidPull::start(site, "mid-pull", async |site, reference| {
        site.job("mid-pull").images([reference]).on(["edge-1"]).retries(3).apply().await
    })
    .await
}

impl MidPull {
    /// Waits until the job completes, and checks that every result is acknowledged.
    async fn ends_right(&self) -> Result<()> {
        let status = self.job.completes().await?;
        let image = status.image("edge-1", &self.reference).context("no image")?;
        assert_eq!(image.status, Tristate::True);
        assert_eq!(image.digest.as_deref(), Some(self.image.digest()));
        assert_eq!(status.summary.successful, 1);
        ensure!(self.node.has_image(&self.reference).await?);
        self.node.forgets_all_tasks().await
    }
}

#[tokio::test]
async fn a_killed_agent_resumes_its_pull() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.node.kill9_agent()?;
    assert_eq!(mid.node.read_ledger()?.len(), 1);
    // Time for containerd to remove content that is not in use.
    tokio::time::sleep(Duration::from_secs(2)).await;
    mid.node.restart_agent()?;
    mid.ends_right().await?;
    mid.nothing_was_pulled_twice()
}

#[tokio::test]
async fn a_terminated_agent_resumes_later() -> Result<()> {
    let mut mid = mid_pull().await?;
    let began = Instant::now();
    mid.node.terminate_agent().await?;
    let took = began.elapsed();
    ensure!(took < Duration::from_secs(3), "it took {took:?}");
    // The task has no result: the work is only postponed.
    assert_eq!(mid.node.read_ledger()?.iter().filter(|task| !task.ended).count(), 1);
    let before = mid.site.link.bytes();
    tokio::time::sleep(Duration::from_millis(500)).await;
    ensure!(mid.site.link.bytes() < before + MIB, "the runtime still pulls");
    let during = mid.job.node_status("edge-1").await?;
    assert_eq!(during.phase, NodePhase::InProgress);

    mid.node.restart_agent()?;
    mid.ends_right().await?;
    mid.nothing_was_pulled_twice()
}

#[tokio::test]
async fn an_ended_image_is_not_touched_again() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.args(&["--parallel-pulls", "1"]).await?;
    let (_, first) = site.seed_image("done-first", &[SMALL])?;
    let (_, second) = site.seed_image("done-second", &[LARGE])?;
    site.link.throttle(SLOW);
    let job = site.job("two").images([&first, &second]).on(["edge-1"]).policy("Always").apply().await?;
    node.ledger_gets("an image", |tasks| tasks.iter().any(|task| task.images_ended == 1)).await?;
    site.link_carries(MIB).await?;
    let asked = |of: &str| site.link.records().iter().filter(|record| record.path.contains(of)).count();
    let before = asked("/done-first/");
    ensure!(before > 0);
    node.restart_agent()?;
    let status = job.completes().await?;
    assert_eq!(asked("/done-first/"), before, "it was asked for again");
    for reference in [&first, &second] {
        let image = status.image("edge-1", reference).context("no image")?;
        ensure!(image.status == Tristate::True && image.digest.is_some(), "{image:?}");
    }
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn a_result_outlives_an_early_kill() -> Result<()> {
    let mut mid = mid_pull().await?;
    // The agent sends its result, which does not arrive.
    mid.tunnel.freeze();
    mid.node.ends_a_task().await?;
    mid.node.kill9_agent()?;
    // Data that's still in the proxy must not arrive later.
    mid.tunnel.refuse();
    assert!(mid.node.read_ledger()?.iter().all(|task| task.ended), "the result is on the disk");
    assert_eq!(mid.job.status().await?.phase, JobPhase::InProgress);
    let asked = mid.site.link.records().len();

    mid.tunnel.thaw();
    mid.tunnel.accept_again()?;
    mid.node.restart_agent()?;
    mid.ends_right().await?;
    assert_eq!(mid.site.link.records().len(), asked, "this needs no registry");
    Ok(())
}

#[tokio::test]
async fn a_result_outlives_a_kill_of_both_sides() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.site.cloud.kill9()?;
    mid.node.ends_a_task().await?;
    mid.node.kill9_agent()?;
    let asked = mid.site.link.records().len();
    mid.site.cloud.restart().await?;
    mid.node.restart_agent()?;
    mid.ends_right().await?;
    assert_eq!(mid.site.link.records().len(), asked, "this needs no registry");
    Ok(())
}

#[tokio::test]
async fn a_killed_cloud_continues_its_job() -> Result<()> {
    let mut site = Site::start().await?;
    let (image, reference) = site.seed_image("cloud-killed", &[SMALL, LARGE])?;
    let mut nodes = Vec::new();
    for name in ["edge-1", "edge-2", "edge-3"] {
        nodes.push(site.add_node(name).await?.await?);
    }
    site.link.throttle(Some(6 * MIB));
    let job = site.job("killed").images([&reference]).on(["edge-1", "edge-2", "edge-3"]).apply().await?;

    // The cloud is killed and restarted before there is a result.
    nodes[0].accepts_a_task().await?;
    site.link_carries(MIB).await?;
    site.cloud.restart().await?;
    // The cloud is killed again, and restarted when there is a result.
    job.until("edge-2 has begun", |status| {
        status.node("edge-2").is_some_and(|node| node.phase == NodePhase::InProgress)
    })
    .await?;
    nodes[1].accepts_a_task().await?;
    site.cloud.kill9()?;
    nodes[1].ends_a_task().await?;
    site.cloud.restart().await?;

    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 3);
    for node in &nodes {
        assert_eq!(status.node(node.name()).map(|node| node.attempt), Some(1));
        node.forgets_all_tasks().await?;
    }
    assert_eq!(site.fetches(&image), 3 * image.blobs().len(), "each node fetched each blob once");
    Ok(())
}

#[tokio::test]
async fn a_terminated_cloud_ends_immediately() -> Result<()> {
    let mut mid = mid_pull().await?;
    let began = Instant::now();
    mid.site.cloud.terminate().await?;
    let took = began.elapsed();
    ensure!(took < Duration::from_secs(3), "it took {took:?}");
    mid.site.cloud.restart().await?;
    let began = Instant::now();
    mid.site.cloud.has_sessions(1).await?;
    let took = began.elapsed();
    ensure!(took < Duration::from_secs(10), "it took {took:?}");
    mid.ends_right().await?;
    assert_eq!(mid.site.fetches(&mid.image), mid.image.blobs().len());
    Ok(())
}

#[tokio::test]
async fn an_absent_api_server_loses_nothing() -> Result<()> {
    let site = Site::in_own_cluster().await?;
    let (image, reference) = site.seed_image("api-away", &[SMALL, LARGE])?;
    let nodes = [site.add_node("edge-1").await?.await?, site.add_node("edge-2").await?.await?];
    site.link.throttle(Some(8 * MIB));
    let job =
        site.job("api-away").images([&reference]).on(["edge-1", "edge-2"]).concurrency(2).apply().await?;
    for node in &nodes {
        node.accepts_a_task().await?;
    }
    site.link_carries(MIB).await?;

    let away = Instant::now();
    site.cluster.stop_api()?;
    for node in &nodes {
        node.ends_a_task().await?;
    }
    tokio::time::sleep(Duration::from_secs(10).saturating_sub(away.elapsed())).await;
    for node in &nodes {
        assert_eq!(node.read_ledger()?.len(), 1, "{} got an acknowledgement", node.name());
    }
    site.cluster.start_api().await?;

    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 2);
    for node in &nodes {
        node.forgets_all_tasks().await?;
    }
    assert_eq!(site.fetches(&image), 2 * image.blobs().len());
    Ok(())
}

#[tokio::test]
async fn a_restarted_runtime_is_retried() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.node.containerd_mut().kill9()?;
    mid.job
        .until("it is known that the runtime is away", |status| {
            status.image("edge-1", &mid.reference).is_some_and(|image| !image.reason.is_empty())
        })
        .await?;
    mid.node.restart_containerd().await?;
    mid.ends_right().await?;
    mid.nothing_was_pulled_twice()
}
