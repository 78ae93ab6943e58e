//! Silent failures of the network: the cloud and real edges run in network namespaces, with cables that drop packets.
//! The registry is not reached through the cables, so that pulls continue.

use std::time::{Duration, Instant};

use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_e2e::prelude::*;

/// Heartbeat of tests that wait until silence is noticed.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Tolerance for a busy machine.
const SLACK: Duration = Duration::from_secs(3);

/// A site in a network, with real edges at the ends of its cables.
struct Scene {
    // Fields are dropped in this order.
    nodes: Vec<EdgeNode>,
    cables: Vec<Cable>,
    site: Site,
    _network: Network,
    image: Image,
    reference: String,
}

impl Scene {
    /// Starts a scene with edges `edge-1` and so on. A node alone takes about two seconds to pull the image.
    async fn start(edges: u8) -> Result<Self> {
        let (site, network) = Site::in_network(&["--heartbeat", "1s"], edges).await?;
        let (mut nodes, mut cables) = (Vec::new(), Vec::new());
        for number in 1..=edges {
            let cable = network.add_cable().await?;
            nodes.push(site.add_node(&format!("edge-{number}")).await?.on_cable(&cable).await?);
            cables.push(cable);
        }
        let (image, reference) = site.seed_image("partitions", &[4 * MIB])?;
        site.link.throttle(Some(2 * MIB));
        let scene = Self { nodes, cables, site, _network: network, image, reference };
        scene.has_sessions(edges.into()).await?;
        Ok(scene)
    }

    /// Waits until the cloud has this many sessions, and returns the duration.
    async fn has_sessions(&self, expected: u32) -> Result<Duration> {
        let begin = Instant::now();
        self.site.cloud.has_sessions(expected).await?;
        Ok(begin.elapsed())
    }

    /// Waits until the edge has noticed the loss of its session, and returns the duration.
    async fn is_alone(&self, edge: usize) -> Result<Duration> {
        let begin = Instant::now();
        eventually("the edge ends the session", SOON, async || {
            let connected = self.nodes[edge].metrics().await?.sum("edgecore_prepull_connected", &[]);
            ensure!(connected < 0.5, "it has not");
            Ok(())
        })
        .await?;
        Ok(begin.elapsed())
    }

    /// Checks that there was only one attempt, no blob was fetched twice, and every result is acknowledged.
    async fn done_at_the_first_attempt(&self, status: &ImagePrePullJobStatus) -> Result<()> {
        for node in &self.nodes {
            assert_eq!(status.node(node.name()).map(|node| node.attempt), Some(1));
            node.forgets_all_tasks().await?;
        }
        self.pulled_once_each();
        Ok(())
    }

    fn pulled_once_each(&self) {
        assert_eq!(self.site.fetches(&self.image), self.nodes.len() * self.image.blobs().len());
    }
}

#[tokio::test]
async fn briefly_cut_edges_pull_and_report_later() -> Result<()> {
    let scene = Scene::start(3).await?;
    let job = scene.site.job("cut-off").images([&scene.reference]).on(["edge-1", "edge-2", "edge-3"]);
    let job = job.concurrency(3).apply().await?;
    for node in &scene.nodes {
        node.accepts_a_task().await?;
    }
    scene.cables[0].cut().await?;
    scene.cables[1].cut().await?;
    scene.has_sessions(1).await?;
    for node in &scene.nodes[..2] {
        node.ends_a_task().await?;
    }
    // The connected edge has reported; the job waits for the others.
    job.until("edge-3 is done", |status| status.summary.successful == 1).await?;
    let during = job.status().await?;
    assert_eq!((during.summary.in_progress, during.summary.unknown), (2, 0));

    scene.cables[0].mend().await?;
    scene.cables[1].mend().await?;
    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 3);
    scene.done_at_the_first_attempt(&status).await
}

#[tokio::test]
async fn a_late_result_counts_after_its_slot() -> Result<()> {
    let scene = Scene::start(2).await?;
    let job = scene.site.job("beyond").images([&scene.reference]).on(["edge-1", "edge-2"]);
    let job = job.concurrency(1).timeout_seconds(6).tolerate("0.5").apply().await?;
    scene.nodes[0].accepts_a_task().await?;
    scene.cables[0].cut().await?;
    // The pull ends in time, but the edge cannot report it.
    scene.nodes[0].ends_a_task().await?;
    assert_eq!(job.node_status("edge-2").await?.phase, NodePhase::Pending, "the slot is taken");
    let status = job
        .until("edge-1 is unknown and edge-2 is done", |status| {
            status.summary.unknown == 1 && status.summary.successful == 1
        })
        .await?;
    let lost = status.node("edge-1").context("no edge-1")?;
    ensure!(lost.reason.contains("offline"), "{lost:?}");
    assert_eq!(scene.nodes[0].open_tasks(), 1, "its result wasn't acknowledged");

    scene.cables[0].mend().await?;
    let status = job.until("edge-1 is believed", |status| status.summary.successful == 2).await?;
    assert_eq!((status.phase, status.summary.unknown), (JobPhase::Completed, 0));
    scene.done_at_the_first_attempt(&status).await
}

#[tokio::test]
async fn a_job_completes_over_a_lossy_link() -> Result<()> {
    const WAY: Duration = Duration::from_millis(150);
    // The default heartbeat, with which a session survives short losses.
    let (site, network) = Site::in_network(&[], 1).await?;
    let cable = network.add_cable().await?;
    // 30 % of the packets in each direction; 300 ms round trip.
    let (tunnel, _way) = cable.slow_way(site.cloud.tunnel_addr().port(), WAY)?;
    cable.drop_randomly(0.3).await?;
    let node = site.add_node("edge-1").await?.on_cable(&cable).tunnel_at(tunnel).await?;
    let (image, reference) = site.seed_image("lossy", &[MIB])?;
    let job = site.job("lossy").images([&reference]).on(["edge-1"]).apply().await?;
    let status = job.completes().await?;
    assert_eq!((status.summary.successful, status.node("edge-1").map(|node| node.attempt)), (1, Some(1)));
    node.forgets_all_tasks().await?;
    ensure!(
        cable.dropped_packets().await? >= 3,
        "hardly anything was lost: {}",
        cable.dropped_packets().await?
    );
    assert_eq!(site.fetches(&image), image.blobs().len());
    Ok(())
}

#[tokio::test]
async fn a_dead_connection_is_noticed_on_both_sides() -> Result<()> {
    let scene = Scene::start(1).await?;
    scene.cables[0].cut().await?;
    let noticed = tokio::try_join!(scene.has_sessions(0), scene.is_alone(0))?;
    ensure!(noticed.0.max(noticed.1) < 2 * HEARTBEAT + SLACK, "{noticed:?}");
    scene.cables[0].mend().await?;
    scene.has_sessions(1).await?;
    Ok(())
}

#[tokio::test]
async fn lost_cloud_messages_end_the_session() -> Result<()> {
    one_way(async |cable| cable.lose_from_cloud().await).await
}

#[tokio::test]
async fn lost_edge_messages_end_the_session() -> Result<()> {
    one_way(async |cable| cable.lose_from_edge().await).await
}

/// Breaks one direction of the cable in the middle of a pull.
async fn one_way(breaks: impl AsyncFn(&Cable) -> Result<()>) -> Result<()> {
    let scene = Scene::start(1).await?;
    let job = scene.site.job("one-way").images([&scene.reference]).on(["edge-1"]).apply().await?;
    scene.nodes[0].accepts_a_task().await?;
    breaks(&scene.cables[0]).await?;
    let noticed = tokio::try_join!(scene.has_sessions(0), scene.is_alone(0))?;
    ensure!(noticed.0.max(noticed.1) < 2 * HEARTBEAT + SLACK, "{noticed:?}");
    scene.nodes[0].ends_a_task().await?;
    assert_eq!(job.node_status("edge-1").await?.phase, NodePhase::InProgress);
    ensure!(scene.cables[0].dropped_packets().await? > 0, "nothing was lost");

    scene.cables[0].mend().await?;
    let status = job.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
    scene.nodes[0].forgets_all_tasks().await?;
    scene.pulled_once_each();
    Ok(())
}
