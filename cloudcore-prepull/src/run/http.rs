//! The plain HTTP server for Prometheus and the kubelet's probes. It serves no secrets.

use std::future::ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::StatusCode;
use prepull_program::http::{self, Answer, METRICS, TEXT, answer_request};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::kube_api::leader::Leadership;
use crate::run::metrics::Metrics;

/// Connections at a time, of probes and collectors, and of whoever else there is in the network.
const CONNECTIONS: usize = 256;

/// The readiness of cloudcore: it leads, jobs and nodes have been listed, and the tunnel listens.
#[derive(Debug)]
pub(crate) struct Readiness {
    leadership: Leadership,
    serving: AtomicBool,
    /// What keeps it from serving, if that is known.
    obstacle: Mutex<Option<String>>,
    /// What is not served although it is asked for, and why; the rest is.
    lack: Mutex<Option<String>>,
}

impl Readiness {
    /// The readiness at the start: not ready.
    pub(crate) fn new(leadership: Leadership) -> Self {
        Self {
            leadership,
            serving: AtomicBool::new(false),
            obstacle: Mutex::default(),
            lack: Mutex::default(),
        }
    }

    /// Sets whether the tunnel listens.
    pub(crate) fn set_serving(&self, serving: bool) {
        self.serving.store(serving, Ordering::Relaxed);
    }

    /// Sets what keeps it from serving, for the answer of /readyz.
    pub(crate) fn set_obstacle(&self, obstacle: Option<String>) {
        *self.obstacle.lock().unwrap_or_else(PoisonError::into_inner) = obstacle;
    }

    /// Sets what is not served although it is asked for, for the answer of /readyz.
    pub(crate) fn set_lack(&self, lack: Option<String>) {
        *self.lack.lock().unwrap_or_else(PoisonError::into_inner) = lack;
    }

    fn answer(&self) -> (StatusCode, String) {
        let reason = match self.leadership.why_not() {
            Some(why) => format!("not the leader: {why}\n"),
            None if self.serving.load(Ordering::Relaxed) => {
                let lack = self.lack.lock().unwrap_or_else(PoisonError::into_inner);
                let lack = lack.as_ref().map(|lack| format!("{lack}\n")).unwrap_or_default();
                return (StatusCode::OK, format!("ok\n{lack}"));
            }
            None => {
                let obstacle = self.obstacle.lock().unwrap_or_else(PoisonError::into_inner);
                obstacle.as_ref().map_or_else(
                    || "waiting for the API server to list jobs and nodes\n".to_owned(),
                    |obstacle| format!("waiting for the API server: {obstacle}\n"),
                )
            }
        };
        (StatusCode::SERVICE_UNAVAILABLE, reason)
    }
}

/// Serves /healthz, /readyz and /metrics until `shutdown`.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    shutdown: CancellationToken,
) {
    let serve_one = |stream| {
        let (metrics, readiness) = (Arc::clone(&metrics), Arc::clone(&readiness));
        answer_request(stream, move |request| ready(answer(&metrics, &readiness, request.uri().path())))
    };
    http::serve_connections(listener, CONNECTIONS, shutdown, serve_one).await;
}

fn answer(metrics: &Metrics, readiness: &Readiness, path: &str) -> Answer {
    match path {
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            let (status, text) = readiness.answer();
            (status, TEXT, text)
        }
        "/metrics" => {
            metrics.set_leadership(&readiness.leadership);
            (StatusCode::OK, METRICS, metrics.render())
        }
        _ => (StatusCode::NOT_FOUND, TEXT, "there are /metrics, /healthz and /readyz\n".to_owned()),
    }
}
