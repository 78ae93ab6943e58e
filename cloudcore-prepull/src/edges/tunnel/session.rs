//! One session, from `Hello` to its end, on one task.

mod end;

use std::convert::Infallible;
use std::error::Error as _;
use std::time::SystemTime;

use jiff::Timestamp;
use prepull_api::task::NodeName;
use prepull_api::text::to_plain_line;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_OPEN_TASKS, Welcome, encode_frame};
use prepull_engine::fleet::session::{SessionEvent, SessionId};
use prepull_tunnel::{Channel, ChannelEvent};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::frame::decode_from_edge;
use super::node_connections::NodeLimit;
use super::outbox::{Knowledge, Outbox, Outgoing};
use super::overload::{Overload, OverloadReason};
use super::trust::SessionTrust;
use super::{ListenerSettings, Sessions};
use crate::edges::pki::ca_set::CaFingerprint;
use crate::edges::pki::peer::PeerIdentity;
use crate::edges::pki::{CaSet, ServerIdentity};
use crate::edges::roster::Roster;
use end::SessionEnd;

/// The most characters of an edge's version that are logged: a message may have a million.
const MAX_VERSION: usize = 64;

/// The node of a session, and what the session shares with all others.
pub(super) struct SessionContext<'a> {
    pub(super) peer: PeerIdentity,
    /// The CA of the node's certificate.
    pub(super) issuer: CaFingerprint,
    pub(super) identity: &'a ServerIdentity,
    pub(super) sessions: &'a Sessions,
    pub(super) roster: &'a Roster,
    pub(super) events: &'a mpsc::Sender<SessionEvent>,
    pub(super) settings: &'a ListenerSettings,
    pub(super) overload: &'a Overload,
    /// What the node may send.
    pub(super) limit: NodeLimit,
}

/// Runs a session to its end. If the session was announced to the controller, so is its end on return.
#[allow(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, in each session")]
pub(super) fn run<S>(mut channel: Channel<S>, context: SessionContext<'_>) -> impl Future<Output = ()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    async move {
        let (end, announced) = context.serve(&mut channel).await;
        context.limit.lock().count_end(channel.take_received(), Instant::now());
        Box::pin(context.report_end(channel, end, announced)).await;
    }
}

/// Removes the session from the registry, and notes its end in the directory, when dropped: also if its task panics or is aborted.
struct Registration<'a> {
    sessions: &'a Sessions,
    node: &'a NodeName,
    id: SessionId,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        self.sessions.remove(self.node, self.id);
        self.sessions.directory().note_disconnected(self.node, self.id, Timestamp::now());
    }
}

/// Receives the first message, which must be `Hello`.
async fn receive_hello<S>(channel: &mut Channel<S>) -> Result<Box<Hello>, SessionEnd>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let ChannelEvent::Text(text) = channel.next(true).await? else { continue };
        return match decode_from_edge(&text)? {
            EdgeMessage::Hello(hello) if hello.open.len() > MAX_OPEN_TASKS => {
                Err(SessionEnd::TooManyTasks(hello.open.len()))
            }
            EdgeMessage::Hello(hello) => Ok(hello),
            EdgeMessage::Other => continue,
            _ => Err(SessionEnd::NotHello),
        };
    }
}

impl SessionContext<'_> {
    /// Serves the node until the session ends. Returns why, and the session if the controller knows it.
    async fn serve<S>(&self, channel: &mut Channel<S>) -> (SessionEnd, Option<SessionId>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // What lasts for a moment only is boxed: the memory of a session is what it needs while it's idle.
        let first = async {
            // Otherwise a node could say Hello, which has up to 64 tasks, as often as it connects.
            let owed = self.limit.lock().owed(Instant::now());
            sleep(owed).await;
            receive_hello(channel).await
        };
        let greeting = Box::pin(timeout(self.settings.hello_deadline, first));
        let hello = match greeting.await {
            Ok(Ok(hello)) => hello,
            Ok(Err(end)) => return (end, None),
            Err(_) => return (SessionEnd::NoHello(self.settings.hello_deadline), None),
        };
        let (node, key) = (&self.peer.node, self.peer.key);
        let trust = SessionTrust::new(self.issuer, self.peer.form, &hello);
        let outbox = self.sessions.register(node.clone(), trust, key, Knowledge::from_hello(&hello));
        let id = outbox.id;
        // Check again: a revocation since the handshake couldn't find this session to end it.
        if let Err(refusal) = self.roster.check_key(node, key) {
            self.roster.count_ended(&refusal);
            self.sessions.disconnect(node, id, &refusal.to_string());
        } else {
            self.sessions.directory().note_connected(&self.peer, id, &hello, Timestamp::now());
        }
        let registration = Registration { sessions: self.sessions, node, id };
        let mut announced = false;
        let Err(end) = self.exchange_messages(channel, &outbox, hello, &mut announced).await;
        drop(registration);
        (end, announced.then_some(id))
    }

    /// Welcomes the node and exchanges messages until the session ends. Sets `announced` once the controller knows
    /// the session.
    async fn exchange_messages<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        channel: &mut Channel<S>,
        outbox: &Outbox,
        hello: Box<Hello>,
        announced: &mut bool,
    ) -> Result<Infallible, SessionEnd> {
        // Before any message that is queued for the node.
        channel.start_send(self.welcome(outbox.id)?.into())?;
        let now = Instant::now();
        let pause = self.limit.lock().count_hello(hello.open.len(), channel.take_received(), now);
        self.log_beginning(outbox.id, &hello);
        let up = SessionEvent::Up { node: self.peer.node.clone(), session: outbox.id, hello };
        if let Some(up) = self.offer(up)? {
            self.wait_for_controller(up).await?;
        }
        *announced = true;

        let mut serving = self.identity.watch();
        self.tell_cas(outbox, &serving.borrow_and_update().cas)?;

        let lifetime = self.peer.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let expires = Instant::now() + lifetime;
        let mut paused_until = (!pause.is_zero()).then(|| now + pause);
        loop {
            tokio::select! {
                outgoing = outbox.next(channel.is_writable()) => match outgoing {
                    Outgoing::Message(text) => channel.start_send(text)?,
                    Outgoing::Close(close) => return Err(SessionEnd::Closed(close)),
                },
                event = channel.next(paused_until.is_none()) => match event? {
                    ChannelEvent::Writable => {}
                    event => {
                        let bytes = channel.take_received();
                        let Incoming { for_controller, is_result } = self.read_event(event, outbox)?;
                        if let Some(message) = for_controller
                            && let Some(message) = self.offer(message)?
                        {
                            self.wait_for_controller(message).await?;
                        }
                        paused_until = self.pause_after(bytes, is_result)?;
                    }
                },
                // Always: the sender is part of `identity`.
                Ok(()) = serving.changed() => self.tell_cas(outbox, &serving.borrow_and_update().cas)?,
                () = sleep_until(paused_until.map_or(expires, |until| until.min(expires))) => {
                    if Instant::now() >= expires {
                        return Err(SessionEnd::CertificateExpired);
                    }
                    paused_until = None;
                }
            }
        }
    }

    /// Sends the node the CAs unless it has them. Ends the session if the node's certificate is of none of them.
    fn tell_cas(&self, outbox: &Outbox, cas: &CaSet) -> Result<(), SessionEnd> {
        if !outbox.trust.is_accepted(cas) {
            return Err(SessionEnd::CaRetired);
        }
        if let Some(news) = outbox.trust.ca_message(cas, self.sessions.len()) {
            // A session that cannot take it is closing.
            let _ = outbox.push(encode_frame(&news)?.into());
        }
        Ok(())
    }

    fn welcome(&self, session: SessionId) -> Result<String, SessionEnd> {
        Ok(encode_frame(&CloudMessage::Welcome(Welcome {
            session: session.to_string(),
            heartbeat: self.settings.heartbeat,
            progress_interval: self.settings.progress_interval,
            state_interval: Some(self.settings.state_interval),
            tickets: self.sessions.tickets().terms(SystemTime::now()),
        }))?)
    }

    fn log_beginning(&self, session: SessionId, hello: &Hello) {
        if self.sessions.may_log(&self.peer.node) {
            let version = to_plain_line(&hello.version, MAX_VERSION);
            tracing::info!(%session, version, open = hello.open.len(), "session up");
        }
    }

    /// Takes over the node's state from a message, and returns the controller's part of it.
    fn read_event(&self, event: ChannelEvent, outbox: &Outbox) -> Result<Incoming, SessionEnd> {
        let message = match event {
            ChannelEvent::Writable | ChannelEvent::Control => None,
            ChannelEvent::Text(text) => Some(decode_from_edge(&text)?),
        };
        let is_result = matches!(message, Some(EdgeMessage::Result(_)));
        if let Some(message) = &message {
            self.sessions.directory().apply_message(&self.peer.node, outbox.id, message, Timestamp::now());
        }
        let for_controller = match message {
            Some(EdgeMessage::Hello(_)) => return Err(SessionEnd::SecondHello),
            Some(EdgeMessage::Trusts { bundle }) => {
                outbox.trust.confirm_bundle(&bundle);
                None
            }
            // The state is for people, who ask the directory.
            Some(EdgeMessage::State(_)) | None => None,
            Some(EdgeMessage::Other) => {
                if self.limit.lock().is_first_unknown() && self.sessions.may_log(&self.peer.node) {
                    tracing::warn!(
                        "messages of a kind that cloudcore-prepull doesn't know are skipped: the agent is newer; \
                         update cloudcore-prepull"
                    );
                }
                None
            }
            Some(message) => {
                let (node, session) = (self.peer.node.clone(), outbox.id);
                Some(SessionEvent::Message { node, session, message })
            }
        };
        Ok(Incoming { for_controller, is_result })
    }

    /// Until when to pause reading, if the node sends too much.
    fn pause_after(&self, bytes: u64, is_result: bool) -> Result<Option<Instant>, SessionEnd> {
        let now = Instant::now();
        let counted = self.limit.lock().count_message(bytes, is_result, now);
        let pause = counted.map_err(|_| SessionEnd::Flood)?;
        Ok((!pause.is_zero()).then(|| now + pause))
    }

    /// Hands an event to the controller, or returns it while that has no room: boxed, since each session keeps room for it.
    fn offer(&self, event: SessionEvent) -> Result<Option<Box<SessionEvent>>, SessionEnd> {
        match self.events.try_send(event) {
            Ok(()) => Ok(None),
            Err(TrySendError::Full(event)) => Ok(Some(Box::new(event))),
            // The controller is gone, and this process is about to end.
            Err(TrySendError::Closed(_)) => Err(SessionEnd::MessageNotTaken(self.settings.heartbeat)),
        }
    }

    /// We read nothing from the node while the controller takes an event. That must not last longer than one heartbeat:
    /// after two, the node gives the session up.
    async fn wait_for_controller(&self, event: Box<SessionEvent>) -> Result<(), SessionEnd> {
        let patience = self.settings.heartbeat;
        let sending = Box::pin(timeout(patience, self.events.send(*event)));
        let is_taken = matches!(sending.await, Ok(Ok(())));
        if is_taken { Ok(()) } else { Err(SessionEnd::MessageNotTaken(patience)) }
    }

    /// Reports the end of the session to the node, the controller and the log.
    async fn report_end<S>(&self, channel: Channel<S>, end: SessionEnd, announced: Option<SessionId>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // The underlying TCP or TLS error, if there is one.
        let cause = end.source().map(ToString::to_string);
        if self.sessions.may_log(&self.peer.node) {
            if end.is_fault() {
                tracing::warn!(reason = %end, cause, "session ended");
            } else {
                tracing::info!(reason = %end, cause, "session ended");
            }
        }
        let now = Instant::now();
        let goaway = match end {
            SessionEnd::MessageNotTaken(waited) => {
                self.overload.mark_controller_behind(waited, now);
                self.overload.goaway(&self.peer.node, OverloadReason::MessageNotTaken(waited), now)
            }
            _ => None,
        };
        let close = async {
            match end.close_code() {
                Some(code) => channel.close_after(goaway, code, &end.to_string()).await,
                None => drop(channel),
            }
        };
        let announce_end = async {
            if let Some(session) = announced {
                // Without a deadline: if this event were lost, the controller would take the node for online forever.
                let node = self.peer.node.clone();
                let _ = self.events.send(SessionEvent::Down { node, session }).await;
            }
        };
        tokio::join!(close, announce_end);
    }
}

/// What a message of the node amounts to.
struct Incoming {
    for_controller: Option<SessionEvent>,
    is_result: bool,
}

#[cfg(test)]
mod tests;
