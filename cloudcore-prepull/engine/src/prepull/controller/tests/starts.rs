//! Starts that are slow to be recorded, or are not recorded at all.

use super::course::{fleet, template};
use super::*;

#[test]
fn the_accepted_spec_is_written_before_starts() {
    // Of a large job the status does not show every node, nor are all names known then.
    for (shown, taken, says) in
        [(2, 2, "undo the change"), (1, 0, "no node starts"), (0, 0, "no node starts")]
    {
        let (mut world, nodes) = fleet(2);
        world.answers = false;
        world.give(job(template(&nodes), 1, None));
        world.pass(5_000);
        assert_eq!((world.tried.clone(), world.taken().len()), (vec![StatusOrReport::Status], 0));
        // Its leader dies, and a user removes a name.
        let mut stored = world.status().clone();
        stored.node_status.truncate(shown);
        (world.answers, world.unanswered) = (true, Vec::new());
        world.restart(&nodes);
        for node in &nodes {
            world.up(node, &[]);
        }
        world.give(job(template(&nodes[..1]), 2, Some(&stored)));
        world.pass(1_000);
        assert_eq!((world.taken().len(), world.condition("Valid").0), (taken, "False"));
        assert!(world.status().reason.contains(says), "{}", world.status().reason);
    }
}

#[test]
fn a_held_job_pulls_on_all_nodes_once_undone() {
    for (shown, leaders) in [(1, 0), (0, 0), (0, 1)] {
        let (mut world, nodes) = fleet(3);
        world.answers = false;
        world.give(job(template(&nodes), 1, None));
        let mut stored = world.status().clone();
        stored.node_status.truncate(shown);
        (world.answers, world.unanswered) = (true, Vec::new());
        // No report has been made, and of the names that were edited the status doesn't show all.
        for leader in 0..=leaders {
            world.restart(&nodes);
            for node in &nodes {
                world.up(node, &[]);
            }
            world.give(job(template(&nodes[..1]), 2 + leader, Some(&stored)));
            world.pass(1_000);
            assert_eq!((world.taken().len(), world.status().summary.desired), (0, 3));
            stored = world.status().clone();
        }
        world.give(job(template(&nodes), 4, None));
        world.pass(1_000);
        let status = world.status();
        assert_eq!((status.phase, status.summary.desired), (JobPhase::InProgress, 3), "{}", status.reason);
        assert_eq!((world.taken().len(), world.status().node_status.len()), (3, 3));
    }
}

#[test]
fn a_held_jobs_status_counts_what_happens() {
    let (mut world, nodes) = fleet(3);
    let template = |nodes: &[String]| json!({"nodeNames": nodes, "concurrency": 1});
    world.give(job(template(&nodes), 1, None));
    world.pass(5_000);
    let mut stored = world.status().clone();
    stored.node_status.remove(1);
    world.reports.get_mut(&0).unwrap().node_status.truncate(1);
    world.restart(&nodes);
    world.give(job(template(&nodes[..1]), 2, Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(60_000);
    let Summary { desired, successful, pending, in_progress, .. } = world.status().summary;
    assert_eq!((desired, successful, pending, in_progress), (3, 1, 2, 0));
    let shown = world.status().node_status.iter().map(|node| (node.node_name.as_str(), node.phase));
    assert_eq!(shown.collect::<Vec<_>>(), [("n0", NodePhase::Successful), ("n2", NodePhase::Pending)]);
}

#[test]
fn a_nodes_time_begins_when_recorded() {
    let (mut world, nodes) = fleet(2);
    world.api_up = false;
    world.give(job(json!({"nodeNames": nodes, "concurrency": 1, "timeoutSeconds": 10}), 1, None));
    for _ in 0..60 {
        world.pass(1_000);
        assert_eq!((world.taken().len(), world.cancels().len()), (0, 0));
    }
    world.api_up = true;
    world.pass(6_000);
    assert_eq!((world.taken(), world.phase_of("n0")), (vec!["n0".to_owned()], NodePhase::InProgress));
    assert_eq!(world.record("n0").start_time.as_ref().unwrap().0, world.now);
    assert_eq!(world.remaining.last(), Some(&Duration::from_secs(10)));
    world.pass(11_000);
    world.pass(1_000);
    assert_eq!(world.phase_of("n0"), NodePhase::Unknown);
}

#[test]
fn an_unrecorded_start_ends_as_pending() {
    let (mut world, nodes) = fleet(1);
    world.api_up = false;
    world.give(with_spec(json!({"nodeNames": nodes}), json!({"activeDeadlineSeconds": 60}), 1, None));
    world.pass(61_000);
    world.api_up = true;
    world.pass(6_000);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Failed").1), (JobPhase::Failure, "DeadlineExceeded"));
    assert_eq!((world.phase_of("n0"), world.taken().len()), (NodePhase::Pending, 0));
    assert!(world.record("n0").reason.contains("not started"), "{}", world.record("n0").reason);
}

#[test]
fn an_end_waits_for_the_written_beginning() {
    // Without it the next leader chooses the nodes again: reports that it then finds hold nodes that may be gone.
    let names = |names: &[&str]| json!({"nodeNames": names, "failureTolerate": "0"});
    for (template, edit) in [
        (names(&["n0", "n1"]), json!({"cancel": true})),
        (names(&["n0", "n1"]), json!({"activeDeadlineSeconds": 5})),
        (names(&["n0", "gone"]), json!({})),
    ] {
        let (mut world, _) = fleet(2);
        world.api_up = false;
        world.give(with_spec(template.clone(), json!({}), 1, None));
        world.give(with_spec(template, edit.clone(), 2, None));
        for _ in 0..10 {
            world.pass(1_000);
        }
        assert!(
            world.tried.iter().all(|object| *object == StatusOrReport::Status),
            "{edit}: {:?}",
            world.tried
        );
        world.api_up = true;
        world.pass(6_000);
        world.pass(1_000);
        let (phase, taken) = (world.status().phase, world.taken().len());
        let expected = (NodePhase::Pending, JobPhase::Failure, 0);
        assert_eq!((world.phase_of("n0"), phase, taken), expected, "{edit}");
        assert!(world.status().completion_time.is_some(), "{edit}");
    }
}

#[test]
fn slow_writes_cost_nodes_no_time() {
    let (mut world, nodes) = fleet(1);
    world.answers = false;
    world.give(job(json!({"nodeNames": nodes, "timeoutSeconds": 10}), 1, None));
    world.pass(25_000);
    assert_eq!(world.cancels().len(), 0);
    world.answer();
    assert_eq!(world.remaining, [Duration::from_secs(10)]);
    world.pass(9_000);
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
}

#[test]
fn an_unrecorded_start_heeds_edits() {
    for (concurrency, suspend, left) in [(3, true, 0), (1, false, 1)] {
        let (mut world, nodes) = fleet(3);
        world.api_up = false;
        let of = |concurrency| json!({"nodeNames": nodes, "concurrency": concurrency});
        world.give(with_spec(of(3), json!({}), 1, None));
        world.give(with_spec(of(concurrency), json!({"suspend": suspend}), 2, None));
        world.api_up = true;
        world.pass(5_000);
        world.pass(5_000);
        assert_eq!(
            (world.taken().len(), world.status().summary.in_progress),
            (usize::try_from(left).unwrap(), left)
        );
    }
}

#[test]
fn a_repeated_unrecorded_start_happens_once() {
    let (mut world, nodes) = fleet(1);
    world.answers = false;
    for (suspend, generation) in [(false, 1), (true, 2), (false, 3)] {
        world.give(with_spec(json!({"nodeNames": nodes}), json!({"suspend": suspend}), generation, None));
        world.pass(1_000);
    }
    world.answers = true;
    world.answer();
    world.pass(5_000);
    assert_eq!(world.taken(), ["n0"]);
}

#[test]
fn a_repeated_start_waits_for_its_own_record() {
    // A start that is put back keeps its slot and its place in the wave until that is recorded: those of n1 are free.
    let (mut world, nodes) = fleet(2);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "n1".into(), session: SessionId(2) }));
    let spec = |suspend, generation| {
        let template = json!({"nodeNames": nodes, "concurrency": 2});
        with_spec(template, json!({"suspend": suspend}), generation, None)
    };
    world.give(spec(true, 1));
    world.pass(1_000);
    // The start cannot be written before it is put back; then it is taken up again while that is being written.
    world.api_up = false;
    world.give(spec(false, 2));
    world.give(spec(true, 3));
    (world.api_up, world.answers) = (true, false);
    world.pass(10_000);
    assert_eq!(world.phase_of("n0"), NodePhase::Pending);
    world.give(spec(false, 4));
    for written in std::mem::take(&mut world.unanswered) {
        world.give(written);
    }
    assert_eq!((world.taken().len(), world.phase_of("n0")), (0, NodePhase::Pending));
    world.pass(10_000);
    assert_eq!(world.taken().len(), 0, "the API server has not answered");
    world.answer();
    assert_eq!((world.taken(), world.phase_of("n0")), (vec!["n0".to_owned()], NodePhase::InProgress));
}

#[test]
fn a_working_nodes_reconnection_writes_nothing() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    world.pass(60_000);
    let writes = world.writes;
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session: SessionId(1) }));
    world.pass(60_000);
    world.up("a", &[(UID, 1, OpenPhase::Running)]);
    world.pass(60_000);
    assert_eq!(world.writes, writes);
}
