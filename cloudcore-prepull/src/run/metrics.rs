//! The metrics of cloudcore-prepull, as Prometheus scrapes them.

use std::sync::atomic::AtomicU64;

use prepull_api::crd::status::JobPhase;
use prepull_api::failure::FailureCode;
use prepull_api::task::TaskOutcome;
use prepull_api::wire::EdgeMessage;
use prepull_engine::kruise::node_images::Written;
use prepull_engine::kruise::{self, jobs, node_images};
use prepull_engine::prepull::controller::Input;
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use prepull_engine::shared::session::SessionEvent;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::edges::EdgeMetrics;
use crate::edges::roster::RosterMetrics;
use crate::kube_api::leader::Leadership;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

prepull_program::metrics! {
    /// The counters and gauges of the engines' inputs, of the sessions and of the election.
    struct Counted {
        /// ImagePrePullJobs by phase
        jobs: Family<PhaseLabel, Gauge>,
        /// Edge nodes that are connected
        edge_sessions: Gauge<i64>,
        /// Tasks sent to edge nodes, by outcome
        dispatches: Family<OutcomeLabel, Counter>,
        /// Results that edge nodes sent, by outcome
        results: Family<OutcomeLabel, Counter>,
        /// Images that edge nodes reported as failed, by the code of the failure
        image_failures: Family<CodeLabel, Counter>,
        /// Writes of job status and of reports, by outcome
        status_writes: Family<OutcomeLabel, Counter>,
        /// Writes of NodeImages, ImagePullJobs and ImageListPullJobs, by outcome
        kruise_writes: Family<OutcomeLabel, Counter>,
        /// What the controller took in
        controller_inputs: Counter<u64, AtomicU64>,
        /// Whether this replica leads
        leader: Gauge<i64>,
        /// How often the Lease had changed hands when it was last read
        lease_transitions: Gauge<i64>,
    }
}

/// All metrics of cloudcore-prepull.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    counted: Counted,
    edges: EdgeMetrics,
    roster: RosterMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("cloudcore_prepull");
        let (counted, edges, roster) = (Counted::default(), EdgeMetrics::default(), RosterMetrics::default());
        edges.register(&mut registry);
        roster.register(&mut registry);
        counted.register(&mut registry);
        Self { registry, counted, edges, roster }
    }
}

impl Metrics {
    /// Counts an input of the controller, and the outcome that it may carry.
    pub(super) fn count_input(&self, input: &Input) {
        self.counted.controller_inputs.inc();
        match input {
            Input::Dispatched { outcome, .. } => self.count_dispatch(outcome),
            Input::Written { outcome, .. } => {
                let outcome = match outcome {
                    WriteOutcome::Done => "done",
                    WriteOutcome::Gone => "gone",
                    WriteOutcome::Failed => "failed",
                };
                self.counted.status_writes.get_or_create(&OutcomeLabel { outcome }).inc();
            }
            Input::Session(SessionEvent::Message { message: EdgeMessage::Result(result), .. }) => {
                let outcome = match result.outcome {
                    TaskOutcome::Succeeded => "succeeded",
                    TaskOutcome::Failed => "failed",
                    TaskOutcome::DeadlineExceeded => "deadline_exceeded",
                    TaskOutcome::Cancelled => "cancelled",
                };
                self.counted.results.get_or_create(&OutcomeLabel { outcome }).inc();
                for image in result.images.iter().filter(|image| !image.outcome.is_on_node()) {
                    let code = image.code.unwrap_or(FailureCode::Other).as_str();
                    self.counted.image_failures.get_or_create(&CodeLabel { code }).inc();
                }
            }
            _ => {}
        }
    }

    /// Counts an input of Kruise's engine, and the outcome that it may carry.
    pub(super) fn count_kruise_input(&self, input: &kruise::Input) {
        self.counted.controller_inputs.inc();
        let outcome = match input {
            kruise::Input::Node(node_images::Input::Written(_, written)) => match written {
                Written::Done(_) => "done",
                Written::Refused(_) => "conflict",
                Written::Failed => "failed",
            },
            kruise::Input::Job(jobs::Input::Written { outcome, .. }) => match outcome {
                WriteOutcome::Done => "done",
                WriteOutcome::Gone => "gone",
                WriteOutcome::Failed => "failed",
            },
            kruise::Input::Node(node_images::Input::Dispatched { outcome, .. }) => {
                self.count_dispatch(outcome);
                return;
            }
            _ => return,
        };
        self.counted.kruise_writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    fn count_dispatch(&self, outcome: &DispatchOutcome) {
        let outcome = match outcome {
            DispatchOutcome::Sent(_) => "sent",
            DispatchOutcome::Offline => "offline",
            DispatchOutcome::Postponed(_) => "postponed",
            DispatchOutcome::Withheld { .. } => "withheld",
            DispatchOutcome::Unsendable(_) => "unsendable",
        };
        self.counted.dispatches.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Sets the gauges of jobs and sessions.
    pub(super) fn set_levels(&self, phases: impl Iterator<Item = JobPhase>, sessions: usize) {
        let mut counts = [0_i64; 4];
        phases.for_each(|phase| counts[phase as usize] += 1);
        for (phase, count) in
            [JobPhase::Init, JobPhase::InProgress, JobPhase::Completed, JobPhase::Failure].iter().zip(counts)
        {
            let phase = match phase {
                JobPhase::Init => "Init",
                JobPhase::InProgress => "InProgress",
                JobPhase::Completed => "Completed",
                JobPhase::Failure => "Failure",
            };
            self.counted.jobs.get_or_create(&PhaseLabel { phase }).set(count);
        }
        self.counted.edge_sessions.set(i64::try_from(sessions).unwrap_or(i64::MAX));
    }

    /// Sets the gauges of the election.
    pub(super) fn set_leadership(&self, leadership: &Leadership) {
        self.counted.leader.set(leadership.is_leader().into());
        self.counted.lease_transitions.set(leadership.transitions());
    }

    /// The metrics that the ports of the edges count themselves.
    pub fn edges(&self) -> EdgeMetrics {
        self.edges.clone()
    }

    /// The metrics of the nodes' keys.
    pub(super) fn roster(&self) -> RosterMetrics {
        self.roster.clone()
    }

    /// All metrics in the text format of OpenMetrics.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests;
