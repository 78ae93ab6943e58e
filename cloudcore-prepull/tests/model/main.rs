//! Cloud and edge cores together, without a socket, in a world that does its worst: messages are lost, late and
//! repeated, writes fail or land unheard, both sides are killed between any two steps, and people change their
//! minds. After every step the invariants of docs/architecture.md are checked, and when the faults stop every
//! job has to end.
//!
//! ```text
//!  user ─▶ Api ─watch─▶ Cloud (Controller) ─dispatch─▶ Conn ═▶ Edge (Agent, disk, executor, runtime)
//!           ▲◀─writes──────┘  ▲◀──────────────────────────◀═─────┘
//!           └──── Check: what the API server takes, what edges begin, pull, say and forget
//! ```
//!
//! A run is its seed: `PREPULL_MODEL_SEED=7 cargo test -p cloudcore-prepull --test model` plays one with the trace
//! of its last events, `PREPULL_MODEL_RUNS=100000` plays so many. A seed that failed goes to [`REGRESSIONS`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod api;
mod check;
mod cloud;
mod edge;
#[path = "../../engine/src/shared/rng.rs"]
mod rng;
mod settle;
mod steps;
mod user;
mod world;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use world::World;

/// Runs, where nothing else is asked for.
const RUNS: u64 = 3_000;
/// Steps of a run, at most.
const STEPS: usize = 400;
/// Seeds that failed once, and the steps that this took. They are played first.
const REGRESSIONS: &[(u64, usize)] = &[
    // A start that was held back went out for a later attempt, which was not recorded.
    (684, 100),
    // A wave whose pause was written before the ends of its nodes was waited for without end.
    (3907, 400),
    // What a deleted job had taken was never acknowledged.
    (3084, 100),
    // A job came back to life by watch events older than its deletion.
    (4331, 400),
    // A round of retry that only the reports knew of stood still.
    (1383, 400),
    // A change made while no cloudcore ran was never observed.
    (672, 100),
    // Every start made a write of the status that said nothing new.
    (856, 100),
    // An edge that was told to stop while it stored its task went on; so did one that had stored it between Hello and
    // Welcome.
    (4942, 300),
    // A round of retry that only the reports knew of stayed over, where the spec had become another one.
    (13_522, 300),
    // A report that was lost was made again beside the late one of an earlier life.
    (5009, 200),
    (5765, 200),
];

thread_local! {
    /// Where the run is, for the report.
    static STEP: Cell<usize> = const { Cell::new(0) };
}

/// Plays a run. The answer is what broke, and at which step.
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

/// How long the run of a seed is: short ones are easier to read.
fn steps_of(seed: u64) -> usize {
    STEPS / 4 + usize::try_from(seed % 4).unwrap() * STEPS / 4
}

/// The failure in as few steps as show it, with its trace.
fn explain(seed: u64, steps: usize, failed_at: usize, message: &str) -> String {
    let mut fewest = failed_at.saturating_add(1).min(steps);
    if failed_at == steps {
        // It broke when all settled: perhaps after fewer steps as well.
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
fn what_was_promised_holds_whatever_happens() {
    // The panics of the runs are caught and told below.
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
