//! Many edges at once: simulated pulls, the real tunnel, the real agent, the real cloud.

use std::time::{Duration, Instant};

use prepull_e2e::prelude::*;

#[tokio::test]
async fn a_fleet_connects_works_and_comes_back() -> Result<()> {
    const EDGES: usize = 200;
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).await?;
    let job =
        |name: &str| cluster.job(name).images(["harbor.example/a:v1", "harbor.example/b:v1"]).concurrency(50);

    let status = job("before").on(fleet.names()).completes().await?;
    assert_eq!((status.summary.desired, status.summary.successful), (200, 200));
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (400, 0));

    cloud.kill9()?;
    fleet.reaches(0, Duration::from_secs(10)).await?;
    let began = Instant::now();
    cloud.restart().await?;
    fleet.all_connected().await?;
    ensure!(began.elapsed() < Duration::from_secs(60), "back after {:?}", began.elapsed());
    let status = job("after").on(fleet.names()).completes().await?;
    assert_eq!(status.summary.successful, 200);
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (800, 0));
    fleet.all_acknowledged().await?;
    fleet.stop().await;
    Ok(())
}
