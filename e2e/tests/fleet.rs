//! Many simulated edges with faults: only the pulls are simulated; tunnel, agent and cloud are real.

use std::time::{Duration, Instant};

use prepull_api::crd::EDGE_LABEL;
use prepull_e2e::prelude::*;

const EDGES: usize = 200;

#[tokio::test]
async fn a_fleet_connects_works_and_comes_back() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).await?;
    let job = |name: &str| {
        let image = |tag: &str| format!("harbor.example/{name}:{tag}");
        cluster.job(name).images([image("v1"), image("v2")]).concurrency(50)
    };

    let status = job("before").on(fleet.names()).completes().await?;
    assert_eq!((status.summary.desired, status.summary.successful), (200, 200));
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (400, 0));

    cloud.kill9()?;
    fleet.reaches_sessions(0, SOON).await?;
    let began = Instant::now();
    cloud.restart().await?;
    fleet.all_connected().await?;
    ensure!(began.elapsed() < SOON, "back after {:?}", began.elapsed());
    let status = job("after").on(fleet.names()).completes().await?;
    assert_eq!(status.summary.successful, 200);
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (800, 0));
    fleet.all_acknowledged().await?;
    fleet.stop().await;
    Ok(())
}

/// Limit for a job with links that break all the time. An idle machine takes up to 45 s.
const ENDS: Duration = Duration::from_secs(180);

/// Faults of one edge: as many as an idle machine has until the job ends.
const FAULTS: Option<u32> = Some(5);

/// Duration of a pull, long enough for each edge to lose its connection about twice.
const SLOW: PullDurations = PullDurations::Between(Duration::from_millis(200), Duration::from_secs(2));

#[tokio::test]
async fn all_faults_together_lose_nothing() -> Result<()> {
    let behaviour = Behaviour {
        pull: SLOW,
        fail_rate: 0.05,
        image_bytes: 100 * MIB,
        disconnect_every: Some(Duration::from_secs(4)),
        restart_every: Some(Duration::from_secs(6)),
        most_faults: FAULTS,
        seed: 3,
        ..Behaviour::default()
    };
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).behaves(behaviour).await?;
    let job = cluster
        .job("faults")
        .images(["harbor.example/a:v1", "harbor.example/b:v1", "harbor.example/c:v1"])
        .on_label(EDGE_LABEL, "")
        .concurrency(EDGES.try_into()?)
        .tolerate("1")
        .apply()
        .await?
        .within(ENDS);
    fleet.until_met("half of the images are there", SOON, |tally| tally.whole >= 300).await?;
    cloud.restart().await?;

    let summary = job.completes().await?.summary;
    assert_eq!((summary.desired, summary.pending, summary.in_progress, summary.unknown), (200, 0, 0, 0));
    assert_eq!(summary.successful + summary.failure, 200, "{summary:?}");
    fleet.all_acknowledged().await?;
    let tally = fleet.tally();
    assert_eq!(tally.pulled_twice, 0, "{tally:?}");
    assert_eq!((tally.tasks, tally.failed), (200, summary.failure.into()), "{tally:?}");
    // The expected fraction of nodes with all three images is 0.95³.
    ensure!((10..60).contains(&summary.failure), "{summary:?}: {tally:?}");
    ensure!(tally.cuts > 30 && tally.restarts > 30, "too little happened: {tally:?}");
    // Pulls continue without a connection, and begin again only with their edge.
    ensure!(tally.pulls <= 600 + tally.restarts, "more than the restarts can explain: {tally:?}");
    Ok(())
}
