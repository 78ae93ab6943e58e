//! The waves after a restart, in a further round, and at the end of a pause.

use super::*;

fn steps(steps: &[&str]) -> Vec<WaveStep> {
    steps.iter().map(|step| WaveStep::parse(step).unwrap()).collect()
}

fn step(rollout: &Rollout) -> u32 {
    rollout.waves().unwrap().step
}

#[test]
fn the_next_leader_resumes_the_wave_reached() {
    // In the second case the wave had 3 of 15 nodes, and five that waited were deleted.
    for (started, shown, expected) in [(3, 2, 2), (3, 3, 1), (2, 1, 1)] {
        let record = |n| NodeStatus {
            node_name: node(n).0,
            phase: if n < started { NodePhase::InProgress } else { NodePhase::Pending },
            ..NodeStatus::default()
        };
        let settings = RolloutSettings { steps: steps(&["20%", "50%"]), ..unheld() };
        let mut rollout = Rollout::new(settings, (0..10).map(record).collect());
        rollout.resume_waves(&RolloutStatus { step: 1, nodes: shown, ..RolloutStatus::default() });
        assert_eq!(step(&rollout), expected, "{started} of the {shown} shown have started");
    }
}

/// Three nodes. One has failed, and the others begin 60 seconds after its end.
fn in_two_waves() -> Rollout {
    let mut rollout = rollout(3, 3, "1");
    let (steps, pause) = (steps(&["1"]), Duration::from_secs(60));
    rollout.configure(RolloutSettings { steps, pause, ..rollout.settings().clone() });
    all_online(&mut rollout, 3);
    assert_eq!(begin(&mut rollout, at(0)), [node(0)]);
    rollout.record_result(&node(0), None, &result(TaskOutcome::Failed), at(1));
    assert_eq!(rollout.advance(at(1)), []);
    rollout
}

#[test]
fn a_wave_begins_at_the_end_of_the_pause() {
    let mut rollout = in_two_waves();
    assert_eq!(rollout.next_deadline(), Some(at(61)));
    assert_eq!(begin(&mut rollout, at(61)), [node(1), node(2)]);
}

#[test]
fn a_failed_job_waits_for_no_wave() {
    let mut rollout = in_two_waves();
    let tolerance = Ratio::parse("0").unwrap();
    rollout.configure(RolloutSettings { tolerance, ..rollout.settings().clone() });
    assert_eq!((rollout.verdict(), rollout.next_deadline()), (RolloutVerdict::Failed, None));
}

#[test]
fn a_further_round_begins_with_the_first_wave() {
    let mut rollout = in_two_waves();
    begin(&mut rollout, at(61));
    for n in 1..3 {
        rollout.record_result(&node(n), None, &result(TaskOutcome::Failed), at(62));
    }
    assert_eq!((step(&rollout), rollout.begin_round(|_| false), step(&rollout)), (2, 3, 1));
    assert_eq!(begin(&mut rollout, at(63)), [node(0)]);
}

#[test]
fn no_wave_follows_the_last_node() {
    let counts = Summary { desired: 1, successful: 1, ..Summary::default() };
    let (mut waves, pause) = (waves::Waves::default(), Duration::from_secs(60));
    waves.advance(&steps(&["1"]), pause, &counts, at(0));
    assert_eq!(waves.paused_until(pause), None);
}
