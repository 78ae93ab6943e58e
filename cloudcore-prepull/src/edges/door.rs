//! The way in, of both ports that edges connect to. What it costs to say nothing is limited for each source, and not by
//! shutting out everybody.
//!
//! ```text
//!             ClientHello               a slot is free
//!  silent ─────────────────▶ waiting ─────────────────▶ at work ──▶ session, or answer
//!    │ place lost, deadline      │ place lost, deadline   │  ▲
//!    ▼                           ▼                        ▼  │ goes on without a slot when it speaks
//!  dropped                     dropped                  silent ──▶ dropped
//! ```
//!
//! Only a connection at work takes a slot: one that keeps us busy. A client that falls silent in the middle of
//! its handshake gives its slot back while others wait, and is one of the silent ones again. Slots go to the source that
//! has the fewest.

mod heard;
mod slots;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use prepull_program::places::{ConnectionPlaces, ConnectionSource, Loses};
use rustls::server::Acceptor;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

use crate::edges::EdgeMetrics;
pub(super) use heard::{Attention, HeardStream};
use slots::{Slot, Slots};

/// A connection after its ClientHello has arrived.
pub(super) type Arrived = StartHandshake<HeardStream<TcpStream>>;
/// A connection after its TLS handshake.
pub(super) type Secured = TlsStream<HeardStream<TcpStream>>;

/// The interval between two looks whether a silent client keeps others waiting.
const CONTENTION_CHECK: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// The most connections with a silent client: before its ClientHello, or in the middle of its handshake.
    pub(super) silent: usize,
    /// The most connections that wait for a slot.
    pub(super) waiting: usize,
    /// The most connections at work.
    pub(super) slots: usize,
    /// How long the ClientHello may take.
    pub(super) hello_deadline: Duration,
    /// How long a connection may wait for a slot.
    pub(super) waiting_deadline: Duration,
    /// How long a client may be silent and keep its slot, while others wait.
    pub(super) patience: Duration,
    /// How long a client may keep its slot, while others wait, even if it is not silent.
    pub(super) turn: Duration,
    /// How long the work may take in all.
    pub(super) deadline: Duration,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Turned {
    #[error("no ClientHello within {0:?}")]
    NoHello(Duration),
    #[error("it was silent, and its place was needed: its address had the most silent connections")]
    PlaceLost,
    #[error("too many others waited for their handshake, and its address had the most of them")]
    QueueFull,
    #[error("the handshake could not begin within {0:?}: too many others were in flight")]
    QueueDeadline(Duration),
    #[error("the handshake took longer than {0:?}")]
    Deadline(Duration),
    #[error("TLS handshake failed")]
    Tls(#[source] io::Error),
}

impl Turned {
    fn label(&self) -> &'static str {
        match self {
            Self::NoHello(_) => "no_hello",
            Self::PlaceLost => "place_lost",
            Self::QueueFull => "queue_full",
            Self::QueueDeadline(_) => "queue_deadline",
            Self::Deadline(_) => "deadline",
            Self::Tls(_) => "tls",
        }
    }
}

#[derive(Debug)]
pub(super) struct Door {
    limits: Limits,
    silent: ConnectionPlaces,
    waiting: ConnectionPlaces,
    slots: Slots,
    port: &'static str,
    metrics: EdgeMetrics,
}

impl Door {
    pub(super) fn new(port: &'static str, limits: Limits, metrics: EdgeMetrics) -> Self {
        Self {
            silent: ConnectionPlaces::new(limits.silent, Loses::Oldest),
            waiting: ConnectionPlaces::new(limits.waiting, Loses::Newest),
            slots: Slots::new(limits.slots),
            limits,
            port,
            metrics,
        }
    }

    /// Waits for the ClientHello, and then for a slot. Then it begins with `work`, and returns its outcome, together with
    /// what is left of the slot.
    pub(super) async fn admit_connection<T, E: From<Turned>, W: Future<Output = Result<T, E>>>(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        work: impl FnOnce(Arrived, Attention) -> W,
    ) -> Result<(T, Option<Slot>), E> {
        let source = ConnectionSource::from(address.ip());
        let passing = async {
            // Each phase has its own memory, for as long as it lasts: of a silent client's there may be thousands.
            let arrived = Box::pin(self.wait_for_hello(stream, source)).await?;
            let slot = self.wait_for_slot(source).await?;
            let attention = arrived.io.observer().clone();
            Box::pin(self.limit_work(work(arrived, attention.clone()), slot, &attention, source)).await
        };
        let (outcome, slot) =
            passing.await.inspect_err(|turned| self.metrics.count_turned_away(self.port, turned.label()))?;
        outcome.map(|done| (done, slot))
    }

    async fn wait_for_hello(&self, stream: TcpStream, source: ConnectionSource) -> Result<Arrived, Turned> {
        let mut place = self.silent.take(source);
        // Every message is flushed when it is complete: Nagle's algorithm would only delay it.
        let _ = stream.set_nodelay(true);
        let arriving =
            LazyConfigAcceptor::new(Acceptor::default(), HeardStream::new(stream, Attention::from_now()));
        let deadline = self.limits.hello_deadline;
        tokio::select! {
            // First, so that a ClientHello that is there is worth more than a place that is gone.
            biased;
            arrived = timeout(deadline, arriving) => match arrived {
                Ok(arrived) => arrived.map_err(Turned::Tls),
                Err(_) => Err(Turned::NoHello(deadline)),
            },
            () = place.wait_for_loss() => Err(Turned::PlaceLost),
        }
    }

    async fn wait_for_slot(&self, source: ConnectionSource) -> Result<Slot, Turned> {
        if let Some(slot) = self.slots.try_take(source) {
            return Ok(slot);
        }
        let mut place = self.waiting.take(source);
        let _counted = self.metrics.count_waiting();
        let deadline = self.limits.waiting_deadline;
        tokio::select! {
            biased;
            slot = timeout(deadline, self.slots.take(source)) => {
                slot.map_err(|_| Turned::QueueDeadline(deadline))
            }
            () = place.wait_for_loss() => Err(Turned::QueueFull),
        }
    }

    /// Ends the work at its deadline. While others wait for its slot, the slot is taken from a client that is silent, or
    /// has had it for long; its work goes on, as long as the client has a place among the silent ones.
    async fn limit_work<T>(
        &self,
        work: impl Future<Output = T>,
        slot: Slot,
        attention: &Attention,
        source: ConnectionSource,
    ) -> Result<(T, Option<Slot>), Turned> {
        // While it waited for the slot, it was not its turn to speak.
        attention.note_heard();
        let begun = Instant::now();
        let deadline = begun + self.limits.deadline;
        let mut work = std::pin::pin!(work);
        let mut slot = Some(slot);
        while slot.is_some() {
            let now = Instant::now();
            if now >= deadline {
                return Err(Turned::Deadline(self.limits.deadline));
            }
            let look = now + CONTENTION_CHECK.min(self.limits.patience);
            if let Ok(done) = timeout_at(look.min(deadline), &mut work).await {
                return Ok((done, slot));
            }
            let now = Instant::now();
            let is_over = now - begun >= self.limits.turn && !attention.is_busy();
            let is_slow = is_over || attention.silent_for(now) >= self.limits.patience;
            if is_slow && self.slots.are_awaited() {
                slot = None;
            }
        }
        let mut place = self.silent.take(source);
        tokio::select! {
            biased;
            done = work => Ok((done, None)),
            () = place.wait_for_loss() => Err(Turned::PlaceLost),
            () = sleep_until(deadline) => Err(Turned::Deadline(self.limits.deadline)),
        }
    }
}
