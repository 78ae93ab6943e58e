//! The task that keeps a session up: it dials, sends `Hello`, carries messages, waits, and dials again.
//! [`super::route`] chooses the address and the wait.

mod end;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prepull_api::sites::PeerDoor;
use prepull_api::wire::{
    CloudMessage, EdgeMessage, Hello, SUBPROTOCOL, TrustedCas, Welcome, decode_frame, encode_frame,
};
use prepull_registry::Proxies;
use prepull_tunnel::{ByteCount, Channel, ChannelEvent, CountingStream, Terms, websocket_config};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::{HeaderValue, header::SEC_WEBSOCKET_PROTOCOL};
use tokio_util::sync::CancellationToken;

use super::TunnelEvent;
use super::route::{RoundWaits, Route};
use crate::backoff::random_fraction;
use crate::cloud::endpoint::{BadUrl, CONNECT_DEADLINE, CloudEndpoint, TUNNEL_SCHEME, Urls, printable_start};
use crate::cloud::identity::{CurrentCertificate, Identity};
use crate::metrics::AgentMetrics;
use end::{TunnelEnd, from_websocket};

/// The shortest and the longest heartbeat that a cloud may choose. A shorter one would fill the link with pings; with a
/// longer one a NAT would silently forget the connection.
const HEARTBEATS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(300));

/// Timing of the tunnel's edge side.
#[derive(Clone, Debug)]
pub struct TunnelSettings {
    /// Upper bound of the first wait after a round of failed attempts. It grows by the time already waited.
    pub first_backoff: Duration,
    /// Upper bound of all later waits.
    pub last_backoff: Duration,
    /// A session that lasted at least this long resets the waits.
    pub stable_after: Duration,
    /// The limit for the TCP connection to one address.
    pub connect_deadline: Duration,
    /// Deadline for the handshakes of TLS and websocket. It's longer than the server's, because a server that gives up
    /// first can send a reason.
    pub handshake_deadline: Duration,
    /// The limit for the agent's `Hello` and the cloud's `Welcome` together.
    pub welcome_deadline: Duration,
    /// The time that a write may take in addition to its size at 8 KiB/s.
    pub write_grace: Duration,
}

impl Default for TunnelSettings {
    fn default() -> Self {
        Self {
            first_backoff: Duration::from_secs(1),
            last_backoff: Duration::from_secs(60),
            stable_after: Duration::from_secs(60),
            connect_deadline: CONNECT_DEADLINE,
            handshake_deadline: Duration::from_secs(20),
            welcome_deadline: Duration::from_secs(20),
            write_grace: Duration::from_secs(10),
        }
    }
}

/// Keeps a session with one of `tunnel_urls` up until `shutdown`. While there is none, messages from `outgoing` are
/// dropped.
///
/// # Errors
/// Only for a URL that cannot be dialled; everything else is tried again.
pub async fn run(
    identity: Identity,
    tunnel_urls: impl Into<Urls>,
    events: mpsc::Sender<TunnelEvent>,
    outgoing: mpsc::Receiver<EdgeMessage>,
    shutdown: CancellationToken,
) -> Result<(), BadUrl> {
    Dial::new(TunnelSettings::default(), identity, events, shutdown).keep_session(tunnel_urls, outgoing).await
}

/// Dials the cloud with settings of its own; see [`run`].
pub struct Dial {
    settings: TunnelSettings,
    identity: watch::Receiver<Arc<CurrentCertificate>>,
    /// Takes over the CAs that the cloud names.
    trust: Identity,
    events: mpsc::Sender<TunnelEvent>,
    shutdown: CancellationToken,
    metrics: Option<Arc<AgentMetrics>>,
    peer_address: PeerAddress,
    /// The local address of the session.
    local: Option<SocketAddr>,
    /// The end of the certificate that the last attempt has shown.
    dialled: SystemTime,
}

/// Where the neighbours of the site reach this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum PeerAddress {
    /// Not reachable: it serves no neighbour.
    #[default]
    None,
    /// At the local address of the tunnel, at this port.
    Port(u16),
    /// At these addresses, each as HOST:PORT.
    Given(Vec<String>),
}

impl PeerAddress {
    /// The address to announce in a session with this local address. A neighbour can't reach the loopback interface.
    fn door(&self, local: Option<SocketAddr>, streams: bool) -> Option<PeerDoor> {
        let addresses = match self {
            Self::None => return None,
            Self::Given(addresses) => addresses.clone(),
            Self::Port(port) => {
                let local = local.filter(|local| !local.ip().is_loopback())?;
                vec![SocketAddr::new(local.ip(), *port).to_string()]
            }
        };
        Some(PeerDoor { addresses, streams })
    }
}

/// The outcome of an attempt.
struct DialOutcome {
    end: TunnelEnd,
    /// The duration of the session, counted from `Welcome`. `None` if there was no `Welcome`.
    lasted: Option<Duration>,
}

type TunnelChannel = Channel<TlsStream<TcpStream>>;

impl Dial {
    /// Dials with these settings.
    pub fn new(
        settings: TunnelSettings,
        trust: Identity,
        events: mpsc::Sender<TunnelEvent>,
        shutdown: CancellationToken,
    ) -> Self {
        let (metrics, peer_address, local) = (None, PeerAddress::None, None);
        let identity = trust.watch();
        let dialled = trust.not_after();
        Self { settings, identity, trust, events, shutdown, metrics, peer_address, local, dialled }
    }

    /// Keeps the address of the session in the metrics, and sends this node's address for its neighbours in `Hello`.
    #[must_use]
    pub(crate) fn with_metrics(self, metrics: Arc<AgentMetrics>, peer_address: PeerAddress) -> Self {
        Self { metrics: Some(metrics), peer_address, ..self }
    }

    /// Makes one attempt after the other until `shutdown`.
    ///
    /// # Errors
    /// As [`run`].
    pub async fn keep_session(
        mut self,
        tunnel_urls: impl Into<Urls>,
        mut outgoing: mpsc::Receiver<EdgeMessage>,
    ) -> Result<(), BadUrl> {
        let endpoints = tunnel_urls.into().endpoints_to_dial(TUNNEL_SCHEME, &Proxies::from_env())?;
        // `endpoints` is never empty.
        let addresses = NonZeroUsize::new(endpoints.len()).unwrap_or(NonZeroUsize::MIN);
        let waits = RoundWaits::new(self.settings.first_backoff, self.settings.last_backoff);
        let mut route = Route::new(addresses, waits, self.settings.stable_after);
        while !self.shutdown.is_cancelled() {
            let endpoint = &endpoints[route.index()];
            let DialOutcome { end, lasted } = self.dial_once(endpoint, &mut outgoing).await;
            if end.says_expired() {
                self.trust.note_refused(Some(self.dialled));
            }
            let Some(ended) = end.for_route(lasted.is_some()) else { break };
            let wait = route.advance(ended, lasted, random_fraction());
            let (address, next) = (endpoint.to_string(), endpoints[route.index()].to_string());
            if let Some(metrics) = &self.metrics {
                let now = Instant::now().into_std();
                metrics.status().mark_disconnected(address.clone(), end.to_string(), wait, now);
            }
            if lasted.is_some() {
                tracing::info!(address, reason = %end, reconnect_in = ?wait, next, "disconnected from the cloud");
            } else {
                tracing::warn!(address, reason = %end, retry_in = ?wait, next, "not connected to the cloud");
            }
            let shutdown = self.shutdown.clone();
            let waiting = async {
                tokio::select! {
                    () = sleep(wait) => {}
                    // An attempt that failed because of an expired certificate is worth repeating.
                    Ok(()) = self.identity.changed() => {}
                }
            };
            if shutdown.run_until_cancelled(drop_meanwhile(waiting, &mut outgoing)).await.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Dials once, and carries messages until the session ends.
    async fn dial_once(
        &mut self,
        endpoint: &CloudEndpoint,
        outgoing: &mut mpsc::Receiver<EdgeMessage>,
    ) -> DialOutcome {
        let shutdown = self.shutdown.clone();
        // Boxed, so that the memory of the handshake is freed before the session.
        let connected = drop_meanwhile(Box::pin(self.connect(endpoint)), outgoing);
        let mut channel = match shutdown.run_until_cancelled(connected).await {
            Some(Ok(channel)) => channel,
            Some(Err(end)) => return DialOutcome { end, lasted: None },
            None => return DialOutcome { end: TunnelEnd::Shutdown, lasted: None },
        };
        let welcomed = drop_meanwhile(self.greet(&mut channel), outgoing);
        let (end, lasted) = match shutdown.run_until_cancelled(welcomed).await {
            Some(Ok(welcome)) => {
                let start = Instant::now();
                tracing::info!(
                    address = %endpoint,
                    session = welcome.session,
                    "connected to the cloud"
                );
                self.trust.note_refused(None);
                self.measure_session(Some(endpoint));
                drop_meanwhile(self.send_event(TunnelEvent::Connected(welcome)), outgoing).await;
                let end =
                    match shutdown.run_until_cancelled(self.carry_messages(&mut channel, outgoing)).await {
                        Some(Ok(never)) => match never {},
                        Some(Err(end)) => end,
                        None => TunnelEnd::Shutdown,
                    };
                self.measure_session(None);
                (end, Some(start.elapsed()))
            }
            Some(Err(end)) => (end, None),
            None => (TunnelEnd::Shutdown, None),
        };
        let farewell = async {
            match end.close_code() {
                Some(code) => channel.close(code, &end.to_string()).await,
                None => drop(channel),
            }
        };
        let notified = self.send_event(TunnelEvent::Disconnected);
        // The agent may be blocked in a send before it receives the event.
        drop_meanwhile(async { tokio::join!(farewell, notified) }, outgoing).await;
        DialOutcome { end, lasted }
    }

    /// Sends an event to the agent. During shutdown it's dropped if the queue is full, because the agent may no longer
    /// receive.
    async fn send_event(&self, event: TunnelEvent) {
        match self.shutdown.run_until_cancelled(self.events.reserve()).await {
            Some(Ok(permit)) => permit.send(event),
            Some(Err(_)) | None => {
                let _ = self.events.try_send(event);
            }
        }
    }

    fn measure_session(&self, endpoint: Option<&CloudEndpoint>) {
        if let Some(metrics) = &self.metrics {
            metrics.set_session(endpoint.map(ToString::to_string));
            if let Some(endpoint) = endpoint {
                metrics.status().mark_connected(endpoint.to_string(), Instant::now().into_std());
            }
        }
    }

    async fn connect(&mut self, endpoint: &CloudEndpoint) -> Result<TunnelChannel, TunnelEnd> {
        let unreachable = |error: std::io::Error| TunnelEnd::Unreachable(error.into());
        let stream = endpoint.connect(self.settings.connect_deadline).await.map_err(unreachable)?;
        self.local = stream.local_addr().ok();
        let current = Arc::clone(&self.identity.borrow_and_update());
        self.dialled = current.not_after;
        let name = endpoint.server_name().map_err(unreachable)?;
        let handshake = async {
            let stream =
                TlsConnector::from(current.tls.clone()).connect(name, stream).await.map_err(unreachable)?;
            let (socket, _) = client_async_with_config(
                upgrade_request(endpoint)?,
                CountingStream::new(stream, ByteCount::default()),
                Some(websocket_config()),
            )
            .await
            .map_err(from_websocket)?;
            Ok::<_, TunnelEnd>(socket)
        };
        let deadline = self.settings.handshake_deadline;
        let socket =
            timeout(deadline, handshake).await.map_err(|_| TunnelEnd::HandshakeTooSlow(deadline))??;
        let terms =
            Terms { heartbeat: self.settings.welcome_deadline, write_grace: self.settings.write_grace };
        Ok(Channel::new(socket, terms))
    }

    /// Sends `Hello` and waits for `Welcome`.
    async fn greet(&self, channel: &mut TunnelChannel) -> Result<Welcome, TunnelEnd> {
        let greeting = async {
            let hello = self.request_hello().await.ok_or(TunnelEnd::NoHello)?;
            let streams = hello.peer.is_some_and(|door| door.streams);
            let peer = self.peer_address.door(self.local, streams);
            let hello = Hello { trusts: Some(self.trust.trusted_bundle_id()), peer, ..hello };
            channel.start_send(encode_frame(&EdgeMessage::Hello(Box::new(hello)))?.into())?;
            loop {
                match channel.next(true).await? {
                    ChannelEvent::Text(text) => match decode_frame(&text)? {
                        CloudMessage::Welcome(welcome) => return Ok(welcome),
                        CloudMessage::Goaway { after, reason } => {
                            return Err(TunnelEnd::Goaway { after, reason: printable_start(&reason) });
                        }
                        CloudMessage::Other => {}
                        _ => return Err(TunnelEnd::NotWelcome),
                    },
                    ChannelEvent::Control | ChannelEvent::Writable => {}
                }
            }
        };
        let deadline = self.settings.welcome_deadline;
        let welcome: Welcome = match timeout(deadline, greeting).await {
            Ok(welcome) => welcome?,
            Err(_) => return Err(TunnelEnd::NoWelcome(deadline)),
        };
        let heartbeat = welcome.heartbeat.clamp(HEARTBEATS.0, HEARTBEATS.1);
        channel.set_terms(Terms { heartbeat, write_grace: self.settings.write_grace });
        Ok(welcome)
    }

    async fn request_hello(&self) -> Option<Hello> {
        let (answer, hello) = oneshot::channel();
        self.events.send(TunnelEvent::Connecting(answer)).await.ok()?;
        hello.await.ok()
    }

    /// Carries messages both ways until the session ends. We read from the socket only while there's room for an event,
    /// but always write: the agent may be blocked in a send before it receives again.
    async fn carry_messages(
        &mut self,
        channel: &mut TunnelChannel,
        outgoing: &mut mpsc::Receiver<EdgeMessage>,
    ) -> Result<std::convert::Infallible, TunnelEnd> {
        let (mut room, mut confirmation, mut has_skipped) = (None, None, false);
        // Heartbeats of the session must not wait for a slow disk.
        let mut taking_over: JoinSet<Option<EdgeMessage>> = JoinSet::new();
        loop {
            if channel.is_writable()
                && let Some(confirmation) = confirmation.take()
            {
                channel.start_send(encode_frame(&confirmation)?.into())?;
            }
            tokio::select! {
                permit = self.events.reserve(), if room.is_none() => {
                    room = Some(permit.map_err(|_| TunnelEnd::Shutdown)?);
                }
                message = outgoing.recv(), if channel.is_writable() => {
                    let message = message.ok_or(TunnelEnd::Shutdown)?;
                    match encode_frame(&message) {
                        Ok(text) => channel.start_send(text.into())?,
                        // The agent keeps its messages within the limits, so this is a bug and must not be silent.
                        Err(error) => tracing::error!(%error, "a message for the cloud cannot be sent"),
                    }
                }
                event = channel.next(room.is_some()) => {
                    let ChannelEvent::Text(text) = event? else { continue };
                    match decode_frame(&text)? {
                        CloudMessage::Goaway { after, reason } => {
                            return Err(TunnelEnd::Goaway { after, reason: printable_start(&reason) });
                        }
                        CloudMessage::Trust(cas) => {
                            // The last to come counts.
                            taking_over.abort_all();
                            taking_over.spawn(take_over(self.trust.clone(), cas));
                        }
                        CloudMessage::Other => {
                            if !std::mem::replace(&mut has_skipped, true) {
                                tracing::warn!(
                                    "messages of a kind that this agent doesn't know are skipped: the cloud is newer; \
                                     update edgecore-prepull"
                                );
                            }
                        }
                        message => {
                            // `next` reads only if there is room.
                            if let Some(permit) = room.take() {
                                permit.send(TunnelEvent::Message(message));
                            }
                        }
                    }
                }
                Some(taken_over) = taking_over.join_next() => {
                    confirmation = taken_over.ok().flatten().or(confirmation);
                }
                changed = self.identity.changed() => {
                    changed.map_err(|_| TunnelEnd::Shutdown)?;
                    return Err(TunnelEnd::Renewed);
                }
            }
        }
    }
}

/// Trusts the CAs that the cloud names, and returns the confirmation.
async fn take_over(identity: Identity, cas: TrustedCas) -> Option<EdgeMessage> {
    match identity.take_over(cas).await {
        Ok(bundle) => {
            tracing::info!(bundle, "the CAs that the cloud named are trusted");
            Some(EdgeMessage::Trusts { bundle })
        }
        // We still trust the previous CAs, and the cloud names the new ones again in the next session.
        Err(error) => {
            tracing::error!(%error, "the CAs that the cloud named were not taken over");
            None
        }
    }
}

fn upgrade_request(endpoint: &CloudEndpoint) -> Result<tungstenite::handshake::client::Request, TunnelEnd> {
    let url = format!("wss://{}{}", endpoint.authority(), endpoint.path);
    let mut request = url.into_client_request().map_err(from_websocket)?;
    request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    Ok(request)
}

/// Runs `work` and drops messages from `outgoing` until it's done, so that the agent never waits for a session.
async fn drop_meanwhile<T>(work: impl Future<Output = T>, outgoing: &mut mpsc::Receiver<EdgeMessage>) -> T {
    let dropping = async {
        while outgoing.recv().await.is_some() {}
        std::future::pending().await
    };
    tokio::select! {
        // Biased, so that nothing is dropped once the work is done: messages after `Connected` must be sent.
        biased;
        done = work => done,
        never = dropping => never,
    }
}
