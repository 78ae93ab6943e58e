//! Traces of tasks, for an OpenTelemetry collector (`--otlp-endpoint`). The edges are asked for nothing, and need no way to a
//! collector: their results say when each image began and ended, of which the leader makes the spans.
//!
//! ```text
//!  Core ─ EndedTask ─▶ Traces ─ spans ─▶ queue ─▶ send ─▶ collector
//! ```

mod endpoint;
mod spans;

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use prepull_api::task::{NodeName, TaskResult};
use prepull_engine::shared::in_hand::TaskInHand;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::metrics::Metrics;
use crate::kube_api::refusal::FailureLog;

pub(crate) use endpoint::OtlpEndpoint;

/// Traces that wait to be sent. Beyond them a collector is too slow, or away: they are lost, and counted. One of ten images is
/// ten kilobytes.
const QUEUE: usize = 4096;
/// Traces of one request: of ten images each, three thousand spans, and a megabyte.
const TRACES_OF_A_REQUEST: usize = 256;
/// The time in which traces gather, unless there are enough for a request already.
const PAUSE: Duration = Duration::from_secs(1);
/// Limit for a request.
const LIMIT: Duration = Duration::from_secs(10);

/// A task that has ended, with what its result does not say.
#[derive(Clone, Debug)]
pub(super) struct EndedTask<'a> {
    pub(super) node: &'a NodeName,
    pub(super) known: TaskInHand,
    pub(super) result: &'a TaskResult,
    /// When the result arrived.
    pub(super) arrived: Timestamp,
}

/// Where ended tasks go.
#[derive(Debug)]
pub(super) struct Traces {
    queue: mpsc::Sender<Vec<SpanData>>,
    metrics: Arc<Metrics>,
}

impl Traces {
    /// Sends traces to a collector from now on, until this value is dropped and what waits is sent.
    ///
    /// # Errors
    /// The CAs of the system cannot be read, for `https`.
    pub(super) fn start(endpoint: &OtlpEndpoint, metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(endpoint.client(LIMIT)?)
            .with_endpoint(endpoint.traces())
            .with_timeout(LIMIT)
            .build()?;
        exporter.set_resource(&Resource::builder().with_service_name("cloudcore-prepull").build());
        tokio::spawn(send(exporter, waiting, Arc::clone(&metrics)));
        Ok(Self { queue, metrics })
    }

    /// Takes a task that has ended. Never waits.
    pub(super) fn take(&self, ended: &EndedTask<'_>) {
        match self.queue.try_reserve() {
            Ok(place) => place.send(spans::of(ended)),
            Err(_) => self.metrics.count_traces("lost", 1),
        }
    }
}

async fn send(exporter: SpanExporter, mut waiting: mpsc::Receiver<Vec<SpanData>>, metrics: Arc<Metrics>) {
    let failures = FailureLog::default();
    let mut taken = Vec::with_capacity(TRACES_OF_A_REQUEST);
    loop {
        let traces = waiting.recv_many(&mut taken, TRACES_OF_A_REQUEST).await;
        if traces == 0 {
            return;
        }
        let spans: Vec<_> = taken.drain(..).flatten().collect();
        let number = spans.len();
        // The exporter's own limit is that of its client.
        let problem = match timeout(2 * LIMIT, exporter.export(spans)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(with_causes(&error)),
            Err(elapsed) => Some(with_causes(&elapsed)),
        };
        metrics.count_traces(if problem.is_none() { "sent" } else { "lost" }, traces as u64);
        match problem {
            None => debug!(traces, spans = number, "traces were sent"),
            Some(problem) if failures.is_due("traces", &problem, Instant::now()) => {
                warn!(problem, traces, "traces cannot be sent to --otlp-endpoint, and are lost");
            }
            Some(_) => {}
        }
        if traces < TRACES_OF_A_REQUEST {
            sleep(PAUSE).await;
        }
    }
}
