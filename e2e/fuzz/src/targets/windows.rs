//! Windows in one line, durations and moments: one per line. Any other line is the time zone of the node.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use prepull_api::download::MAX_WINDOWS;
use prepull_window::{HORIZON, Openings, parse_duration, parse_window, write_duration, write_window};

/// Number of moments of one input that we check.
const MOMENTS: usize = 4;
/// Time after each of them for which we check the openings: each window opens within it.
const AHEAD: SignedDuration = SignedDuration::from_hours(10 * 24);

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (mut windows, mut durations, mut moments, mut zone) = (Vec::new(), Vec::new(), Vec::new(), None);
    for line in text.split('\n') {
        if let Ok(window) = parse_window(line) {
            assert_eq!(
                parse_window(&write_window(&window)),
                Ok(window.clone()),
                "{line} is written as itself"
            );
            windows.push(window);
        } else if let Ok(duration) = parse_duration(line) {
            assert_eq!(
                parse_duration(&write_duration(duration)),
                Ok(duration),
                "{line} is written as itself"
            );
            durations.push(duration);
        } else if let Ok(moment) = line.parse::<Timestamp>() {
            moments.push(moment);
        } else {
            zone = Some(line);
        }
    }
    windows.truncate(MAX_WINDOWS);
    let (of_job, of_node) = windows.split_at(windows.len() / 2);
    let delay = durations.first().copied().unwrap_or_default();
    let openings =
        Openings::new(of_job, delay, zone).intersect_with(Openings::new(of_node, Duration::ZERO, zone));
    let open = durations.last().copied().unwrap_or_default().min(AHEAD.unsigned_abs());
    for from in moments.into_iter().take(MOMENTS) {
        check_openings(&openings, from, open);
    }
}

fn check_openings(openings: &Openings, from: Timestamp, open: Duration) {
    let after = |wait| from.saturating_add(wait).unwrap_or(Timestamp::MAX);
    let state = openings.state_at(from);
    assert!(
        state.until.is_none_or(|until| until > from || until == Timestamp::MAX),
        "time stands still at {from}"
    );
    assert_eq!(openings.explain_wait(from).is_none(), state.is_open, "what is said at {from}");
    match openings.next_open(from) {
        None => assert!(!state.is_open || from == Timestamp::MAX, "{from}"),
        Some(opens) => {
            assert!(openings.is_open(opens), "it opens at {opens} after {from}, and is closed then");
            assert_eq!(opens == from, state.is_open, "it opens at {opens}, seen from {from}");
        }
    }
    let (middle, to) = (after(AHEAD / 3), after(AHEAD));
    let parts = openings.open_between(from, middle) + openings.open_between(middle, to);
    assert_eq!(openings.open_between(from, to), parts, "the parts of the time from {from} to {to}");
    let done = openings.after_open_time(from, open);
    // Later moments may be estimates.
    if done <= after(SignedDuration::try_from(HORIZON).unwrap_or_default()) {
        assert!(openings.open_between(from, done) <= open, "{open:?} are over by {done}, seen from {from}");
    }
    let earliest = after(SignedDuration::try_from(open).unwrap_or(AHEAD));
    assert!(done >= earliest, "{open:?} are over by {done}, seen from {from}");
}
