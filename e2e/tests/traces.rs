//! Traces of tasks for an OpenTelemetry collector, replaced by a server that decodes them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prepull_e2e::prelude::*;
use prost::Message;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A collector that keeps all spans.
struct Collector {
    addr: SocketAddr,
    taken: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    stop: DropGuard,
}

impl Collector {
    async fn start() -> Result<Self> {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let take = {
            let taken = Arc::clone(&taken);
            async move |body: Bytes| match ExportTraceServiceRequest::decode(body) {
                Ok(request) => {
                    taken.lock().unwrap_or_else(PoisonError::into_inner).push(request);
                    StatusCode::OK
                }
                Err(_) => StatusCode::BAD_REQUEST,
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (addr, stop) = (listener.local_addr()?, CancellationToken::new());
        let served = axum::serve(listener, Router::new().route("/v1/traces", post(take)));
        tokio::spawn(served.with_graceful_shutdown(stop.clone().cancelled_owned()).into_future());
        Ok(Self { addr, taken, stop: stop.drop_guard() })
    }

    /// The spans, each with the name of its service.
    fn spans(&self) -> Vec<(String, Span)> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let of_resources = taken.iter().flat_map(|request| &request.resource_spans);
        let spans = of_resources.flat_map(|of_resource| {
            let attributes = of_resource.resource.as_ref().map(|resource| resource.attributes.as_slice());
            let service = text(attributes.unwrap_or_default(), "service.name");
            let spans = of_resource.scope_spans.iter().flat_map(|of_scope| &of_scope.spans);
            spans.map(move |span| (service.clone(), span.clone()))
        });
        spans.collect()
    }
}

/// The text of an attribute; empty if it's missing.
fn text(attributes: &[KeyValue], key: &str) -> String {
    match attributes.iter().find(|pair| pair.key == key).map(|pair| &pair.value) {
        Some(Some(AnyValue { value: Some(Value::StringValue(text)) })) => text.clone(),
        _ => String::new(),
    }
}

#[tokio::test]
async fn each_ended_task_is_a_trace() -> Result<()> {
    let collector = Collector::start().await?;
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let endpoint = format!("http://{}", collector.addr);
    let cloud = Cloud::start(&cluster).args(&["--otlp-endpoint", &endpoint]).await?;
    let stage = Stage::from_parts(cluster, cloud, &["edge-1", "edge-2"]).await?;
    let good = registry.seed(&Image::small("good")?, "team/good:v1")?;
    let missing = good.replace("good:v1", "missing:v1");

    let whole = stage.cluster.job("whole").images([&good]).on(["edge-1"]).completes().await?;
    assert_eq!(whole.summary.successful, 1);
    let broken = stage.cluster.job("broken").images([&good, &missing]).on(["edge-2"]).fails().await?;
    assert_eq!(broken.summary.failure, 1);
    let spans = eventually("two traces have arrived", SOON, async || {
        let spans = collector.spans();
        let tasks = spans.iter().filter(|(_, span)| span.parent_span_id.is_empty()).count();
        ensure!(tasks == 2, "{tasks} of 2");
        Ok(spans)
    })
    .await?;
    ensure!(spans.iter().all(|(service, _)| service == "cloudcore-prepull"), "{spans:?}");
    let cases = [
        ("edge-1", "whole", "Succeeded", vec![(&good, "")]),
        ("edge-2", "broken", "Failed", vec![(&good, ""), (&missing, "NotFound")]),
    ];
    for (node, job, outcome, images) in cases {
        let root =
            spans.iter().map(|(_, span)| span).find(|span| text(&span.attributes, "k8s.node.name") == node);
        let root = root.with_context(|| format!("no trace of {node}"))?;
        let said = ["prepull.job.name", "prepull.task.outcome"].map(|key| text(&root.attributes, key));
        assert_eq!((root.name.as_str(), said), ("pre-pull", [job, outcome].map(str::to_owned)));
        let of_trace = spans.iter().map(|(_, span)| span).filter(|span| span.trace_id == root.trace_id);
        let mut pulls: Vec<_> = of_trace.filter(|span| span.name == "pull image").collect();
        pulls.sort_by_key(|span| text(&span.attributes, "container.image.name"));
        let said = pulls
            .iter()
            .map(|span| ["container.image.name", "error.type"].map(|key| text(&span.attributes, key)));
        let expected = images.iter().map(|(image, code)| [(*image).clone(), (*code).to_owned()]);
        assert_eq!(said.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        for pull in pulls {
            let times = [
                root.start_time_unix_nano,
                pull.start_time_unix_nano,
                pull.end_time_unix_nano,
                root.end_time_unix_nano,
            ];
            ensure!(times.is_sorted() && times[1] < times[2], "{times:?}");
        }
    }

    // Without a collector the work continues, and lost spans are counted and logged.
    drop(collector.stop);
    assert_eq!(
        stage.cluster.job("untraced").images([&good]).on(["edge-1"]).completes().await?.summary.desired,
        1
    );
    eventually("what is lost is counted", SOON, async || {
        let metrics = stage.cloud.metrics().await?;
        let counted = |outcome, traces: f64| {
            let sum = metrics.sum("cloudcore_prepull_traces_total", &[("outcome", outcome)]);
            ensure!((sum - traces).abs() < 0.5, "{sum} are {outcome}, not {traces}");
            Ok(())
        };
        counted("sent", 2.0)?;
        counted("lost", 1.0)?;
        Ok(())
    })
    .await?;
    let log = stage.cloud.process()?.log();
    ensure!(log.contains("traces cannot be sent to --otlp-endpoint"), "{log}");
    Ok(())
}
