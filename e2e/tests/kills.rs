//! cloudcore killed repeatedly, at random moments, in the middle of a job with waves, retries and failures.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_e2e::prelude::*;

const EDGES: u32 = 64;
const IMAGES: [&str; 2] = ["harbor.example/a:v1", "harbor.example/b:v1"];
const AT_A_TIME: u8 = 8;
/// Number of kills, all of which the job must outlast.
const KILLS: usize = 10;
/// Shortest and longest time from the start of a cloudcore to its kill: from its first requests until long after its
/// edges have reconnected.
const LIFE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(1800));
/// Environment variable with the seed, to repeat a run that failed with nearly the same moments.
const SEED: &str = "PREPULL_KILLS_SEED";

/// The random moments of the kills. The seed is printed.
fn moments() -> Result<Chance> {
    let seed = match std::env::var(SEED) {
        Ok(seed) => seed.parse().with_context(|| format!("{SEED}={seed}"))?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos().into(),
    };
    eprintln!("{SEED}={seed}");
    Ok(Chance::new(seed, 0))
}

#[tokio::test]
async fn a_job_survives_ten_kills_of_the_cloud_at_random_moments() -> Result<()> {
    let mut moments = moments()?;
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let behaviour = Behaviour {
        pull: PullTime::Between(Duration::from_millis(300), Duration::from_millis(1000)),
        fail_rate: 0.06,
        redial_within: Some(Duration::from_millis(500)),
        // With this seed some nodes fail, and none fails in all of the four rounds.
        seed: 7,
        ..Behaviour::default()
    };
    let fleet = Fleet::start(&cluster, &cloud, EDGES as usize).behaves(behaviour).await?;
    let job = cluster.job("killed").images(IMAGES).on(fleet.names()).concurrency(AT_A_TIME.into());
    let job = job.waves(&["10%", "50%", "100%"], 1).tolerate("0.4").retries(2);
    let job = job.spec(|spec| spec.retry = 3).apply().await?;
    job.until("it has begun", |status| status.summary.in_progress > 0).await?;

    for kill in 1..=KILLS {
        tokio::time::sleep(moments.between(LIFE.0, LIFE.1)).await;
        let status = job.status().await?;
        ensure!(status.completion_time.is_none(), "it was over before kill {kill}: {:?}", status.summary);
        cloud.restart().await?;
    }

    let status = job.completes().await?;
    let summary = &status.summary;
    assert_eq!((summary.desired, summary.successful, summary.failure), (EDGES, EDGES, 0), "{summary:?}");
    assert_eq!((summary.pending, summary.in_progress, summary.unknown), (0, 0, 0), "{summary:?}");
    fleet.all_acknowledged().await?;

    let tally = fleet.tally();
    // A task is assigned once, and again only if it failed; an image is pulled until it succeeds, and never again.
    ensure!(tally.failed > 0 && status.retry > 0, "nothing failed: {tally:?}");
    assert_eq!(tally.tasks, u64::from(EDGES) + tally.failed, "{tally:?}");
    assert_eq!((tally.whole, tally.pulled_twice), (u64::from(EDGES) * IMAGES.len() as u64, 0), "{tally:?}");
    ensure!(tally.most_at_once <= AT_A_TIME.into(), "{tally:?}");
    assert_eq!((tally.open, tally.running), (0, 0), "{tally:?}");

    // The reports agree.
    let reports = job.reports().await?;
    let nodes: Vec<_> = reports.iter().flat_map(|report| &report.body.node_status).collect();
    assert_eq!(nodes.iter().map(|node| &node.node_name).collect::<BTreeSet<_>>().len(), EDGES as usize);
    ensure!(nodes.iter().all(|node| node.phase == NodePhase::Successful), "{nodes:?}");
    let attempts: u64 = nodes.iter().map(|node| u64::from(node.attempt)).sum();
    assert_eq!((nodes.len(), attempts), (EDGES as usize, tally.tasks));
    Ok(())
}
