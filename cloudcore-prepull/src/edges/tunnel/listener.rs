//! Accepts connections, within bounds, and makes sessions of them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use prepull_api::task::NodeName;
use prepull_api::wire::{SUBPROTOCOL, TUNNEL_PATH};
use prepull_engine::shared::session::SessionEvent;
use prepull_tunnel::{Channel, CloseCode, Metered, Terms, websocket_config};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::unconstrained;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode, header::SEC_WEBSOCKET_PROTOCOL};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::Meters;
use super::overload::{Overload, Why};
use super::peer::{Peer, PeerError};
use super::registry::Sessions;
use super::session::{self, Session};
use super::throttle::Bucket;

/// Connections that the kernel holds ready: a fleet's first second after a restart.
const BACKLOG: u32 = 4096;
/// Wait after a failed accept: it fails where descriptors have run out, and would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refusals that are logged per second, and at once. Anyone who reaches the port can cause them.
const LOGGED_REFUSALS: (f64, f64) = (5.0, 50.0);
/// How long, while it drains, a listener waits before it looks for sessions that began in the meantime.
const DRAIN_STEP: Duration = Duration::from_millis(100);
/// Between two looks whether others wait for the place of a handshake.
const HURRY_STEP: Duration = Duration::from_millis(100);
/// What rustls may hold of one session's outgoing bytes: one TLS record. Beyond, the websocket waits.
const TLS_BUFFER: usize = 16 * 1024;

/// Bounds and timing of the tunnel's cloud side.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How often both sides ping; `--heartbeat`.
    pub heartbeat: Duration,
    /// The shortest time between two `Progress` of one task: a person reads no faster.
    pub progress_interval: Duration,
    /// Sessions at a time, of all nodes. Each takes up to 25 KiB while idle. Who comes beyond is told when to come
    /// back.
    pub max_connections: usize,
    /// Connections of one node at a time: its session, the one that replaces it, and some that are closing.
    pub max_connections_per_node: usize,
    /// TLS and websocket handshakes in flight. More of them than cores can serve in the deadline only make
    /// all of them fail.
    pub max_handshakes: usize,
    /// Connections that wait for their handshake to begin: each is a socket and a task.
    pub max_waiting: usize,
    /// How long they may wait. Whoever waited longer than an edge's own patience (20 s for the handshake) would be
    /// gone, and what is done for him would be done in vain.
    pub queue_deadline: Duration,
    /// For TLS and the websocket's handshake together: four round trips on a bad link.
    pub handshake_deadline: Duration,
    /// The same while all places for handshakes are taken: whoever takes longer makes room. Four round trips on a
    /// link of 300 ms with some loss, and the time in which a slow machine serves all places: when a whole fleet comes
    /// back they are always taken, and whoever is cut then comes again and makes it worse.
    pub handshake_hurry: Duration,
    /// For `Hello`, which the edge sends without waiting for anything.
    pub hello_deadline: Duration,
    /// What a write may take beyond its size at 8 KiB/s.
    pub write_grace: Duration,
    /// How long sessions may take to end after `shutdown`.
    pub drain_deadline: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
            max_connections: 20_000,
            max_connections_per_node: 4,
            max_handshakes: 512,
            max_waiting: 10_000,
            queue_deadline: Duration::from_secs(15),
            handshake_deadline: Duration::from_secs(10),
            handshake_hurry: Duration::from_secs(3),
            hello_deadline: Duration::from_secs(10),
            write_grace: Duration::from_secs(10),
            drain_deadline: Duration::from_secs(5),
        }
    }
}

/// Listens with a backlog that a fleet's return fits into.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `shutdown`; then stops accepting, sends every session a `Goaway`, and returns when all have
/// ended, or at the drain's deadline.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    sessions: Sessions,
    events: mpsc::Sender<SessionEvent>,
    settings: Settings,
    meters: Meters,
    shutdown: CancellationToken,
) {
    let door = Arc::new(Door::new(tls, sessions.clone(), events, settings.clone(), meters));
    let tracker = TaskTracker::new();
    let abort = CancellationToken::new();
    // Not interrupted while more are waiting: between two turns of this task hundreds of handshakes may get theirs,
    // and the backlog overflows. The number of those who may wait ends it.
    while let Some((stream, address, waiting)) = unconstrained(door.admit(&listener, &shutdown)).await {
        let (door, abort) = (Arc::clone(&door), abort.clone());
        let span = tracing::info_span!("tunnel", %address, node = tracing::field::Empty);
        let connection = async move {
            tokio::select! {
                () = door.enter(stream, waiting) => {}
                () = abort.cancelled() => {}
            }
        };
        tracker.spawn(connection.instrument(span));
    }
    drop(listener);
    tracker.close();
    let drained = async {
        // A connection may have become a session after the first round.
        while !tracker.is_empty() {
            sessions.goaway_all("cloudcore is shutting down");
            let _ = timeout(DRAIN_STEP, tracker.wait()).await;
        }
    };
    if timeout(settings.drain_deadline, drained).await.is_err() {
        tracing::warn!(sessions = tracker.len(), "sessions did not end in time and are cut");
    }
    abort.cancel();
    tracker.wait().await;
}

/// What the connections share, and what bounds them.
struct Door {
    acceptor: TlsAcceptor,
    sessions: Sessions,
    events: mpsc::Sender<SessionEvent>,
    settings: Settings,
    connections: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    handshakes: Semaphore,
    per_node: Arc<Mutex<HashMap<NodeName, usize>>>,
    refusals: Mutex<Bucket>,
    overload: Overload,
    meters: Meters,
}

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("TLS handshake failed")]
    Tls(#[source] io::Error),
    #[error("no handshake within {0:?}")]
    TooSlow(Duration),
    #[error("no turn for the handshake within {0:?}")]
    NoTurn(Duration),
    #[error("no handshake within {0:?}, while others wait for one")]
    MadeRoom(Duration),
    #[error("sent away: {0}")]
    SentAway(Why),
    #[error("{0}")]
    Peer(#[from] PeerError),
    #[error("node {0} has too many connections open")]
    TooMany(NodeName),
    #[error("websocket handshake failed")]
    WebSocket(#[source] tokio_tungstenite::tungstenite::Error),
}

impl Door {
    fn new(
        tls: Arc<rustls::ServerConfig>,
        sessions: Sessions,
        events: mpsc::Sender<SessionEvent>,
        settings: Settings,
        meters: Meters,
    ) -> Self {
        let (rate, burst) = LOGGED_REFUSALS;
        Self {
            acceptor: TlsAcceptor::from(tls),
            sessions,
            events,
            connections: Arc::new(Semaphore::new(settings.max_connections)),
            waiting: Arc::new(Semaphore::new(settings.max_waiting)),
            handshakes: Semaphore::new(settings.max_handshakes),
            per_node: Arc::default(),
            refusals: Mutex::new(Bucket::new(rate, burst, Instant::now())),
            overload: Overload::new(meters.clone(), Instant::now()),
            meters,
            settings,
        }
    }

    /// The next connection. All that come are taken at once, and wait for their handshake here: beyond its backlog
    /// the kernel drops them, and an edge that was dropped tries again only after 1, 2 and 4 s. Where too many wait,
    /// the next ones do so in the backlog, where they cost us nothing.
    async fn admit(
        &self,
        listener: &TcpListener,
        shutdown: &CancellationToken,
    ) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
        let admitted = async {
            // The semaphore is never closed, so that it gives a permit in the end.
            let waiting = Arc::clone(&self.waiting).acquire_owned().await.ok()?;
            loop {
                match listener.accept().await {
                    Ok((stream, address)) => return Some((stream, address, waiting)),
                    Err(error) => {
                        tracing::warn!(%error, "accept failed; is the limit of open files (ulimit -n) too low?");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => None,
            admitted = admitted => admitted,
        }
    }

    async fn enter(&self, stream: TcpStream, waiting: OwnedSemaphorePermit) {
        let queue_deadline = self.settings.queue_deadline;
        let counted = self.meters.waits();
        // It is never closed, either.
        let Ok(Ok(handshake)) = timeout(queue_deadline, self.handshakes.acquire()).await else {
            return self.log(&Refusal::NoTurn(queue_deadline));
        };
        drop((waiting, counted));
        let connection = Arc::clone(&self.connections).try_acquire_owned().ok();
        // Boxed, so that the handshake's memory does not stay with the session.
        let refusal = match Box::pin(self.in_time(self.establish(stream))).await {
            Ok((channel, peer, place)) => {
                tracing::Span::current().record("node", tracing::field::display(&peer.node));
                match (connection, self.overload.lasts(Instant::now())) {
                    (Some(connection), false) => {
                        drop(handshake);
                        let session = Session {
                            peer,
                            sessions: &self.sessions,
                            events: &self.events,
                            settings: &self.settings,
                            overload: &self.overload,
                        };
                        session::run(channel, session).await;
                        drop((place, connection));
                        return;
                    }
                    // The place of the handshake is kept: it bounds those who are told, too.
                    (None, _) => Box::pin(self.send_away(channel, &peer.node, Why::Full)).await,
                    (Some(_), true) => Box::pin(self.send_away(channel, &peer.node, Why::Behind)).await,
                }
            }
            Err(refusal) => refusal,
        };
        drop(handshake);
        self.log(&refusal);
    }

    fn log(&self, refusal: &Refusal) {
        let mut logged = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.try_take(1.0, Instant::now()).is_ok() {
            let cause = std::error::Error::source(refusal).map(ToString::to_string);
            tracing::warn!(reason = %refusal, cause, "connection refused");
        }
    }

    /// Bounds a handshake, more tightly where others wait for its place.
    async fn in_time<T>(&self, handshake: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
        let Settings { handshake_deadline: deadline, handshake_hurry: hurry, .. } = self.settings;
        let begun = Instant::now();
        let mut handshake = std::pin::pin!(handshake);
        let mut wait = hurry.min(deadline);
        loop {
            if let Ok(established) = timeout(wait, &mut handshake).await {
                return established;
            }
            let taken = begun.elapsed();
            if taken >= deadline {
                return Err(Refusal::TooSlow(deadline));
            }
            if self.handshakes.available_permits() == 0 {
                return Err(Refusal::MadeRoom(taken));
            }
            wait = HURRY_STEP.min(deadline.saturating_sub(taken));
        }
    }

    /// Tells an edge when to come back.
    async fn send_away(&self, channel: Channel<TlsStream<TcpStream>>, node: &NodeName, why: Why) -> Refusal {
        let goaway = self.overload.goaway(node, why, Instant::now());
        channel.close_after(goaway, CloseCode::Again, &why.to_string()).await;
        Refusal::SentAway(why)
    }

    async fn establish(
        &self,
        stream: TcpStream,
    ) -> Result<(Channel<TlsStream<TcpStream>>, Peer, Place), Refusal> {
        // Messages are whole and flushed at once; waiting for more would only delay them.
        let _ = stream.set_nodelay(true);
        let limit = |connection: &mut rustls::ServerConnection| connection.set_buffer_limit(Some(TLS_BUFFER));
        let stream = self.acceptor.accept_with(stream, limit).await.map_err(Refusal::Tls)?;
        let peer = Peer::from_chain(stream.get_ref().1.peer_certificates(), SystemTime::now());
        let admitted = peer.map_err(Refusal::from).and_then(|peer| {
            let place = Place::take(&self.per_node, &peer.node, self.settings.max_connections_per_node)
                .ok_or_else(|| Refusal::TooMany(peer.node.clone()))?;
            Ok((peer, place))
        });
        let refused = admitted.as_ref().err().map(|refusal| {
            let status = match refusal {
                Refusal::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
                _ => StatusCode::FORBIDDEN,
            };
            (status, refusal.to_string())
        });
        // The signature is tungstenite's.
        #[allow(clippy::result_large_err)]
        let check = |request: &Request, response: Response| match refused {
            Some((status, reason)) => Err(refuse(status, reason)),
            None => negotiate(request, response),
        };
        let accepted =
            accept_hdr_async_with_config(Metered::new(stream), check, Some(websocket_config())).await;
        let (peer, place) = admitted?;
        let socket = accepted.map_err(Refusal::WebSocket)?;
        let terms = Terms { heartbeat: self.settings.heartbeat, write_grace: self.settings.write_grace };
        Ok((Channel::new(socket, terms), peer, place))
    }
}

#[allow(clippy::result_large_err)] // tungstenite's signature
fn negotiate(request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
    if request.uri().path() != TUNNEL_PATH {
        return Err(refuse(StatusCode::NOT_FOUND, format!("the tunnel is at {TUNNEL_PATH}")));
    }
    let offered = request.headers().get_all(SEC_WEBSOCKET_PROTOCOL);
    let spoken = offered.iter().filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
    if !spoken.into_iter().any(|protocol| protocol.trim() == SUBPROTOCOL) {
        let reason =
            format!("the subprotocol {SUBPROTOCOL} is to be offered; is the agent of another version?");
        return Err(refuse(StatusCode::BAD_REQUEST, reason));
    }
    response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    Ok(response)
}

fn refuse(status: StatusCode, reason: String) -> ErrorResponse {
    let mut response = ErrorResponse::new(Some(reason));
    *response.status_mut() = status;
    response
}

/// A place among one node's connections.
struct Place {
    taken: Arc<Mutex<HashMap<NodeName, usize>>>,
    node: NodeName,
}

impl Place {
    fn take(taken: &Arc<Mutex<HashMap<NodeName, usize>>>, node: &NodeName, max: usize) -> Option<Self> {
        let mut counts = taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(node.clone()).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(Self { taken: Arc::clone(taken), node: node.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.node);
            }
        }
    }
}
