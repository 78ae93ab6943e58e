//! The TLS and websocket handshakes of one connection, from its ClientHello on.

use std::sync::Arc;
use std::time::SystemTime;

use prepull_api::wire::{SUBPROTOCOL, TUNNEL_PATH};
use prepull_tunnel::{ByteCount, Channel, CountingStream, Terms, websocket_config};
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode, header::SEC_WEBSOCKET_PROTOCOL};

use super::ListenerSettings;
use super::node_connections::{NodeConnections, OpenConnection};
use super::refusal::ConnectionRefusal;
use crate::edges::door::{Arrived, Secured, Turned};
use crate::edges::pki::ca_set::CaFingerprint;
use crate::edges::pki::peer::PeerIdentity;
use crate::edges::pki::{CaSet, ServerIdentity};
use crate::edges::roster::Roster;

/// The most outgoing bytes that rustls buffers per session: one TLS record. Beyond it, the websocket waits.
const TLS_BUFFER: usize = 16 * 1024;

pub(super) struct Handshaker {
    identity: Arc<ServerIdentity>,
    roster: Roster,
    node_connections: NodeConnections,
    max_connections_per_node: usize,
    accept_system_nodes: bool,
    terms: Terms,
}

/// A websocket with an authenticated node at its other end.
pub(super) struct Connected {
    pub(super) channel: Channel<Secured>,
    pub(super) peer: PeerIdentity,
    /// The CA of the node's certificate.
    pub(super) issuer: CaFingerprint,
    /// Counts the connection until it is dropped.
    pub(super) open: OpenConnection,
}

impl Handshaker {
    pub(super) fn new(identity: Arc<ServerIdentity>, roster: Roster, settings: &ListenerSettings) -> Self {
        Self {
            identity,
            roster,
            node_connections: NodeConnections::default(),
            max_connections_per_node: settings.max_connections_per_node,
            accept_system_nodes: settings.accept_system_nodes,
            terms: Terms { heartbeat: settings.heartbeat, write_grace: settings.write_grace },
        }
    }

    /// Performs both handshakes. A peer that TLS accepts and we refuse gets an HTTP status with the reason.
    pub(super) async fn accept(&self, arrived: Arrived) -> Result<Connected, ConnectionRefusal> {
        let limit = |connection: &mut rustls::ServerConnection| connection.set_buffer_limit(Some(TLS_BUFFER));
        let serving = self.identity.serving();
        let stream =
            arrived.into_stream_with(Arc::clone(&serving.tunnel), limit).await.map_err(Turned::Tls)?;
        let admitted = self.admit_peer(&stream, &serving.cas).await;
        let refused = admitted.as_ref().err().map(|refusal| {
            let status = match refusal {
                ConnectionRefusal::TooManyConnections(_) => StatusCode::TOO_MANY_REQUESTS,
                _ => StatusCode::FORBIDDEN,
            };
            (status, refusal.to_string())
        });
        // The signature is tungstenite's.
        #[allow(clippy::result_large_err)]
        let check = |request: &Request, response: Response| match refused {
            Some((status, reason)) => Err(error_response(status, reason)),
            None => negotiate_subprotocol(request, response),
        };
        let stream = CountingStream::new(stream, ByteCount::default());
        let accepted = accept_hdr_async_with_config(stream, check, Some(websocket_config())).await;
        let (peer, issuer, open) = admitted?;
        let socket = accepted.map_err(ConnectionRefusal::WebSocket)?;
        Ok(Connected { channel: Channel::new(socket, self.terms), peer, issuer, open })
    }

    async fn admit_peer(
        &self,
        stream: &Secured,
        cas: &CaSet,
    ) -> Result<(PeerIdentity, CaFingerprint, OpenConnection), ConnectionRefusal> {
        let chain = stream.get_ref().1.peer_certificates();
        let peer = PeerIdentity::from_chain(chain, SystemTime::now())?;
        peer.check_subject(self.accept_system_nodes)?;
        // TLS has verified it with one of these CAs: which one?
        let issuer =
            chain.and_then(|chain| cas.issuer_of(chain.first()?)).ok_or(ConnectionRefusal::UnknownCa)?;
        let open = self.node_connections.try_open(&peer.node, self.max_connections_per_node);
        let open = open.ok_or_else(|| ConnectionRefusal::TooManyConnections(peer.node.clone()))?;
        self.roster.wait_for_node(&peer.node).await;
        self.roster.admit(&peer, issuer)?;
        Ok((peer, issuer, open))
    }
}

#[allow(clippy::result_large_err)] // tungstenite's signature
fn negotiate_subprotocol(request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
    if request.uri().path() != TUNNEL_PATH {
        return Err(error_response(StatusCode::NOT_FOUND, format!("the tunnel is at {TUNNEL_PATH}")));
    }
    let offered = request.headers().get_all(SEC_WEBSOCKET_PROTOCOL);
    let mut offered = offered.iter().filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
    if !offered.any(|protocol| protocol.trim() == SUBPROTOCOL) {
        let reason = format!("the subprotocol {SUBPROTOCOL} is required; is the agent of another version?");
        return Err(error_response(StatusCode::BAD_REQUEST, reason));
    }
    response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    Ok(response)
}

fn error_response(status: StatusCode, reason: String) -> ErrorResponse {
    let mut response = ErrorResponse::new(Some(reason));
    *response.status_mut() = status;
    response
}
