//! Further rounds: their triggers, their cost, and the retries left over at the end.

use super::course::{fleet, template};
use super::*;

#[test]
fn a_round_runs_despite_outdated_reports() {
    let (mut world, nodes) = fleet(2);
    let spec = |stored: Option<&ImagePrePullJobStatus>| {
        let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "1"});
        with_spec(template, json!({"retry": 1}), 1, stored)
    };
    for node in &nodes {
        world.up(node, &[]);
    }
    world.give(spec(None));
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    let before = world.reports.clone();
    world.ends("n1", TaskOutcome::Succeeded);
    world.pass(1_000);
    let stored = world.status().clone();
    assert_eq!((stored.retry, before[&0].retry, before[&0].node_status[0].attempt), (1, Some(0), 1));
    // The leader dies before it has written that the first node is tried again.
    let mut report = before[&0].clone();
    report.node_status[1] = world.reports[&0].node_status[1].clone();
    world.reports.insert(0, report);
    world.taken();
    world.restart(&nodes);
    world.give(spec(Some(&stored)));
    for node in &nodes {
        world.up(node, &[]);
    }
    world.pass(2_000);
    assert_eq!((world.taken(), world.status().retry), (vec!["n0".to_owned()], 1));
    assert_eq!(world.reports[&0].node_status[0].attempt, 2);
}

#[test]
fn a_leftover_retry_starts_nothing() {
    let (mut world, nodes) = fleet(2);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1});
    let spec =
        |retry, ttl| json!({"retry": retry, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": ttl});
    world.give(with_spec(one_by_one.clone(), spec(1, 900_000), 1, None));
    world.pass(61_000);
    world.pass(1_000);
    assert_eq!((world.taken().len(), world.condition("Failed").1), (1, "DeadlineExceeded"));
    let ended = world.status().clone();
    let is_over = |world: &mut World| {
        for node in &nodes {
            world.up(node, &[]);
        }
        world.pass(2_000);
        assert_eq!((world.taken(), world.status().retry), (vec![], 0));
        assert_eq!(world.status().completion_time, ended.completion_time);
    };
    // Another leader; an edit of something else; both, also long after the end.
    world.restart(&nodes);
    world.give(with_spec(one_by_one.clone(), spec(1, 900_000), 1, Some(&ended)));
    is_over(&mut world);
    world.give(with_spec(one_by_one.clone(), spec(1, 800_000), 2, None));
    is_over(&mut world);
    for (generation, seen) in [(2, true), (3, false), (4, false)] {
        world.pass(if generation == 4 { 3_600_000 } else { 0 });
        let stored = world.status().clone();
        assert_eq!(stored.observed_generation == Some(generation), seen);
        world.restart(&nodes);
        let ttl = 800_000 - generation;
        world.give(with_spec(one_by_one.clone(), spec(1, ttl), generation, Some(&stored)));
        is_over(&mut world);
    }
    world.give(with_spec(one_by_one, spec(2, 800_000), 5, None));
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().retry), (vec!["n0".to_owned()], 1));
    assert_eq!(world.notes["Retrying"].1, "round 1 of 2: another try for 2 nodes");
}

#[test]
fn late_eligible_nodes_use_no_retry() {
    let select = json!({"labelSelector": {"matchLabels": {"pool": "a"}}, "concurrency": 10});
    let spec = |retry| json!({"retry": retry, "followNodes": true});
    let pool = |name: &str| {
        let mut node = edge(name);
        node.labels.insert("pool".to_owned(), "a".to_owned());
        node
    };
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Node(pool("first")));
    world.up("first", &[]);
    world.give(with_spec(select.clone(), spec(1), 1, None));
    world.ends("first", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Completed, 1));
    let ended = world.status().clone();
    world.restart(&[]);
    world.hear(FleetEvent::Node(pool("first")));
    world.hear(FleetEvent::Node(pool("new")));
    world.give(with_spec(select.clone(), spec(1), 1, Some(&ended)));
    world.up("new", &[]);
    world.pass(2_000);
    assert_eq!((world.taken(), world.status()), (vec![], &ended));
    // A further round takes them up, also under another leader.
    world.give(with_spec(select, spec(2), 2, None));
    world.pass(1_000);
    assert_eq!((world.taken(), world.status().summary.desired), (vec!["new".to_owned()], 2));
}

#[test]
fn a_finished_job_parks_despite_leftover_retries() {
    let (mut world, nodes) = fleet(1);
    world.give(with_spec(template(&nodes), json!({"retry": 3}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.pass(3_600_000);
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template(&nodes), json!({"retry": 3}), 1, Some(&stored)));
    assert_eq!((world.controller.jobs.len(), world.controller.parked.len()), (0, 1));
}

#[test]
fn rounds_share_one_deadline() {
    let (mut world, nodes) = fleet(1);
    let template = json!({"nodeNames": nodes, "failureTolerate": "0"});
    let spec = |retry| json!({"retry": retry, "activeDeadlineSeconds": 100});
    world.give(with_spec(template.clone(), spec(5), 1, None));
    world.pass(60_000);
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!((world.status().retry, world.taken().len()), (1, 2));
    world.pass(38_000);
    assert_eq!(world.status().phase, JobPhase::InProgress);
    world.pass(1_000);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.condition("Failed").1), (JobPhase::Failure, "DeadlineExceeded"));
    world.give(with_spec(template, spec(6), 2, None));
    world.pass(99_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 1));
    world.pass(1_000);
    assert_eq!(world.status().phase, JobPhase::Failure);
}

#[test]
fn a_new_leader_judges_ended_nodes() {
    for (outcome, phase) in
        [(TaskOutcome::Succeeded, JobPhase::Completed), (TaskOutcome::Failed, JobPhase::Failure)]
    {
        let (mut world, nodes) = fleet(1);
        let template = json!({"nodeNames": nodes, "failureTolerate": "0"});
        let spec = json!({"activeDeadlineSeconds": 60, "retry": 1});
        world.give(with_spec(template.clone(), spec.clone(), 1, None));
        world.pass(1_000);
        let stored = world.status().clone();
        world.ends("n0", outcome);
        world.pass(1_000);
        if outcome == TaskOutcome::Failed {
            // As the report was before the next round.
            let record = &mut world.reports.get_mut(&0).unwrap().node_status[0];
            (record.phase, record.attempt) = (NodePhase::Failure, 1);
        }
        world.restart(&nodes);
        world.pass(100_000);
        world.give(with_spec(template, spec, 1, Some(&stored)));
        world.up("n0", &[]);
        world.pass(1_000);
        assert_eq!((world.status().phase, world.taken().len()), (phase, 0));
        assert_ne!(world.condition("Failed").1, "DeadlineExceeded");
    }
}

#[test]
fn no_round_begins_without_startable_nodes() {
    let (mut world, nodes) = fleet(2);
    let template = json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "1"});
    let spec = |retry| json!({"retry": retry});
    world.give(with_spec(template.clone(), spec(1_000), 1, None));
    world.hear(FleetEvent::NodeGone("n0".into()));
    world.ends("n1", TaskOutcome::Succeeded);
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.status().retry), (JobPhase::Completed, 0));
    world.give(with_spec(template.clone(), spec(1_001), 2, None));
    world.pass(1_000);
    assert_eq!(world.condition("Valid").0, "False");
    world.give(with_spec(template, spec(999), 3, None));
    world.pass(1_000);
    assert!(!world.events.contains(&"Retrying"), "{:?}", world.events);
    assert_eq!((world.status().phase, world.condition("Valid").0), (JobPhase::Completed, "True"));
}

#[test]
fn exceeded_tolerance_is_announced_once_a_round() {
    let (mut world, nodes) = fleet(6);
    let template = json!({"nodeNames": nodes, "concurrency": 6, "failureTolerate": "0"});
    world.give(with_spec(template, json!({}), 1, None));
    for node in &nodes[..5] {
        world.ends(node, TaskOutcome::Failed);
        world.pass(1_000);
    }
    let said = world.events.iter().filter(|reason| **reason == "ToleranceExceeded").count();
    assert_eq!((said, world.status().phase), (1, JobPhase::InProgress));
    assert!(world.status().reason.starts_with("5 of 6"), "{}", world.status().reason);
}

#[test]
fn a_changed_pause_counts_from_the_waves_end() {
    for is_unseen in [false, true] {
        let (mut world, nodes) = fleet(4);
        let spec = |pause| json!({"rollout": {"steps": ["1", "100%"], "pauseSeconds": pause}});
        world.give(with_spec(template(&nodes), spec(86_400), 1, None));
        let first = world.taken();
        world.all_end(&first, TaskOutcome::Succeeded);
        world.pass(30_000);
        let stored = world.status().clone();
        if is_unseen {
            world.restart(&nodes);
        }
        world.give(with_spec(template(&nodes), spec(60), 2, Some(&stored)));
        for node in nodes.iter().filter(|_| is_unseen) {
            world.up(node, &[]);
        }
        world.pass(28_000);
        assert_eq!(world.taken().len(), 0);
        world.pass(2_000);
        assert_eq!(
            (world.taken().len(), world.status().rollout.as_ref().unwrap().step),
            (3, 2),
            "{is_unseen}"
        );
    }
}

#[test]
fn an_edges_claim_starts_no_barred_node() {
    let (mut world, nodes) = fleet(3);
    let open = |attempt, phase| vec![(UID, attempt, phase)];
    let spec = |suspend| json!({"rollout": {"steps": ["1", "100%"]}, "suspend": suspend});
    world.give(with_spec(template(&nodes), spec(true), 1, None));
    world.pass(1_000);
    for phase in [OpenPhase::NeedsKeys, OpenPhase::Running] {
        world.sent.clear();
        world.up("n1", &open(world.record("n1").attempt.max(1), phase));
        world.pass(1_000);
        assert_eq!((world.taken().len(), world.cancels()), (0, vec!["n1"]));
    }
    world.ends("n1", TaskOutcome::Cancelled);
    assert_eq!((world.phase_of("n1"), world.acks()), (NodePhase::Pending, 1));
    world.give(with_spec(template(&nodes), spec(false), 2, None));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n0"]);
    // Beyond the wave.
    world.sent.clear();
    world.up("n2", &open(1, OpenPhase::NeedsKeys));
    world.pass(1_000);
    assert_eq!((world.taken().len(), world.cancels()), (0, vec!["n2"]));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(1_000);
    assert_eq!((world.taken(), world.record("n1").attempt), (vec!["n1".to_owned(), "n2".to_owned()], 3));
    // Where it may start, it is recorded first.
    let (mut world, nodes) = fleet(2);
    world.give(with_spec(template(&nodes[..1]), json!({"suspend": true}), 1, None));
    world.pass(1_000);
    world.restart(&nodes);
    let stored = world.status().clone();
    world.give(with_spec(template(&nodes[..1]), json!({}), 2, Some(&stored)));
    world.api_up = false;
    world.up("n0", &open(1, OpenPhase::Running));
    world.pass(10_000);
    assert_eq!((world.taken().len(), world.cancels().len()), (0, 0));
    world.api_up = true;
    world.pass(6_000);
    assert_eq!((world.taken(), world.record("n0").attempt), (vec!["n0".to_owned()], 1));
}

#[test]
fn a_round_known_from_reports_continues() {
    let (mut world, nodes) = fleet(1);
    let template = json!({"nodeNames": nodes, "failureTolerate": "0"});
    let spec = |retry| json!({"retry": retry, "activeDeadlineSeconds": 60});
    world.give(with_spec(template.clone(), spec(0), 1, None));
    world.all_end(&nodes, TaskOutcome::Failed);
    let ended = world.status().clone();
    assert_eq!((ended.phase, world.taken().len()), (JobPhase::Failure, 1));
    world.give(with_spec(template.clone(), spec(1), 2, None));
    world.pass(1_000);
    assert_eq!((world.taken().len(), world.record("n0").attempt), (1, 2));
    // The leader dies before it has written so in the status, and the retry is taken back.
    world.restart(&nodes);
    // The active deadline of a round doesn't count from the job's start.
    world.pass(60_000);
    world.give(with_spec(template, spec(0), 3, Some(&ended)));
    world.up("n0", &[(UID, 2, OpenPhase::Running)]);
    world.pass(2_000);
    assert_eq!((world.status().phase, world.cancels().len()), (JobPhase::InProgress, 0));
    let mut result = result(TaskOutcome::Succeeded);
    result.task.attempt = 2;
    world.says("n0", EdgeMessage::Result(result));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 1));
}
