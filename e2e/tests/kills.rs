//! cloudcore killed again and again, at moments of chance, in the middle of a job with waves, rounds and failures.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_e2e::prelude::*;

const EDGES: u32 = 64;
const IMAGES: [&str; 2] = ["harbor.example/a:v1", "harbor.example/b:v1"];
const AT_A_TIME: u8 = 8;
/// What the job has to take at the least, lest it is over before the last of them.
const KILLS: usize = 10;
/// From one moment at which cloudcore listens to its end: from its first requests to well into the work, at which its
/// edges are back.
const LIFE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(1800));
/// Begins a round of the kills that went wrong again; the moments are of the same length, and so nearly the same.
const SEED: &str = "PREPULL_KILLS_SEED";

/// Lengths of time by a seed (Knuth's MMIX generator): the same moments again, as far as a machine allows.
struct Moments(u64);

impl Moments {
    fn new() -> Result<Self> {
        let seed = match std::env::var(SEED) {
            Ok(seed) => seed.parse().with_context(|| format!("{SEED}={seed}"))?,
            Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos().into(),
        };
        eprintln!("{SEED}={seed}");
        Ok(Self(seed))
    }

    fn next(&mut self, (from, to): (Duration, Duration)) -> Duration {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        from + to.saturating_sub(from) * u32::try_from(self.0 >> 56).unwrap_or(0) / 256
    }
}

#[tokio::test]
async fn a_cloud_killed_ten_times_at_any_moment_ends_the_job_as_if_it_had_not_been() -> Result<()> {
    let mut moments = Moments::new()?;
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let behaviour = Behaviour {
        pull: PullTime::Between(Duration::from_millis(300), Duration::from_millis(1000)),
        fail_rate: 0.06,
        redial_within: Some(Duration::from_millis(500)),
        // With it some nodes fail, and none does in each of the four rounds.
        seed: 7,
        ..Behaviour::default()
    };
    let fleet = Fleet::start(&cluster, &cloud, EDGES as usize).behaves(behaviour).await?;
    let job = cluster.job("killed").images(IMAGES).on(fleet.names()).concurrency(AT_A_TIME.into());
    let job = job.waves(&["10%", "50%", "100%"], 1).tolerate("0.4").retries(2);
    let job = job.spec(|spec| spec.retry = 3).apply().await?;
    job.until("it has begun", |status| status.summary.in_progress > 0).await?;

    for kill in 1..=KILLS {
        tokio::time::sleep(moments.next(LIFE)).await;
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
    // A task is assigned once, and once more where it failed; an image is pulled until it is there, and never again.
    ensure!(tally.failed > 0 && status.retry > 0, "nothing failed: {tally:?}");
    assert_eq!(tally.tasks, u64::from(EDGES) + tally.failed, "{tally:?}");
    assert_eq!((tally.whole, tally.pulled_twice), (u64::from(EDGES) * IMAGES.len() as u64, 0), "{tally:?}");
    ensure!(tally.most_at_once <= AT_A_TIME.into(), "{tally:?}");
    assert_eq!((tally.open, tally.running), (0, 0), "{tally:?}");

    // And the reports say the same.
    let reports = job.reports().await?;
    let nodes: Vec<_> = reports.iter().flat_map(|report| &report.body.node_status).collect();
    assert_eq!(nodes.iter().map(|node| &node.node_name).collect::<BTreeSet<_>>().len(), EDGES as usize);
    ensure!(nodes.iter().all(|node| node.phase == NodePhase::Successful), "{nodes:?}");
    let attempts: u64 = nodes.iter().map(|node| u64::from(node.attempt)).sum();
    assert_eq!((nodes.len(), attempts), (EDGES as usize, tally.tasks));
    Ok(())
}
