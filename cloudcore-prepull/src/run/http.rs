//! Plain HTTP for Prometheus and for the kubelet's probes. No secret passes here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::kube_api::leader::Leadership;
use crate::run::metrics::Metrics;

/// Whether cloudcore can do its work: it leads, the jobs and nodes are known, and the tunnel listens.
#[derive(Debug)]
pub struct Readiness {
    leadership: Leadership,
    serving: AtomicBool,
    /// What keeps it from serving, where that is known.
    waits_for: Mutex<Option<String>>,
}

impl Readiness {
    /// Not ready.
    pub fn new(leadership: Leadership) -> Self {
        Self { leadership, serving: AtomicBool::new(false), waits_for: Mutex::default() }
    }

    /// Says whether the tunnel listens.
    pub fn set(&self, serving: bool) {
        self.serving.store(serving, Ordering::Relaxed);
    }

    /// Says what keeps it from serving.
    pub fn waits_for(&self, what: Option<String>) {
        *self.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    fn answer(&self) -> (StatusCode, String) {
        let reason = match self.leadership.why_not() {
            Some(why) => format!("not the leader: {why}\n"),
            None if self.serving.load(Ordering::Relaxed) => return (StatusCode::OK, "ok\n".to_owned()),
            None => {
                let waits_for = self.waits_for.lock().unwrap_or_else(PoisonError::into_inner);
                waits_for.as_ref().map_or_else(
                    || "waiting for the API server's jobs and nodes\n".to_owned(),
                    |what| format!("waiting for the API server: {what}\n"),
                )
            }
        };
        (StatusCode::SERVICE_UNAVAILABLE, reason)
    }
}

/// Serves until the token is cancelled.
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let app = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state((metrics, readiness));
    axum::serve(listener, app).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

type Served = State<(Arc<Metrics>, Arc<Readiness>)>;

async fn ready(State((_, readiness)): Served) -> impl IntoResponse {
    readiness.answer()
}

async fn scrape(State((metrics, readiness)): Served) -> impl IntoResponse {
    metrics.set_leadership(&readiness.leadership);
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], metrics.render())
}
