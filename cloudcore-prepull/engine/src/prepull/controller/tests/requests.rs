//! Edits that ask a job for something, and those that don't.

use super::course::{fleet, template};
use super::rechecks::{answer, found, gone, pulled, there, wanted};
use super::*;

#[test]
fn a_count_lowered_and_raised_begins_nothing() {
    let (mut world, nodes) = pulled(1);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.says("n0", answer(2, there()));
    for (recheck, generation) in [(0, 3), (1, 4)] {
        world.give(wanted(&world, &nodes, json!({"recheck": recheck}), generation));
        world.pass(1_000);
    }
    assert_eq!((world.taken().len(), world.status().phase), (1, JobPhase::Completed));
}

#[test]
fn a_recheck_needs_a_node_to_ask() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Failed);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    assert!(world.status().recheck.is_none() && !world.events.contains(&"Rechecking"));
}

/// Another leader takes over in the middle, with what the API server has.
fn change_leaders(world: &mut World, nodes: &[String], spec: serde_json::Value, generation: i64) {
    world.restart(nodes);
    world.give(wanted(world, nodes, spec, generation));
    for node in nodes {
        world.up(node, &[]);
    }
    world.pass(1_000);
}

#[test]
fn requests_wait_for_a_rechecks_end() {
    let round = json!({"recheck": 1, "retry": 1});
    for (asked, looks) in [(round.clone(), [false].as_slice()), (json!({"recheck": 2}), &[true])] {
        for leaders in [1, 2] {
            let (mut world, nodes) = pulled(2);
            world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
            world.pass(1_000);
            world.give(wanted(&world, &nodes, asked.clone(), 3));
            world.pass(1_000);
            if leaders == 2 {
                change_leaders(&mut world, &nodes, asked.clone(), 3);
            }
            world.says("n0", answer(2, gone()));
            world.taken();
            world.looks.clear();
            world.says("n1", answer(2, there()));
            world.pass(1_000);
            let next = if asked == round { "n0" } else { "n1" };
            assert_eq!((world.taken(), &*world.looks), (vec![next.to_owned()], looks), "{asked}, {leaders}");
            assert_eq!(
                (world.status().phase, world.condition("Complete").0),
                (JobPhase::InProgress, "False")
            );
            world.says(next, answer(3, there()));
            world.pass(1_000);
            assert_eq!((world.taken(), world.status().observed_generation), (vec![], Some(3)));
            assert_eq!(world.status().phase == JobPhase::Completed, asked == round);
        }
    }
}

#[test]
fn a_recheck_follows_its_run() {
    for leaders in [1, 2] {
        let (mut world, nodes) = fleet(1);
        world.give(wanted(&world, &nodes, json!({}), 1));
        world.pass(1_000);
        world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
        world.pass(1_000);
        assert!(world.status().recheck.is_none());
        if leaders == 2 {
            change_leaders(&mut world, &nodes, json!({"recheck": 1}), 2);
        }
        world.looks.clear();
        world.ends("n0", TaskOutcome::Succeeded);
        world.pass(1_000);
        assert_eq!(world.looks, [true], "{leaders}");
        world.says("n0", answer(2, there()));
        world.pass(1_000);
        assert_eq!((world.status().phase, found(&world)), (JobPhase::Completed, (1, 0, 0)));
    }
}

#[test]
fn withdrawn_requests_do_not_begin() {
    for taken_back in [json!({"recheck": 1}), json!({"recheck": 1, "retry": 1, "cancel": true})] {
        let (mut world, nodes) = pulled(1);
        world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
        world.pass(1_000);
        world.taken();
        world.give(wanted(&world, &nodes, json!({"recheck": 1, "retry": 1}), 3));
        world.give(wanted(&world, &nodes, taken_back, 4));
        world.says("n0", answer(2, gone()));
        world.pass(1_000);
        assert_eq!((world.taken(), world.status().retry), (vec![], 0));
        assert!(world.status().completion_time.is_some());
    }
}

#[test]
fn an_ended_job_remembers_its_cancel() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Failed);
    world.give(wanted(&world, &nodes, json!({"cancel": true, "verify": {"keys": []}}), 2));
    world.pass(1_000);
    world.restart(&nodes);
    world.up("n0", &[]);
    world.give(wanted(&world, &nodes, json!({"retry": 1}), 3));
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().retry), (vec![], 0));
    assert!(world.status().reason.contains("spec.cancel cannot be taken back"));
}

#[test]
fn an_ended_job_announces_no_suspension() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.give(wanted(&world, &nodes, json!({"suspend": true}), 2));
    assert_eq!(world.events, ["Started", "Completed"]);
}

#[test]
fn pausing_a_suspended_job_resumes_nothing() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({"suspend": true}), 1));
    world.pass(1_000);
    world.give(wanted(&world, &nodes, json!({"suspend": true, "pause": true}), 2));
    world.pass(1_000);
    assert_eq!(world.status().active_since, world.status().start_time);
}

#[test]
fn nodes_join_when_a_job_begins_to_follow() {
    let mut world = World::new(&["a", "b"]);
    world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("not-ready") }));
    let select = json!({"labelSelector": {}, "concurrency": 10});
    world.give(with_spec(select.clone(), json!({}), 1, None));
    world.hear(FleetEvent::Node(edge("new")));
    world.give(with_spec(select, json!({"followNodes": true}), 2, None));
    world.pass(1_000);
    let summary = &world.status().summary;
    assert_eq!((summary.desired, summary.skipped), (3, 1));
}

#[test]
fn only_the_spec_lets_missing_nodes_leave() {
    for (allowed, counts) in [(false, (3, 1, 0)), (true, (2, 0, 1))] {
        let (mut world, mut nodes) = fleet(2);
        nodes.push("ghost".to_owned());
        let template = json!({"nodeNames": nodes, "concurrency": 3, "failureTolerate": "0.9"});
        world.give(with_spec(template.clone(), json!({}), 1, None));
        world.all_end(&nodes[..2], TaskOutcome::Failed);
        let spec = json!({"retry": 1, "allowMissingNodes": allowed});
        world.give(with_spec(template, spec, 2, None));
        world.pass(1_000);
        let summary = &world.status().summary;
        assert_eq!((summary.desired, summary.failure, summary.skipped), counts);
    }
}

#[test]
fn a_further_run_begins_with_pending_nodes() {
    let (mut world, nodes) = fleet(1);
    world.give(job(template(&nodes), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.answers = false;
    let mut other = template(&nodes);
    other["images"] = json!(["app:2"]);
    world.give(job(other, 2, None));
    world.pass(1_000);
    // The API server has not answered: nothing may have started.
    assert_eq!((world.status().first_attempt, world.status().summary.pending), (Some(2), 1));
}

#[test]
fn layers_without_secrets_are_open_to_all() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    for outcome in [None, Some(TaskOutcome::Succeeded)] {
        if let Some(outcome) = outcome {
            world.ends("a", outcome);
        }
        let (sharing, access) = world.controller.shared_by(&"a".into(), &task(), true).unwrap();
        assert_eq!(
            (sharing.has_succeeded, access),
            (outcome.is_some(), crate::shared::access::LayerAccess::Open)
        );
    }
}
