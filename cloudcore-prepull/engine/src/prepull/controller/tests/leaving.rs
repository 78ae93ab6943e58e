//! Nodes that are deleted before they have started.

use prepull_api::failure::FailureCode;

use super::course::fleet;
use super::*;

fn summary(world: &World) -> (u32, u32, u32, u32) {
    let summary = &world.status().summary;
    (summary.desired, summary.successful, summary.failure + summary.unknown, summary.skipped)
}

#[test]
fn a_node_deleted_before_starting_is_skipped() {
    let select = json!({"labelSelector": {}, "concurrency": 10, "failureTolerate": "0.1"});
    for follow in [true, false] {
        let (mut world, nodes) = fleet(10);
        let spec = json!({"rollout": {"steps": ["2", "100%"]}, "followNodes": follow});
        world.give(with_spec(select.clone(), spec.clone(), 1, None));
        let first = world.taken();
        assert_eq!(first, ["n0", "n1"]);
        world.hear(FleetEvent::NodeGone("n7".into()));
        world.pass(1_000);
        assert_eq!(summary(&world), (9, 0, 0, 1));
        assert_eq!(world.status().skipped_nodes[0].node_name, "n7");
        assert!(world.status().skipped_nodes[0].reason.contains("deleted"));
        let recorded = world.reports[&0].node_status.len();
        assert_eq!((recorded, world.reports[&0].summary.desired), (9, 9));
        world.all_end(&first, TaskOutcome::Succeeded);
        world.pass(1_000);
        assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 7));
        // It is there again, and joins where nodes may.
        world.hear(FleetEvent::Node(edge("n7")));
        world.pass(1_000);
        world.pass(1_000);
        let joined: &[&str] = if follow { &["n7"] } else { &[] };
        assert_eq!(world.taken(), joined);
        world.all_end(&nodes[2..], TaskOutcome::Succeeded);
        let expected = if follow { (10, 10, 0, 0) } else { (9, 9, 0, 1) };
        assert_eq!((world.status().phase, summary(&world)), (JobPhase::Completed, expected));
        world.hear(FleetEvent::Node(edge("late")));
        world.pass(1_000);
        assert_eq!(summary(&world), expected, "none joins a job that is over");
    }
}

#[test]
fn a_node_deleted_unseen_is_skipped_once() {
    let (mut world, nodes) = fleet(3);
    let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "0"});
    world.give(job(template.clone(), 1, None));
    world.pass(1_000);
    let before = (world.status().clone(), world.reports.clone());
    world.hear(FleetEvent::NodeGone("n2".into()));
    world.pass(2_000);
    assert_eq!(summary(&world), (2, 0, 0, 1));
    // The status was written, the report was not; or neither was.
    for stored in [world.status().clone(), before.0] {
        world.reports.clone_from(&before.1);
        world.restart(&nodes[..2]);
        world.give(job(template.clone(), 1, Some(&stored)));
        world.up("n0", &[(UID, 1, OpenPhase::Running)]);
        world.pass(2_000);
        assert_eq!((summary(&world), world.status().skipped_nodes.len()), ((2, 0, 0, 1), 1));
        assert_eq!(world.reports[&0].node_status.len(), 2);
    }
}

#[test]
fn deleting_waiting_nodes_opens_no_gate() {
    let (mut world, nodes) = fleet(20);
    let template = json!({"nodeNames": nodes, "concurrency": 20, "failureTolerate": "0.5"});
    let spec = json!({"rollout": {"steps": ["20%", "100%"]}});
    world.give(with_spec(template.clone(), spec.clone(), 1, None));
    assert_eq!(world.taken().len(), 4);
    for node in &nodes[10..] {
        world.hear(FleetEvent::NodeGone(node.as_str().into()));
    }
    // Two of the four that have begun may fail, although the wave has become one of two nodes.
    world.ends("n0", TaskOutcome::Failed);
    world.ends("n1", TaskOutcome::Failed);
    world.pass(2_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 0));
    let stored = world.status().clone();
    world.restart(&nodes[..10]);
    world.give(with_spec(template, spec, 1, Some(&stored)));
    for node in &nodes[..2] {
        world.up(node, &[]);
    }
    for node in &nodes[2..4] {
        world.up(node, &[(UID, 1, OpenPhase::Running)]);
    }
    for node in &nodes[4..10] {
        world.up(node, &[]);
    }
    world.pass(2_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 0));
    world.all_end(&nodes[2..4], TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!(world.taken().len(), 6);
}

#[test]
fn a_job_without_remaining_nodes_fails() {
    let mut world = World::new(&["a"]);
    world.give(on(&["a"]));
    world.hear(FleetEvent::NodeGone("a".into()));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Failed").1), (JobPhase::Failure, "NotStarted"));
    assert!(world.status().reason.contains("deleted"), "{}", world.status().reason);
    let stored = world.status().clone();
    world.restart(&[]);
    world.give(job(json!({"nodeNames": ["a"], "concurrency": 2, "failureTolerate": "0"}), 1, Some(&stored)));
    world.pass(5_000);
    assert_eq!(world.status(), &stored);
}

#[test]
fn a_node_deleted_before_its_task_goes_out_leaves() {
    let withheld = DispatchOutcome::Withheld { secrets: vec!["s/t".to_owned()], reason: "no".to_owned() };
    let outcomes = [DispatchOutcome::Offline, DispatchOutcome::Postponed("no answer".to_owned()), withheld];
    for (outcome, others) in outcomes.into_iter().flat_map(|outcome| [(outcome.clone(), 0), (outcome, 1)]) {
        let nodes = &["a", "b"][..=others];
        let mut world = World::new(nodes);
        world.up("a", &[]);
        world.api_up = false;
        world.give(job(json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "0"}), 1, None));
        world.hear(FleetEvent::NodeGone("a".into()));
        (world.next_outcome, world.api_up) = (Some(outcome), true);
        (0..6).for_each(|_| world.pass(1_000));
        let session = SessionId(world.sessions);
        world.hear(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session }));
        if others == 1 {
            world.up("b", &[]);
            (0..3).for_each(|_| world.pass(1_000));
            world.ends("b", TaskOutcome::Succeeded);
        }
        (0..6).for_each(|_| world.pass(10_000));
        assert_eq!(world.status().skipped_nodes[0].node_name, "a");
        let end = if others == 1 { JobPhase::Completed } else { JobPhase::Failure };
        assert_eq!((world.status().phase, world.dispatched.len()), (end, nodes.len()));
    }
}

#[test]
fn a_suspended_start_without_its_node_leaves() {
    for returns in [false, true] {
        let mut world = World::new(&["a"]);
        world.up("a", &[]);
        world.api_up = false;
        let template = json!({"nodeNames": ["a"], "concurrency": 2, "failureTolerate": "0"});
        world.give(with_spec(template.clone(), json!({}), 1, None));
        world.hear(FleetEvent::NodeGone("a".into()));
        if returns {
            world.hear(FleetEvent::Node(edge("a")));
        }
        world.give(with_spec(template, json!({"suspend": true}), 2, None));
        world.api_up = true;
        (0..6).for_each(|_| world.pass(10_000));
        let end = if returns { JobPhase::InProgress } else { JobPhase::Failure };
        assert_eq!((world.status().phase, world.dispatched.len()), (end, 0));
    }
}

#[test]
fn keys_for_a_deleted_node_begin_nothing() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    (world.withheld, world.asks) = (true, 1);
    world.give(on(&["a"]));
    world.hear(FleetEvent::NodeGone("a".into()));
    let mut failed = result(TaskOutcome::Failed);
    failed.images[0].code = Some(FailureCode::SecretUnusable);
    world.says("a", EdgeMessage::Result(failed));
    world.pass(5_000);
    assert_eq!((world.status().phase, world.phase_of("a")), (JobPhase::Failure, NodePhase::Unknown));
    assert_eq!(world.record("a").code, Some(FailureCode::NodeNotFound));
}
