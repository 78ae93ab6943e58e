//! Jobs that another leader goes on with, where their status, reports, nodes or spec do not say the same.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::remove::RemovalStatus;
use prepull_api::crd::status::{FailureCount, RecheckStatus, RolloutStatus};
use prepull_api::failure::FailureCode;

use super::course::{fleet, template};
use super::rechecks::{answer, found, gone, pulled, there, wanted};
use super::*;

impl World {
    /// Another leader reads the job. Only these nodes are left, and they connect.
    fn lead_again(&mut self, nodes: &[String], input: Input) {
        self.restart(nodes);
        self.give(input);
        for node in nodes {
            self.up(node, &[]);
        }
        self.pass(1_000);
    }
}

#[test]
fn missing_names_fail_although_reports_are_lost() {
    for (allows_missing, expected) in [(false, &["n0", "ghost"][..]), (true, &["n0"])] {
        let (mut world, nodes) = fleet(2);
        let wanted = |stored: Option<&ImagePrePullJobStatus>| {
            let spec = json!({"allowMissingNodes": allows_missing, "suspend": true});
            let named = json!({"nodeNames": ["n0", "n1", "ghost"], "failureTolerate": "1"});
            with_spec(named, spec, 1, stored)
        };
        world.give(wanted(None));
        world.hear(FleetEvent::NodeGone("n1".into()));
        world.pass(5_000);
        // As of a job with more nodes than a status shows.
        let mut stored = world.status().clone();
        stored.node_status.clear();
        world.reports.clear();
        world.lead_again(&nodes[..1], wanted(Some(&stored)));
        world.pass(5_000);
        let records = world.reports[&0].node_status.iter();
        assert_eq!(records.map(|node| node.node_name.as_str()).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn shown_nodes_stay_chosen_although_reports_are_lost() {
    let (mut world, nodes) = fleet(2);
    let wanted = |stored| job(json!({"nodeNames": nodes, "concurrency": 1}), 1, stored);
    world.give(wanted(None));
    world.pass(1_000);
    world.reports.clear();
    let stored = world.status().clone();
    world.restart(&nodes);
    world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("n1") }));
    world.give(wanted(Some(&stored)));
    world.pass(1_000);
    assert_eq!(world.status().summary.desired, 2);
}

#[test]
fn an_unreadable_jobs_reports_come_back_too() {
    let (mut world, nodes) = fleet(1);
    world.give(job(json!({"nodeNames": nodes}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    let stored = ImagePrePullJobStatus { started_spec: String::new(), ..world.status().clone() };
    world.reports.clear();
    world.lead_again(&nodes, Input::Job(Err(unreadable(UID, 2, Some(&stored), "spec.retry: no integer"))));
    world.pass(5_000);
    assert_eq!((world.phase_of("n0"), world.taken()), (NodePhase::Successful, vec![]));
}

#[test]
fn a_held_jobs_lost_nodes_go_on() {
    let (mut world, nodes) = fleet(2);
    let wanted = |generation, stored: Option<&ImagePrePullJobStatus>| {
        job(json!({"nodeNames": nodes, "concurrency": 2}), generation, stored)
    };
    world.give(wanted(1, None));
    world.pass(1_000);
    let stored = ImagePrePullJobStatus { started_spec: String::new(), ..world.status().clone() };
    world.reports.clear();
    world.restart(&nodes);
    world.give(Input::Job(Err(unreadable(UID, 2, Some(&stored), "spec.retry: no integer"))));
    world.sent.clear();
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.says("n0", EdgeMessage::Accepted { task: task() });
    world.up("n1", &[(UID, 1, OpenPhase::Finished)]);
    world.ends("n1", TaskOutcome::Succeeded);
    world.pass(5_000);
    assert_eq!((world.cancels(), world.acks()), (vec![], 0), "which nodes the job has is not known yet");
    world.give(wanted(3, world.stored.clone().as_ref()));
    world.pass(1_000);
    assert_eq!(world.taken(), nodes, "the agents go on, and send their results again");
    world.all_end(&nodes, TaskOutcome::Succeeded);
    let phases = nodes.iter().map(|node| world.phase_of(node)).collect::<Vec<_>>();
    assert_eq!((phases, world.acks()), (vec![NodePhase::Successful; 2], 2));
}

#[test]
fn an_ended_status_outlasts_lost_reports() {
    let (mut world, nodes) = fleet(2);
    let wanted = |ttl: u32, stored| {
        with_spec(template(&nodes), json!({"ttlSecondsAfterFinished": ttl}), i64::from(ttl), stored)
    };
    world.give(wanted(1_000, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    let mut stored = world.status().clone();
    stored.summary.desired = 300;
    stored.failures_by_code = vec![FailureCount { code: FailureCode::Timeout, nodes: 7 }];
    stored.removal = Some(RemovalStatus { removed: 3, ..RemovalStatus::default() });
    stored.rollout = Some(RolloutStatus { step: 2, steps: 2, nodes: 300, paused_until: None });
    let time = Some(Time(world.now));
    let ended = RecheckStatus {
        rounds: 1,
        start_time: time.clone(),
        completion_time: time,
        ..RecheckStatus::default()
    };
    stored.recheck = Some(RecheckStatus { present: 290, ..ended });
    stored.node_status.reverse();
    world.lead_again(&nodes, wanted(1_001, Some(&stored)));
    world.pass(5_000);
    let after = world.status().clone();
    let (started_spec, conditions) = (after.started_spec.clone(), after.conditions.clone());
    let observed_generation = Some(1_001);
    assert_eq!(after, ImagePrePullJobStatus { started_spec, conditions, observed_generation, ..stored });
}

#[test]
fn only_a_following_jobs_pulls_take_up_nodes() {
    let selected = json!({"labelSelector": {}, "concurrency": 10});
    let spec = |follow, recheck| json!({"followNodes": follow, "recheck": recheck});
    for (follow, has_ended, is_readable, desired) in
        [(false, false, true, 1), (true, false, true, 2), (true, false, false, 2), (true, true, true, 1)]
    {
        let (mut world, mut nodes) = fleet(1);
        world.give(with_spec(selected.clone(), spec(follow, 0), 1, None));
        world.pass(1_000);
        if has_ended {
            world.all_end(&nodes, TaskOutcome::Succeeded);
        }
        let stored = world.status().clone();
        nodes.push("new".to_owned());
        let edited = if is_readable {
            with_spec(selected.clone(), spec(follow, u32::from(has_ended)), 2, Some(&stored))
        } else {
            Input::Job(Err(unreadable(UID, 2, Some(&stored), "spec.retry: no integer")))
        };
        world.lead_again(&nodes, edited);
        let status = world.status();
        assert_eq!(
            (status.phase, status.summary.desired),
            (JobPhase::InProgress, desired),
            "{follow} {has_ended} {is_readable}"
        );
    }
}

#[test]
fn a_round_known_from_reports_restarts_its_waves() {
    let (mut world, nodes) = fleet(4);
    let wanted = |stored| {
        let spec = json!({"rollout": {"steps": ["1", "100%"]}, "retry": 1});
        with_spec(json!({"nodeNames": nodes, "concurrency": 4, "failureTolerate": "1"}), spec, 1, stored)
    };
    world.give(wanted(None));
    world.pass(1_000);
    world.all_end(&nodes[..1], TaskOutcome::Failed);
    let stored = world.status().clone();
    assert_eq!((stored.rollout.as_ref().unwrap().step, stored.retry), (2, 0));
    world.all_end(&nodes[1..], TaskOutcome::Failed);
    assert_eq!((world.status().retry, world.reports[&0].retry), (1, Some(1)));
    // As if n0 had not started again when its leader died.
    let record = &mut world.reports.get_mut(&0).unwrap().node_status[0];
    (record.phase, record.start_time) = (NodePhase::Pending, None);
    world.lead_again(&nodes, wanted(Some(&stored)));
    assert_eq!((world.taken(), world.status().retry), (vec!["n0".to_owned()], 1));
}

#[test]
fn a_report_that_is_behind_joins_its_round() {
    let (mut world, nodes) = fleet(2);
    let wanted = |stored| {
        let named = json!({"nodeNames": ["n0", "n1", "ghost"], "concurrency": 2, "failureTolerate": "1"});
        with_spec(named, json!({"retry": 1}), 1, stored)
    };
    world.give(wanted(None));
    world.ends("n1", TaskOutcome::Failed);
    world.pass(1_000);
    let before = world.reports.clone();
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    let stored = world.status().clone();
    assert_eq!((stored.retry, before[&0].retry), (1, Some(0)));
    world.reports = before;
    world.lead_again(&nodes[..1], wanted(Some(&stored)));
    // The Node of n1 is gone, and that of ghost has never been.
    let phases = ["n0", "n1", "ghost"].map(|node| world.phase_of(node));
    assert_eq!(phases, [NodePhase::InProgress, NodePhase::Unknown, NodePhase::Failure]);
}

#[test]
fn an_ended_job_is_not_written_again() {
    let (mut world, nodes) = fleet(1);
    let wanted = |stored| {
        with_spec(json!({"nodeNames": ["n0", "ghost"]}), json!({"allowMissingNodes": true}), 1, stored)
    };
    world.give(wanted(None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    let (stored, writes) = (world.status().clone(), world.writes);
    assert_eq!(stored.summary.skipped, 1);
    world.lead_again(&nodes, wanted(Some(&stored)));
    world.pass(5_000);
    assert_eq!(world.writes, writes);
}

#[test]
fn a_refused_edit_is_announced_once() {
    let (mut world, nodes) = fleet(1);
    let wanted = |image, generation, stored: Option<&ImagePrePullJobStatus>| {
        job(json!({"nodeNames": nodes, "images": [image]}), generation, stored)
    };
    world.give(wanted("app:1", 1, None));
    world.pass(1_000);
    for _leader in 0..2 {
        let stored = world.status().clone();
        world.lead_again(&nodes, wanted("app:2", 2, Some(&stored)));
        world.pass(5_000);
        assert_eq!(world.events, ["Started", "SpecChangeIgnored"]);
    }
}

#[test]
fn refused_overriders_concern_no_node() {
    let overrider = json!([{"imagePrePullOverrider": {"nodeLabel": prepull_api::crd::EDGE_LABEL, "overriders": {
        "imageOverriders": [{"component": "Tag", "operator": "replace", "value": "1.26"}],
    }}}]);
    let (mut world, nodes) = fleet(2);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1});
    let edited =
        |stored| with_spec(one_by_one.clone(), json!({"imagePrePullOverriders": overrider}), 2, stored);
    world.give(job(one_by_one.clone(), 1, None));
    world.give(edited(None));
    world.pass(1_000);
    assert_eq!(world.condition("Valid").0, "False");
    let stored = world.status().clone();
    world.lead_again(&nodes, edited(Some(&stored)));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!(world.taken().last().unwrap(), "n1");
    assert_eq!(world.pulls.last().unwrap(), "docker.io/library/nginx:1.25 ");
}

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
    let taken_back = wanted(&world, &nodes, json!({"recheck": 1}), 4);
    world.lead_again(&nodes, taken_back);
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
    let taken_back = wanted(&world, &nodes, json!({}), 3);
    world.lead_again(&nodes, taken_back);
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
    world.lead_again(&nodes, job(template, 1, Some(&stored)));
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

#[test]
fn a_pull_goes_on_although_its_node_object_is_gone() {
    let (mut world, nodes) = fleet(1);
    let wanted = |stored| with_spec(template(&nodes), json!({"pin": true}), 1, stored);
    world.give(wanted(None));
    world.says("n0", EdgeMessage::Accepted { task: task() });
    world.pass(1_000);
    let stored = world.status().clone();
    world.restart(&[]);
    world.give(wanted(Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.pass(1_000);
    assert_eq!(world.cancels(), [""; 0]);
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(5_000);
    assert_eq!(world.phase_of("n0"), NodePhase::Successful);
}
