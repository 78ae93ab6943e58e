//! Traces of tasks, for an OpenTelemetry collector (`--otlp-endpoint`). Edges need no connection to the collector: the
//! leader makes the spans from the times in their results.
//!
//! ```text
//!  Core ─ EndedTask ─▶ Traces ─ spans ─▶ queue ─▶ send ─▶ collector
//! ```

mod spans;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use opentelemetry::trace::Status;
use opentelemetry::{KeyValue, Value};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use prepull_api::task::{NodeName, TaskResult};
use prepull_engine::fleet::in_hand::TaskInHand;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::metrics::Metrics;
use crate::commands::otlp_endpoint::OtlpEndpoint;
use crate::kube_api::refusal::FailureLog;

/// Traces that wait to be sent. Beyond them a collector is too slow, or away: they are lost, and counted.
const QUEUE: usize = 4096;
/// Bytes of the traces that wait and of those that are being sent: one of ten images is ten kilobytes, and one of hundreds
/// of images, each with a long reason, a quarter of a megabyte.
const WAITING_BYTES: usize = 32 << 20;
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
    pub(super) arrived: Timestamp,
}

/// A trace that waits, and its bytes.
type WaitingTrace = (Vec<SpanData>, usize);

/// The bytes of the traces that have not been sent.
#[derive(Debug, Default)]
struct WaitingBytes(AtomicUsize);

impl WaitingBytes {
    /// Takes room for a trace, unless there is none. One trace may always wait.
    fn take_room(&self, bytes: usize) -> bool {
        let with = |taken: usize| Some(taken + bytes).filter(|all| taken == 0 || *all <= WAITING_BYTES);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn bytes_of(spans: &[SpanData]) -> usize {
    let of_attribute = |attribute: &KeyValue| match &attribute.value {
        Value::String(text) => size_of::<KeyValue>() + text.as_str().len(),
        _ => size_of::<KeyValue>(),
    };
    let of_span = |span: &SpanData| {
        let status = if let Status::Error { description } = &span.status { description.len() } else { 0 };
        size_of::<SpanData>() + status + span.attributes.iter().map(of_attribute).sum::<usize>()
    };
    spans.iter().map(of_span).sum()
}

#[derive(Debug)]
pub(super) struct Traces {
    queue: mpsc::Sender<WaitingTrace>,
    bytes: Arc<WaitingBytes>,
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
            .with_endpoint(endpoint.traces_url())
            .with_timeout(LIMIT)
            .build()?;
        exporter.set_resource(&Resource::builder().with_service_name("cloudcore-prepull").build());
        let bytes = Arc::<WaitingBytes>::default();
        tokio::spawn(send_traces(exporter, waiting, Arc::clone(&bytes), Arc::clone(&metrics)));
        Ok(Self { queue, bytes, metrics })
    }

    /// Takes a task that has ended. Never waits.
    pub(super) fn take_task(&self, ended: &EndedTask<'_>) {
        if let Ok(place) = self.queue.try_reserve() {
            let spans = spans::task_spans(ended);
            let bytes = bytes_of(&spans);
            if self.bytes.take_room(bytes) {
                return place.send((spans, bytes));
            }
        }
        self.metrics.count_traces("lost", 1);
    }
}

async fn send_traces(
    exporter: SpanExporter,
    mut waiting: mpsc::Receiver<WaitingTrace>,
    bytes: Arc<WaitingBytes>,
    metrics: Arc<Metrics>,
) {
    let failures = FailureLog::default();
    let mut taken = Vec::with_capacity(TRACES_OF_A_REQUEST);
    loop {
        let traces = waiting.recv_many(&mut taken, TRACES_OF_A_REQUEST).await;
        if traces == 0 {
            return;
        }
        let sent: usize = taken.iter().map(|(_, bytes)| bytes).sum();
        let spans: Vec<_> = taken.drain(..).flat_map(|(spans, _)| spans).collect();
        let number = spans.len();
        // The exporter's own limit is that of its client.
        let problem = match timeout(2 * LIMIT, exporter.export(spans)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(with_causes(&error)),
            Err(elapsed) => Some(with_causes(&elapsed)),
        };
        bytes.give_back(sent);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_traces_are_bounded_in_bytes() {
        let bytes = WaitingBytes::default();
        assert!(bytes.take_room(2 * WAITING_BYTES), "one may always wait");
        assert!(!bytes.take_room(1));
        bytes.give_back(2 * WAITING_BYTES);
        assert!(bytes.take_room(WAITING_BYTES - 1) && bytes.take_room(1) && !bytes.take_room(1));
    }
}
