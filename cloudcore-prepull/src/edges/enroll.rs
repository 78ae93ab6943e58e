//! The enrolment endpoint: three HTTPS routes, without state of its own.
//!
//! ```text
//!  GET  /v1/ca                          ─▶ the CAs' certificates
//!  POST /v1/enroll  token, CSR          ─▶ tokens ─▶ Authority::sign_client ─▶ roster
//!  POST /v1/renew   certificate, CSR    ─▶ PeerIdentity ─▶ Authority::sign_client ─▶ roster
//! ```

mod issue_rate;
mod routes;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prepull_program::errors::with_causes;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::edges::PortTerms;
use crate::edges::accept::accept_connection;
use crate::edges::door::{Arrived, Attention, Door, Limits};
use crate::edges::log_rate::{LogRate, NodeLogRate};
use crate::edges::pki::ServerIdentity;
use crate::edges::pki::peer::PeerIdentity;
use crate::edges::tokens::Tokens;
use issue_rate::IssueRate;
use routes::Routes;

/// The bounds of the port. Each connection serves one request.
const LIMITS: Limits = Limits {
    silent: 1024,
    // Some of a fleet that renews at once.
    waiting: 1024,
    // Each may have a request to the API server under way.
    slots: 128,
    hello_deadline: TLS_DEADLINE,
    waiting_deadline: Duration::from_secs(10),
    patience: Duration::from_millis(200),
    turn: Duration::from_secs(3),
    deadline: Duration::from_secs(20),
};
/// The deadline for the ClientHello, and for the rest of the TLS handshake: two round trips, and two losses.
const TLS_DEADLINE: Duration = Duration::from_secs(3);
/// The deadline for the request's head, after TLS.
const HEADER_DEADLINE: Duration = Duration::from_secs(5);
/// The most bytes of a request's head. A few hundred would do; hyper's minimum is 8 KiB.
const MAX_HEAD: usize = 8 * 1024;
/// How long requests in progress may take after `shutdown`.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// Settings of the certificates that the endpoint issues.
#[derive(Clone, Debug)]
pub struct EnrollSettings {
    /// The lifetime of an edge's certificate, `--edge-cert-ttl`. The edge renews it when a third is left.
    pub certificate_ttl: Duration,
    /// Whether subjects of release 0.1 are accepted, and issued to its agents: `--accept-system-nodes`.
    pub accept_system_nodes: bool,
    /// How long ago a certificate may have expired and still be renewed, `--renew-grace`.
    pub renew_grace: Duration,
}

impl Default for EnrollSettings {
    fn default() -> Self {
        Self {
            certificate_ttl: Duration::from_secs(30 * 24 * 3600),
            accept_system_nodes: true,
            renew_grace: Duration::from_secs(90 * 24 * 3600),
        }
    }
}

/// Serves edges until `shutdown`; requests in progress then have two more seconds.
pub async fn serve(
    listener: TcpListener,
    PortTerms { identity, roster, metrics, shutdown }: PortTerms,
    tokens: Tokens,
    settings: EnrollSettings,
) {
    let routes = Routes {
        identity: Arc::clone(&identity),
        tokens,
        roster,
        settings,
        refusal_log: LogRate::default(),
        node_log: NodeLogRate::default(),
        issue_rate: IssueRate::default(),
    };
    let endpoint = Arc::new(EnrollEndpoint { door: Door::new("enroll", LIMITS, metrics), identity, routes });
    let tracker = TaskTracker::new();
    let accept = async {
        loop {
            let (stream, address) = accept_connection(&listener).await;
            let endpoint = Arc::clone(&endpoint);
            tracker.spawn(async move { endpoint.serve_connection(stream, address).await });
        }
    };
    shutdown.run_until_cancelled(accept).await;
    tracker.close();
    let _ = timeout(DRAIN_DEADLINE, tracker.wait()).await;
}

struct EnrollEndpoint {
    door: Door,
    identity: Arc<ServerIdentity>,
    routes: Routes,
}

impl EnrollEndpoint {
    async fn serve_connection(&self, stream: TcpStream, address: SocketAddr) {
        let serving = self.door.admit_connection(stream, address, |arrived, attention| {
            self.answer_request(arrived, attention, address.ip())
        });
        if let Err(error) = serving.await {
            tracing::debug!(%address, error = with_causes(error.as_ref()), "enrolment connection failed");
        }
    }

    async fn answer_request(
        &self,
        arrived: Arrived,
        attention: Attention,
        address: IpAddr,
    ) -> anyhow::Result<()> {
        let handshake = timeout(TLS_DEADLINE, arrived.into_stream(self.identity.enroll_tls()));
        let stream = handshake.await.context("the TLS handshake took too long")??;
        let grace = self.routes.settings.renew_grace;
        let chain = stream.get_ref().1.peer_certificates();
        let peer = PeerIdentity::from_chain_within(chain, SystemTime::now(), grace);
        let (peer, attention) = (&peer, &attention);
        let service = service_fn(move |request| async move {
            let response = match routes::read_body(request).await {
                Ok(request) => {
                    // Not the client is slow now, if anybody is.
                    let _busy = attention.busy();
                    self.routes.handle(request, peer, address).await
                }
                Err(response) => response,
            };
            Ok::<_, std::convert::Infallible>(response)
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
}
