//! From an accepted connection to its session.
//!
//! ```text
//! door (ClientHello, handshake slot) ─▶ handshake ─▶ session slot ─▶ session
//!                                                         └─ none left, or the controller is behind ─▶ Goaway
//! ```

use std::net::SocketAddr;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use prepull_api::task::NodeName;
use prepull_engine::fleet::session::SessionEvent;
use prepull_tunnel::{Channel, CloseCode};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::handshake::{Connected, Handshaker};
use super::overload::{Overload, OverloadReason};
use super::refusal::ConnectionRefusal;
use super::session::{self, SessionContext};
use super::{ListenerSettings, Sessions};
use crate::edges::PortTerms;
use crate::edges::door::{Door, Secured};
use crate::edges::log_rate::LogRate;
use crate::edges::pki::ServerIdentity;
use crate::edges::roster::Roster;

/// What all connections share, and what limits them.
pub(super) struct Admission {
    door: Door,
    identity: Arc<ServerIdentity>,
    handshaker: Handshaker,
    sessions: Sessions,
    roster: Roster,
    events: mpsc::Sender<SessionEvent>,
    settings: ListenerSettings,
    session_slots: Arc<Semaphore>,
    refusal_log: LogRate,
    overload: Overload,
}

impl Admission {
    pub(super) fn new(
        terms: PortTerms,
        sessions: Sessions,
        events: mpsc::Sender<SessionEvent>,
        settings: ListenerSettings,
    ) -> Self {
        let PortTerms { identity, roster, metrics, shutdown: _ } = terms;
        Self {
            door: Door::new("tunnel", settings.door_limits(), metrics.clone()),
            handshaker: Handshaker::new(Arc::clone(&identity), roster.clone(), &settings),
            identity,
            sessions,
            roster,
            events,
            session_slots: Arc::new(Semaphore::new(settings.max_connections)),
            refusal_log: LogRate::default(),
            overload: Overload::new(metrics, Instant::now()),
            settings,
        }
    }

    /// Serves one connection from its ClientHello to the end of its session.
    ///
    /// Connections are accepted at once and wait here: the kernel drops those that overflow its backlog, and a dropped
    /// edge retries only after 1, 2 and 4 s.
    pub(super) async fn serve_connection(&self, stream: TcpStream, address: SocketAddr) {
        // Boxed, and so freed when it's over: the task of a session would keep its room.
        if let Some(session) = Box::pin(self.open_session(stream, address)).await {
            session.await;
        }
    }

    /// The session of a connection that gets one.
    async fn open_session(&self, stream: TcpStream, address: SocketAddr) -> Option<BoxFuture<'_, ()>> {
        let passed =
            self.door.admit_connection(stream, address, |arrived, _| self.handshaker.accept(arrived)).await;
        let refusal = match passed {
            Ok((Connected { channel, peer, issuer, open }, handshake_slot)) => {
                tracing::Span::current().record("node", tracing::field::display(&peer.node));
                let session_slot = Arc::clone(&self.session_slots).try_acquire_owned().ok();
                let overload = if session_slot.is_none() {
                    Some(OverloadReason::SessionsFull)
                } else if self.overload.is_controller_behind(Instant::now()) {
                    Some(OverloadReason::ControllerBehind)
                } else {
                    None
                };
                match overload {
                    None => {
                        drop(handshake_slot);
                        let context = SessionContext {
                            peer,
                            issuer,
                            identity: &self.identity,
                            sessions: &self.sessions,
                            roster: &self.roster,
                            events: &self.events,
                            settings: &self.settings,
                            overload: &self.overload,
                            limit: open.limit(),
                        };
                        let session = session::run(channel, context);
                        return Some(Box::pin(session.map(move |()| drop((open, session_slot)))));
                    }
                    // Keep the handshake slot: it also limits how many are sent away at a time.
                    Some(reason) => self.send_away(channel, &peer.node, reason).await,
                }
            }
            Err(refusal) => refusal,
        };
        if self.refusal_log.allows(Instant::now()) {
            refusal.log();
        }
        None
    }

    /// Sends an edge the time to come back, and closes the connection.
    async fn send_away(
        &self,
        channel: Channel<Secured>,
        node: &NodeName,
        reason: OverloadReason,
    ) -> ConnectionRefusal {
        let goaway = self.overload.goaway(node, reason, Instant::now());
        channel.close_after(goaway, CloseCode::Again, &reason.to_string()).await;
        ConnectionRefusal::SentAway(reason)
    }
}
