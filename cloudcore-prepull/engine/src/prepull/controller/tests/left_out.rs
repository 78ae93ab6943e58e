//! Names without a Node, and how a status shows them and other failures.

use prepull_api::crd::status::FailureCount;
use prepull_api::failure::FailureCode;

use super::*;

fn names(names: &[&str]) -> serde_json::Value {
    json!({"nodeNames": names, "concurrency": 10, "images": ["nginx:1.25"]})
}

fn missing(world: &World) -> Vec<&str> {
    let nodes = world.status().node_status.iter();
    nodes.filter(|node| node.code == Some(FailureCode::NodeNotFound)).map(|n| n.node_name.as_str()).collect()
}

#[test]
fn a_missing_name_counts_as_failed() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(job(names(&["a", "ghost"]), 1, None));
    world.pass(1000);
    // One of two is more than the tolerance allows: nothing is pulled for nothing.
    assert_eq!(world.dispatched, []);
    assert_eq!(missing(&world), ["ghost"]);
    let status = world.status();
    assert!(status.node_status.iter().any(|node| node.reason == "there is no Node of this name"));
    assert_eq!((status.phase, status.summary.failure, status.summary.desired), (JobPhase::Failure, 1, 2));
    let reason = "1 of 2 nodes failed, more than failureTolerate 0.1 allows; 1 node not started \
                  (NodeNotFound 1)";
    assert_eq!(status.reason, reason);
    let count = FailureCount { code: FailureCode::NodeNotFound, nodes: 1 };
    assert_eq!(status.failures_by_code, [count]);
    assert!(world.events.contains(&"NodesMissing") && !world.events.contains(&"NodesSkipped"));
}

#[test]
fn an_allowed_missing_name_is_skipped() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(with_spec(names(&["a", "ghost"]), json!({"allowMissingNodes": true}), 1, None));
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(1000);
    let status = world.status();
    assert_eq!((status.phase, status.summary.skipped, status.summary.desired), (JobPhase::Completed, 1, 1));
    assert_eq!(status.skipped_nodes[0].node_name, "ghost");
    assert!(world.events.contains(&"NodesSkipped") && !world.events.contains(&"NodesMissing"));
}

#[test]
fn a_missing_node_belongs_to_no_wave() {
    let (mut world, mut nodes) = course::fleet(19);
    nodes.insert(0, "ghost".to_owned());
    let spec = json!({"rollout": {"steps": ["1", "100%"]}, "retry": 3});
    world.give(with_spec(course::template(&nodes), spec, 1, None));
    assert_eq!(world.taken(), ["n0"]);
    world.all_end(&["n0".to_owned()], TaskOutcome::Succeeded);
    let rest = world.taken();
    assert_eq!(rest.len(), 18);
    world.all_end(&rest, TaskOutcome::Succeeded);
    let status = world.status();
    assert_eq!((status.phase, status.summary.failure, status.retry), (JobPhase::Completed, 1, 0));
    assert_eq!(status.reason, "1 of 20 nodes failed, within failureTolerate 0.3 (NodeNotFound 1)");
    assert!(!world.events.contains(&"Retrying"));
}

#[test]
fn missing_nodes_use_up_no_round() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(with_spec(names(&["a", "ghost"]), json!({"retry": 3}), 1, None));
    world.pass(1000);
    let status = world.status();
    assert_eq!((status.phase, status.retry, world.dispatched.len()), (JobPhase::Failure, 0, 0));
    assert!(!world.events.contains(&"Retrying"));
}

#[test]
fn a_missing_node_survives_a_restart() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    let template = |retry: u32| {
        let template =
            json!({"nodeNames": ["a", "ghost"], "failureTolerate": "0.5", "images": ["nginx:1.25"]});
        (template, json!({"retry": retry}))
    };
    let (first, spec) = template(0);
    world.give(with_spec(first, spec, 1, None));
    world.pass(1000);
    let stored = world.status().clone();
    world.boot(&["a"]);
    let (first, spec) = template(0);
    world.give(with_spec(first, spec, 1, Some(&stored)));
    world.up("a", &[(UID, 1, OpenPhase::Running)]);
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(1000);
    assert_eq!((world.status().phase, missing(&world)), (JobPhase::Completed, vec!["ghost"]));
    // A user creates the Node, and asks for a further round.
    world.hear(FleetEvent::Node(edge("ghost")));
    world.up("ghost", &[]);
    world.dispatched.clear();
    let (second, spec) = template(1);
    let stored = world.status().clone();
    world.give(with_spec(second, spec, 2, Some(&stored)));
    world.pass(1000);
    assert_eq!(world.dispatched, ["ghost".into()]);
    world.ends("ghost", TaskOutcome::Succeeded);
    world.pass(1000);
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 2));
}

#[test]
fn finished_is_true_at_either_end() {
    for (outcome, phase, reason) in [
        (TaskOutcome::Succeeded, JobPhase::Completed, "Completed"),
        (TaskOutcome::Failed, JobPhase::Failure, "ToleranceExceeded"),
    ] {
        let mut world = World::new(&["a"]);
        world.up("a", &[]);
        world.give(job(names(&["a"]), 1, None));
        world.pass(1000);
        assert_eq!(world.condition("Finished"), ("False", "NodesPulling"));
        world.ends("a", outcome);
        world.pass(1000);
        assert_eq!(world.status().phase, phase);
        assert_eq!(world.condition("Finished"), ("True", reason));
    }
}

#[test]
fn a_running_job_reports_its_failure_causes() {
    let mut world = World::new(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        world.up(node, &[]);
    }
    let template = json!({"nodeNames": ["a", "b", "c"], "failureTolerate": "1", "concurrency": 3,
        "images": ["nginx:1.25"]});
    world.give(job(template, 1, None));
    world.ends("a", TaskOutcome::Failed);
    world.ends("b", TaskOutcome::DeadlineExceeded);
    world.pass(3000);
    assert_eq!(world.status().reason, "2 nodes failed so far (Timeout 1, Other 1)");
}

#[test]
fn the_event_of_a_failed_node_says_why() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.ends("a", TaskOutcome::Failed);
    assert_eq!(world.notes["NodeFailed"].1, "a: Other: nginx:1.25: wrong password");
}

#[test]
fn a_following_job_adopts_missing_nodes() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    let mut template = names(&["a", "ghost"]);
    template["failureTolerate"] = json!("0.5");
    world.give(with_spec(template, json!({"followNodes": true}), 1, None));
    world.pass(1000);
    assert_eq!(missing(&world), ["ghost"]);
    world.hear(FleetEvent::Node(edge("ghost")));
    world.up("ghost", &[]);
    world.pass(1000);
    assert_eq!(world.dispatched, ["a".into(), "ghost".into()]);
    for node in ["a", "ghost"] {
        world.ends(node, TaskOutcome::Succeeded);
    }
    world.pass(1000);
    let status = world.status();
    assert_eq!((status.phase, status.summary.successful), (JobPhase::Completed, 2));
    assert_eq!((missing(&world), status.failures_by_code.len()), (vec![], 0));
}

fn not_ready(name: &str) -> NodeView {
    NodeView { ready: false, ..edge(name) }
}

#[test]
fn a_job_waits_for_a_ready_node() {
    for leader_changes in [false, true] {
        let mut world = World::new(&[]);
        world.hear(FleetEvent::Nodes(vec![not_ready("a"), not_ready("b")]));
        let wanted = |world: &World| job(names(&["a", "b"]), 1, world.stored.as_ref());
        let object = wanted(&world);
        world.give(object);
        world.pass(1000);
        let status = world.status();
        assert_eq!(
            (status.phase, status.summary.skipped, status.start_time.is_some()),
            (JobPhase::Init, 2, false)
        );
        assert!(status.reason.contains("a is NotReady"), "{}", status.reason);
        assert_eq!((world.condition("Valid").0, world.condition("Finished").0), ("True", "False"));
        assert_eq!(world.events, ["NoEligibleNodes"]);
        if leader_changes {
            world.controller = Controller::default();
            world.hear(FleetEvent::Nodes(vec![not_ready("a"), not_ready("b")]));
            let object = wanted(&world);
            world.give(object);
        }
        world.up("a", &[]);
        // Another node, or one that stays as it was, is nothing to it.
        for node in [edge("other"), not_ready("b")] {
            world.controller.note_fleet_event(FleetEvent::Node(node), world.now);
            assert_eq!(world.controller.agenda.next(), None, "it isn't even looked at");
        }
        world.pass(1000);
        assert_eq!((world.status().phase, world.dispatched.len()), (JobPhase::Init, 0));
        world.hear(FleetEvent::Node(edge("a")));
        assert_eq!(world.dispatched, ["a".into()]);
        world.ends("a", TaskOutcome::Succeeded);
        world.pass(1000);
        let status = world.status();
        assert_eq!(
            (status.phase, status.summary.desired, status.summary.skipped),
            (JobPhase::Completed, 1, 1)
        );
    }
}

#[test]
fn a_job_waits_for_no_deleted_node() {
    for is_deleted in [false, true] {
        let mut world = World::new(&[]);
        world.hear(FleetEvent::Nodes(vec![not_ready("a"), not_ready("b")]));
        world.give(job(names(&["a", "b"]), 1, None));
        world.hear(FleetEvent::NodeGone("b".into()));
        world.pass(1000);
        assert_eq!(world.status().phase, JobPhase::Init, "it waits for the other");
        let mut cloud = not_ready("a");
        cloud.labels.clear();
        world.hear(if is_deleted { FleetEvent::NodeGone("a".into()) } else { FleetEvent::Node(cloud) });
        world.pass(1000);
        let reason = if is_deleted { "a is not found" } else { "a is not an edge node" };
        assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Failure, "False"));
        assert!(world.status().reason.contains(reason), "{}", world.status().reason);
    }
}

#[test]
fn joined_nodes_are_not_skipped() {
    let mut world = World::new(&["a"]);
    world.hear(FleetEvent::Node(not_ready("b")));
    let spec = |status| with_spec(json!({"labelSelector": {}}), json!({"followNodes": true}), 1, status);
    world.give(spec(None));
    world.pass(1000);
    assert_eq!(world.status().summary.skipped, 1);
    let stored = world.status().clone();
    world.restart(&["a".to_owned(), "b".to_owned()]);
    world.give(spec(Some(&stored)));
    world.pass(1000);
    let status = world.status();
    assert_eq!((status.summary.desired, status.summary.skipped, status.skipped_nodes.len()), (2, 0, 0));
}

#[test]
fn nodes_that_become_ready_together_begin_together() {
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Nodes(vec![not_ready("a"), not_ready("b")]));
    world.give(job(names(&["a", "b"]), 1, None));
    world.hear(FleetEvent::Nodes(vec![edge("a"), edge("b")]));
    world.pass(1000);
    assert_eq!((world.status().phase, world.status().summary.desired), (JobPhase::InProgress, 2));
}

#[test]
fn a_spec_matching_no_node_is_refused() {
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Node(not_ready("a")));
    let mut cloud = not_ready("cloud");
    cloud.labels.clear();
    world.hear(FleetEvent::Node(cloud));
    for (generation, nodes) in (1..).zip([["ghost"], ["cloud"]]) {
        world.give(job(names(&nodes), generation, world.stored.as_ref()));
        world.pass(1000);
        assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Failure, "False"));
    }
    // An edit may make it one that waits, and the other way round.
    world.give(job(names(&["a"]), 3, world.stored.as_ref()));
    world.pass(1000);
    assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Init, "True"));
    world.give(job(names(&["ghost"]), 4, world.stored.as_ref()));
    world.hear(FleetEvent::Node(edge("a")));
    world.pass(1000);
    assert_eq!((world.status().phase, world.dispatched.len()), (JobPhase::Failure, 0));
}

#[test]
fn a_waiting_job_can_be_cancelled() {
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Node(not_ready("a")));
    world.give(job(names(&["a", "ghost"]), 1, None));
    world.pass(1000);
    let cancelled = with_spec(names(&["a", "ghost"]), json!({"cancel": true}), 2, world.stored.as_ref());
    world.give(cancelled);
    world.hear(FleetEvent::Node(edge("a")));
    world.up("a", &[]);
    world.pass(1000);
    assert_eq!((world.status().phase, world.condition("Failed")), (JobPhase::Failure, ("True", "Cancelled")));
    assert_eq!((world.dispatched.len(), world.status().summary.skipped), (0, 2));
}

#[test]
fn a_named_node_is_considered_on_appearing() {
    let mut world = World::new(&["a"]);
    for node in ["a", "ghost"] {
        world.up(node, &[]);
    }
    let mut template = names(&["a", "ghost"]);
    template["failureTolerate"] = json!("0.5");
    world.give(with_spec(template, json!({"followNodes": true}), 1, None));
    world.pass(1000);
    world.dispatched.clear();
    // Its edge is connected already, so nothing else happens to the job.
    world.hear(FleetEvent::Node(edge("ghost")));
    assert_eq!(world.dispatched, ["ghost".into()]);
}
