//! Re-checks: which nodes are asked, what becomes of their answers, and how a re-check ends.

use prepull_api::failure::FailureCode;

use super::course::fleet;
use super::*;
use crate::prepull::rollout::RECHECK_TIME;

const DAYS: i64 = 12 * 24 * 3_600_000;

/// The job as the API server has it: a job that has been over for long is read again.
pub(super) fn wanted(world: &World, nodes: &[String], spec: serde_json::Value, generation: i64) -> Input {
    let template = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "0.1"});
    with_spec(template, spec, generation, world.stored.as_ref())
}

/// A job in which every node has succeeded, days ago.
pub(super) fn pulled(nodes: usize) -> (World, Vec<String>) {
    let (mut world, nodes) = fleet(nodes);
    world.give(wanted(&world, &nodes, json!({}), 1));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.pass(DAYS);
    world.taken();
    world.looks.clear();
    for node in &nodes {
        world.up(node, &[]);
    }
    (world, nodes)
}

pub(super) fn answer(attempt: u32, image: ImageResult) -> EdgeMessage {
    let there = image.outcome.is_on_node();
    let outcome = if there { TaskOutcome::Succeeded } else { TaskOutcome::Failed };
    let task = TaskId { attempt, ..task() };
    EdgeMessage::Result(TaskResult { task, images: vec![image], ..result(outcome) })
}

pub(super) fn there() -> ImageResult {
    let digest = Some(format!("sha256:{}", "0".repeat(64)));
    ImageResult { digest, ..ImageResult::new(ImageOutcome::Present) }
}

pub(super) fn gone() -> ImageResult {
    ImageResult { code: Some(FailureCode::NotPresent), ..ImageResult::new(ImageOutcome::Failed) }
}

/// Nodes that have every image, lack one, and were not checked.
pub(super) fn found(world: &World) -> (u32, u32, u32) {
    let recheck = world.status().recheck.clone().unwrap();
    (recheck.present, recheck.missing, recheck.not_checked)
}

#[test]
fn what_was_removed_is_found_and_retried() {
    let (mut world, nodes) = pulled(3);
    let pull_time = world.record("n0").action_flow.clone();
    world.events.clear();
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    // All at once, beyond the concurrency: a look takes no link.
    assert_eq!((world.taken(), world.looks.clone()), (nodes.clone(), vec![true; 3]));
    assert_eq!((world.status().phase, world.condition("Complete").0), (JobPhase::InProgress, "False"));
    assert_eq!(world.status().reason, "re-check: 3 nodes still to answer");
    world.says("n0", answer(2, there()));
    world.says("n1", answer(2, gone()));
    world.says("n2", answer(2, there()));
    world.pass(1_000);
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Failure, (2, 1, 0)));
    assert_eq!(world.events, ["Rechecking", "NodeFailed", "ImagesMissing", "Failed"]);
    let (kept, lost) = (world.record("n0"), world.record("n1"));
    assert_eq!((kept.phase, &kept.action_flow), (NodePhase::Successful, &pull_time));
    assert!(kept.recheck.as_ref().unwrap().checked_time.is_some());
    assert_eq!((lost.phase, lost.code), (NodePhase::Failure, Some(FailureCode::Removed)));
    assert_eq!(lost.image_status[0].code, Some(FailureCode::Removed));
    assert!(lost.image_status[0].reason.starts_with("it was there at "), "{}", lost.image_status[0].reason);
    // A retry round brings back what is missing, and nothing else.
    world.give(wanted(&world, &nodes, json!({"recheck": 1, "retry": 1}), 3));
    world.pass(1_000);
    assert_eq!(
        (world.taken(), world.looks.pop(), world.there.pop()),
        (vec!["n1".to_owned()], Some(false), Some(vec![]))
    );
    world.says("n1", answer(3, there()));
    world.pass(1_000);
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Completed, (2, 0, 0)));
}

#[test]
fn nodes_without_an_answer_keep_their_result() {
    let (mut world, nodes) = pulled(4);
    let session = SessionId(world.sessions - 3);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "n0".into(), session }));
    world.sent.clear();
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    assert_eq!(world.taken(), nodes[1..]);
    assert_eq!(world.status().reason, "re-check: 4 nodes still to answer, 1 of them offline");
    world.says("n1", answer(2, there()));
    let down = ImageResult { code: Some(FailureCode::RuntimeDown), reason: "no socket".to_owned(), ..gone() };
    world.says("n2", answer(2, down));
    world.pass(i64::try_from(RECHECK_TIME.as_millis()).unwrap() - 1_001);
    assert_eq!(world.status().phase, JobPhase::InProgress);
    // What arrives at the end is too late.
    world.pass(1);
    world.says("n3", answer(2, gone()));
    world.pass(1_000);
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Completed, (1, 0, 3)));
    let reason = |node: &str| world.record(node).recheck.clone().unwrap().not_checked_reason;
    assert!(reason("n0").starts_with("offline"), "{}", reason("n0"));
    assert_eq!(reason("n2"), "no socket");
    assert!(reason("n3").starts_with("no answer"), "{}", reason("n3"));
    assert_eq!(world.cancels(), ["n3"]);
    assert_eq!(world.phase_of("n3"), NodePhase::Successful);
}

#[test]
fn another_leader_goes_on_looking() {
    let (mut world, nodes) = pulled(2);
    let asked = |world: &World| wanted(world, &nodes, json!({"recheck": 1, "retry": 3}), 3);
    let (started, ended) = (world.status().clone(), json!({"retry": 3}));
    assert_eq!(started.phase, JobPhase::Completed);
    world.give(wanted(&world, &nodes, ended, 2));
    world.taken();
    world.give(asked(&world));
    world.pass(1_000);
    world.says("n0", answer(2, gone()));
    world.pass(1_000);
    let stored = world.status().clone();
    world.looks.clear();
    world.restart(&nodes);
    world.give(asked(&world));
    world.up("n0", &[]);
    world.up("n1", &[]);
    world.pass(1_000);
    assert_eq!((world.taken(), world.looks.clone()), (vec!["n1".to_owned()], vec![true]));
    let until = stored.recheck.unwrap().start_time.unwrap().0 + RECHECK_TIME;
    assert_eq!(world.now + *world.remaining.last().unwrap(), until + Duration::from_secs(1));
    world.says("n1", answer(2, there()));
    world.pass(1_000);
    // What is left of `retry` doesn't follow by itself: the person wanted to look, and not to download.
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Failure, (1, 1, 0)));
    assert_eq!((world.taken(), world.status().retry), (vec![], 0));
}

#[test]
fn a_report_that_is_behind_is_rechecked() {
    let (mut world, nodes) = pulled(2);
    let before = world.reports.clone();
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.reports = before;
    world.looks.clear();
    world.restart(&nodes);
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    for node in &nodes {
        world.up(node, &[]);
    }
    world.pass(1_000);
    assert_eq!((world.taken(), world.looks.clone()), (nodes, vec![true, true]));
    assert_eq!((world.status().recheck.as_ref().unwrap().rounds, world.reports[&0].recheck), (1, 1));
}

#[test]
fn nothing_new_starts_in_a_recheck() {
    let (mut world, nodes) = fleet(3);
    let spec = |recheck: u32| json!({"activeDeadlineSeconds": 60, "followNodes": true, "recheck": recheck});
    world.give(wanted(&world, &nodes, spec(0), 1));
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(61_000);
    world.pass(1_000);
    assert_eq!(world.condition("Failed").1, "DeadlineExceeded");
    world.taken();
    world.give(wanted(&world, &nodes, spec(1), 2));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n0"]);
    world.says("n0", answer(2, there()));
    world.pass(1_000);
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Failure, (1, 0, 0)));
    assert_eq!((world.taken(), world.phase_of("n2")), (vec![], NodePhase::Pending));
}

#[test]
fn an_answer_is_judged_by_its_images() {
    let other = || ImageResult { digest: Some("sha256:other".to_owned()), ..there() };
    let unclear = |code| ImageResult { code, reason: "unclear".to_owned(), ..gone() };
    for (image, phase, code, not_checked) in [
        (there(), NodePhase::Successful, None, ""),
        // A runtime that reports no digest has the image.
        (ImageResult { digest: None, ..there() }, NodePhase::Successful, None, ""),
        (gone(), NodePhase::Failure, Some(FailureCode::Removed), ""),
        (other(), NodePhase::Failure, Some(FailureCode::Removed), ""),
        (unclear(Some(FailureCode::RuntimeDown)), NodePhase::Successful, None, "unclear"),
        (unclear(Some(FailureCode::Cancelled)), NodePhase::Successful, None, "unclear"),
        (unclear(None), NodePhase::Successful, None, "unclear"),
    ] {
        let (mut world, nodes) = pulled(1);
        world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
        world.pass(1_000);
        world.says("n0", answer(2, image.clone()));
        world.pass(1_000);
        let record = world.record("n0");
        let recheck = record.recheck.clone().unwrap();
        assert_eq!((record.phase, record.code), (phase, code), "{image:?}");
        assert_eq!(recheck.not_checked_reason, not_checked, "{image:?}");
        assert_eq!(recheck.checked_time.is_some(), not_checked.is_empty(), "{image:?}");
    }
}

#[test]
fn a_recheck_finds_images_from_before_relabelling() {
    let overrider = json!([{"imagePrePullOverrider": {"nodeLabel": "region=x", "overriders": {
        "imageOverriders": [{"component": "Tag", "operator": "replace", "value": "1.26"}],
    }}}]);
    let spec = |recheck: u32| json!({"imagePrePullOverriders": overrider, "recheck": recheck});
    let (mut world, nodes) = fleet(1);
    world.give(wanted(&world, &nodes, spec(0), 1));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    let mut relabelled = edge("n0");
    relabelled.labels.insert("region".to_owned(), "x".to_owned());
    world.hear(FleetEvent::Node(relabelled));
    world.pulls.clear();
    world.give(wanted(&world, &nodes, spec(1), 2));
    world.pass(1_000);
    assert_eq!(world.pulls, ["docker.io/library/nginx:1.25 "]);
}

#[test]
fn a_deleted_node_keeps_its_result() {
    let (mut world, nodes) = pulled(2);
    let session = SessionId(world.sessions);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "n1".into(), session }));
    world.give(wanted(&world, &nodes, json!({"recheck": 1}), 2));
    world.pass(1_000);
    world.hear(FleetEvent::NodeGone("n1".into()));
    world.says("n0", answer(2, there()));
    world.pass(1_000);
    assert_eq!((world.status().phase, found(&world)), (JobPhase::Completed, (1, 0, 1)));
    let recheck = world.record("n1").recheck.clone().unwrap();
    assert_eq!(recheck.not_checked_reason, "its Node was deleted");
    // The next one does not ask it, and gives the reason.
    world.give(wanted(&world, &nodes, json!({"recheck": 2}), 3));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n0", "n0"]);
    let recheck = world.record("n1").recheck.clone().unwrap();
    assert_eq!(recheck.not_checked_reason, "there is no Node of this name any more");
}
