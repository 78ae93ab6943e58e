//! One session, from `Hello` to its end, on one task.

use std::time::{Duration, SystemTime};

use prepull_api::task::NodeName;
use prepull_api::wire::{
    CloudMessage, DecodeError, EdgeMessage, Hello, MAX_OPEN_TASKS, Welcome, decode, encode,
};
use prepull_engine::shared::session::{SessionEvent, SessionId};
use prepull_tunnel::{Channel, CloseCode, Ended, Event};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::listener::Settings;
use super::overload::{Overload, Why};
use super::peer::Peer;
use super::registry::{Farewell, Outbox, Outgoing, Sessions};
use super::throttle::Inbound;

/// What a session needs to know of the rest.
pub(super) struct Session<'a> {
    pub(super) peer: Peer,
    pub(super) sessions: &'a Sessions,
    pub(super) events: &'a mpsc::Sender<SessionEvent>,
    pub(super) settings: &'a Settings,
    pub(super) overload: &'a Overload,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("{0}")]
    Connection(#[from] Ended),
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("no Hello within {0:?}")]
    NoHello(Duration),
    #[error("the first message is to be Hello")]
    NotHello,
    #[error("Hello may come only once")]
    SecondHello,
    #[error("Hello lists {0} tasks; at most {MAX_OPEN_TASKS} are accepted")]
    TooManyTasks(usize),
    #[error("too many messages: the node goes on sending although it is held back")]
    Flood,
    #[error("{}", Why::NotTaken(*.0))]
    Overloaded(Duration),
    #[error("the client certificate has expired: renew it, or join again with a new token")]
    Expired,
    #[error("{}", .0.reason)]
    Told(Farewell),
}

impl End {
    fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::Connection(ended) => ended.close_code(),
            Self::Decode(DecodeError::TooLarge(_)) => Some(CloseCode::Size),
            Self::Decode(DecodeError::Malformed(_)) => Some(CloseCode::Invalid),
            Self::NoHello(_) | Self::NotHello | Self::SecondHello | Self::TooManyTasks(_) => {
                Some(CloseCode::Protocol)
            }
            Self::Flood | Self::Expired => Some(CloseCode::Policy),
            Self::Overloaded(_) => Some(CloseCode::Again),
            Self::Told(farewell) => Some(farewell.code),
        }
    }

    /// Whether someone may have to do something about it.
    fn is_fault(&self) -> bool {
        match self {
            Self::Connection(Ended::ByPeer { .. } | Ended::Cut | Ended::Io(_) | Ended::Silent(_))
            | Self::Told(_) => false,
            Self::Connection(Ended::Stalled(_) | Ended::TooLarge { .. } | Ended::Protocol(_))
            | Self::Decode(_)
            | Self::NoHello(_)
            | Self::NotHello
            | Self::SecondHello
            | Self::TooManyTasks(_)
            | Self::Flood
            | Self::Overloaded(_)
            | Self::Expired => true,
        }
    }
}

/// Carries a session to its end. Returns when the controller knows of it, if it knew of the session.
pub(super) async fn run<S>(mut channel: Channel<S>, session: Session<'_>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (end, up) = match timeout(session.settings.hello_deadline, hello(&mut channel)).await {
        Ok(Ok(hello)) => {
            let outbox = session.sessions.register(session.peer.node.clone());
            let id = outbox.id;
            let registered = Registered { sessions: session.sessions, node: &session.peer.node, id };
            let mut up = false;
            let end = match session.carry(&mut channel, &outbox, hello, &mut up).await {
                Ok(never) => match never {},
                Err(end) => end,
            };
            drop(registered);
            (end, up.then_some(id))
        }
        Ok(Err(end)) => (end, None),
        Err(_) => (End::NoHello(session.settings.hello_deadline), None),
    };
    // The error of TCP or TLS itself, where it is one.
    let cause = std::error::Error::source(&end).map(ToString::to_string);
    if end.is_fault() {
        tracing::warn!(reason = %end, cause, "session ended");
    } else {
        tracing::info!(reason = %end, cause, "session ended");
    }
    let now = Instant::now();
    let goaway = match end {
        End::Overloaded(waited) => {
            session.overload.is_behind(waited, now);
            session.overload.goaway(&session.peer.node, Why::NotTaken(waited), now)
        }
        _ => None,
    };
    let farewell = async {
        match end.close_code() {
            Some(code) => Box::pin(channel.close_after(goaway, code, &end.to_string())).await,
            None => drop(channel),
        }
    };
    let down = async {
        if let Some(session_id) = up {
            // Without a deadline: were it lost, the node would stay online in the controller's eyes.
            let node = session.peer.node.clone();
            let _ = session.events.send(SessionEvent::Down { node, session: session_id }).await;
        }
    };
    tokio::join!(farewell, down);
}

/// Takes the session out of the registry, also where its task panics or is dropped.
struct Registered<'a> {
    sessions: &'a Sessions,
    node: &'a NodeName,
    id: SessionId,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.sessions.forget(self.node, self.id);
    }
}

/// The first message, which has to be `Hello`.
async fn hello<S: AsyncRead + AsyncWrite + Unpin>(channel: &mut Channel<S>) -> Result<Hello, End> {
    loop {
        let Event::Text(text) = channel.next(true).await? else { continue };
        return match decode(&text)? {
            EdgeMessage::Hello(hello) if hello.open.len() > MAX_OPEN_TASKS => {
                Err(End::TooManyTasks(hello.open.len()))
            }
            EdgeMessage::Hello(hello) => Ok(hello),
            _ => Err(End::NotHello),
        };
    }
}

impl Session<'_> {
    async fn carry<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        channel: &mut Channel<S>,
        outbox: &Outbox,
        hello: Hello,
        up: &mut bool,
    ) -> Result<std::convert::Infallible, End> {
        let welcome = CloudMessage::Welcome(Welcome {
            session: outbox.id.to_string(),
            heartbeat: self.settings.heartbeat,
            progress_interval: self.settings.progress_interval,
        });
        // Before anything that is queued for the node.
        channel.start_send(encode(&welcome)?.into())?;
        tracing::info!(session = %outbox.id, version = hello.version, open = hello.open.len(), "session up");
        self.tell(SessionEvent::Up { node: self.peer.node.clone(), session: outbox.id, hello }).await?;
        *up = true;

        let lifetime = self.peer.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let expires = Instant::now() + lifetime;
        let mut inbound = Inbound::new(Instant::now());
        let mut held_until = None;
        loop {
            tokio::select! {
                outgoing = outbox.next(channel.is_writable()) => match outgoing {
                    Outgoing::Message(text) => channel.start_send(text)?,
                    Outgoing::End(farewell) => return Err(End::Told(farewell)),
                },
                event = channel.next(held_until.is_none()) => match event? {
                    Event::Writable => {}
                    event => held_until = self.take_in(event, outbox.id, &mut inbound).await?,
                },
                () = sleep_until(held_until.unwrap_or(expires)), if held_until.is_some() => held_until = None,
                () = sleep_until(expires) => return Err(End::Expired),
            }
        }
    }

    /// Passes on what came in. The answer is until when nothing more is to be read.
    async fn take_in(
        &self,
        event: Event,
        session: SessionId,
        inbound: &mut Inbound,
    ) -> Result<Option<Instant>, End> {
        let (message, bytes) = match event {
            Event::Writable => return Ok(None),
            Event::Control => (None, 0),
            Event::Text(text) => (Some(decode::<EdgeMessage>(&text)?), text.len()),
        };
        let is_result = matches!(message, Some(EdgeMessage::Result(_)));
        match message {
            Some(EdgeMessage::Hello(_)) => return Err(End::SecondHello),
            Some(message) => {
                self.tell(SessionEvent::Message { node: self.peer.node.clone(), session, message }).await?;
            }
            None => {}
        }
        let now = Instant::now();
        let hold = inbound.admit(bytes, is_result, now).map_err(|_| End::Flood)?;
        Ok((!hold.is_zero()).then(|| now + hold))
    }

    /// Hands an event to the controller. Meanwhile nothing is read from the node, and no longer than one
    /// heartbeat: the node's own deadline is two.
    async fn tell(&self, event: SessionEvent) -> Result<(), End> {
        let patience = self.settings.heartbeat;
        match timeout(patience, self.events.send(event)).await {
            Ok(Ok(())) => Ok(()),
            // The controller is gone: so is the process, in a moment.
            Ok(Err(_)) | Err(_) => Err(End::Overloaded(patience)),
        }
    }
}
