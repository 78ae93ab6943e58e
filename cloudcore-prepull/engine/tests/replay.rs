//! Recordings of `cloudcore-prepull run --record FILE`, played on this version of the engine.
//!
//! `PREPULL_REPLAY=FILE cargo test -p prepull-engine --test replay -- --nocapture` plays a file and tells its story:
//! every action, the last status of each job, and where this version parts from what was recorded. A file that shows a
//! defect belongs into `tests/recordings`, with a test of its own that says how its jobs should have ended.

use std::fs::File;
use std::io::BufReader;

use jiff::SignedDuration;
use prepull_api::crd::status::JobPhase;
use prepull_engine::recording::{Replay, ReplayError, replay};
use world::World;

#[path = "../benches/engine/world.rs"]
#[allow(dead_code, reason = "the benchmark uses the rest")]
mod world;

fn second(_: usize) -> SignedDuration {
    SignedDuration::from_secs(1)
}

/// What a world of three nodes recorded of two jobs of each API, or of the first only.
fn recorded(kruise: bool) -> Vec<u8> {
    let mut world = World::new(3, kruise, second, true);
    world.make_job("all", None);
    world.make_job("some", Some(1));
    if kruise {
        world.make_pull_job("kruise-all", None);
        world.make_pull_job("kruise-some", Some(2));
    }
    world.run_until_ended(if kruise { 4 } else { 2 });
    world.settle();
    world.recording.take().unwrap()
}

fn play(recording: &[u8]) -> Result<Replay, ReplayError> {
    replay(BufReader::new(recording), |_, _| {})
}

#[test]
fn a_replay_takes_the_same_actions_as_the_recorded_engine() {
    for kruise in [false, true] {
        let replayed = play(&recorded(kruise)).unwrap();
        assert_eq!(replayed.differences, Vec::<String>::new());
        assert_eq!(replayed.leaders, 1);
        let phases: Vec<_> =
            replayed.statuses.iter().map(|(job, status)| (job.as_str(), status.phase)).collect();
        assert_eq!(phases, [("all", JobPhase::Completed), ("some", JobPhase::Completed)]);
        assert_eq!(replayed.actions["dispatch"], if kruise { 8 } else { 4 });
    }
}

#[test]
fn a_replay_names_the_line_where_it_parts_from_the_recording() {
    let text = String::from_utf8(recorded(false)).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let result = lines.iter().position(|line| line.contains(r#""type":"result""#)).unwrap();
    let without: Vec<_> =
        lines.iter().enumerate().filter(|(at, _)| *at != result).map(|(_, line)| *line).collect();
    let replayed = play(without.join("\n").as_bytes()).unwrap();
    assert!(!replayed.differences.is_empty());
    let first = &replayed.differences[0];
    assert!(first.starts_with("line ") && first.contains("recorded"), "{first}");
}

#[test]
fn a_line_cut_by_a_kill_is_passed_over_and_another_one_is_not() {
    let whole = recorded(false);
    let half = whole.len() - 20;
    // The process was killed, and another one went on with the file.
    let twice = [&whole[..half], b"\n", &whole].concat();
    let replayed = play(&twice).unwrap();
    assert_eq!((replayed.leaders, replayed.differences.len()), (2, 0));
    assert_eq!(play(&whole[..half]).unwrap().leaders, 1);

    let text = String::from_utf8(whole).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.insert(3, "{\"input\":");
    let error = play(lines.join("\n").as_bytes()).unwrap_err();
    assert!(error.to_string().starts_with("line 4 "), "{error}");
}

/// Plays the file that PREPULL_REPLAY names. Without it there is nothing to play.
#[test]
fn the_file_of_the_environment_is_played() {
    let Some(path) = std::env::var_os("PREPULL_REPLAY") else { return };
    let file = BufReader::new(File::open(&path).unwrap());
    let replayed = replay(file, |at, action| println!("{at} {action:?}")).unwrap();
    for (job, status) in &replayed.statuses {
        println!("{job}: {:?}, {}", status.phase, serde_json::to_string(&status.summary).unwrap());
    }
    for difference in &replayed.differences {
        println!("other actions: {difference}");
    }
    println!(
        "{} leaders, {} inputs, actions {:?}, {} differences",
        replayed.leaders,
        replayed.inputs,
        replayed.actions,
        replayed.differences.len()
    );
}
