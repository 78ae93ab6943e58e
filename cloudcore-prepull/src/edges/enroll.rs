//! The enrolment endpoint: HTTPS, three small routes, no state of its own.
//!
//! ```text
//!  GET  /v1/ca                          ─▶ the CA's certificate
//!  POST /v1/enroll  token, CSR          ─▶ tokens ─▶ Authority::sign_client
//!  POST /v1/renew   certificate, CSR    ─▶ peer ───▶ Authority::sign_client
//! ```

mod failures;
mod routes;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::edges::pki::Authority;
use crate::edges::tokens::Tokens;
use crate::edges::tunnel::peer::Peer;
use failures::Failures;
use routes::Routes;

/// Connections at a time. Each serves one request and is gone; more wait in the kernel.
const MAX_CONNECTIONS: usize = 1024;
/// Tokens that are looked up at the API server at a time: what it can bear, and by how much the bound on failed
/// tokens can be overrun.
const MAX_LOOKUPS: usize = 32;
/// For the whole of a connection: TLS, one request, the API server, the answer.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(20);
/// For the request's head, after TLS.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// A request's head is a few hundred bytes; hyper asks for 8 KiB at least.
const MAX_HEAD: usize = 8 * 1024;
/// What is under way at `shutdown` may finish within this.
const DRAIN: Duration = Duration::from_secs(2);
/// Wait after a failed accept: it fails where descriptors have run out, and would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the endpoint gives.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The life of an edge's certificate, `--edge-cert-ttl`. It is renewed when a third is left: an edge that
    /// is offline for longer than that third has to join again.
    pub certificate_ttl: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { certificate_ttl: Duration::from_secs(30 * 24 * 3600) }
    }
}

/// Serves until `shutdown`; what is under way then may finish within two seconds.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    authority: Arc<Authority>,
    tokens: Tokens,
    settings: Settings,
    shutdown: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(tls);
    let failures = Mutex::new(Failures::new(Instant::now()));
    let lookups = Semaphore::new(MAX_LOOKUPS);
    let routes = Arc::new(Routes { authority, tokens, settings, failures, lookups });
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let tracker = TaskTracker::new();
    let accept = async {
        // The semaphore is never closed.
        while let Ok(permit) = Arc::clone(&room).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, address)) => {
                    let (acceptor, routes) = (acceptor.clone(), Arc::clone(&routes));
                    tracker.spawn(async move {
                        let served =
                            timeout(CONNECTION_DEADLINE, connection(acceptor, stream, address, routes));
                        match served.await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::debug!(%address, error, "enrolment connection failed"),
                            Err(_) => tracing::debug!(%address, "enrolment connection took too long"),
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed; is the limit of open files (ulimit -n) too low?");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    shutdown.run_until_cancelled(accept).await;
    tracker.close();
    let _ = timeout(DRAIN, tracker.wait()).await;
}

async fn connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    routes: Arc<Routes>,
) -> Result<(), String> {
    let stream = acceptor.accept(stream).await.map_err(|error| error.to_string())?;
    let peer = Peer::from_chain(stream.get_ref().1.peer_certificates(), SystemTime::now());
    let (peer, routes) = (&peer, &routes);
    let service = service_fn(move |request| async move {
        Ok::<_, std::convert::Infallible>(routes.answer(request, peer, address.ip()).await)
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(|error| error.to_string())
}
