//! Plain HTTP for Prometheus and for health probes: /metrics, /healthz and /readyz.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::metrics::Metrics;

/// Connections at a time: enough for one collector and one person.
const CONNECTIONS: usize = 4;
/// A client that takes longer to send its request is disconnected.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// Pause after a connection could not be accepted: most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `shutdown`.
pub(super) async fn serve(listener: TcpListener, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                debug!(%error, "metrics: connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let metrics = metrics.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                let (status, content_type, text) = answer(&metrics, request.uri().path());
                let mut response = Response::new(Full::new(Bytes::from(text)));
                *response.status_mut() = status;
                let content_type = header::HeaderValue::from_static(content_type);
                response.headers_mut().insert(header::CONTENT_TYPE, content_type);
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                debug!(%error, "metrics: connection ended");
            }
            drop(permit);
        });
    }
}

/// Status, content type and body for a path.
fn answer(metrics: &Metrics, path: &str) -> (StatusCode, &'static str, String) {
    const TEXT: &str = "text/plain; charset=utf-8";
    match path {
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" if metrics.is_runtime_up() => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            (StatusCode::SERVICE_UNAVAILABLE, TEXT, "the container runtime does not answer\n".to_owned())
        }
        "/metrics" => {
            (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", metrics.render())
        }
        _ => (StatusCode::NOT_FOUND, TEXT, "there are /metrics, /healthz and /readyz\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_ready_while_the_runtime_answers() {
        let metrics = Metrics::default();
        let status_of = |path| answer(&metrics, path).0;
        assert_eq!(status_of("/readyz"), StatusCode::SERVICE_UNAVAILABLE);
        metrics.set_runtime_up(true);
        assert_eq!(status_of("/readyz"), StatusCode::OK);
        assert_eq!(status_of("/"), StatusCode::NOT_FOUND);
    }
}
