//! The metrics of cloudcore-prepull, as Prometheus scrapes them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::crd::status::{JobPhase, Summary};
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageResult, TaskResult};
use prepull_api::wire::EdgeMessage;
use prepull_engine::engine::Input;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::SessionEvent;
use prepull_engine::kruise::node_images::WrittenNodeImage;
use prepull_engine::kruise::{self, jobs, node_images};
use prepull_engine::prepull::controller;
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use prepull_engine::sites::{SiteEventKind, SiteReport};
use prepull_program::metrics::{DURATION_BUCKETS, Label};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::edges::EdgeMetrics;
use crate::edges::pki::CaCensus;
use crate::edges::roster::RosterMetrics;
use crate::kube_api::leader::Leadership;

mod sites;

use sites::SiteMetrics;

/// What runs.
const BUILD: Label = [("version", env!("CARGO_PKG_VERSION"))];
/// Upper bounds in seconds of a write to the API server, which gives up after a minute.
const WRITE_BUCKETS: [f64; 9] = [0.005, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0];
/// The most jobs with series about their nodes, five each. We take those with the first names, so that they stay the
/// same.
const MAX_JOBS: usize = 100;

prepull_program::metrics! {
    /// The counters and gauges of the engines' inputs, of the sessions and of the election.
    struct Counted {
        /// ImagePrePullJobs by phase
        jobs: Family<Label, Gauge>,
        /// Edge nodes that are connected
        edge_sessions: Gauge<i64>,
        /// Tasks sent to edge nodes, by outcome
        dispatches: Family<Label, Counter>,
        /// Results that edge nodes sent, by outcome
        results: Family<Label, Counter>,
        /// Seconds from the acceptance of a task on its node to its end, by outcome
        task_duration_seconds: Family<Label, Histogram, fn() -> Histogram>
            = Family::new_with_constructor(|| Histogram::new(DURATION_BUCKETS)),
        /// Seconds from the acceptance of a task on its node to the first try of an image: other tasks, windows, checks
        task_queue_duration_seconds: Histogram = Histogram::new(DURATION_BUCKETS),
        /// Seconds from the first try of an image to its end, by outcome
        image_duration_seconds: Family<Label, Histogram, fn() -> Histogram>
            = Family::new_with_constructor(|| Histogram::new(DURATION_BUCKETS)),
        /// Tries that edge nodes made for images, by how the image ended
        image_tries: Family<Label, Counter>,
        /// Compressed bytes of images that edge nodes have pulled, by who has downloaded, or delta if it was rebuilt
        pulled_image_bytes: Family<Label, Counter>,
        /// Images that came by layers although their registry has deltas to them, by the reason
        refused_deltas: Family<Label, Counter>,
        /// Nodes of the jobs that run, by phase; of at most 100 jobs
        job_nodes: Family<(Label<String>, Label), Gauge>,
        /// Seconds that a write of a job status or of a report took, by outcome
        status_write_duration_seconds: Family<Label, Histogram, fn() -> Histogram>
            = Family::new_with_constructor(|| Histogram::new(WRITE_BUCKETS)),
        /// 1; the labels say what runs
        build_info: Family<Label, Gauge>,
        /// Images that edge nodes reported as failed, by the code of the failure
        image_failures: Family<Label, Counter>,
        /// Writes of job status and of reports, by outcome
        status_writes: Family<Label, Counter>,
        /// Writes of NodeImages, ImagePullJobs and ImageListPullJobs, by outcome
        kruise_writes: Family<Label, Counter>,
        /// Traces of tasks for the collector of --otlp-endpoint, by outcome
        traces: Family<Label, Counter>,
        /// What the controller took in
        controller_inputs: Counter<u64, AtomicU64>,
        /// Whether this replica leads
        leader: Gauge<i64>,
        /// How often the Lease had changed hands when it was last read
        lease_transitions: Gauge<i64>,
    }
}

/// The phases of a node, in the order in which they are counted.
const NODE_PHASES: [&str; 5] = ["Pending", "InProgress", "Successful", "Failure", "Unknown"];

fn outcome_label(outcome: WriteOutcome) -> &'static str {
    match outcome {
        WriteOutcome::Done => "done",
        WriteOutcome::Gone => "gone",
        WriteOutcome::Failed => "failed",
    }
}

/// All metrics of cloudcore-prepull.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    counted: Counted,
    edges: EdgeMetrics,
    roster: RosterMetrics,
    sites: SiteMetrics,
    /// The jobs that have series, with what these say.
    shown_jobs: Mutex<BTreeMap<String, [u32; 5]>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("cloudcore_prepull");
        let (counted, edges, roster) =
            (Counted::default(), EdgeMetrics::default(), RosterMetrics::with_alerted_series());
        edges.register(&mut registry);
        roster.register(&mut registry);
        counted.register(&mut registry);
        let sites = SiteMetrics::default();
        sites.series.register(&mut registry);
        counted.build_info.get_or_create(&BUILD).set(1);
        // Prometheus sees no increase from nothing to one, so these series are there before their first event.
        for code in FailureCode::ALL {
            drop(counted.image_failures.get_or_create(&[("code", code.as_str())]));
        }
        drop(counted.dispatches.get_or_create(&[("outcome", "withheld")]));
        Self { registry, counted, edges, roster, sites, shown_jobs: Mutex::default() }
    }
}

impl Metrics {
    /// Counts what the engine takes in, and the outcome that it may carry.
    pub(super) fn count_input(&self, input: &Input) {
        if !matches!(input, Input::Settings(_)) {
            self.counted.controller_inputs.inc();
        }
        match input {
            Input::Fleet(FleetEvent::Session(SessionEvent::Message {
                message: EdgeMessage::Result(result),
                ..
            })) => self.count_result(result),
            Input::Prepull(controller::Input::Dispatched { outcome, .. })
            | Input::Kruise(kruise::Input::Node(node_images::Input::Dispatched { outcome, .. })) => {
                self.count_dispatch(outcome);
            }
            Input::Prepull(controller::Input::Written { outcome, .. }) => {
                let outcome = outcome_label(*outcome);
                self.counted.status_writes.get_or_create(&[("outcome", outcome)]).inc();
            }
            Input::Kruise(kruise::Input::Node(node_images::Input::Written(_, written))) => {
                self.count_kruise_write(match written {
                    WrittenNodeImage::Done(_) => "done",
                    WrittenNodeImage::Refused(_) => "conflict",
                    WrittenNodeImage::Failed | WrittenNodeImage::TooLarge => "failed",
                });
            }
            Input::Kruise(kruise::Input::Job(jobs::Input::Written { outcome, .. })) => {
                self.count_kruise_write(outcome_label(*outcome));
            }
            _ => {}
        }
    }

    fn count_kruise_write(&self, outcome: &'static str) {
        self.counted.kruise_writes.get_or_create(&[("outcome", outcome)]).inc();
    }

    fn count_result(&self, result: &TaskResult) {
        let outcome = result.outcome.as_str();
        self.counted.results.get_or_create(&[("outcome", outcome)]).inc();
        let durations = &self.counted.task_duration_seconds;
        durations.get_or_create(&[("outcome", outcome)]).observe(result.took.as_secs_f64());
        self.count_images(&result.images);
        for image in result.images.iter().filter(|image| !image.outcome.is_on_node()) {
            let code = image.code.unwrap_or(FailureCode::Other).as_str();
            self.counted.image_failures.get_or_create(&[("code", code)]).inc();
        }
    }

    /// Counts the images of a task's result, because edges behind NAT can't be scraped.
    fn count_images(&self, images: &[ImageResult]) {
        let began = |image: &ImageResult| Some(image.ended?.saturating_sub(image.took?));
        if let Some(first) = images.iter().filter_map(began).min() {
            self.counted.task_queue_duration_seconds.observe(first.as_secs_f64());
        }
        for image in images {
            let outcome = [("outcome", image.outcome.as_str())];
            if image.attempts > 0 {
                self.counted.image_tries.get_or_create(&outcome).inc_by(image.attempts.into());
            }
            if let (Some(by), Some(bytes)) = (image.facts.pulled_by, image.bytes) {
                // What deltas saved and what neighbours delivered are parts of it.
                let saved = image.facts.delta_saved_bytes.unwrap_or_default().min(bytes.done);
                let from_peers = image.from_peers.unwrap_or_default().min(bytes.done - saved);
                let by_itself = bytes.done - saved - from_peers;
                let count = |by, bytes| {
                    self.counted.pulled_image_bytes.get_or_create(&[("by", by)]).inc_by(bytes);
                };
                count(by.as_str(), by_itself);
                [("peer", from_peers), ("delta", saved)]
                    .into_iter()
                    .filter(|(_, bytes)| *bytes > 0)
                    .for_each(|(by, bytes)| count(by, bytes));
            }
            if let Some(reason) = image.facts.no_delta {
                self.counted.refused_deltas.get_or_create(&[("reason", reason.as_str())]).inc();
            }
            if let Some(took) = image.took {
                self.counted.image_duration_seconds.get_or_create(&outcome).observe(took.as_secs_f64());
            }
        }
    }

    /// Counts what a node of a site did.
    pub(super) fn count_site_event(&self, kind: SiteEventKind) {
        self.sites.count_event(kind);
    }

    /// Sets the gauges and counters of sites: the most active of them come first.
    pub(super) fn set_sites(&self, reports: &[SiteReport], bytes: usize, limit: usize) {
        self.sites.set_reports(reports);
        self.sites.set_memory(bytes, limit);
    }

    /// Counts traces, `sent` or `lost`.
    pub(super) fn count_traces(&self, outcome: &'static str, traces: u64) {
        self.counted.traces.get_or_create(&[("outcome", outcome)]).inc_by(traces);
    }

    /// Measures a write of a status or of a report.
    pub(super) fn measure_write(&self, outcome: WriteOutcome, took: Duration) {
        let outcome = outcome_label(outcome);
        let durations = &self.counted.status_write_duration_seconds;
        durations.get_or_create(&[("outcome", outcome)]).observe(took.as_secs_f64());
    }

    /// Sets the gauges of the nodes of the jobs that run, and takes away those of jobs that do not.
    pub(super) fn set_job_nodes<'a>(&self, running: impl Iterator<Item = (&'a str, &'a Summary)>) {
        let counts = |nodes: &Summary| {
            let Summary { pending, in_progress, successful, failure, unknown, .. } = *nodes;
            [pending, in_progress, successful, failure, unknown]
        };
        let running: BTreeMap<&str, [u32; 5]> = running.map(|(job, nodes)| (job, counts(nodes))).collect();
        let running: BTreeMap<&str, [u32; 5]> = running.into_iter().take(MAX_JOBS).collect();
        // Not `job`, which Prometheus takes for itself.
        let labels = |job: &str, phase| ([("job_name", job.to_owned())], [("phase", phase)]);
        let mut shown = self.shown_jobs.lock();
        shown.retain(|job, _| {
            let runs = running.contains_key(job.as_str());
            if !runs {
                for phase in NODE_PHASES {
                    self.counted.job_nodes.remove(&labels(job, phase));
                }
            }
            runs
        });
        for (job, counts) in running {
            if shown.get(job) == Some(&counts) {
                continue;
            }
            for (phase, count) in NODE_PHASES.into_iter().zip(counts) {
                self.counted.job_nodes.get_or_create(&labels(job, phase)).set(count.into());
            }
            shown.insert(job.to_owned(), counts);
        }
    }

    fn count_dispatch(&self, outcome: &DispatchOutcome) {
        let outcome = match outcome {
            DispatchOutcome::Sent(_) | DispatchOutcome::SentWithoutKeys(_) => "sent",
            DispatchOutcome::Offline => "offline",
            DispatchOutcome::Postponed(_) => "postponed",
            DispatchOutcome::Withheld { .. } => "withheld",
            DispatchOutcome::TooOld(_) => "too_old",
            DispatchOutcome::Unsendable(_) => "unsendable",
        };
        self.counted.dispatches.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Sets the gauges of jobs and sessions.
    pub(super) fn set_levels(&self, phases: [(JobPhase, usize); 4], sessions: usize) {
        for (phase, jobs) in phases {
            let phase = match phase {
                JobPhase::Init => "Init",
                JobPhase::InProgress => "InProgress",
                JobPhase::Completed => "Completed",
                JobPhase::Failure => "Failure",
            };
            let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
            self.counted.jobs.get_or_create(&[("phase", phase)]).set(jobs);
        }
        self.counted.edge_sessions.set(i64::try_from(sessions).unwrap_or(i64::MAX));
    }

    /// The work has ended, for good or until it begins again: no job runs, and no edge is connected. `limit`: that of the memory
    /// of sites, in bytes.
    pub(super) fn clear_work(&self, limit: usize) {
        let phases = [JobPhase::Init, JobPhase::InProgress, JobPhase::Completed, JobPhase::Failure];
        self.set_levels(phases.map(|phase| (phase, 0)), 0);
        self.set_job_nodes(std::iter::empty());
        self.set_sites(&[], 0, limit);
        self.edges.set_outdated(&CaCensus::default());
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
