//! `make storm`: all kinds of faults, randomly and concurrently, on real parts. Afterwards every job must be in the
//! right state.
//!
//! ```text
//!  StormOptions ─▶ StormScene (cluster, API proxy, two clouds, front, registries, three nodes, fleet)
//!               ├─ weather   strikes and heals: programs, links, API server, registries, disks, clocks
//!               ├─ people    create, edit, throttle, suspend, cancel, retry and delete jobs; secrets, nodes, reports
//!               ├─ observer  watches every job, and notes each promise that is broken
//!               └─ calm      heals all, waits for every job to end, and checks the leftovers
//! ```
//!
//! The seed decides on the faults, their targets, times and durations. It's printed, and the same seed gives the same
//! storm, as far as a busy machine keeps its times.

mod calm;
mod diary;
mod observer;
mod options;
mod people;
mod scene;
mod schedule;
mod weather;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use prepull_e2e::place::Place;

pub(crate) use options::StormOptions;

use diary::Diary;
use observer::StormObserver;
use people::People;
use scene::StormScene;
use weather::Weather;

/// Exit status after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Runs the program. The exit status is 0 if every promise was kept.
pub(crate) async fn run(options: StormOptions) -> ExitCode {
    // Held to the end, so that all parts use the same place.
    let place = match Place::here() {
        Ok(place) => place,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let diary = match Diary::create_at(&place.log_file("diary")) {
        Ok(diary) => diary,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let seed = options.seed();
    diary.note_event(&format!("PREPULL_STORM_SEED={seed} repeats this storm"));
    let outcome = tokio::select! {
        outcome = run_storm(&options, seed, &diary) => outcome,
        _ = tokio::signal::ctrl_c() => {
            diary.note_event("interrupted; everything is stopped");
            return ExitCode::from(INTERRUPTED);
        }
    };
    if let Err(error) = outcome {
        diary.note_broken(&format!("the storm itself failed: {error:#}"));
    }
    let broken = diary.all_broken();
    diary.note_event(&format!("everything is stopped; the logs are in {}", place.logs().display()));
    if broken.is_empty() {
        diary.note_event("every promise was kept");
        return ExitCode::SUCCESS;
    }
    diary.note_event(&format!("{} promises were broken, with PREPULL_STORM_SEED={seed}:", broken.len()));
    for line in broken {
        diary.note_event(&format!("  {line}"));
    }
    ExitCode::FAILURE
}

async fn run_storm(options: &StormOptions, seed: u64, diary: &Diary) -> Result<()> {
    let mut scene = StormScene::start(options, seed, diary).await?;
    let observer = StormObserver::start(&scene.cluster, diary);
    let duration = Duration::from_secs(60 * options.minutes);
    let mut weather = Weather::new(seed, duration);
    let mut people = People::new(seed, duration);
    {
        let StormScene { cluster, trouble, fleet, images, .. } = &mut scene;
        tokio::join!(
            weather.cause_faults(trouble, cluster, diary),
            people.act_until_end(cluster, fleet, images, diary)
        );
    }
    people.repair_all(&scene.cluster, &scene.fleet, &scene.images, diary).await;
    diary.note_event("the storm is over: everything is healed");
    calm::wait_and_check(&mut scene, &weather, &people, diary).await?;
    observer.end_watches(diary).await;
    Ok(())
}
