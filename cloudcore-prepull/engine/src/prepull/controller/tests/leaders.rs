//! A job that another leader goes on with, by its status and its reports.

use super::course::fleet;
use super::rechecks::{answer, found, gone, pulled, there, wanted};
use super::*;

#[test]
fn the_active_deadline_outlives_a_leader() {
    let (mut world, nodes) = fleet(1);
    let (template, spec) = (json!({"nodeNames": nodes}), json!({"activeDeadlineSeconds": 60}));
    world.give(with_spec(template.clone(), spec.clone(), 1, None));
    world.pass(40_000);
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template, spec, 1, Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.pass(19_000);
    assert_eq!(world.status().phase, JobPhase::InProgress);
    (0..2).for_each(|_| world.pass(1_000));
    assert_eq!(world.condition("Failed").1, "DeadlineExceeded");
}

#[test]
fn an_ended_jobs_status_outlives_a_leader() {
    let (mut world, nodes) = pulled(2);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.says("n0", answer(2, there()));
    world.says("n1", answer(2, gone()));
    world.pass(1_000);
    let ended = world.status().clone();
    assert!(!ended.reason.is_empty());
    world.give(wanted(&world, &nodes, json!({"recheck": 1, "retry": -1}), 3));
    world.pass(1_000);
    world.restart(&nodes);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 4));
    world.pass(1_000);
    let after = world.status();
    assert_eq!((&after.reason, &after.recheck), (&ended.reason, &ended.recheck));
    assert_eq!(after.observed_generation, Some(4));
}

#[test]
fn an_unwritten_recheck_is_not_retried() {
    let (mut world, nodes) = pulled(1);
    let before = world.stored.clone();
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.says("n0", answer(2, gone()));
    world.pass(1_000);
    // The leader dies before it has written so in the status, and the re-check is taken back.
    world.stored = before;
    world.restart(&nodes);
    world.give(wanted(&world, &nodes, json!({}), 3));
    world.up("n0", &[]);
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().retry, found(&world)), (vec![], 0, (0, 1, 0)));
}

#[test]
fn an_unwritten_round_ends_the_recheck() {
    let (mut world, nodes) = pulled(1);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    let checking = world.stored.clone();
    world.says("n0", answer(2, gone()));
    world.pass(1_000);
    world.give(wanted(&world, &nodes, json!({"recheck": 1, "retry": 1}), 3));
    world.pass(1_000);
    world.stored = checking;
    world.restart(&nodes);
    world.give(wanted(&world, &nodes, json!({"recheck": 1, "retry": 1}), 3));
    world.up("n0", &[(UID, 3, OpenPhase::Running)]);
    world.pass(1_000);
    let status = world.status();
    assert_eq!((status.phase, status.retry, status.reason.as_str()), (JobPhase::InProgress, 1, ""));
    assert!(status.recheck.as_ref().unwrap().completion_time.is_some());
}

#[test]
fn a_leader_that_ends_a_job_reports_no_recheck() {
    let (mut world, nodes) = fleet(2);
    let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "0"});
    world.give(job(template.clone(), 1, None));
    world.pass(1_000);
    let (stored, waiting) = (world.status().clone(), world.record("n1").clone());
    world.ends("n0", TaskOutcome::Failed);
    // The leader dies before it has ended the job.
    world.reports.get_mut(&0).unwrap().node_status[1] = waiting;
    world.restart(&nodes);
    world.give(job(template, 1, Some(&stored)));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.reports[&0].rechecking), (JobPhase::Failure, false));
}

#[test]
fn a_held_jobs_pause_costs_no_time() {
    let (mut world, nodes) = fleet(2);
    let of = |pause: bool, image: &str, generation, stored: Option<&ImagePrePullJobStatus>| {
        let template =
            json!({"nodeNames": nodes, "concurrency": 1, "timeoutSeconds": 300, "images": [image]});
        with_spec(template, json!({"pause": pause}), generation, stored)
    };
    world.give(of(false, "app:1", 1, None));
    world.pass(100_000);
    world.give(of(true, "app:1", 2, None));
    world.pass(1_000_000);
    let stored = ImagePrePullJobStatus { started_spec: String::new(), ..world.status().clone() };
    world.restart(&nodes);
    world.give(of(true, "app:2", 3, Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.pass(1_000);
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
    world.give(of(false, "app:1", 4, None));
    world.pass(1_000);
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
}
