//! What Prometheus can see.

use std::sync::atomic::AtomicU64;

use prepull_api::crd::status::JobPhase;
use prepull_api::task::TaskOutcome;
use prepull_api::wire::EdgeMessage;
use prepull_engine::kruise::node_images::Written;
use prepull_engine::kruise::{self, jobs, node_images};
use prepull_engine::prepull::controller::{Input, WriteOutcome};
use prepull_engine::shared::outcomes::DispatchOutcome;
use prepull_engine::shared::session::SessionEvent;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::edges::tunnel::Meters;
use crate::kube_api::leader::Leadership;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// All metrics of cloudcore-prepull. They are counted where the controller's inputs and actions pass, and at the
/// tunnel's door.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    jobs: Family<PhaseLabel, Gauge>,
    sessions: Gauge<i64>,
    dispatches: Family<OutcomeLabel, Counter>,
    results: Family<OutcomeLabel, Counter>,
    writes: Family<OutcomeLabel, Counter>,
    kruise_writes: Family<OutcomeLabel, Counter>,
    inputs: Counter<u64, AtomicU64>,
    leader: Gauge<i64>,
    lease_transitions: Gauge<i64>,
    tunnel: Meters,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("cloudcore_prepull");
        let jobs = Family::default();
        let sessions = Gauge::default();
        let dispatches = Family::default();
        let results = Family::default();
        let writes = Family::default();
        let kruise_writes = Family::default();
        let inputs = Counter::default();
        let leader = Gauge::default();
        let lease_transitions = Gauge::default();
        let tunnel = Meters::default();
        tunnel.register(&mut registry);
        registry.register("jobs", "ImagePrePullJobs by phase", jobs.clone());
        registry.register("edge_sessions", "Edge nodes that are connected", sessions.clone());
        registry.register("dispatches", "Tasks sent to edge nodes, by outcome", dispatches.clone());
        registry.register("results", "Results that edge nodes sent, by outcome", results.clone());
        registry.register("status_writes", "Writes of job status and of reports, by outcome", writes.clone());
        registry.register(
            "kruise_writes",
            "Writes of NodeImages, ImagePullJobs and ImageListPullJobs, by outcome",
            kruise_writes.clone(),
        );
        registry.register("controller_inputs", "What the controller took in", inputs.clone());
        registry.register("leader", "Whether this replica leads", leader.clone());
        registry.register(
            "lease_transitions",
            "How often the Lease had changed hands when it was last read",
            lease_transitions.clone(),
        );
        Self {
            registry,
            jobs,
            sessions,
            dispatches,
            results,
            writes,
            kruise_writes,
            inputs,
            leader,
            lease_transitions,
            tunnel,
        }
    }
}

impl Metrics {
    /// Counts what comes in.
    pub fn input(&self, input: &Input) {
        self.inputs.inc();
        match input {
            Input::Dispatched { outcome, .. } => self.dispatched(outcome),
            Input::Written { outcome, .. } => {
                let outcome = match outcome {
                    WriteOutcome::Done => "done",
                    WriteOutcome::Gone => "gone",
                    WriteOutcome::Failed => "failed",
                };
                self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
            }
            Input::Session(SessionEvent::Message { message: EdgeMessage::Result(result), .. }) => {
                let outcome = match result.outcome {
                    TaskOutcome::Succeeded => "succeeded",
                    TaskOutcome::Failed => "failed",
                    TaskOutcome::DeadlineExceeded => "deadline_exceeded",
                    TaskOutcome::Cancelled => "cancelled",
                };
                self.results.get_or_create(&OutcomeLabel { outcome }).inc();
            }
            _ => {}
        }
    }

    /// Counts what comes in of Kruise's objects.
    pub fn kruise_input(&self, input: &kruise::Input) {
        self.inputs.inc();
        let outcome = match input {
            kruise::Input::Node(node_images::Input::Written(_, written)) => match written {
                Written::Done(_) => "done",
                Written::Refused(_) => "conflict",
                Written::Failed => "failed",
            },
            kruise::Input::Job(jobs::Input::Written { outcome, .. }) => match outcome {
                jobs::Outcome::Done => "done",
                jobs::Outcome::Gone => "gone",
                jobs::Outcome::Failed => "failed",
            },
            kruise::Input::Node(node_images::Input::Dispatched { outcome, .. }) => {
                self.dispatched(outcome);
                return;
            }
            _ => return,
        };
        self.kruise_writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    fn dispatched(&self, outcome: &DispatchOutcome) {
        let outcome = match outcome {
            DispatchOutcome::Sent(_) => "sent",
            DispatchOutcome::Offline => "offline",
            DispatchOutcome::Unsendable(_) => "unsendable",
        };
        self.dispatches.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Takes the state that is a level and no flow.
    pub fn levels(&self, phases: impl Iterator<Item = JobPhase>, sessions: usize) {
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
            self.jobs.get_or_create(&PhaseLabel { phase }).set(count);
        }
        self.sessions.set(i64::try_from(sessions).unwrap_or(i64::MAX));
    }

    /// Takes whether this replica leads, now.
    pub fn leadership(&self, leadership: &Leadership) {
        self.leader.set(leadership.is_leader().into());
        self.lease_transitions.set(leadership.transitions());
    }

    /// What the tunnel counts by itself.
    pub fn tunnel(&self) -> Meters {
        self.tunnel.clone()
    }

    /// In the text format of OpenMetrics.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
