//! One session, from `Hello` to its end, on one task.

mod end;

use std::convert::Infallible;
use std::error::Error as _;
use std::time::SystemTime;

use jiff::Timestamp;
use prepull_api::task::NodeName;
use prepull_api::text::to_plain_line;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_OPEN_TASKS, Welcome, encode};
use prepull_engine::shared::session::{SessionEvent, SessionId};
use prepull_tunnel::{Channel, ChannelEvent};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::frame::decode_from_edge;
use super::inbound::InboundLimit;
use super::outbox::{Outbox, Outgoing};
use super::overload::{Overload, OverloadReason};
use super::trust::SessionTrust;
use super::{Sessions, Settings};
use crate::edges::pki::ca_set::Fingerprint;
use crate::edges::pki::peer::Peer;
use crate::edges::pki::{CaSet, ServerIdentity};
use crate::edges::roster::Roster;
use end::SessionEnd;

/// The most characters of an edge's version that are logged: a message may have a million.
const MAX_VERSION: usize = 64;

/// The node of a session, and what the session shares with all others.
pub(super) struct SessionContext<'a> {
    pub(super) peer: Peer,
    /// The CA of the node's certificate.
    pub(super) issuer: Fingerprint,
    pub(super) identity: &'a ServerIdentity,
    pub(super) sessions: &'a Sessions,
    pub(super) roster: &'a Roster,
    pub(super) events: &'a mpsc::Sender<SessionEvent>,
    pub(super) settings: &'a Settings,
    pub(super) overload: &'a Overload,
}

/// Runs a session to its end. If the controller was told of the session, it has been told of its end on return.
pub(super) async fn run<S>(mut channel: Channel<S>, context: SessionContext<'_>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (end, announced) = match timeout(context.settings.hello_deadline, receive_hello(&mut channel)).await {
        Ok(Ok(hello)) => {
            let trust = SessionTrust::new(context.issuer, context.peer.form, &hello);
            let outbox = context.sessions.register(context.peer.node.clone(), trust, context.peer.key);
            let id = outbox.id;
            // The node may have been revoked since the handshake, when nobody could find this session to end it.
            if let Err(refusal) = context.roster.check(&context.peer.node, context.peer.key) {
                context.roster.count_ended(&refusal);
                context.sessions.disconnect(&context.peer.node, id, &refusal.to_string());
            }
            let not_after = context.peer.not_after;
            context.sessions.directory().connect(&context.peer.node, id, &hello, not_after, Timestamp::now());
            let registration = Registration { sessions: context.sessions, node: &context.peer.node, id };
            let mut announced = false;
            let Err(end) = context.exchange_messages(&mut channel, &outbox, hello, &mut announced).await;
            drop(registration);
            (end, announced.then_some(id))
        }
        Ok(Err(end)) => (end, None),
        Err(_) => (SessionEnd::NoHello(context.settings.hello_deadline), None),
    };
    // The underlying TCP or TLS error, if there is one.
    let cause = end.source().map(ToString::to_string);
    if context.sessions.may_log(&context.peer.node) {
        if end.is_fault() {
            tracing::warn!(reason = %end, cause, "session ended");
        } else {
            tracing::info!(reason = %end, cause, "session ended");
        }
    }
    let now = Instant::now();
    let goaway = match end {
        SessionEnd::MessageNotTaken(waited) => {
            context.overload.mark_controller_behind(waited, now);
            context.overload.goaway(&context.peer.node, OverloadReason::MessageNotTaken(waited), now)
        }
        _ => None,
    };
    let close = async {
        match end.close_code() {
            Some(code) => Box::pin(channel.close_after(goaway, code, &end.to_string())).await,
            None => drop(channel),
        }
    };
    let announce_end = async {
        if let Some(session) = announced {
            // Without a deadline: if this event were lost, the controller would take the node for online forever.
            let node = context.peer.node.clone();
            let _ = context.events.send(SessionEvent::Down { node, session }).await;
        }
    };
    tokio::join!(close, announce_end);
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
        self.sessions.directory().disconnect(self.node, self.id, Timestamp::now());
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
    /// Welcomes the node and exchanges messages until the session ends. Sets `announced` once the controller was told
    /// of the session.
    async fn exchange_messages<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        channel: &mut Channel<S>,
        outbox: &Outbox,
        hello: Box<Hello>,
        announced: &mut bool,
    ) -> Result<Infallible, SessionEnd> {
        let welcome = CloudMessage::Welcome(Welcome {
            session: outbox.id.to_string(),
            heartbeat: self.settings.heartbeat,
            progress_interval: self.settings.progress_interval,
            state_interval: Some(self.settings.state_interval),
            tickets: self.sessions.tickets().terms(SystemTime::now()),
        });
        // Before any message that is queued for the node.
        channel.start_send(encode(&welcome)?.into())?;
        let version = to_plain_line(&hello.version, MAX_VERSION);
        if self.sessions.may_log(&self.peer.node) {
            tracing::info!(session = %outbox.id, version, open = hello.open.len(), "session up");
        }
        self.notify_controller(SessionEvent::Up { node: self.peer.node.clone(), session: outbox.id, hello })
            .await?;
        *announced = true;

        let mut serving = self.identity.watch();
        self.tell_cas(outbox, &serving.borrow_and_update().cas)?;

        let lifetime = self.peer.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let expires = Instant::now() + lifetime;
        let mut limit = InboundLimit::new();
        let mut paused_until = None;
        loop {
            tokio::select! {
                outgoing = outbox.next(channel.is_writable()) => match outgoing {
                    Outgoing::Message(text) => channel.start_send(text)?,
                    Outgoing::Close(close) => return Err(SessionEnd::Closed(close)),
                },
                event = channel.next(paused_until.is_none()) => match event? {
                    ChannelEvent::Writable => {}
                    event => paused_until = self.handle_incoming(event, outbox, &mut limit).await?,
                },
                () = sleep_until(paused_until.unwrap_or(expires)), if paused_until.is_some() => {
                    paused_until = None;
                }
                // Always: the sender is part of `identity`.
                Ok(()) = serving.changed() => self.tell_cas(outbox, &serving.borrow_and_update().cas)?,
                () = sleep_until(expires) => return Err(SessionEnd::CertificateExpired),
            }
        }
    }

    /// Tells the node which CAs there are, if it does not know. Ends the session where the node's own is not among them.
    fn tell_cas(&self, outbox: &Outbox, cas: &CaSet) -> Result<(), SessionEnd> {
        if !outbox.trust.is_accepted(cas) {
            return Err(SessionEnd::CaRetired);
        }
        if let Some(news) = outbox.trust.news(cas, self.sessions.len()) {
            // A session that cannot take it is closing.
            let _ = outbox.push(encode(&news)?.into());
        }
        Ok(())
    }

    /// Forwards a message to the controller. Returns until when to pause reading, if the node sends too much.
    async fn handle_incoming(
        &self,
        event: ChannelEvent,
        outbox: &Outbox,
        limit: &mut InboundLimit,
    ) -> Result<Option<Instant>, SessionEnd> {
        let (message, bytes) = match event {
            ChannelEvent::Writable => return Ok(None),
            ChannelEvent::Control => (None, 0),
            ChannelEvent::Text(text) => (Some(decode_from_edge(&text)?), text.len()),
        };
        let is_result = matches!(message, Some(EdgeMessage::Result(_)));
        if let Some(message) = &message {
            self.sessions.directory().hear(&self.peer.node, outbox.id, message);
        }
        match message {
            Some(EdgeMessage::Hello(_)) => return Err(SessionEnd::SecondHello),
            Some(EdgeMessage::Trusts { bundle }) => outbox.trust.confirm(&bundle),
            // The state is for people, who ask the directory.
            Some(EdgeMessage::State(_)) | None => {}
            Some(EdgeMessage::Other) => {
                if limit.is_first_unknown() && self.sessions.may_log(&self.peer.node) {
                    tracing::warn!(
                        "messages of a kind that cloudcore-prepull doesn't know are skipped: the agent is newer; \
                         update cloudcore-prepull"
                    );
                }
            }
            Some(message) => {
                let (node, session) = (self.peer.node.clone(), outbox.id);
                self.notify_controller(SessionEvent::Message { node, session, message }).await?;
            }
        }
        let now = Instant::now();
        let pause = limit.admit(bytes, is_result, now).map_err(|_| SessionEnd::Flood)?;
        Ok((!pause.is_zero()).then(|| now + pause))
    }

    /// Hands an event to the controller. Nothing is read from the node meanwhile, which must not last longer than one
    /// heartbeat: after two, the node gives the session up.
    async fn notify_controller(&self, event: SessionEvent) -> Result<(), SessionEnd> {
        let patience = self.settings.heartbeat;
        match timeout(patience, self.events.send(event)).await {
            Ok(Ok(())) => Ok(()),
            // A closed channel means that the controller is gone, and this process is about to end.
            Ok(Err(_)) | Err(_) => Err(SessionEnd::MessageNotTaken(patience)),
        }
    }
}

#[cfg(test)]
mod tests;
