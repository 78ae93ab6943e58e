//! Jobs that pull, remove or upgrade: how each begins, and what it shows.

use prepull_api::crd::remove::RemovalStatus;
use prepull_api::task::RemovalResult;

use super::*;

fn removing(nodes: &[&str]) -> serde_json::Value {
    json!({"nodeNames": nodes, "images": [], "remove": {"images": ["old:1"]}, "concurrency": 2})
}

#[test]
fn the_beginning_says_what_the_job_does() {
    for (template, note) in [
        (json!({"nodeNames": ["a"]}), "1 image on 1 node, 0 skipped"),
        (json!({"nodeNames": ["a", "ghost"]}), "1 image on 1 node, 0 skipped, 1 not found"),
        (removing(&["a"]), "removal from 1 node, 0 skipped"),
        (json!({"nodeNames": ["a"], "images": ["agent:1"], "upgrade": {}}), "upgrade of 1 node, 0 skipped"),
    ] {
        let mut world = World::new(&["a"]);
        world.give(job(template, 1, None));
        assert_eq!(world.notes["Started"].1, note);
    }
}

#[test]
fn a_removing_node_may_report_a_minute_late() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(job(removing(&["a"]), 1, None));
    world.pass(1_000);
    world.pass(359_000);
    assert_eq!(world.phase_of("a"), NodePhase::InProgress);
    world.pass(3_000);
    assert_eq!(
        world.phase_of("a"),
        NodePhase::Unknown,
        "300 s, a minute for the last image, and the grace of 2 s"
    );
}

#[test]
fn a_removing_job_shows_what_it_freed() {
    let mut world = World::new(&["a", "b"]);
    for node in ["a", "b"] {
        world.up(node, &[]);
    }
    world.give(job(removing(&["a", "b"]), 1, None));
    world.pass(1_000);
    for (node, removed) in [("a", 2), ("b", 0)] {
        let removal =
            RemovalResult { removed, kept: 1, freed_bytes: u64::from(removed), ..RemovalResult::default() };
        let ended =
            TaskResult { removal: Some(removal), images: Vec::new(), ..result(TaskOutcome::Succeeded) };
        world.says(node, EdgeMessage::Result(ended));
    }
    world.pass(1_000);
    let sum = RemovalStatus { removed: 2, kept: 2, freed_bytes: 2, nodes: 1 };
    assert_eq!((world.status().phase, &world.status().removal), (JobPhase::Completed, &Some(sum)));
}
