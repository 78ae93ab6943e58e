//! The events of a job, and the reason in its status.

use super::course::fleet;
use super::*;

/// Whether the event of the job's end is a warning, its reason, and its note.
fn end_of(cancel: bool, outcomes: &[TaskOutcome]) -> (bool, &'static str, String) {
    let (mut world, nodes) = fleet(2);
    let of = |cancel, generation| {
        let template = json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "0"});
        with_spec(template, json!({"cancel": cancel}), generation, None)
    };
    world.give(of(false, 1));
    world.pass(1_000);
    for (node, outcome) in nodes.iter().zip(outcomes) {
        world.ends(node, *outcome);
    }
    if cancel {
        world.give(of(true, 2));
    }
    let reason = world.events.last().unwrap();
    let (warns, note) = world.notes[reason].clone();
    (warns, reason, note)
}

#[test]
fn only_a_failed_job_ends_with_a_warning() {
    use TaskOutcome::{Failed, Succeeded};
    let all = "2 successful, 0 failed, 0 unknown".to_owned();
    assert_eq!(end_of(false, &[Succeeded; 2]), (false, "Completed", all));
    let half = "1 of 2 nodes failed, more than failureTolerate 0 allows (1 successful, 1 failed, 0 unknown; Other 1)";
    assert_eq!(end_of(false, &[Succeeded, Failed]), (true, "Failed", half.to_owned()));
    let (warns, reason, _) = end_of(true, &[]);
    assert_eq!((warns, reason), (false, "Cancelled"));
}

#[test]
fn at_most_twenty_events_name_failed_nodes() {
    let (mut world, nodes) = fleet(25);
    world.give(job(json!({"nodeNames": nodes, "concurrency": 25}), 1, None));
    world.all_end(&nodes, TaskOutcome::Failed);
    assert_eq!(world.events.iter().filter(|reason| **reason == "NodeFailed").count(), 20);
}

#[test]
fn a_removal_ends_with_what_it_removed() {
    let (mut world, nodes) = fleet(1);
    world.give(job(json!({"nodeNames": nodes, "images": [], "remove": {"images": ["old:1"]}}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    assert_eq!(world.status().reason, "nothing was removed");
}

#[test]
fn a_last_wave_that_fails_is_the_whole_job() {
    let (mut world, nodes) = fleet(2);
    let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "0"});
    world.give(with_spec(template, json!({"rollout": {"steps": ["1", "100%"]}}), 1, None));
    world.all_end(&nodes[..1], TaskOutcome::Succeeded);
    world.all_end(&nodes[1..], TaskOutcome::Failed);
    let reason = "1 of 2 nodes failed, more than failureTolerate 0 allows (Other 1)";
    assert_eq!(world.status().reason, reason);
}
