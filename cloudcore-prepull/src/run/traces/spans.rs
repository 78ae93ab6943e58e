//! The spans of a task, made of its result:
//!
//! ```text
//!  pre-pull ─────────────────────────────┐  from the start of the node to the result
//!     └─ on the edge ─────────────────┐  from the acceptance of the task to its end
//!          ├─ pull image ───┐  from the first try of an image to its end
//!          └─ pull image ────────┐
//! ```
//!
//! Identifiers are hashes of the task's, so that a repeated result makes the same spans.

use std::time::{Duration, SystemTime};

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageResult, PulledBy, TaskOutcome};
use prepull_api::wire::truncate_reason;
use ring::digest::{SHA256, digest};

use super::EndedTask;

/// The spans of a task: of the node, of its edge, and of each image that was tried.
pub(super) fn task_spans(ended: &EndedTask<'_>) -> Vec<SpanData> {
    let EndedTask { node, known, result, arrived } = ended;
    let task = &result.task;
    let key = format!("{}/{}/{node}", task.job, task.attempt);
    let trace = TraceId::from_bytes(hash_prefix(&key));
    let id = |part: &str| SpanId::from_bytes(hash_prefix(&format!("{key}/{part}")));

    let end = SystemTime::from(*arrived);
    // Clamp the edge's times to the ones that we know.
    let started = known.started.map(SystemTime::from).filter(|started| *started <= end);
    let accepted = time_before(end, result.took).max(started.unwrap_or(SystemTime::UNIX_EPOCH));
    let start = started.unwrap_or(accepted);
    let failed = result.images.iter().find(|image| !image.outcome.is_on_node());
    let code = failed.and_then(|image| image.code).map(FailureCode::as_str);
    let status = match result.outcome {
        TaskOutcome::Succeeded => Status::Ok,
        TaskOutcome::Failed | TaskOutcome::DeadlineExceeded | TaskOutcome::Cancelled | TaskOutcome::Other => {
            Status::error(truncate_reason(&result.reason))
        }
    };
    let mut of_node = vec![
        KeyValue::new("k8s.node.name", node.to_string()),
        KeyValue::new("prepull.task.id", task.to_string()),
        KeyValue::new("prepull.task.outcome", format!("{:?}", result.outcome)),
        KeyValue::new("prepull.task.images", integer(result.images.len())),
    ];
    of_node.extend(known.job.clone().map(|job| KeyValue::new("prepull.job.name", job)));
    of_node.extend(code.map(|code| KeyValue::new("error.type", code)));

    let span = |id, parent, name: &'static str, (start_time, end_time), attributes, status| SpanData {
        span_context: SpanContext::new(trace, id, TraceFlags::SAMPLED, false, TraceState::default()),
        parent_span_id: parent,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: name.into(),
        start_time,
        end_time,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status,
        instrumentation_scope: scope(),
    };
    let (root, edge) = (id("node"), id("edge"));
    let mut spans = vec![
        span(root, SpanId::INVALID, "pre-pull", (start, end), of_node, status),
        span(edge, root, "on the edge", (accepted, end), Vec::new(), Status::Unset),
    ];
    // An edge may tell of any number of images.
    for (index, (image, reference)) in result.images.iter().zip(&known.images).enumerate() {
        // An image that was there already was not tried.
        let (Some(took), Some(ended)) = (image.took, image.ended) else { continue };
        let until = accepted.checked_add(ended).map_or(end, |until| until.min(end));
        let times = (time_before(until, took).max(accepted), until);
        let id = id(&format!("image/{index}"));
        spans.push(span(id, edge, "pull image", times, of_image(reference.clone(), image), status_of(image)));
    }
    spans
}

fn of_image(reference: String, image: &ImageResult) -> Vec<KeyValue> {
    let by = image.facts.pulled_by.map(PulledBy::as_str);
    let code = image.code.map(FailureCode::as_str);
    let mut attributes = vec![
        KeyValue::new("container.image.name", reference),
        KeyValue::new("prepull.image.outcome", image.outcome.as_str()),
        KeyValue::new("prepull.image.tries", i64::from(image.attempts)),
    ];
    attributes.extend(
        image.digest.as_deref().map(|digest| KeyValue::new("oci.manifest.digest", truncate_reason(digest))),
    );
    attributes.extend(image.bytes.map(|bytes| KeyValue::new("prepull.image.bytes", integer(bytes.done))));
    let from_peers =
        image.from_peers.map(|bytes| KeyValue::new("prepull.image.bytes_from_peers", integer(bytes)));
    attributes.extend(from_peers);
    attributes.extend(by.map(|by| KeyValue::new("prepull.image.pulled_by", by)));
    attributes.extend(code.map(|code| KeyValue::new("error.type", code)));
    attributes
}

fn status_of(image: &ImageResult) -> Status {
    if image.outcome.is_on_node() { Status::Ok } else { Status::error(truncate_reason(&image.reason)) }
}

fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("cloudcore-prepull").with_version(env!("CARGO_PKG_VERSION")).build()
}

/// The beginning of the SHA-256 of a text.
fn hash_prefix<const N: usize>(text: &str) -> [u8; N] {
    let digest = digest(&SHA256, text.as_bytes());
    std::array::from_fn(|index| digest.as_ref()[index])
}

/// An edge may claim any time: what is before the epoch is the epoch.
fn time_before(time: SystemTime, duration: Duration) -> SystemTime {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + since_epoch.saturating_sub(duration)
}

fn integer(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
