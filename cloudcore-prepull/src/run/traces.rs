//! Traces of tasks, for an OpenTelemetry collector (`--otlp-endpoint`). The edges are asked for nothing, and need no way to a
//! collector: their results say when each image began and ended, of which the leader makes the spans.
//!
//! ```text
//!  Core ─ EndedTask ─▶ Traces ─ queue ─▶ send ─ spans ─▶ collector
//! ```

mod endpoint;
mod spans;

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use prepull_api::task::{NodeName, TaskResult};
use prepull_engine::shared::in_hand::TaskInHand;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::metrics::Metrics;
use crate::kube_api::refusal::FailureLog;

pub(crate) use endpoint::OtlpEndpoint;

/// Ended tasks that wait to be sent. Beyond them a collector is too slow, or away: their traces are lost, and counted. Each
/// is a kilobyte or two.
const QUEUE: usize = 4096;
/// Tasks of one request: with ten images each, some thousand spans, and a megabyte.
const TASKS_OF_A_REQUEST: usize = 256;
/// The time between two requests, in which tasks gather.
const PAUSE: Duration = Duration::from_secs(1);
/// Limit for a request.
const LIMIT: Duration = Duration::from_secs(10);

/// A task that has ended, with what its result does not say.
#[derive(Clone, Debug)]
pub(super) struct EndedTask {
    pub(super) node: NodeName,
    pub(super) known: TaskInHand,
    pub(super) result: TaskResult,
    /// When the result arrived.
    pub(super) arrived: Timestamp,
}

/// Where ended tasks go.
#[derive(Clone, Debug)]
pub(super) struct Traces {
    ended: mpsc::Sender<EndedTask>,
    metrics: Arc<Metrics>,
}

impl Traces {
    /// Sends traces to a collector from now on, until this value and its copies are dropped.
    ///
    /// # Errors
    /// The CAs of the system cannot be read, for `https`.
    pub(super) fn start(endpoint: &OtlpEndpoint, metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let (ended, queue) = mpsc::channel(QUEUE);
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(endpoint.client(LIMIT)?)
            .with_endpoint(endpoint.traces())
            .with_timeout(LIMIT)
            .build()?;
        exporter.set_resource(&Resource::builder().with_service_name("cloudcore-prepull").build());
        tokio::spawn(send(exporter, queue, Arc::clone(&metrics)));
        Ok(Self { ended, metrics })
    }

    /// Takes a task that has ended. Never waits.
    pub(super) fn take(&self, ended: EndedTask) {
        if self.ended.try_send(ended).is_err() {
            self.metrics.count_traces("lost", 1);
        }
    }
}

async fn send(exporter: SpanExporter, mut queue: mpsc::Receiver<EndedTask>, metrics: Arc<Metrics>) {
    let failures = FailureLog::default();
    let mut tasks = Vec::with_capacity(TASKS_OF_A_REQUEST);
    while queue.recv_many(&mut tasks, TASKS_OF_A_REQUEST).await > 0 {
        let spans: Vec<_> = tasks.iter().flat_map(spans::of).collect();
        let (traces, spans_sent) = (tasks.len() as u64, spans.len());
        tasks.clear();
        // The exporter's own limit is that of its client.
        let problem = match timeout(2 * LIMIT, exporter.export(spans)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(with_causes(&error)),
            Err(elapsed) => Some(with_causes(&elapsed)),
        };
        metrics.count_traces(if problem.is_none() { "sent" } else { "lost" }, traces);
        match problem {
            None => debug!(traces, spans = spans_sent, "traces were sent"),
            Some(problem) if failures.is_due("traces", &problem, Instant::now()) => {
                warn!(problem, traces, "traces cannot be sent to --otlp-endpoint, and are lost");
            }
            Some(_) => {}
        }
        sleep(PAUSE).await;
    }
}
