//! Thousands of short random runs of a small fleet: the invariants hold after each step, and every job ends.

use std::time::Duration;

use serde_json::{Value, json};

mod expected;
mod invariants;
mod steps;
mod world;

use crate::shared::rng::Rng;
use world::World;

pub(super) const NODES: &[&str] = &["n1", "n2", "n3", "n4", "n5"];
pub(super) const IMAGES: &[&str] = &["nginx:1", "redis:2", "r.io/app:3"];

/// A random template; one in ten is refused.
pub(super) fn template(rng: &mut Rng) -> Value {
    let mut spec = json!({
        "parallelism": rng.below(4),
        "pullPolicy": {"timeoutSeconds": 1 + rng.below(20), "backoffLimit": rng.below(3)},
    });
    match rng.below(6) {
        0 => spec["selector"] = json!({"names": ["n1", "n3", "n9"]}),
        1 | 2 => spec["selector"] = json!({"matchLabels": {"zone": "x"}}),
        3 => spec["podSelector"] = json!({"matchLabels": {"app": "web"}}),
        _ => {}
    }
    match rng.below(6) {
        0 => spec["completionPolicy"] = json!({"type": "Never"}),
        1 => spec["completionPolicy"] = json!({"activeDeadlineSeconds": 30 + rng.below(300)}),
        2 => spec["completionPolicy"] = json!({"ttlSecondsAfterFinished": rng.below(300)}),
        _ => {}
    }
    if rng.chance(10) {
        spec["parallelism"] = json!("10%");
    }
    spec
}

/// Plays a run: random steps, then every node answers. `interrupted`: cloudcore restarts before that.
fn play(seed: u64, interrupted: bool, trace: bool) -> World {
    let mut world = World::new(Rng::new(seed), trace);
    for _ in 0..60 {
        world.step();
        world.flush();
    }
    // What a write finds may depend on when it comes; one that failed is made again within five seconds.
    for _ in 0..8 {
        world.land_all();
        world.pass(Duration::from_secs(1));
    }
    if interrupted {
        world.restart(false);
    }
    world.settle();
    world.check_all_ended();
    world
}

/// `PREPULL_MODEL_SEED=7` plays one run, and prints its actions.
#[test]
fn invariants_hold_and_every_job_ends() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let one = number("PREPULL_MODEL_SEED");
    let seeds = one.map_or(0..number("PREPULL_MODEL_RUNS").unwrap_or(1000), |seed| seed..seed + 1);
    for seed in seeds {
        let ends = [false, true].map(|interrupted| {
            let run = std::panic::catch_unwind(|| play(seed, interrupted, one.is_some()).ends());
            run.unwrap_or_else(|_| panic!("seed {seed}, interrupted: {interrupted}"))
        });
        for (job, end) in &ends[0] {
            if let Some(other) = ends[1].get(job) {
                assert_eq!(end, other, "seed {seed}: {job} ends another way after a restart");
            }
        }
    }
}
