//! Keeps a session up: dials, says `Hello`, carries messages, waits, dials again. Where and when is decided in
//! [`super::route`].

mod end;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, SUBPROTOCOL, Welcome, decode, encode};
use prepull_tunnel::{Channel, Event, Metered, Terms, websocket_config};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::{HeaderValue, header::SEC_WEBSOCKET_PROTOCOL};
use tokio_util::sync::CancellationToken;

use super::TunnelEvent;
use super::backoff::{Backoff, random};
use super::route::Route;
use crate::cloud::endpoint::{BadUrl, CONNECT_DEADLINE, Endpoint, TUNNEL_SCHEME, Urls, printable};
use crate::cloud::identity::{Current, Identity};
use crate::metrics::Metrics;
use end::{End, of_websocket};

/// What a cloud may choose as heartbeat. Below, the fleet would be busy with pings; above, a NAT forgets the
/// connection and nobody notices.
const HEARTBEATS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(300));

/// Timing of the tunnel's edge side, and who is told of it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The first wait's ceiling.
    pub first_backoff: Duration,
    /// The last wait's ceiling.
    pub last_backoff: Duration,
    /// A session that lasted for so long was a good one: the waits start again from the first.
    pub stable_after: Duration,
    /// For the TCP connection to one address.
    pub connect_deadline: Duration,
    /// For TLS and the websocket's handshake. Longer than the server's: it gives up first, and says why.
    pub handshake_deadline: Duration,
    /// For the agent's `Hello` and for `Welcome`.
    pub welcome_deadline: Duration,
    /// What a write may take beyond its size at 8 KiB/s.
    pub write_grace: Duration,
    /// Told which address the session is with.
    pub metrics: Option<Arc<Metrics>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            first_backoff: Duration::from_secs(1),
            last_backoff: Duration::from_secs(60),
            stable_after: Duration::from_secs(60),
            connect_deadline: CONNECT_DEADLINE,
            handshake_deadline: Duration::from_secs(20),
            welcome_deadline: Duration::from_secs(20),
            write_grace: Duration::from_secs(10),
            metrics: None,
        }
    }
}

/// Keeps a session with one of `tunnel_urls` up until `shutdown`. While there is none, what comes from `outgoing`
/// is dropped.
///
/// # Errors
/// Only for a URL that is none: everything else is tried again.
pub async fn run(
    identity: Identity,
    tunnel_urls: impl Into<Urls>,
    events: mpsc::Sender<TunnelEvent>,
    outgoing: mpsc::Receiver<EdgeMessage>,
    shutdown: CancellationToken,
) -> Result<(), BadUrl> {
    run_with(Settings::default(), identity, tunnel_urls, events, outgoing, shutdown).await
}

/// [`run`] with other timing.
pub async fn run_with(
    settings: Settings,
    identity: Identity,
    tunnel_urls: impl Into<Urls>,
    events: mpsc::Sender<TunnelEvent>,
    mut outgoing: mpsc::Receiver<EdgeMessage>,
    shutdown: CancellationToken,
) -> Result<(), BadUrl> {
    let endpoints = tunnel_urls.into().endpoints(TUNNEL_SCHEME)?;
    // Never empty, as `endpoints` promises.
    let addresses = NonZeroUsize::new(endpoints.len()).unwrap_or(NonZeroUsize::MIN);
    let backoff = Backoff::new(settings.first_backoff, settings.last_backoff);
    let mut route = Route::new(addresses, backoff, settings.stable_after);
    let mut dial = Dial { settings, identity: identity.watch(), events, shutdown };
    while !dial.shutdown.is_cancelled() {
        let endpoint = &endpoints[route.at()];
        let Attempt { end, lasted } = dial.attempt(endpoint, &mut outgoing).await;
        let Some(ended) = end.route(lasted.is_some()) else { break };
        let wait = route.after(ended, lasted, random());
        let (address, next) = (endpoint.authority(), endpoints[route.at()].authority());
        if lasted.is_some() {
            tracing::info!(address, reason = %end, reconnect_in = ?wait, next, "disconnected from the cloud");
        } else {
            tracing::warn!(address, reason = %end, retry_in = ?wait, next, "not connected to the cloud");
        }
        let shutdown = dial.shutdown.clone();
        let waited = shutdown.run_until_cancelled(drop_meanwhile(sleep(wait), &mut outgoing));
        if waited.await.is_none() {
            break;
        }
    }
    Ok(())
}

struct Dial {
    settings: Settings,
    identity: watch::Receiver<Arc<Current>>,
    events: mpsc::Sender<TunnelEvent>,
    shutdown: CancellationToken,
}

/// How a try went.
struct Attempt {
    end: End,
    /// From `Welcome` on; absent where it did not come to that.
    lasted: Option<Duration>,
}

type Tunnel = Channel<TlsStream<TcpStream>>;

impl Dial {
    /// One session, from the dial to its end.
    async fn attempt(&mut self, endpoint: &Endpoint, outgoing: &mut mpsc::Receiver<EdgeMessage>) -> Attempt {
        let shutdown = self.shutdown.clone();
        // Boxed, so that the handshake's memory does not stay with the session.
        let connected = drop_meanwhile(Box::pin(self.connect(endpoint)), outgoing);
        let mut channel = match shutdown.run_until_cancelled(connected).await {
            Some(Ok(channel)) => channel,
            Some(Err(end)) => return Attempt { end, lasted: None },
            None => return Attempt { end: End::Shutdown, lasted: None },
        };
        let welcomed = drop_meanwhile(self.greet(&mut channel), outgoing);
        let (end, lasted) = match shutdown.run_until_cancelled(welcomed).await {
            Some(Ok(welcome)) => {
                let start = Instant::now();
                tracing::info!(
                    address = endpoint.authority(),
                    session = welcome.session,
                    "connected to the cloud"
                );
                self.uses(Some(endpoint));
                drop_meanwhile(self.tell(TunnelEvent::Connected(welcome)), outgoing).await;
                let end = match shutdown.run_until_cancelled(self.carry(&mut channel, outgoing)).await {
                    Some(Ok(never)) => match never {},
                    Some(Err(end)) => end,
                    None => End::Shutdown,
                };
                self.uses(None);
                (end, Some(start.elapsed()))
            }
            Some(Err(end)) => (end, None),
            None => (End::Shutdown, None),
        };
        let farewell = async {
            match end.close_code() {
                Some(code) => channel.close(code, &end.to_string()).await,
                None => drop(channel),
            }
        };
        let told = self.tell(TunnelEvent::Disconnected);
        // The agent may be waiting to say something before it listens.
        drop_meanwhile(async { tokio::join!(farewell, told) }, outgoing).await;
        Attempt { end, lasted }
    }

    /// Tells the agent; once it is stopping, only where it has room: it may not listen any more.
    async fn tell(&self, event: TunnelEvent) {
        match self.shutdown.run_until_cancelled(self.events.reserve()).await {
            Some(Ok(permit)) => permit.send(event),
            Some(Err(_)) | None => {
                let _ = self.events.try_send(event);
            }
        }
    }

    fn uses(&self, endpoint: Option<&Endpoint>) {
        if let Some(metrics) = &self.settings.metrics {
            metrics.session(endpoint.map(Endpoint::authority));
        }
    }

    async fn connect(&mut self, endpoint: &Endpoint) -> Result<Tunnel, End> {
        let unreachable = |error: std::io::Error| End::Unreachable(error.into());
        let stream = endpoint.connect(self.settings.connect_deadline).await.map_err(unreachable)?;
        let tls = self.identity.borrow_and_update().tls.clone();
        let name = endpoint.server_name().map_err(unreachable)?;
        let handshake = async {
            let stream = TlsConnector::from(tls).connect(name, stream).await.map_err(unreachable)?;
            let (socket, _) =
                client_async_with_config(request(endpoint)?, Metered::new(stream), Some(websocket_config()))
                    .await
                    .map_err(of_websocket)?;
            Ok::<_, End>(socket)
        };
        let deadline = self.settings.handshake_deadline;
        let socket = timeout(deadline, handshake).await.map_err(|_| End::HandshakeTooSlow(deadline))??;
        let terms =
            Terms { heartbeat: self.settings.welcome_deadline, write_grace: self.settings.write_grace };
        Ok(Channel::new(socket, terms))
    }

    /// `Hello`, `Welcome`.
    async fn greet(&self, channel: &mut Tunnel) -> Result<Welcome, End> {
        let greeting = async {
            let hello = self.hello().await.ok_or(End::NoHello)?;
            channel.start_send(encode(&EdgeMessage::Hello(hello))?.into())?;
            loop {
                match channel.next(true).await? {
                    Event::Text(text) => {
                        return match decode(&text)? {
                            CloudMessage::Welcome(welcome) => Ok(welcome),
                            CloudMessage::Goaway { after, reason } => {
                                Err(End::Goaway { after, reason: printable(&reason) })
                            }
                            _ => Err(End::NotWelcome),
                        };
                    }
                    Event::Control | Event::Writable => {}
                }
            }
        };
        let deadline = self.settings.welcome_deadline;
        let welcome: Welcome = match timeout(deadline, greeting).await {
            Ok(welcome) => welcome?,
            Err(_) => return Err(End::NoWelcome(deadline)),
        };
        let heartbeat = welcome.heartbeat.clamp(HEARTBEATS.0, HEARTBEATS.1);
        channel.set_terms(Terms { heartbeat, write_grace: self.settings.write_grace });
        Ok(welcome)
    }

    async fn hello(&self) -> Option<Hello> {
        let (answer, hello) = oneshot::channel();
        self.events.send(TunnelEvent::Connecting(answer)).await.ok()?;
        hello.await.ok()
    }

    /// Messages both ways. The socket is read only while there is room for an event, and written all the
    /// same: the agent may have to say something before it listens again.
    async fn carry(
        &mut self,
        channel: &mut Tunnel,
        outgoing: &mut mpsc::Receiver<EdgeMessage>,
    ) -> Result<std::convert::Infallible, End> {
        let mut room = None;
        loop {
            tokio::select! {
                permit = self.events.reserve(), if room.is_none() => {
                    room = Some(permit.map_err(|_| End::Shutdown)?);
                }
                message = outgoing.recv(), if channel.is_writable() => {
                    let message = message.ok_or(End::Shutdown)?;
                    match encode(&message) {
                        Ok(text) => channel.start_send(text.into())?,
                        // The agent bounds what it says, so this is a bug that must not be silent.
                        Err(error) => tracing::error!(%error, "a message for the cloud cannot be sent"),
                    }
                }
                event = channel.next(room.is_some()) => {
                    let Event::Text(text) = event? else { continue };
                    match decode(&text)? {
                        CloudMessage::Goaway { after, reason } => {
                            return Err(End::Goaway { after, reason: printable(&reason) });
                        }
                        message => {
                            // Read only with room, as `next` was told.
                            if let Some(permit) = room.take() {
                                permit.send(TunnelEvent::Message(message));
                            }
                        }
                    }
                }
                changed = self.identity.changed() => {
                    changed.map_err(|_| End::Shutdown)?;
                    return Err(End::Renewed);
                }
            }
        }
    }
}

fn request(endpoint: &Endpoint) -> Result<tungstenite::handshake::client::Request, End> {
    let url = format!("wss://{}{}", endpoint.authority(), endpoint.path);
    let mut request = url.into_client_request().map_err(of_websocket)?;
    request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    Ok(request)
}

/// Does `work`; what comes from `outgoing` meanwhile is dropped, so that the agent never waits for a session.
async fn drop_meanwhile<T>(work: impl Future<Output = T>, outgoing: &mut mpsc::Receiver<EdgeMessage>) -> T {
    let dropping = async {
        while outgoing.recv().await.is_some() {}
        std::future::pending().await
    };
    tokio::select! {
        // Once the work is done nothing more is dropped: after `Connected` a message counts.
        biased;
        done = work => done,
        never = dropping => never,
    }
}
