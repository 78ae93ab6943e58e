//! The limits between an accepted connection and its session.
//!
//! ```text
//! queue slot ─▶ handshake slot ─▶ session slot ─▶ session
//!                                      └─ none left, or the controller is behind ─▶ Goaway
//! ```

use std::sync::Arc;
use std::time::Duration;

use prepull_api::task::NodeName;
use prepull_engine::shared::session::SessionEvent;
use prepull_tunnel::{Channel, CloseCode};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tokio_rustls::server::TlsStream;

use super::handshake::{Connected, Handshaker};
use super::overload::{Overload, OverloadReason};
use super::refusal::{Refusal, RefusalLog};
use super::session::{self, SessionContext};
use super::{Sessions, Settings, TunnelMetrics};

/// The interval between two looks whether a slow handshake keeps others waiting.
const CONTENTION_CHECK: Duration = Duration::from_millis(100);

/// What all connections share, and what limits them.
pub(super) struct Admission {
    handshaker: Handshaker,
    sessions: Sessions,
    events: mpsc::Sender<SessionEvent>,
    settings: Settings,
    queue_slots: Arc<Semaphore>,
    handshake_slots: Semaphore,
    session_slots: Arc<Semaphore>,
    refusal_log: RefusalLog,
    overload: Overload,
    metrics: TunnelMetrics,
}

impl Admission {
    pub(super) fn new(
        tls: Arc<rustls::ServerConfig>,
        sessions: Sessions,
        events: mpsc::Sender<SessionEvent>,
        settings: Settings,
        metrics: TunnelMetrics,
    ) -> Self {
        let now = Instant::now();
        Self {
            handshaker: Handshaker::new(tls, &settings),
            sessions,
            events,
            queue_slots: Arc::new(Semaphore::new(settings.max_waiting)),
            handshake_slots: Semaphore::new(settings.max_handshakes),
            session_slots: Arc::new(Semaphore::new(settings.max_connections)),
            refusal_log: RefusalLog::new(),
            overload: Overload::new(metrics.clone(), now),
            metrics,
            settings,
        }
    }

    /// Waits until a further connection may be accepted; `None` never happens, as the semaphore is never closed.
    ///
    /// Connections are accepted at once and wait for their handshake here: the kernel drops those that overflow its
    /// backlog, and a dropped edge retries only after 1, 2 and 4 s. Beyond the limit they wait in the backlog,
    /// where they cost nothing.
    pub(super) async fn queue_slot(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.queue_slots).acquire_owned().await.ok()
    }

    /// Serves one connection from its handshake to the end of its session.
    pub(super) async fn serve_connection(&self, stream: TcpStream, queue_slot: OwnedSemaphorePermit) {
        let queue_deadline = self.settings.queue_deadline;
        let queued = self.metrics.count_queued();
        // The inner error cannot happen: this semaphore is never closed either.
        let Ok(Ok(handshake_slot)) = timeout(queue_deadline, self.handshake_slots.acquire()).await else {
            return self.log_refusal(&Refusal::QueueDeadline(queue_deadline));
        };
        drop((queue_slot, queued));
        let session_slot = Arc::clone(&self.session_slots).try_acquire_owned().ok();
        // Boxed, so that the session does not hold on to the handshake's memory.
        let refusal = match Box::pin(self.limit_handshake(self.handshaker.accept(stream))).await {
            Ok(Connected { channel, peer, open }) => {
                tracing::Span::current().record("node", tracing::field::display(&peer.node));
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
                            sessions: &self.sessions,
                            events: &self.events,
                            settings: &self.settings,
                            overload: &self.overload,
                        };
                        session::run(channel, context).await;
                        drop((open, session_slot));
                        return;
                    }
                    // The handshake slot is kept meanwhile: it also limits how many are sent away at a time.
                    Some(reason) => Box::pin(self.send_away(channel, &peer.node, reason)).await,
                }
            }
            Err(refusal) => refusal,
        };
        drop(handshake_slot);
        self.log_refusal(&refusal);
    }

    /// Ends a handshake at its deadline, or at an earlier one while others wait for its slot.
    async fn limit_handshake<T>(
        &self,
        handshake: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<T, Refusal> {
        let Settings { handshake_deadline: deadline, contended_handshake_deadline, .. } = self.settings;
        let begun = Instant::now();
        let mut handshake = std::pin::pin!(handshake);
        let mut wait = contended_handshake_deadline.min(deadline);
        loop {
            if let Ok(connected) = timeout(wait, &mut handshake).await {
                return connected;
            }
            let elapsed = begun.elapsed();
            if elapsed >= deadline {
                return Err(Refusal::HandshakeDeadline(deadline));
            }
            if self.handshake_slots.available_permits() == 0 {
                return Err(Refusal::ContendedHandshake(elapsed));
            }
            wait = CONTENTION_CHECK.min(deadline.saturating_sub(elapsed));
        }
    }

    /// Tells an edge when to come back, and closes the connection.
    async fn send_away(
        &self,
        channel: Channel<TlsStream<TcpStream>>,
        node: &NodeName,
        reason: OverloadReason,
    ) -> Refusal {
        let goaway = self.overload.goaway(node, reason, Instant::now());
        channel.close_after(goaway, CloseCode::Again, &reason.to_string()).await;
        Refusal::SentAway(reason)
    }

    fn log_refusal(&self, refusal: &Refusal) {
        self.refusal_log.log(refusal, Instant::now());
    }
}
