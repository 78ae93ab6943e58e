//! The enrolment endpoint: three HTTPS routes, without state of its own.
//!
//! ```text
//!  GET  /v1/ca                          ─▶ the CA's certificate
//!  POST /v1/enroll  token, CSR          ─▶ tokens ─▶ Authority::sign_client
//!  POST /v1/renew   certificate, CSR    ─▶ Peer ───▶ Authority::sign_client
//! ```

mod failed_tokens;
mod routes;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::edges::accept::accept_connection;
use crate::edges::pki::Authority;
use crate::edges::pki::peer::Peer;
use crate::edges::tokens::Tokens;
use failed_tokens::FailedTokens;
use routes::Routes;

/// The most connections at a time. Each serves one request and closes; further ones wait in the kernel.
const MAX_CONNECTIONS: usize = 1024;
/// The most tokens that are looked up at a time. It protects the API server, and is how far the limit of failed
/// tokens can be exceeded.
const MAX_LOOKUPS: usize = 32;
/// The deadline for a whole connection: TLS, one request, the API server, the answer.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(20);
/// The deadline for the request's head, after TLS.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// The most bytes of a request's head. A few hundred would do; hyper's minimum is 8 KiB.
const MAX_HEAD: usize = 8 * 1024;
/// How long requests in progress may take after `shutdown`.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// Settings of the certificates that the endpoint issues.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The lifetime of an edge's certificate, `--edge-cert-ttl`. The edge renews it when a third is left; one that is
    /// offline for longer than that third must join again.
    pub certificate_ttl: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { certificate_ttl: Duration::from_secs(30 * 24 * 3600) }
    }
}

/// Serves edges until `shutdown`; requests in progress then have two more seconds.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    authority: Arc<Authority>,
    tokens: Tokens,
    settings: Settings,
    shutdown: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(tls);
    let failed_tokens = Mutex::new(FailedTokens::new());
    let lookups = Semaphore::new(MAX_LOOKUPS);
    let routes = Arc::new(Routes { authority, tokens, settings, failed_tokens, lookups });
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let tracker = TaskTracker::new();
    let accept = async {
        // Loops forever: the semaphore is never closed.
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            let (stream, address) = accept_connection(&listener).await;
            let (acceptor, routes) = (acceptor.clone(), Arc::clone(&routes));
            tracker.spawn(async move {
                match timeout(CONNECTION_DEADLINE, serve_connection(acceptor, stream, address, routes)).await
                {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%address, %error, "enrolment connection failed"),
                    Err(_) => tracing::debug!(%address, "enrolment connection took too long"),
                }
                drop(slot);
            });
        }
    };
    shutdown.run_until_cancelled(accept).await;
    tracker.close();
    let _ = timeout(DRAIN_DEADLINE, tracker.wait()).await;
}

async fn serve_connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    routes: Arc<Routes>,
) -> anyhow::Result<()> {
    let stream = acceptor.accept(stream).await?;
    let peer = Peer::from_chain(stream.get_ref().1.peer_certificates(), SystemTime::now());
    let (peer, routes) = (&peer, &routes);
    let service = service_fn(move |request| async move {
        Ok::<_, std::convert::Infallible>(routes.handle(request, peer, address.ip()).await)
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await?;
    Ok(())
}
