//! `spec.cancel`: its effect on running and waiting nodes, and that it is final.

use prepull_api::failure::FailureCode;

use super::course::fleet;
use super::*;

/// The job as the API server has it, one node at a time.
fn wanted(world: &World, nodes: &[String], spec: serde_json::Value, generation: i64) -> Input {
    let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "0.3"});
    with_spec(template, spec, generation, world.stored.as_ref())
}

fn is_cancelled(world: &World) -> bool {
    let over = world.status().phase == JobPhase::Failure && world.status().completion_time.is_some();
    over && world.condition("Failed") == ("True", "Cancelled")
}

#[test]
fn a_suspended_job_starts_nothing() {
    let (mut world, nodes) = fleet(3);
    world.give(wanted(&world, &nodes, json!({"suspend": true}), 1));
    world.pass(1_000);
    world.events.clear();
    world.give(wanted(&world, &nodes, json!({"suspend": true, "cancel": true}), 2));
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), world.cancels(), &world.events[..]), (vec![], vec![], &["Cancelled"][..]));
    assert_eq!(world.condition("Finished"), ("True", "Cancelled"));
    assert_eq!(world.status().reason, "cancelled; 0 nodes did not end, 3 not started");
    for node in &nodes {
        let record = world.record(node);
        let expected = (NodePhase::Pending, "not started: the job was cancelled");
        assert_eq!((record.phase, record.reason.as_str()), expected);
    }
}

#[test]
fn a_running_job_stops_its_nodes() {
    let (mut world, nodes) = fleet(3);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!(world.taken(), ["n0", "n1"]);
    world.events.clear();
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 2));
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), world.cancels(), &world.events[..]), (vec![], vec!["n1"], &["Cancelled"][..]));
    let stopped = world.record("n1");
    assert_eq!((stopped.phase, stopped.code), (NodePhase::Unknown, Some(FailureCode::Cancelled)));
    assert_eq!(stopped.reason, "stopped: the job was cancelled");
    assert_eq!([world.phase_of("n0"), world.phase_of("n2")], [NodePhase::Successful, NodePhase::Pending]);
    // The node's answer changes nothing but the states of its images.
    world.ends("n1", TaskOutcome::Cancelled);
    world.pass(1_000);
    assert_eq!((world.phase_of("n1"), &world.events[..]), (NodePhase::Unknown, &["Cancelled"][..]));
}

#[test]
fn an_unrecorded_start_is_withdrawn() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({"suspend": true}), 1));
    world.pass(1_000);
    world.answers = false;
    world.give(wanted(&world, &nodes, json!({}), 2));
    world.pass(1_000);
    assert_eq!(world.reports[&0].node_status[0].phase, NodePhase::InProgress);
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 3));
    world.answer();
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), world.cancels()), (vec![], vec![]));
    assert_eq!(world.phase_of("n0"), NodePhase::Pending);
}

#[test]
fn a_cancel_is_for_good() {
    let (mut world, nodes) = fleet(3);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.ends("n0", TaskOutcome::Succeeded);
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 2));
    world.pass(1_000);
    world.taken();
    let asked = [
        (json!({}), "spec.cancel cannot be taken back"),
        (json!({"retry": 1}), "spec.cancel cannot be taken back"),
        (json!({"cancel": true, "retry": 1}), "spec.cancel is true"),
        (json!({"cancel": true, "recheck": 1}), "spec.cancel is true"),
    ];
    for (generation, (spec, refusal)) in (3..).zip(asked) {
        // Also by the next leader, and the same leader again.
        for restarts in [false, false, true] {
            if restarts {
                world.restart(&nodes);
            }
            world.give(wanted(&world, &nodes, spec.clone(), generation));
            for node in &nodes {
                world.up(node, &[]);
            }
            world.pass(1_000);
            assert!(is_cancelled(&world), "{spec}: {:?}", world.status());
            assert_eq!((world.taken(), world.condition("Valid").0), (vec![], "False"), "{spec}");
            let valid = world.status().conditions.iter().find(|known| known.type_ == "Valid").unwrap();
            assert!(valid.message.starts_with(refusal), "{spec}: {}", valid.message);
            let reasons = world.status().node_status[1..].iter().map(|node| node.reason.as_str());
            assert_eq!(reasons.collect::<Vec<_>>(), ["not started: the job was cancelled"; 2], "{spec}");
        }
    }
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 9));
    world.pass(1_000);
    assert_eq!(world.condition("Valid").0, "True");
}

#[test]
fn the_next_leader_cancels_what_runs() {
    let (mut world, nodes) = fleet(2);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.pass(1_000);
    world.restart(&nodes);
    world.up("n0", &[]);
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 2));
    world.up("n1", &[]);
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), world.cancels()), (vec![], vec!["n0"]));
}

#[test]
fn a_refused_edit_cancels_all_the_same() {
    for spec in [json!({"cancel": true, "retry": -1}), json!({"cancel": true, "verify": {"keys": []}})] {
        let (mut world, nodes) = fleet(2);
        world.give(wanted(&world, &nodes, json!({}), 1));
        world.give(wanted(&world, &nodes, spec.clone(), 2));
        world.pass(1_000);
        assert!(is_cancelled(&world), "{spec}: {:?}", world.status());
        assert_eq!((world.cancels(), world.condition("Valid").0), (vec!["n0"], "False"), "{spec}");
    }
}

#[test]
fn a_held_job_can_be_cancelled() {
    let (mut world, nodes) = fleet(2);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.pass(1_000);
    // What it carries out is not known, and the spec is another one.
    let stored = world.stored.as_mut().unwrap();
    stored.started_spec.clear();
    world.restart(&nodes);
    let template = json!({"nodeNames": nodes, "images": ["other:1"]});
    let held = with_spec(template.clone(), json!({}), 2, world.stored.as_ref());
    world.give(held);
    world.pass(1_000);
    assert_eq!(world.status().phase, JobPhase::InProgress);
    let cancelled = with_spec(template, json!({"cancel": true}), 3, world.stored.as_ref());
    world.give(cancelled);
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
}

#[test]
fn a_job_created_cancelled_starts_nothing() {
    let (mut world, nodes) = fleet(2);
    world.give(wanted(&world, &nodes, json!({"cancel": true, "ttlSecondsAfterFinished": 5}), 1));
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), &world.events[..]), (vec![], &["Cancelled"][..]));
    world.pass(6_000);
    assert_eq!(world.deleted, 1);
}

#[test]
fn an_ended_job_keeps_its_phase() {
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.give(wanted(&world, &nodes, json!({"cancel": true}), 2));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Completed, "True"));
    world.give(wanted(&world, &nodes, json!({"cancel": true, "recheck": 1}), 3));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Completed, "False"));
    assert_eq!(world.condition("Finished").0, "True", "what was asked for first has been done");
}

#[test]
fn a_cancelled_recheck_leaves_the_result() {
    let (mut world, nodes) = fleet(2);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.give(wanted(&world, &nodes, json!({"recheck": 1, "cancel": true}), 3));
    world.pass(1_000);
    let status = world.status();
    assert_eq!((status.phase, status.recheck.as_ref().unwrap().not_checked), (JobPhase::Completed, 2));
    let recheck = world.record("n0").recheck.clone().unwrap();
    assert_eq!(recheck.not_checked_reason, "stopped: the job was cancelled");
    assert_eq!(world.cancels(), nodes);
}

#[test]
fn a_cancelled_recheck_leaves_a_failure() {
    let (mut world, nodes) = fleet(2);
    let given = |recheck: u32, cancel: bool, generation| {
        let template = json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "0.5"});
        let spec = json!({"activeDeadlineSeconds": 60, "recheck": recheck, "cancel": cancel});
        with_spec(template, spec, generation, None)
    };
    world.give(given(0, false, 1));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(61_000);
    world.pass(1_000);
    assert_eq!(world.condition("Failed"), ("True", "DeadlineExceeded"));
    let reason = world.status().reason.clone();
    world.give(given(1, false, 2));
    world.pass(1_000);
    assert_eq!(world.status().phase, JobPhase::InProgress);
    world.give(given(1, true, 3));
    world.pass(1_000);
    assert_eq!(world.condition("Failed"), ("True", "DeadlineExceeded"));
    assert_eq!((world.status().phase, &world.status().reason), (JobPhase::Failure, &reason));
}

#[test]
fn no_further_round_follows_a_cancel() {
    let (mut world, nodes) = fleet(2);
    world.give(wanted(&world, &nodes, json!({"retry": 3}), 1));
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!(world.status().retry, 1);
    world.give(wanted(&world, &nodes, json!({"retry": 3, "cancel": true}), 2));
    world.pass(1_000);
    assert!(is_cancelled(&world), "{:?}", world.status());
    assert_eq!((world.taken(), world.status().retry), (vec!["n0".to_owned(), "n0".to_owned()], 1));
}
