//! Plain HTTP for Prometheus and for health probes: /metrics, /healthz and /readyz; and /status for this machine alone.

use std::future::ready;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use hyper::{HeaderMap, StatusCode};
use prepull_program::http::{self, HttpAnswer, TEXT, answer_metrics, answer_request};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::clock::CloudClock;
use crate::metrics::AgentMetrics;

/// Concurrent connections: enough for a collector, a person, and probes. Each takes some ten KiB.
const CONNECTIONS: usize = 16;

/// Serves until `shutdown`.
pub(super) async fn serve(
    listener: TcpListener,
    metrics: Arc<AgentMetrics>,
    clock: Arc<CloudClock>,
    shutdown: CancellationToken,
) {
    let serve_one = |stream: TcpStream| {
        let (metrics, clock) = (Arc::clone(&metrics), Arc::clone(&clock));
        let from = stream.peer_addr().ok().map(|address| address.ip().to_canonical());
        answer_request(stream, move |request| {
            ready(answer(&metrics, &clock, from, request.uri().path(), request.headers()))
        })
    };
    http::serve_connections(listener, CONNECTIONS, shutdown, serve_one).await;
}

const JSON: &str = "application/json";

fn answer(
    metrics: &AgentMetrics,
    clock: &CloudClock,
    from: Option<IpAddr>,
    path: &str,
    headers: &HeaderMap,
) -> HttpAnswer {
    match path {
        // Names of jobs and images are for those who are on the machine.
        "/status" if from.is_some_and(|from| from.is_loopback()) => {
            // A clock that isn't set still shows how long something took.
            let wall = if clock.is_known() { clock.wall() } else { SystemTime::now() };
            let status = metrics.status().read(Instant::now(), wall);
            (StatusCode::OK, JSON, serde_json::to_string(&status).unwrap_or_default())
        }
        "/status" => (StatusCode::FORBIDDEN, TEXT, "only this machine may ask for /status\n".to_owned()),
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" if metrics.is_runtime_up() => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            (StatusCode::SERVICE_UNAVAILABLE, TEXT, "the container runtime does not answer\n".to_owned())
        }
        "/metrics" => answer_metrics(headers, metrics.render()),
        _ => (StatusCode::NOT_FOUND, TEXT, "there are /metrics, /healthz, /readyz and /status\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_runtime_decides_readiness() {
        let metrics = AgentMetrics::default();
        let clock = CloudClock::default();
        let status_of = |path| answer(&metrics, &clock, None, path, &HeaderMap::new()).0;
        assert_eq!(status_of("/readyz"), StatusCode::SERVICE_UNAVAILABLE);
        metrics.set_runtime_up(true);
        assert_eq!(status_of("/readyz"), StatusCode::OK);
        assert_eq!(status_of("/"), StatusCode::NOT_FOUND);
    }

    #[test]
    fn only_this_machine_reads_the_status() {
        let (metrics, clock) = (AgentMetrics::default(), CloudClock::default());
        metrics.status().mark_connected("cloud.example:10000".to_owned(), Instant::now());
        let ask = |from: &str| answer(&metrics, &clock, from.parse().ok(), "/status", &HeaderMap::new());
        let (status, _, text) = ask("127.0.0.1");
        assert!(status == StatusCode::OK && text.contains("cloud.example:10000"), "{text}");
        for other in ["10.0.0.7", "fe80::1"] {
            assert_eq!(ask(other).0, StatusCode::FORBIDDEN);
        }
    }

    #[test]
    fn the_status_has_the_clouds_time() {
        let (metrics, clock) = (AgentMetrics::default(), CloudClock::default());
        clock.set(Duration::from_secs(4_000_000_000));
        let (_, _, text) = answer(&metrics, &clock, "127.0.0.1".parse().ok(), "/status", &HeaderMap::new());
        assert!(text.contains("2096-10-02T07:"), "{text}");
    }
}
