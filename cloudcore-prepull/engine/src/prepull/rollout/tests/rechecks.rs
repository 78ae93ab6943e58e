//! Answers of nodes that are only asked to look, and nodes without one.

use prepull_api::crd::status::{Action, ActionStatus};

use super::*;

/// A node that has pulled its only image.
fn pulled(n: usize) -> NodeStatus {
    let action = |action, seconds| ActionStatus {
        action,
        status: Tristate::True,
        reason: String::new(),
        time: Time(at(seconds)),
    };
    NodeStatus {
        node_name: node(n).0,
        phase: NodePhase::Successful,
        attempt: 1,
        start_time: Some(Time(at(0))),
        action_flow: vec![action(Action::Check, 5), action(Action::Pull, 9)],
        image_status: vec![JobImageStatus { status: Tristate::True, ..JobImageStatus::default() }],
        ..NodeStatus::default()
    }
}

/// The job of these nodes was over, and is re-checked.
fn rechecking(records: Vec<NodeStatus>) -> Rollout {
    let mut rollout = Rollout::for_ended_job(unheld(), records);
    rollout.begin_recheck(at(220), |_| true);
    rollout
}

/// What a node answers that was asked to look.
fn answer(images: Vec<ImageResult>) -> TaskResult {
    let task = TaskId { attempt: 2, ..result(TaskOutcome::Failed).task };
    TaskResult { task, images, ..result(TaskOutcome::Failed) }
}

#[test]
fn a_node_that_is_not_checked_has_the_reason() {
    let mut rollout = rechecking((0..3).map(pulled).collect());
    rollout.mark_online(&node(0), SessionId(1), None, at(100));
    rollout.set_busy(&node(0), true);
    assert_eq!(rollout.advance(at(100)), []);
    rollout.mark_online(&node(1), SessionId(1), None, at(220));
    assert_eq!(rollout.advance(at(220)), []);
    let reason = |record: &NodeStatus| record.recheck.clone().unwrap().not_checked_reason;
    let reasons: Vec<_> = rollout.records().map(reason).collect();
    assert_eq!(reasons, [BUSY, "no answer: its edgecore-prepull is connected and silent", OFFLINE]);
}

#[test]
fn an_answer_without_images_checks_nothing() {
    for (reason, expected) in [("", "its answer does not fit the images"), ("it stops", "it stops")] {
        let mut rollout = rechecking(vec![pulled(0)]);
        all_online(&mut rollout, 1);
        assert_eq!(begin(&mut rollout, at(100)), [node(0)]);
        let answer = TaskResult { reason: reason.to_owned(), ..answer(vec![]) };
        assert!(rollout.record_result(&node(0), None, &answer, at(101)));
        let record = rollout.record(&node(0)).unwrap();
        assert_eq!(record.recheck.as_ref().unwrap().not_checked_reason, expected);
        assert_eq!(record.start_time, pulled(0).start_time, "the pull's");
    }
}

#[test]
fn a_removed_image_was_last_seen_when_pulled() {
    let failed = NodeStatus { phase: NodePhase::Failure, ..pulled(2) };
    let mut rollout = rechecking(vec![pulled(0), pulled(1), failed]);
    all_online(&mut rollout, 2);
    begin(&mut rollout, at(100));
    let gone = ImageResult { code: Some(FailureCode::NotPresent), ..ImageResult::new(ImageOutcome::Failed) };
    let there = ImageResult::new(ImageOutcome::Present);
    rollout.record_result(&node(0), None, &answer(vec![gone]), at(101));
    rollout.record_result(&node(1), None, &answer(vec![there]), at(101));
    let reason = &rollout.record(&node(0)).unwrap().image_status[0].reason;
    assert!(reason.starts_with(&format!("it was there at {}, and", at(9))), "{reason}");
    assert_eq!(rollout.nodes_lacking_images(), [node(0).0]);
}

#[test]
fn an_ended_recheck_leaves_waiting_nodes_alone() {
    let waiting = NodeStatus { node_name: node(0).0, ..NodeStatus::default() };
    let mut rollout = rechecking(vec![waiting]);
    rollout.close_after_recheck();
    let reattach = rollout.mark_online(&node(0), SessionId(1), Some((1, OpenPhase::Running)), at(100));
    assert_eq!((reattach, rollout.take_touched()), (Reattach::Cancel, vec![]));
}

#[test]
fn a_recheck_ends_after_the_last_task() {
    let at_work = NodeStatus { phase: NodePhase::InProgress, ..pulled(1) };
    let mut rollout = Rollout::new(unheld(), vec![pulled(0), at_work]);
    rollout.resume_recheck(at(220));
    assert_eq!(rollout.verdict(), RolloutVerdict::Running);
    rollout.record_result(&node(1), None, &result(TaskOutcome::Succeeded), at(101));
    assert_eq!(rollout.verdict(), RolloutVerdict::Completed);
}
