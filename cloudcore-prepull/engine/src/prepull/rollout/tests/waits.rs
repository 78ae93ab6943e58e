//! Nodes that wait: for another job's task, their windows, and their secrets.

use super::*;

fn clock(window: &str) -> NodeClock {
    NodeClock { time_zone: None, windows: vec![window.to_owned()] }
}

#[test]
fn a_busy_node_waits_without_a_slot() {
    let mut rollout = rollout(2, 1, "0");
    all_online(&mut rollout, 2);
    assert!(rollout.set_busy(&node(0), true));
    assert_eq!(started(&rollout.advance(at(0))), [node(1)]);
    assert_eq!(rollout.record(&node(0)).unwrap().reason, BUSY);
}

#[test]
fn an_offline_node_waits_for_no_window() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.set_clock(&node(0), &clock("14:00+1h UTC"));
    assert_eq!(rollout.advance(at(0)), []);
    assert_eq!(rollout.take_touched(), [Touched { at: 0, phase: false }]);
    assert_eq!(rollout.waiting_for_windows().map(|(nodes, _)| nodes), Some(1));
    rollout.mark_offline(&node(0), SessionId(1));
    assert_eq!(rollout.waiting_for_windows(), None);
}

#[test]
fn a_clock_counts_unless_it_lengthens_the_time() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    rollout.set_clock(&node(0), &clock("13:00+2h UTC"));
    assert_eq!(begin(&mut rollout, at(0)), [node(0)]);
    // The time ends at 13:51:40, or, by the last clock, on the next day.
    for window in ["13:00+3h UTC", "13:00+50m UTC"] {
        rollout.set_clock(&node(0), &clock(window));
        assert_eq!(rollout.record(&node(0)).unwrap().clock, Some(clock("13:00+3h UTC")));
    }
}

#[test]
fn changed_settings_follow_a_task_that_is_being_sent() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    begin(&mut rollout, at(0));
    assert_eq!(rollout.change_settings(), []);
    rollout.mark_accepted(&node(0), 1);
    assert_eq!(rollout.mark_sent(&node(0), SessionId(1)), Reattach::Dispatch);
    rollout.begin_dispatch(&node(0), at(1)).unwrap();
    // Of the earlier one.
    rollout.mark_accepted(&node(0), 1);
    assert_eq!(rollout.mark_sent(&node(0), SessionId(1)), Reattach::Leave);
    assert_eq!(rollout.change_settings(), [node(0)]);
}

#[test]
fn a_postponed_task_is_sent_beside_an_accepted_one() {
    for comes_first in [true, false] {
        let mut rollout = rollout(1, 1, "0");
        all_online(&mut rollout, 1);
        begin(&mut rollout, at(0));
        rollout.mark_sent(&node(0), SessionId(1));
        rollout.begin_dispatch(&node(0), at(1)).unwrap();
        if comes_first {
            rollout.mark_accepted(&node(0), 1);
        }
        assert!(rollout.postpone(&node(0), "its secret can't be read", &[], at(1)));
        rollout.mark_accepted(&node(0), 1);
        let until = rollout.next_deadline().unwrap();
        assert_eq!(rollout.advance(until), [RolloutDecision::Redispatch(node(0))], "{comes_first}");
    }
}

#[test]
fn flapping_nodes_pay_real_waits() {
    let mut rollout = rollout(1, 1, "0");
    for flap in 0..100 {
        let (up, down) = (at(2 * flap), at(2 * flap + 1));
        rollout.mark_online(&node(0), SessionId(1), None, up);
        assert_eq!(begin(&mut rollout, up), [node(0)], "{flap}");
        assert!(rollout.postpone(&node(0), "its secret can't be read", &[], up), "{flap}");
        assert_eq!(rollout.waiting_for_secrets().map(|(nodes, _)| nodes), Some(1));
        rollout.advance(down);
        rollout.mark_offline(&node(0), SessionId(1));
        assert_eq!(rollout.waiting_for_secrets(), None);
    }
}

#[test]
fn only_a_task_without_its_keys_is_repeated() {
    for (asked, phase) in [(true, NodePhase::InProgress), (false, NodePhase::Failure)] {
        let mut rollout = rollout(1, 1, "1");
        all_online(&mut rollout, 1);
        begin(&mut rollout, at(0));
        if asked {
            rollout.mark_asked(&node(0));
        }
        let mut failed = failed_with(TaskOutcome::Failed, Some(FailureCode::SecretUnusable));
        failed.images.truncate(1);
        assert!(rollout.record_result(&node(0), None, &failed, at(1)));
        rollout.advance(at(1));
        assert_eq!((rollout.record(&node(0)).unwrap().phase, rollout.has_asked(&node(0))), (phase, asked));
    }
}

#[test]
fn a_node_that_returns_keeps_its_attempt() {
    let mut rollout = rollout(1, 1, "0");
    all_online(&mut rollout, 1);
    begin(&mut rollout, at(0));
    rollout.mark_not_sent(&node(0));
    assert!(rollout.remove_node(&node(0)));
    rollout.add(NodeStatus { node_name: node(0).0, ..NodeStatus::default() });
    assert_eq!(rollout.record(&node(0)).unwrap().attempt, 1);
}
