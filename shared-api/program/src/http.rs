//! The HTTP server for Prometheus and health probes, which anybody in the network may reach.
//!
//! Each connection serves one request. Idle ones cost a bounded number of places, and lose them to newer ones: a probe
//! is answered however many there are.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics::to_prometheus_text;
use crate::places::{ConnectionPlace, ConnectionPlaces, Loses};

/// A client that takes longer to send its request is disconnected.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// The deadline for a whole connection: a slow collector on a slow link reads a few hundred KiB within it.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(20);
/// The most bytes of a request's head. A few hundred would do, but for a token of a kilobyte; hyper's minimum is 8 KiB.
const MAX_HEAD: usize = 16 * 1024;
/// The wait after a connection could not be accepted: most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The connections that are accepted in a row before other tasks get a turn.
const ACCEPT_BATCH: usize = 64;

/// An answer: its status, its content type, and its text.
pub type HttpAnswer = (StatusCode, &'static str, String);

/// The content type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";
/// The content type of metrics in the text format of Prometheus.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The content type of metrics in that of OpenMetrics.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers with metrics, which are given in the text format of OpenMetrics, in that or the older one: as the client accepts.
pub fn answer_metrics(headers: &HeaderMap, openmetrics: String) -> HttpAnswer {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text")) {
        (StatusCode::OK, OPENMETRICS, openmetrics)
    } else {
        (StatusCode::OK, PROMETHEUS, to_prometheus_text(&openmetrics))
    }
}

/// Serves connections with `serve_one` until `shutdown`, at most `connections` at a time. A connection beyond
/// that takes the place of the oldest one of the source with the most.
pub async fn serve_connections<F>(
    listener: TcpListener,
    connections: usize,
    shutdown: CancellationToken,
    serve_one: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let places = ConnectionPlaces::new(connections, Loses::Oldest);
    let mut in_a_row = 0;
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, address)) => {
                let place = places.take(address.ip().into());
                tokio::spawn(limit(place, serve_one(stream)));
                in_a_row = (in_a_row + 1) % ACCEPT_BATCH;
                if in_a_row == 0 {
                    tokio::task::yield_now().await;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "metrics: a connection was not accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Ends a connection at its deadline, or when its place is lost.
async fn limit(mut place: ConnectionPlace, connection: impl Future<Output = ()>) {
    tokio::select! {
        () = place.wait_for_loss() => {}
        _ = timeout(CONNECTION_DEADLINE, connection) => {}
    }
}

/// Answers the one request of a connection.
pub async fn answer_request<S, F>(stream: S, answer: impl Fn(Request<Incoming>) -> F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = HttpAnswer>,
{
    let service = hyper::service::service_fn(|request| {
        let answering = answer(request);
        async move {
            let (status, content_type, text) = answering.await;
            let mut response = Response::new(Full::new(Bytes::from(text)));
            *response.status_mut() = status;
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "metrics: a connection ended");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::Instant;
    use tokio_util::sync::DropGuard;

    use super::*;

    /// The number of connections at a time, of the server under test.
    const CONNECTIONS: usize = 8;

    async fn start() -> (SocketAddr, DropGuard) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let serve_one = |stream| answer_request(stream, async |_| (StatusCode::OK, TEXT, "ok\n".to_owned()));
        tokio::spawn(serve_connections(listener, CONNECTIONS, shutdown.clone(), serve_one));
        (address, shutdown.drop_guard())
    }

    async fn probe(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(HEADER_DEADLINE / 2, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }

    #[tokio::test]
    async fn idle_connections_delay_no_probe() {
        let (address, _stop) = start().await;
        let mut idle = Vec::new();
        for _ in 0..5 * CONNECTIONS {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        // A request that never ends is as idle as none.
        for stream in idle.iter_mut().rev().take(CONNECTIONS) {
            stream.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
        }
        let begun = Instant::now();
        assert!(probe(address).await.starts_with("HTTP/1.1 200"));
        assert!(begun.elapsed() < HEADER_DEADLINE / 2, "{:?}", begun.elapsed());
        // The oldest were closed, at once.
        let mut rest = Vec::new();
        timeout(HEADER_DEADLINE / 2, idle[0].read_to_end(&mut rest)).await.unwrap().ok();
    }

    #[tokio::test]
    async fn a_connection_serves_one_request_and_ends_with_the_server() {
        let (address, stop) = start().await;
        let answer = probe(address).await;
        assert!(answer.ends_with("\r\n\r\nok\n") && answer.contains("text/plain"), "{answer}");
        drop(stop);
        let refused = async { while TcpStream::connect(address).await.is_ok() {} };
        timeout(HEADER_DEADLINE, refused).await.unwrap();
    }
}
