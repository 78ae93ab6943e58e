//! Plain HTTP for Prometheus and for health probes: /metrics, /healthz and /readyz.

use std::future::ready;
use std::sync::Arc;

use hyper::{HeaderMap, StatusCode};
use prepull_program::http::{self, Answer, TEXT, answer_metrics, answer_request};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Concurrent connections: enough for a collector, a person, and probes. Each takes some ten KiB.
const CONNECTIONS: usize = 16;

/// Serves until `shutdown`.
pub(super) async fn serve(listener: TcpListener, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let serve_one = |stream| {
        let metrics = Arc::clone(&metrics);
        answer_request(stream, move |request| {
            ready(answer(&metrics, request.uri().path(), request.headers()))
        })
    };
    http::serve_connections(listener, CONNECTIONS, shutdown, serve_one).await;
}

fn answer(metrics: &Metrics, path: &str, headers: &HeaderMap) -> Answer {
    match path {
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" if metrics.is_runtime_up() => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            (StatusCode::SERVICE_UNAVAILABLE, TEXT, "the container runtime does not answer\n".to_owned())
        }
        "/metrics" => answer_metrics(headers, metrics.render()),
        _ => (StatusCode::NOT_FOUND, TEXT, "there are /metrics, /healthz and /readyz\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_decides_readiness() {
        let metrics = Metrics::default();
        let status_of = |path| answer(&metrics, path, &HeaderMap::new()).0;
        assert_eq!(status_of("/readyz"), StatusCode::SERVICE_UNAVAILABLE);
        metrics.set_runtime_up(true);
        assert_eq!(status_of("/readyz"), StatusCode::OK);
        assert_eq!(status_of("/"), StatusCode::NOT_FOUND);
    }
}
