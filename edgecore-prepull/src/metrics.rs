//! The metrics of the agent, and the state behind its health checks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageResult, TaskOutcome};
use prepull_program::metrics::{DURATION_BUCKETS, Label, TwoLabels};
use prepull_window::{Openings, WindowState};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::clock::{CloudClock, timestamp};
use crate::error_class::ErrorClass;
use crate::status::StatusBoard;

/// Version of the running program.
const BUILD: Label = [("version", env!("CARGO_PKG_VERSION"))];

prepull_program::metrics! {
    /// Everything that the agent counts and measures.
    struct Counted {
        /// 1 while the tunnel is up
        connected: Gauge,
        /// 1 for the address that the session is with
        session: Family<Label<String>, Gauge>,
        /// Tasks in the ledger
        open_tasks: Gauge,
        /// Tasks that ended, by outcome
        tasks: Family<Label, Counter>,
        /// Images that ended, by outcome
        images: Family<Label, Counter>,
        /// Images that failed, by the code of the failure
        image_failures: Family<Label, Counter>,
        /// Bytes of images that the agent has downloaded itself, by source: registry, or peer for the neighbours of its site
        downloaded_bytes: Family<Label, Counter>,
        /// Bytes of layers that were rebuilt from deltas, and so not downloaded
        delta_saved_bytes: Counter,
        /// Images that came by layers although the registry has deltas to them, by the reason
        refused_deltas: Family<Label, Counter>,
        /// Images that the agent has removed to make room for others, with --make-room
        removed_images: Counter,
        /// Bytes that those have freed, as far as containerd knows
        removed_image_bytes: Counter,
        /// Bytes that the agent has served to the neighbours of its site
        peer_served_bytes: Counter,
        /// Pulls, by who has downloaded: agent or runtime
        pulls: Family<Label, Counter>,
        /// Seconds from the first try of an image to its end, by outcome
        image_duration_seconds: Family<Label, Histogram, fn() -> Histogram>
            = Family::new_with_constructor(|| Histogram::new(DURATION_BUCKETS)),
        /// Tries to pull an image that failed, by the class of the error, which decides what happens next, and its code
        failed_tries: Family<TwoLabels, Counter>,
        /// Sessions with the cloud since the start: all but the first are reconnects
        sessions: Counter,
        /// When the node's certificate ends, as a Unix time
        certificate_not_after_timestamp_seconds: Gauge,
        /// 1 while the node's windows let it download
        download_window_open: Gauge,
        /// When the node's windows open or close next, as a Unix time; 0 if they never do
        download_window_change_timestamp_seconds: Gauge,
        /// 1; the labels say what runs
        build_info: Family<Label, Gauge>,
        /// Runs of credential providers' plugins, by outcome
        credential_provider_execs: Family<(Label<String>, Label), Counter>,
        /// How long a run of a credential provider's plugin took
        credential_provider_exec_duration_seconds: Family<Label<String>, Histogram, fn() -> Histogram>
            = Family::new_with_constructor(|| Histogram::new(PLUGIN_BUCKETS)),
    }
}

/// Upper bounds in seconds: a plugin asks a server on the same machine or in its cloud, and is killed after a minute.
const PLUGIN_BUCKETS: [f64; 7] = [0.05, 0.2, 0.5, 2.0, 5.0, 15.0, 60.0];

/// How a run of a credential provider's plugin ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PluginOutcome {
    /// The plugin answered.
    Ok,
    /// The plugin could not be started, or ended with an error.
    Failed,
    /// The plugin took too long and was killed.
    Timeout,
    /// The plugin wrote something other than a valid answer.
    Malformed,
}

/// All metrics of edgecore-prepull, whether the container runtime answers, and what a person at the box asks for.
#[derive(Debug)]
pub(crate) struct AgentMetrics {
    registry: Registry,
    counted: Counted,
    runtime_up: AtomicBool,
    /// The node's windows, once they are known.
    windows: Mutex<Option<(Openings, Arc<CloudClock>)>>,
    status: StatusBoard,
}

impl Default for AgentMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("edgecore_prepull");
        let counted = Counted::default();
        counted.register(&mut registry);
        counted.build_info.get_or_create(&BUILD).set(1);
        Self {
            registry,
            counted,
            runtime_up: AtomicBool::new(false),
            windows: Mutex::default(),
            status: StatusBoard::default(),
        }
    }
}

impl AgentMetrics {
    /// Connection and tasks, for a person at the box.
    pub(crate) fn status(&self) -> &StatusBoard {
        &self.status
    }

    /// Sets whether the tunnel is up.
    pub(crate) fn set_connected(&self, up: bool) {
        self.counted.connected.set(i64::from(up));
    }

    /// Sets the address that the node has a session with, if it has one.
    pub(crate) fn set_session(&self, address: Option<String>) {
        self.counted.session.clear();
        if let Some(address) = address {
            self.counted.session.get_or_create(&[("address", address)]).set(1);
        }
    }

    /// Sets the number of tasks in the ledger.
    pub(crate) fn set_open_tasks(&self, count: usize) {
        self.counted.open_tasks.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Counts a task that ended.
    pub(crate) fn count_task(&self, outcome: TaskOutcome) {
        let outcome = outcome.as_str();
        self.counted.tasks.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Counts an image that ended, by whether it's on the node now, and if not, by the reason. Also counts a pull, by
    /// the downloader, and what deltas saved.
    pub(crate) fn count_image(&self, result: &ImageResult) {
        let is_there = result.outcome.is_on_node();
        let outcome = if is_there { "there" } else { "failed" };
        self.counted.images.get_or_create(&[("outcome", outcome)]).inc();
        if !is_there {
            let code = result.code.unwrap_or(FailureCode::Other).as_str();
            self.counted.image_failures.get_or_create(&[("code", code)]).inc();
        }
        if let Some(took) = result.took {
            let durations = &self.counted.image_duration_seconds;
            durations.get_or_create(&[("outcome", outcome)]).observe(took.as_secs_f64());
        }
        if let Some(by) = result.facts.pulled_by {
            self.counted.pulls.get_or_create(&[("by", by.as_str())]).inc();
        }
        self.counted.delta_saved_bytes.inc_by(result.facts.delta_saved_bytes.unwrap_or_default());
        if let Some(reason) = result.facts.no_delta {
            self.counted.refused_deltas.get_or_create(&[("reason", reason.as_str())]).inc();
        }
    }

    /// Counts a try that failed.
    pub(crate) fn count_failed_try(&self, class: ErrorClass, code: FailureCode) {
        let (class, code) = (class.as_str(), code.as_str());
        self.counted.failed_tries.get_or_create(&[("class", class), ("code", code)]).inc();
    }

    /// Counts a session that has begun.
    pub(crate) fn count_session(&self) {
        self.counted.sessions.inc();
    }

    /// Sets when the node's certificate ends.
    pub(crate) fn set_certificate_end(&self, end: SystemTime) {
        let seconds = end.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.counted.certificate_not_after_timestamp_seconds.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    /// Counts bytes of images that the agent has downloaded, from a neighbour or from a registry.
    pub(crate) fn count_downloaded(&self, bytes: u64, is_of_peer: bool) {
        let source = if is_of_peer { "peer" } else { "registry" };
        self.counted.downloaded_bytes.get_or_create(&[("source", source)]).inc_by(bytes);
    }

    /// Counts an image that was removed to make room.
    pub(crate) fn count_removed(&self, bytes: u64) {
        self.counted.removed_images.inc();
        self.counted.removed_image_bytes.inc_by(bytes);
    }

    /// Counts bytes that the agent has served to a neighbour.
    pub(crate) fn count_served(&self, bytes: u64) {
        self.counted.peer_served_bytes.inc_by(bytes);
    }

    /// Counts and measures a run of a plugin. The configuration bounds the number of providers.
    pub(crate) fn count_plugin_run(&self, provider: &str, outcome: PluginOutcome, took: Duration) {
        let outcome = match outcome {
            PluginOutcome::Ok => "ok",
            PluginOutcome::Failed => "failed",
            PluginOutcome::Timeout => "timeout",
            PluginOutcome::Malformed => "malformed",
        };
        let Counted {
            credential_provider_execs: runs,
            credential_provider_exec_duration_seconds: durations,
            ..
        } = &self.counted;
        let provider = [("provider", provider.to_owned())];
        durations.get_or_create(&provider).observe(took.as_secs_f64());
        runs.get_or_create(&(provider, [("outcome", outcome)])).inc();
    }

    /// Sets the node's windows.
    pub(crate) fn set_windows(&self, windows: Openings, clock: Arc<CloudClock>) {
        *self.windows.lock().unwrap_or_else(PoisonError::into_inner) = Some((windows, clock));
    }

    /// Updates the window metrics from the clock.
    fn look_at_windows(&self) {
        let known = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((windows, clock)) = &*known else { return };
        let state = match timestamp(clock.wall()) {
            Some(now) => windows.state_at(now),
            // No window opens while the time is unknown.
            None => WindowState { is_open: windows.is_always(), until: None },
        };
        self.counted.download_window_open.set(i64::from(state.is_open));
        let change = state.until.map_or(0, Timestamp::as_second);
        self.counted.download_window_change_timestamp_seconds.set(change);
    }

    /// Sets whether the container runtime answers.
    pub(crate) fn set_runtime_up(&self, up: bool) {
        self.runtime_up.store(up, Ordering::Relaxed);
    }

    /// Whether the container runtime answered the last probe.
    pub(crate) fn is_runtime_up(&self) -> bool {
        self.runtime_up.load(Ordering::Relaxed)
    }

    /// All metrics in the text format of OpenMetrics.
    pub(crate) fn render(&self) -> String {
        self.look_at_windows();
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests;
