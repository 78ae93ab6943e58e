//! The cloud's controller and the edges' agents together, under random faults: messages are lost, late and repeated,
//! writes fail, or succeed although their answer is lost, both sides are killed between any two steps, and people edit
//! jobs and nodes. The promises of docs/architecture.md are checked after every step, and once the faults stop every
//! job has to end.
//!
//! ```text
//!  user ─▶ Api ─watch─▶ Cloud (Controller) ─dispatch─▶ Conn ═▶ Edge (Agent, disk, executor, runtime)
//!           ▲◀─writes──────┘  ▲◀──────────────────────────◀═─────┘
//!           └──── Check: what the API server accepts, and what edges start, pull, send and forget
//! ```
//!
//! A seed decides everything in a run. `PREPULL_MODEL_SEED=7 cargo test -p cloudcore-prepull --test model` plays the
//! run of one seed and prints its last events if it fails; `PREPULL_MODEL_RUNS=100000` plays that many seeds. A seed
//! that failed is added to [`REGRESSIONS`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod api;
mod check;
mod cloud;
mod conn;
mod edge;
mod removal;
#[path = "../../engine/src/shared/rng.rs"]
mod rng;
mod settle;
mod steps;
mod trace;
mod user;
mod world;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use world::World;

/// How many runs there are unless `PREPULL_MODEL_RUNS` is set.
const RUNS: u64 = 3_000;
/// Steps of the longest runs.
const STEPS: usize = 400;
/// Seeds that failed once, with the number of steps that showed it. They are played first.
const REGRESSIONS: &[(u64, usize)] = &[
    (16_142, 300),
    (20_077, 200),
    (30_039, 340),
    (40_943, 400),
    (52_015, 168),
    (59_295, 307),
    (67_285, 200),
    (108_993, 150),
    (10_230, 216),
    (4_848, 100),
    (54_743, 400),
    (78_303, 400),
];

thread_local! {
    /// The step that the run has reached, for the message of a failure.
    static STEP: Cell<usize> = const { Cell::new(0) };
}

/// Plays a run. The error is the step that failed, the message, and the trace.
fn play(seed: u64, steps: usize, trace: bool) -> Result<(), (usize, String, Vec<String>)> {
    let mut world = World::new(seed, trace);
    let played = catch_unwind(AssertUnwindSafe(|| {
        for step in 0..steps {
            STEP.set(step);
            world.step();
        }
        STEP.set(steps);
        world.settle();
    }));
    played.map_err(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let traced = world.traced().cloned().collect();
        (STEP.get(), message.unwrap_or_default(), traced)
    })
}

/// The number of steps of a seed's run. Some runs are short, because their traces are easier to read.
fn steps_of(seed: u64) -> usize {
    STEPS / 4 + usize::try_from(seed % 4).unwrap() * STEPS / 4
}

/// Describes a failure, with the trace of the shortest run that shows it.
fn explain(seed: u64, steps: usize, failed_at: usize, message: &str) -> String {
    let mut fewest = failed_at.saturating_add(1).min(steps);
    if failed_at == steps {
        // It failed after the last step: perhaps a run of fewer steps fails as well.
        let shorter = (1..8).map(|part| steps * part / 8).find(|&fewer| play(seed, fewer, false).is_err());
        fewest = shorter.unwrap_or(steps);
    }
    let (at, message, trace) = match play(seed, fewest, true) {
        Err(again) => again,
        Ok(()) => (failed_at, format!("{message} (not seen when played again)"), Vec::new()),
    };
    format!(
        "seed {seed}, step {at} of {fewest}: {message}\n{}\nagain: PREPULL_MODEL_SEED={seed} PREPULL_MODEL_STEPS={fewest} cargo test -p cloudcore-prepull --test model\n",
        trace.join("\n")
    )
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[test]
fn every_promise_holds_whatever_faults_happen() {
    // The panics of the runs are caught and reported below.
    std::panic::set_hook(Box::new(|_| {}));
    let steps = number("PREPULL_MODEL_STEPS").map(|steps| usize::try_from(steps).unwrap());
    let runs: Vec<(u64, usize)> = if let Some(seed) = number("PREPULL_MODEL_SEED") {
        vec![(seed, steps.unwrap_or(steps_of(seed)))]
    } else {
        let runs = number("PREPULL_MODEL_RUNS").unwrap_or(RUNS);
        let first = number("PREPULL_MODEL_FIRST").unwrap_or(0);
        let random = (first..first + runs).map(|seed| (seed, steps.unwrap_or(steps_of(seed))));
        REGRESSIONS.iter().copied().chain(random).collect()
    };
    let next = AtomicU64::new(0);
    let begun = std::time::Instant::now();
    let worker = || {
        let mut failed = Vec::new();
        loop {
            let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
            let Some(&(seed, steps)) = runs.get(at) else { return failed };
            if let Err((step, message, _)) = play(seed, steps, false) {
                failed.push((seed, steps, step, message));
                if failed.len() >= 20 {
                    return failed;
                }
            }
        }
    };
    let mut failed: Vec<_> = std::thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    failed.sort_unstable_by_key(|(_, _, step, _)| *step);
    let report = failed.first().map(|(seed, steps, step, message)| explain(*seed, *steps, *step, message));
    let _ = std::panic::take_hook();
    println!("{} runs in {:?}", runs.len(), begun.elapsed());
    if let Some(report) = report {
        let others: Vec<_> = failed
            .iter()
            .map(|(seed, _, step, message)| format!("  seed {seed}, step {step}: {message}"))
            .collect();
        panic!("{} runs failed:\n{}\n\n{report}", failed.len(), others.join("\n"));
    }
}
