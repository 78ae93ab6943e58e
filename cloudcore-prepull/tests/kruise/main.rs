//! Kruise's engine under random faults: watches are late, writes are refused, fail, or succeed without an answer, links
//! are cut, both sides are killed between any two steps, and people edit everything. Invariants hold after every step;
//! once the faults stop, every job and every tag must end.
//!
//! ```text
//!  user ─▶ Api ─watch─▶ Kruise ─Assign─▶ Edge
//!           ▲◀─writes─────┘  ▲◀──────────┘
//! ```
//!
//! A seed decides everything in a run. `PREPULL_KRUISE_SEED=7 cargo test -p cloudcore-prepull --test kruise` plays the
//! run of one seed and prints its trace if it fails; `PREPULL_KRUISE_RUNS=100000` plays that many seeds. A seed that
//! failed is added to [`REGRESSIONS`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::panic)]

mod edge;
#[path = "../../engine/src/shared/rng.rs"]
mod rng;
mod settle;
mod steps;
mod user;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImagePullJob, PullPhase};
use serde_json::json;

use world::{NODES, World};

/// How many runs there are unless `PREPULL_KRUISE_RUNS` is set.
const RUNS: u64 = 500;
/// Seeds that failed once.
const REGRESSIONS: &[u64] = &[747, 835, 2721, 3893, 6001, 6640];

/// Plays a run. The error is the message of the failure, and the trace.
fn play(seed: u64, trace: bool) -> Result<(), (String, Vec<String>)> {
    let mut world = World::new(seed, trace);
    let played = catch_unwind(AssertUnwindSafe(|| {
        let steps = 50 + usize::try_from(seed % 4).unwrap() * 150;
        for _ in 0..steps {
            world.step();
            world.check();
        }
        world.settle();
    }));
    played.map_err(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        (message.unwrap_or_default(), std::mem::take(&mut world.trace))
    })
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_job_and_tag_ends_despite_faults() {
    // The panics of the runs are caught and reported below.
    std::panic::set_hook(Box::new(|_| {}));
    let seeds: Vec<u64> = match number("PREPULL_KRUISE_SEED") {
        Some(seed) => vec![seed],
        None => REGRESSIONS.iter().copied().chain(0..number("PREPULL_KRUISE_RUNS").unwrap_or(RUNS)).collect(),
    };
    let begun = std::time::Instant::now();
    let failed: Vec<(u64, String)> =
        seeds.iter().filter_map(|&seed| Some((seed, play(seed, false).err()?.0))).collect();
    let trace = failed.iter().min_by_key(|(seed, _)| seed % 4).map(|&(seed, _)| {
        let trace = play(seed, true).err().map(|(_, trace)| trace).unwrap_or_default();
        format!("seed {seed}:\n{}", trace.join("\n"))
    });
    let _ = std::panic::take_hook();
    println!("{} runs in {:?}", seeds.len(), begun.elapsed());
    if let Some(trace) = trace {
        let list: Vec<_> =
            failed.iter().take(20).map(|(seed, why)| format!("  seed {seed}: {why}")).collect();
        panic!("{trace}\n{} runs failed:\n{}", failed.len(), list.join("\n"));
    }
}

#[test]
fn a_never_job_pulls_three_days() {
    let mut world = World::new(1, false);
    world.calm = true;
    let spec = json!({"image": "nginx:1", "parallelism": 2, "completionPolicy": {"type": "Never"}});
    world.create_job(ImagePullJob::new("daily", serde_json::from_value(spec).unwrap()));
    let mut ended: BTreeMap<(String, i64), Timestamp> = BTreeMap::new();
    for minute in 0..3 * 24 * 60 + 90 {
        world.settle_for(1, Duration::from_secs(60));
        if minute == 30 * 60 {
            world.kill();
            world.start();
        }
        for (name, object) in &world.node_images {
            let status = object.status.as_ref().and_then(|status| status.image_statuses.get("nginx"));
            for tag in status.iter().flat_map(|image| &image.tags) {
                if let Some(time) = tag.completion_time.as_ref() {
                    assert_eq!(tag.phase, PullPhase::Succeeded, "{name}");
                    ended.insert((name.clone(), tag.version), time.0);
                }
            }
        }
    }
    for name in NODES {
        let rounds: Vec<Timestamp> =
            (0..4).filter_map(|round| ended.get(&(name.to_owned(), round)).copied()).collect();
        assert_eq!(rounds.len(), 4, "{name}: at once, and on each of three days");
        for day in rounds.windows(2) {
            // A day with a jitter of ten minutes, and some minutes for the other nodes, which may go first.
            let passed = day[1].duration_since(day[0]).as_mins();
            assert!((24 * 60 - 10..24 * 60 + 30).contains(&passed), "{name}: {passed} minutes");
        }
    }
    let status = world.pull_jobs["daily"].status.clone().unwrap();
    assert_eq!((status.desired, status.succeeded, status.completion_time), (4, 4, None));
}
