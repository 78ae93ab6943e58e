//! A line for each change of a job, for where there is no terminal.

use std::collections::BTreeSet;

use prepull_api::crd::status::JobPhase;
use prepull_api::failure::FailureCode;

use super::render::name_of;
use super::view::JobView;
use crate::amounts::{format_bytes, format_count, format_duration, format_names, part_of};

/// Lines between the beginning and the end of a job in which no node ends.
const STEPS: f64 = 10.0;

#[derive(Debug, Default)]
pub(crate) struct Lines {
    state: Option<LineState>,
    reason: String,
    failures: BTreeSet<FailureCode>,
    waiting: BTreeSet<String>,
}

#[derive(Debug, PartialEq)]
struct LineState {
    phase: JobPhase,
    is_suspended: bool,
    wave: Option<(u32, bool)>,
    round: u32,
    ended: [u32; 3],
    step: u32,
}

impl Lines {
    pub(crate) fn describe_changes(&mut self, view: &JobView) -> Vec<String> {
        let mut lines = Vec::new();
        let nodes = &view.nodes;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a few steps
        let state = LineState {
            phase: view.phase,
            is_suspended: view.suspended,
            wave: view.wave.as_ref().map(|wave| (wave.number, wave.paused_seconds.is_some())),
            round: view.round,
            ended: [nodes.successful, nodes.failure, nodes.unknown],
            step: (view.done * STEPS) as u32,
        };
        if self.state.as_ref() != Some(&state) {
            lines.push(summary(view));
            self.state = Some(state);
        }
        // How many nodes wait changes all the time; what for is news.
        let counted = view.reason.trim_start_matches(|c: char| c.is_ascii_digit());
        let reason = counted.strip_prefix(" nodes").or(counted.strip_prefix(" node")).unwrap_or(counted);
        if self.reason != reason {
            reason.clone_into(&mut self.reason);
            lines.extend((!view.reason.is_empty()).then(|| timed_line(view, &view.reason)));
        }
        for failures in &view.failures {
            if self.failures.insert(failures.code) {
                let on = format_names(&failures.examples, failures.nodes);
                lines.push(timed_line(view, &format!("{} on {on}: {}", failures.code, failures.reason)));
            }
        }
        for waiting in &view.waiting {
            if self.waiting.insert(waiting.reason.clone()) {
                let nodes = format_count(waiting.nodes, "node");
                lines.push(timed_line(view, &format!("{nodes}: {}", waiting.reason)));
            }
        }
        lines
    }
}

fn timed_line(view: &JobView, text: &str) -> String {
    let time = view.seconds.map(format_duration).unwrap_or_default();
    format!("{time:>6}  {}  {text}", view.job)
}

fn summary(view: &JobView) -> String {
    let phase = match view.phase {
        JobPhase::InProgress if view.paused => "Paused",
        JobPhase::InProgress if view.suspended => "Suspended",
        phase => name_of(phase),
    };
    let mut state = vec![phase.to_owned()];
    if let Some(wave) = &view.wave {
        let next =
            wave.paused_seconds.map(|seconds| format!(" over, the next one in {}", format_duration(seconds)));
        state.push(format!("wave {} of {}{}", wave.number, wave.of, next.unwrap_or_default()));
    }
    if view.round > 0 {
        state.push(format!("retry {}", view.round));
    }
    let nodes = &view.nodes;
    let mut numbers = Vec::new();
    if nodes.desired > 0 {
        numbers.push(format!(
            "{} of {} successful",
            nodes.successful,
            format_count(nodes.desired.into(), view.noun())
        ));
    }
    for (nodes, what) in
        [(nodes.failure, "failed"), (nodes.unknown, "unknown"), (nodes.in_progress, "at work")]
    {
        if nodes > 0 {
            numbers.push(format!("{nodes} {what}"));
        }
    }
    let mut speed = Vec::new();
    if view.bytes.total > 0 {
        speed.push(part_of(view.bytes.done, view.bytes.total));
    }
    speed.extend(view.bytes_per_second.map(|rate| format!("{}/s", format_bytes(rate))));
    speed.extend(view.seconds_left.map(|left| format!("about {} left", format_duration(left))));
    let parts = [state, numbers, speed].map(|part| part.join(", "));
    timed_line(view, &parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; "))
}
