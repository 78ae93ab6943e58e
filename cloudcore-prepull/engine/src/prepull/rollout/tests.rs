use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::JobImageStatus;
use prepull_api::crd::status::Tristate;
use prepull_api::image::Reference;
use prepull_api::task::{
    CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, JobUid, PullPolicy, TaskId,
    TaskOutcome, TaskResult,
};
use prepull_api::wire::{OpenPhase, TaskProgress};

use super::*;
use crate::prepull::plan::{NodePlan, PlannedImage};

mod rechecks;
mod results;
mod steps;
mod waits;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn node(n: usize) -> NodeName {
    NodeName(format!("edge-{n}"))
}

/// Nothing holds the nodes back.
fn unheld() -> RolloutSettings {
    RolloutSettings { hold: false, ..RolloutSettings::default() }
}

fn rollout(nodes: usize, concurrency: usize, tolerance: &str) -> Rollout {
    let settings = RolloutSettings {
        concurrency,
        tolerance: Ratio::parse(tolerance).unwrap(),
        timeout: Duration::from_secs(300),
        ..unheld()
    };
    let fresh = |n| NodeStatus { node_name: node(n).0, ..NodeStatus::default() };
    Rollout::new(settings, (0..nodes).map(fresh).collect())
}

fn all_online(rollout: &mut Rollout, nodes: usize) {
    for n in 0..nodes {
        assert_eq!(rollout.mark_online(&node(n), SessionId(1), None, at(0)), Reattach::Leave);
    }
}

fn result(outcome: TaskOutcome) -> TaskResult {
    let image = match outcome {
        TaskOutcome::Succeeded => ImageOutcome::Pulled,
        TaskOutcome::Failed | TaskOutcome::Other => ImageOutcome::Failed,
        TaskOutcome::DeadlineExceeded | TaskOutcome::Cancelled => ImageOutcome::Stopped,
    };
    TaskResult {
        removal: None,
        task: TaskId { job: JobUid("job".to_owned()), attempt: 1 },
        outcome,
        reason: if outcome == TaskOutcome::Succeeded { String::new() } else { "because".to_owned() },
        check: Some(CheckOutcome { passed: true, reason: String::new() }),
        images: vec![ImageResult { attempts: 1, ..ImageResult::new(image) }],
        took: Duration::from_secs(1),
    }
}

fn plan() -> Arc<NodePlan> {
    let reference = Reference::parse("registry.example/app:v1").unwrap();
    let pull = reference.normalized();
    let image = PlannedImage {
        image: "app".to_owned(),
        name: None,
        pull,
        policy: PullPolicy::IfNotPresent,
        secrets: Vec::new(),
    };
    Arc::new(NodePlan { upgrade: None, removal: None, images: vec![image] })
}

fn started(decisions: &[RolloutDecision]) -> Vec<NodeName> {
    decisions
        .iter()
        .filter_map(|d| if let RolloutDecision::Start(node) = d { Some(node.clone()) } else { None })
        .collect()
}

/// Starts what may start, and records that.
fn begin(rollout: &mut Rollout, now: Timestamp) -> Vec<NodeName> {
    let nodes = started(&rollout.advance(now));
    for node in &nodes {
        rollout.begin_dispatch(node, now).unwrap();
    }
    nodes
}

#[test]
fn free_slots_are_used_up_to_concurrency() {
    let mut rollout = rollout(5, 2, "0");
    all_online(&mut rollout, 5);
    assert_eq!(started(&rollout.advance(at(0))), [node(0), node(1)]);
    assert_eq!([1..3, 2..5].map(|places| rollout.any_in_progress(places)), [true, false]);
    assert_eq!(rollout.advance(at(0)), []);
    assert!(rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Succeeded), at(1)));
    assert_eq!(started(&rollout.advance(at(1))), [node(2)]);
    assert_eq!(rollout.summary().in_progress, 2);
}

#[test]
fn an_offline_node_waits_without_a_slot() {
    let mut rollout = rollout(2, 1, "0");
    rollout.mark_online(&node(1), SessionId(1), None, at(0));
    assert_eq!(started(&rollout.advance(at(0))), [node(1)]);
    assert_eq!(rollout.record(&node(0)).unwrap().reason, OFFLINE);
    assert_eq!(rollout.waiting_offline(), 1);
    rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Succeeded), at(1));
    assert_eq!(rollout.advance(at(1)), []);
    assert_eq!(rollout.verdict(), RolloutVerdict::Running);
    rollout.mark_online(&node(0), SessionId(2), None, at(5));
    assert_eq!(started(&rollout.advance(at(5))), [node(0)]);
    assert_eq!(rollout.record(&node(0)).unwrap().reason, "");
}

#[test]
fn a_silent_node_is_unknown_at_its_deadline() {
    let mut rollout = rollout(2, 1, "1");
    all_online(&mut rollout, 2);
    rollout.advance(at(0));
    rollout.begin_dispatch(&node(0), at(0)).unwrap();
    rollout.mark_sent(&node(0), SessionId(1));
    rollout.mark_accepted(&node(0), 1);
    assert_eq!(rollout.next_deadline(), Some(at(302)));
    assert_eq!(rollout.advance(at(301)), []);
    assert_eq!(rollout.advance(at(302)), [RolloutDecision::Expire(node(0)), RolloutDecision::Start(node(1))]);
    let record = rollout.record(&node(0)).unwrap();
    assert_eq!(record.phase, NodePhase::Unknown);
    assert!(
        record.reason.contains("timeoutSeconds (300): the node is connected and silent"),
        "{}",
        record.reason
    );
}

#[test]
fn only_a_late_result_replaces_unknown() {
    let mut rollout = rollout(2, 2, "1");
    all_online(&mut rollout, 2);
    begin(&mut rollout, at(0));
    rollout.advance(at(302));
    assert_eq!(rollout.summary().unknown, 2);
    assert!(rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Succeeded), at(310)));
    assert!(rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Cancelled), at(310)));
    assert_eq!((rollout.summary().successful, rollout.summary().unknown), (1, 1));
    assert!(rollout.record(&node(1)).unwrap().reason.contains("no result within"));
}

#[test]
fn a_result_counts_once_for_its_attempt() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    let mut other = result(TaskOutcome::Failed);
    other.task.attempt = 2;
    assert!(!rollout.record_result(&node(0), Some(&plan()), &other, at(1)));
    assert!(rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Succeeded), at(1)));
    assert!(!rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Failed), at(2)));
    assert_eq!(rollout.summary().successful, 1);
    assert_eq!(rollout.record(&node(0)).unwrap().image_status[0].status, Tristate::True);
}

#[test]
fn nothing_starts_once_the_tolerance_is_exceeded() {
    // 1 of 10 at 0.1 is tolerated, 2 of 10 are not.
    let mut rollout = rollout(10, 2, "0.1");
    all_online(&mut rollout, 10);
    begin(&mut rollout, at(0));
    rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Failed), at(1));
    assert_eq!(begin(&mut rollout, at(1)), [node(2)]);
    rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Failed), at(2));
    assert_eq!(rollout.advance(at(2)), []);
    assert_eq!(rollout.verdict(), RolloutVerdict::Draining);
    rollout.record_result(&node(2), Some(&plan()), &result(TaskOutcome::Succeeded), at(3));
    assert_eq!(rollout.advance(at(3)), []);
    assert_eq!(rollout.verdict(), RolloutVerdict::Failed);
}

#[test]
fn one_of_201_fails_at_zero_tolerance() {
    let mut rollout = rollout(201, 201, "0");
    all_online(&mut rollout, 201);
    rollout.advance(at(0));
    for n in 0..201 {
        let outcome = if n == 7 { TaskOutcome::Failed } else { TaskOutcome::Succeeded };
        rollout.record_result(&node(n), Some(&plan()), &result(outcome), at(1));
    }
    assert_eq!(rollout.verdict(), RolloutVerdict::Failed);
}

#[test]
fn an_undelivered_assign_frees_its_slot() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    rollout.begin_dispatch(&node(0), at(0)).unwrap();
    rollout.mark_offline(&node(0), SessionId(1));
    rollout.mark_not_sent(&node(0));
    assert_eq!(rollout.summary().pending, 1);
    assert_eq!(rollout.next_deadline(), None);
    assert_eq!(rollout.advance(at(1)), []);
    rollout.mark_online(&node(0), SessionId(2), None, at(2));
    assert_eq!(started(&rollout.advance(at(2))), [node(0)]);
}

#[test]
fn an_unsent_start_counts_until_recorded() {
    for (concurrency, steps) in [(1, vec![]), (3, vec![WaveStep::parse("1").unwrap()])] {
        let mut rollout = rollout(3, concurrency, "0");
        rollout.configure(RolloutSettings { steps, ..rollout.settings().clone() });
        all_online(&mut rollout, 3);
        assert_eq!(started(&rollout.advance(at(0))), [node(0)]);
        rollout.stamp_starts(0..3, at(0));
        rollout.begin_dispatch(&node(0), at(0)).unwrap();
        rollout.mark_not_sent(&node(0));
        assert_eq!((rollout.summary().pending, rollout.advance(at(1))), (3, vec![]));
        let start = rollout.withdrawn_start(&node(0)).unwrap();
        rollout.forget_start(start);
        assert_eq!(started(&rollout.advance(at(1))), [node(1)]);
    }
}

#[test]
fn a_twice_withdrawn_start_counts_until_recorded() {
    let mut rollout = rollout(2, 1, "0");
    all_online(&mut rollout, 1);
    assert_eq!(started(&rollout.advance(at(0))), [node(0)]);
    rollout.stamp_starts(0..2, at(0));
    let set_hold = |rollout: &mut Rollout, hold| {
        rollout.configure(RolloutSettings { hold, concurrency: 2, ..rollout.settings().clone() });
    };
    set_hold(&mut rollout, true);
    assert!(matches!(rollout.advance(at(1))[..], [RolloutDecision::Withdraw(..)]));
    set_hold(&mut rollout, false);
    assert_eq!(started(&rollout.advance(at(2))), [node(0)]);
    // The API server has neither the first withdrawal nor this start.
    set_hold(&mut rollout, true);
    let decisions = rollout.advance(at(3));
    assert!(matches!(decisions[..], [RolloutDecision::Withdraw(..)]), "{decisions:?}");
    rollout.configure(RolloutSettings { hold: false, concurrency: 1, ..rollout.settings().clone() });
    rollout.set_busy(&node(0), true);
    rollout.mark_online(&node(1), SessionId(1), None, at(4));
    assert_eq!(rollout.advance(at(4)), [], "another leader would let the first node go on");
}

#[test]
fn a_replaced_sessions_assign_is_resent() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    rollout.begin_dispatch(&node(0), at(0)).unwrap();
    assert_eq!(rollout.mark_online(&node(0), SessionId(2), None, at(1)), Reattach::Leave);
    assert_eq!(rollout.mark_sent(&node(0), SessionId(1)), Reattach::Dispatch);
}

#[test]
fn a_hello_decides_its_tasks_fate() {
    let (running, needs, finished) = (OpenPhase::Running, OpenPhase::NeedsKeys, OpenPhase::Finished);
    let cases = [
        (NodePhase::InProgress, None, Reattach::Dispatch),
        (NodePhase::InProgress, Some((1, running)), Reattach::AtWork),
        (NodePhase::InProgress, Some((1, needs)), Reattach::Dispatch),
        (NodePhase::InProgress, Some((1, finished)), Reattach::Leave),
        (NodePhase::InProgress, Some((7, running)), Reattach::Dispatch),
        (NodePhase::Pending, None, Reattach::Leave),
        (NodePhase::Pending, Some((1, running)), Reattach::Start),
        (NodePhase::Pending, Some((1, needs)), Reattach::Start),
        (NodePhase::Successful, Some((1, running)), Reattach::Cancel),
        (NodePhase::Unknown, Some((1, needs)), Reattach::Cancel),
        (NodePhase::Unknown, Some((1, finished)), Reattach::Leave),
        (NodePhase::Failure, None, Reattach::Leave),
    ];
    for (phase, open, expected) in cases {
        // As after a restart of cloudcore: the record is all that is known.
        let record = NodeStatus {
            node_name: node(0).0,
            phase,
            attempt: 1,
            start_time: Some(Time(at(0))),
            ..NodeStatus::default()
        };
        let settings = unheld();
        let mut rollout = Rollout::new(settings, vec![record]);
        assert_eq!(rollout.mark_online(&node(0), SessionId(1), open, at(1)), expected, "{phase:?} {open:?}");
    }
    // A node that may not start now must stop, and later messages about that task don't count.
    for open in [running, needs] {
        let mut rollout = rollout(1, 1, "0");
        rollout.configure(RolloutSettings { hold: true, ..rollout.settings().clone() });
        let reattach = rollout.mark_online(&node(0), SessionId(1), Some((1, open)), at(1));
        assert_eq!((reattach, rollout.record(&node(0)).unwrap().attempt), (Reattach::Cancel, 2));
        assert!(!rollout.record_result(&node(0), None, &result(TaskOutcome::Cancelled), at(2)));
    }
}

#[test]
fn a_deadline_survives_restarts_and_timeout_edits() {
    let record = NodeStatus {
        node_name: node(0).0,
        phase: NodePhase::InProgress,
        attempt: 1,
        start_time: Some(Time(at(0))),
        ..NodeStatus::default()
    };
    let settings = |timeout| RolloutSettings { timeout: Duration::from_secs(timeout), ..unheld() };
    let mut rollout = Rollout::new(settings(300), vec![record]);
    assert_eq!(rollout.next_deadline(), Some(at(302)));
    assert_eq!(rollout.begin_dispatch(&node(0), at(100)), Some(Duration::from_secs(200)));
    rollout.configure(settings(60));
    assert_eq!(rollout.next_deadline(), Some(at(62)));
}

#[test]
fn a_deleted_pending_node_may_return() {
    let mut rollout = rollout(2, 1, "0");
    rollout.mark_online(&node(1), SessionId(1), None, at(0));
    assert!(rollout.remove_node(&node(0)) && !rollout.remove_node(&node(0)));
    assert_eq!((rollout.summary().desired, rollout.summary().unknown, rollout.waiting_offline()), (1, 0, 0));
    assert_eq!(rollout.records_of(0..2).count(), 1);
    rollout.advance(at(0));
    rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Succeeded), at(1));
    assert_eq!(rollout.verdict(), RolloutVerdict::Completed);
    rollout.add(NodeStatus { node_name: node(0).0, ..NodeStatus::default() });
    // In its old place: in a new one it could be in two reports.
    assert_eq!(
        (rollout.position(&node(0)), rollout.len(), rollout.verdict()),
        (Some(0), 2, RolloutVerdict::Running)
    );
    assert_eq!(rollout.waiting_offline(), 1);
    assert!(rollout.remove_node(&node(0)));
    assert_eq!(rollout.verdict(), RolloutVerdict::Completed);
}

#[test]
fn a_deleted_retried_node_stays_failed() {
    let mut rollout = rollout(1, 1, "1");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Failed), at(1));
    rollout.begin_round(|_| false);
    assert!(!rollout.remove_node(&node(0)));
    assert_eq!((rollout.summary().unknown, rollout.verdict()), (1, RolloutVerdict::Completed));
}

#[test]
fn an_out_of_range_index_is_ignored() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.advance(at(0));
    let image = ImageProgress { index: u32::MAX, ..progress(1).images[0].clone() };
    let progress = TaskProgress { images: vec![image], ..progress(1) };
    assert!(rollout.record_progress(&node(0), &plan(), &progress, at(1)));
    assert_eq!(rollout.record(&node(0)).unwrap().image_status.len(), 1);
}

/// The result of a failed task with two images; the first one has this code.
fn failed_with(outcome: TaskOutcome, code: Option<FailureCode>) -> TaskResult {
    let mut result = result(outcome);
    let first = ImageResult { code, ..result.images[0].clone() };
    let second = ImageResult { code: Some(FailureCode::NoSpace), ..first.clone() };
    result.images = vec![first, second];
    result
}

fn counted(rollout: &Rollout) -> Vec<(FailureCode, u32)> {
    rollout.failures().into_iter().map(|failure| (failure.code, failure.nodes)).collect()
}

#[test]
fn failures_count_by_their_first_cause() {
    let mut rollout = rollout(6, 6, "1");
    all_online(&mut rollout, 6);
    rollout.advance(at(0));
    let unauthorized = failed_with(TaskOutcome::Failed, Some(FailureCode::Unauthorized));
    let unready = TaskResult {
        check: Some(CheckOutcome { passed: false, reason: "disk: full".to_owned() }),
        ..unauthorized.clone()
    };
    let results = [
        (&unready, FailureCode::CheckFailed),
        (&unauthorized, FailureCode::Unauthorized),
        (&unauthorized, FailureCode::Unauthorized),
        // Of an edge without codes.
        (&failed_with(TaskOutcome::Failed, None), FailureCode::Other),
        (&failed_with(TaskOutcome::DeadlineExceeded, None), FailureCode::Timeout),
        (&failed_with(TaskOutcome::Cancelled, Some(FailureCode::Cancelled)), FailureCode::Cancelled),
    ];
    for (n, (result, code)) in results.into_iter().enumerate() {
        assert!(rollout.record_result(&node(n), Some(&plan()), result, at(1)));
        assert_eq!(rollout.record(&node(n)).unwrap().code, Some(code));
    }
    assert_eq!(rollout.record(&node(3)).unwrap().image_status[0].code, Some(FailureCode::Other));
    let once = [FailureCode::Timeout, FailureCode::CheckFailed, FailureCode::Cancelled, FailureCode::Other];
    let expected = [(FailureCode::Unauthorized, 2)].into_iter().chain(once.map(|code| (code, 1)));
    assert_eq!(counted(&rollout), expected.collect::<Vec<_>>());
    // Also in the next life of cloudcore, which has the records of this one, or of a version without codes.
    let mut records: Vec<NodeStatus> = rollout.records().cloned().collect();
    records[1].code = None;
    let again = Rollout::new(unheld(), records);
    assert_eq!(counted(&again)[0], (FailureCode::Other, 2));
    assert_eq!(again.failures().iter().map(|failure| failure.nodes).sum::<u32>(), 6);
}

#[test]
fn a_missing_result_distinguishes_offline_nodes() {
    let mut rollout = rollout(3, 3, "1");
    all_online(&mut rollout, 3);
    rollout.advance(at(0));
    (0..3).for_each(|n| _ = rollout.begin_dispatch(&node(n), at(0)).unwrap());
    rollout.mark_offline(&node(0), SessionId(1));
    rollout.advance(at(302));
    let code = |rollout: &Rollout, n| rollout.record(&node(n)).unwrap().code;
    assert_eq!(code(&rollout, 0), Some(FailureCode::Offline));
    assert_eq!(code(&rollout, 1), Some(FailureCode::NoResult));
    // A late result is the truth.
    assert!(rollout.record_result(&node(0), None, &result(TaskOutcome::Succeeded), at(400)));
    let late = failed_with(TaskOutcome::Failed, Some(FailureCode::NotFound));
    assert!(rollout.record_result(&node(1), None, &late, at(400)));
    assert_eq!((code(&rollout, 0), code(&rollout, 1)), (None, Some(FailureCode::NotFound)));
    assert_eq!(counted(&rollout), [(FailureCode::NotFound, 1), (FailureCode::NoResult, 1)]);
    // A further round forgets the causes of the last one.
    rollout.begin_round(|_| false);
    assert_eq!((counted(&rollout), code(&rollout, 1)), (vec![], None));
}

#[test]
fn closing_gives_unstarted_nodes_the_reason() {
    let mut rollout = rollout(3, 2, "1");
    all_online(&mut rollout, 3);
    rollout.advance(at(0));
    rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Succeeded), at(1));
    rollout.record_result(&node(1), Some(&plan()), &result(TaskOutcome::Failed), at(1));
    rollout.take_touched();
    rollout.close("the job is over");
    assert_eq!(rollout.take_touched(), [Touched { at: 2, phase: true }]);
    let reasons: Vec<_> = rollout.records().map(|record| record.reason.as_str()).collect();
    assert_eq!(reasons, ["", "because", "the job is over"]);
    rollout.close("the job is over");
    assert_eq!(rollout.take_touched(), [], "it says so already");
}

#[test]
fn an_earlier_attempts_images_still_count() {
    let image = |status| JobImageStatus { status, ..JobImageStatus::default() };
    let record = NodeStatus {
        node_name: node(0).0,
        image_status: [Tristate::Unknown, Tristate::True, Tristate::False, Tristate::True].map(image).into(),
        ..NodeStatus::default()
    };
    let rollout = Rollout::new(unheld(), vec![record]);
    assert_eq!(rollout.pulled_images(&node(0)), [1, 3]);
    assert_eq!(rollout.pulled_images(&node(1)), [0; 0]);
}

fn progress(attempt: u32) -> TaskProgress {
    let image = ImageProgress { attempts: 1, ..ImageProgress::new(0, ImagePhase::Pulling) };
    TaskProgress {
        task: TaskId { job: JobUid("job".to_owned()), attempt },
        images: vec![image],
        waits: String::new(),
    }
}

#[test]
fn an_ended_action_keeps_time_and_reason() {
    let flow = |rollout: &Rollout, n| rollout.record(&node(n)).unwrap().action_flow.clone();
    let mut rollout = rollout(3, 3, "1");
    all_online(&mut rollout, 3);
    begin(&mut rollout, at(0));
    for n in 0..3 {
        assert!(!rollout.record_progress(&node(n), &plan(), &progress(2), at(5)), "of another attempt");
        assert_eq!(flow(&rollout, n), []);
        assert!(rollout.record_progress(&node(n), &plan(), &progress(1), at(10)));
    }
    let checked = flow(&rollout, 0)[0].clone();
    assert_eq!((checked.status, &checked.time), (Tristate::True, &Time(at(10))));
    rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Succeeded), at(20));
    let [check, pull] = &flow(&rollout, 0)[..] else { panic!() };
    assert_eq!((check, pull.status, &pull.time), (&checked, Tristate::True, &Time(at(20))));
    // The edge reports the opposite now.
    let check = Some(CheckOutcome { passed: false, reason: "the disk is full".to_owned() });
    let failed = TaskResult { check, ..result(TaskOutcome::Failed) };
    rollout.record_result(&node(1), Some(&plan()), &failed, at(20));
    let [check] = &flow(&rollout, 1)[..] else { panic!() };
    assert_eq!((check.status, check.reason.as_str()), (Tristate::False, "the disk is full"));
    rollout.advance(at(302));
    let [check, pull] = &flow(&rollout, 2)[..] else { panic!() };
    assert_eq!((check, pull.status, &pull.time), (&checked, Tristate::Unknown, &Time(at(302))));
    assert!(pull.reason.contains("no result within"), "{}", pull.reason);
}

#[test]
fn node_time_begins_after_a_slow_write() {
    for (answered, began, left) in [(1, 0, 299), (2, 2, 300)] {
        let mut rollout = rollout(1, 1, "0");
        all_online(&mut rollout, 1);
        rollout.advance(at(0));
        rollout.stamp_starts(0..1, at(0));
        rollout.take_touched();
        let remaining = rollout.begin_dispatch(&node(0), at(answered));
        assert_eq!(remaining, Some(Duration::from_secs(left)));
        assert_eq!(rollout.record(&node(0)).unwrap().start_time, Some(Time(at(began))));
        assert_eq!(rollout.take_touched().len(), usize::from(began > 0));
    }
}

#[test]
fn an_undelivered_assign_goes_to_the_newest_session() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    begin(&mut rollout, at(0));
    assert_eq!(rollout.mark_online(&node(0), SessionId(2), None, at(1)), Reattach::Leave);
    assert_eq!(rollout.mark_not_sent(&node(0)), Reattach::Dispatch);
}

#[test]
fn an_unresendable_task_keeps_its_slot() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    begin(&mut rollout, at(0));
    assert_eq!(rollout.mark_sent(&node(0), SessionId(1)), Reattach::Leave);
    // Twice, since the first one went to a session that was replaced.
    for _ in 0..2 {
        rollout.begin_dispatch(&node(0), at(1)).unwrap();
    }
    assert_eq!(rollout.mark_not_sent(&node(0)), Reattach::Leave);
    assert_eq!((rollout.summary().in_progress, rollout.advance(at(2))), (1, vec![]));
    assert_eq!(rollout.mark_online(&node(0), SessionId(2), None, at(3)), Reattach::Dispatch);
}

#[test]
fn a_lost_node_is_unknown() {
    let mut rollout = rollout(2, 1, "1");
    all_online(&mut rollout, 2);
    begin(&mut rollout, at(0));
    for n in 0..2 {
        rollout.mark_lost(&node(n), "the Node is gone", at(1));
    }
    let record = rollout.record(&node(0)).unwrap();
    assert_eq!((record.phase, record.code), (NodePhase::Unknown, Some(FailureCode::NodeNotFound)));
    let [check] = &record.action_flow[..] else { panic!("{record:?}") };
    assert_eq!((check.status, check.reason.as_str()), (Tristate::Unknown, "the Node is gone"));
    assert_eq!(rollout.summary().pending, 1);
}

#[test]
fn an_ended_jobs_open_task_is_cancelled() {
    let record = NodeStatus { node_name: node(0).0, ..NodeStatus::default() };
    let mut rollout = Rollout::for_ended_job(unheld(), vec![record]);
    for (open, expected) in [
        (Some(OpenPhase::Running), Reattach::Cancel),
        (Some(OpenPhase::NeedsKeys), Reattach::Cancel),
        (Some(OpenPhase::Finished), Reattach::Leave),
        (None, Reattach::Leave),
    ] {
        let open = open.map(|phase| (1, phase));
        assert_eq!(rollout.mark_online(&node(0), SessionId(1), open, at(0)), expected);
    }
}

#[test]
fn a_missing_node_waits_once_found() {
    let missing = |n| NodeStatus {
        node_name: node(n).0,
        phase: NodePhase::Failure,
        code: Some(FailureCode::NodeNotFound),
        ..NodeStatus::default()
    };
    let settings = rollout(0, 1, "1").settings().clone();
    assert!(Rollout::new(settings.clone(), vec![]).is_empty());
    let mut rollout = Rollout::new(settings, vec![missing(0), missing(1)]);
    assert_eq!((rollout.len(), rollout.is_empty(), rollout.missing_count()), (2, false, 2));
    rollout.mark_found(&node(0));
    assert_eq!((rollout.missing_count(), rollout.summary().pending, rollout.summary().failure), (1, 1, 1));
    // One that has failed otherwise does not begin again.
    rollout.mark_online(&node(0), SessionId(1), None, at(0));
    begin(&mut rollout, at(0));
    rollout.record_result(&node(0), None, &result(TaskOutcome::Failed), at(1));
    rollout.mark_found(&node(0));
    assert_eq!((rollout.summary().pending, rollout.summary().failure), (0, 2));
}

#[test]
fn a_lost_record_is_no_missing_node() {
    // Its report was deleted by hand, so that nothing is known of the start that this is the result of.
    let mut rollout = rollout(2, 1, "1");
    assert!(rollout.record_result(&node(0), Some(&plan()), &result(TaskOutcome::Failed), at(1)));
    let record = rollout.record(&node(0)).unwrap();
    assert_eq!((record.phase, record.attempt, rollout.missing_count()), (NodePhase::Failure, 1, 0));
    assert_eq!((rollout.summary().pending, rollout.waiting_offline()), (1, 1));
}

#[test]
fn a_round_begins_at_the_first_incomplete_wave() {
    let steps = ["1", "50%", "100%"].map(|step| WaveStep::parse(step).unwrap()).to_vec();
    for (pending, wave) in [(10, 1), (9, 2), (6, 2), (5, 3), (1, 3)] {
        let counts = Summary { desired: 10, pending, ..Summary::default() };
        let status = waves::Waves::for_further_round(&steps, &counts).status(&steps, 1, Duration::ZERO);
        assert_eq!(status.map(|status| status.step), Some(wave), "{pending} of 10 nodes are tried again");
    }
}

#[test]
fn the_last_wave_has_all_nodes() {
    let shown = |steps: &[&str], step: u32| {
        let steps: Vec<_> = steps.iter().map(|step| WaveStep::parse(step).unwrap()).collect();
        let status = RolloutStatus { step, ..RolloutStatus::default() };
        let waves = waves::Waves::from_status(&status, Duration::ZERO);
        waves.status(&steps, 1, Duration::ZERO).map(|status| (status.step, status.steps))
    };
    assert_eq!(shown(&["1", "50%"], 1), Some((1, 3)));
    assert_eq!(shown(&["1", "50%"], 9), Some((3, 3)));
    assert_eq!(shown(&["1", "100%"], 2), Some((2, 2)));
    assert_eq!(shown(&[], 1), None);
}

#[test]
fn the_last_attempt_is_the_highest_of_all() {
    let record = |(n, attempt)| NodeStatus { node_name: node(n).0, attempt, ..NodeStatus::default() };
    let last = |attempts: &[u32]| {
        let records = attempts.iter().copied().enumerate().map(record).collect();
        Rollout::new(unheld(), records).last_attempt()
    };
    assert_eq!([last(&[]), last(&[0, 7, 3])], [0, 7]);
}
