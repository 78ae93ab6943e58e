//! Recordings of `cloudcore-prepull run --record FILE`, played on this version of the engine.
//!
//! `PREPULL_REPLAY=$PWD/FILE cargo test -p prepull-engine --test replay -- --nocapture` plays a file and prints its
//! story: every action, the last status of each job, and where this version parts from what was recorded. A file that
//! shows a defect belongs into `tests/recordings`, with its own test of how its jobs should have ended.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use prepull_api::crd::status::JobPhase;
use prepull_engine::engine::Action;
use prepull_engine::recording::{Replay, ReplayError, replay};
use world::World;

#[path = "../benches/engine/world.rs"]
#[allow(dead_code, clippy::expect_used, reason = "a test may panic; the benchmark uses the rest")]
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

#[test]
fn both_apis_share_a_nodes_single_slot() {
    let mut world = World::new(1, true, second, false);
    let began = world.now;
    world.make_job("job", None);
    world.make_pull_job("pull-job", None);
    world.run_until_ended(2);
    let took = world.now.duration_since(began).as_secs_f64();
    assert!((2.0..4.0).contains(&took), "two pulls of a second each took {took} s");
    assert_eq!(world.figures.tasks, 2);
}

fn play(recording: &[u8]) -> Result<Replay, ReplayError> {
    replay(BufReader::new(recording), |_, _| {})
}

#[test]
fn a_replay_repeats_the_recorded_actions() {
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
fn a_replay_names_the_first_differing_line() {
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
fn only_lines_cut_by_kills_are_skipped() {
    let whole = recorded(false);
    let half = whole.len() - 20;
    // The process was killed, and another one went on with the file.
    let twice = [&whole[..half], b"\n", &whole].concat();
    let replayed = play(&twice).unwrap();
    assert_eq!((replayed.leaders, replayed.differences.len()), (2, 0));
    assert_eq!(play(&whole[..half]).unwrap().leaders, 1);

    let text = String::from_utf8(whole.clone()).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.insert(3, "{\"input\":");
    let error = play(lines.join("\n").as_bytes()).unwrap_err();
    assert!(error.to_string().starts_with("line 4 "), "{error}");

    // A kill may leave half a character.
    let half_a_character = [&whole[..], "{\"input\":\"é".as_bytes().split_last().unwrap().1].concat();
    assert_eq!(play(&half_a_character).unwrap().leaders, 1);
}

#[test]
fn only_recordings_are_played() {
    for (file, expected) in [
        ("not a recording", "line 1 is not an entry of a recording that this version can play"),
        ("\u{1f}\u{8b}\n\u{0}", "line 1 is not an entry"),
    ] {
        let error = play(file.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let whole = recorded(false);
    let tail: Vec<_> = [&whole[..], b"one\ntwo\n"].concat();
    assert!(play(&tail).is_err(), "only one line can be cut by a kill");
    let beginning = whole.iter().position(|byte| *byte == b'\n').unwrap();
    let error = play(&whole[beginning + 1..]).unwrap_err().to_string();
    assert_eq!(error, "line 1: the recording does not start where a leader began: its beginning is missing");
}

/// Plays the file or directory PREPULL_REPLAY, and prints its story. In a directory, every file `*.recording` is
/// played, and must lead to the same actions again: `make test` does so with the recordings of all end-to-end tests.
#[test]
fn the_recordings_of_the_environment_are_played() {
    let Some(path) = std::env::var_os("PREPULL_REPLAY").map(PathBuf::from) else { return };
    assert!(
        path.exists(),
        "PREPULL_REPLAY={} does not exist, as seen from {}: give an absolute path",
        path.display(),
        std::env::current_dir().unwrap().display()
    );
    if path.is_file() {
        let replayed = play_file(&path, |at, action| println!("{at} {action:?}"));
        for (job, status) in &replayed.statuses {
            println!("{job}: {:?}, {}", status.phase, serde_json::to_string(&status.summary).unwrap());
        }
        for difference in &replayed.differences {
            println!("other actions: {difference}");
        }
        let Replay { leaders, inputs, actions, differences, .. } = replayed;
        println!(
            "{leaders} leaders, {inputs} inputs, actions {actions:?}, {} differences",
            differences.len()
        );
        return;
    }
    let (mut files, mut inputs, mut parted) = (0, 0, Vec::new());
    for file in recordings_below(&path) {
        let replayed = play_file(&file, |_, _| {});
        files += 1;
        inputs += replayed.inputs;
        if let Some(first) = replayed.differences.first() {
            parted.push(format!("{}: {} differences, {first}", file.display(), replayed.differences.len()));
        }
    }
    println!("{files} recordings with {inputs} inputs below {} were played", path.display());
    assert!(files > 0, "no recording below {}", path.display());
    assert!(parted.is_empty(), "{}", parted.join("\n"));
}

fn play_file(path: &Path, watch: impl FnMut(Timestamp, &Action)) -> Replay {
    let file = BufReader::new(File::open(path).unwrap());
    replay(file, watch).unwrap_or_else(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        panic!("{}: {error}: {source}", path.display())
    })
}

fn recordings_below(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| {
        if path.is_dir() {
            return recordings_below(&path);
        }
        let is_recording = path.extension().is_some_and(|extension| extension == "recording");
        if is_recording { vec![path] } else { Vec::new() }
    };
    entries.flat_map(below).collect()
}
