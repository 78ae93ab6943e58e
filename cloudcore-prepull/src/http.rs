//! Plain HTTP for Prometheus and for the kubelet's probes. No secret passes here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Whether cloudcore can do its work: the jobs and nodes are known, and the tunnel listens.
#[derive(Debug, Default)]
pub struct Readiness(AtomicBool);

impl Readiness {
    /// Says so.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Relaxed);
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
        .route(
            "/readyz",
            get(|State((_, readiness)): State<(Arc<Metrics>, Arc<Readiness>)>| async move {
                if readiness.0.load(Ordering::Relaxed) {
                    (StatusCode::OK, "ok\n")
                } else {
                    (StatusCode::SERVICE_UNAVAILABLE, "waiting for the API server's jobs and nodes\n")
                }
            }),
        )
        .route(
            "/metrics",
            get(|State((metrics, _)): State<(Arc<Metrics>, Arc<Readiness>)>| async move {
                let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                ([(header::CONTENT_TYPE, format)], metrics.render()).into_response()
            }),
        )
        .with_state((metrics, readiness));
    axum::serve(listener, app).with_graceful_shutdown(shutdown.cancelled_owned()).await
}
