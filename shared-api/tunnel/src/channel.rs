//! One websocket with heartbeats and deadlines.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Sink, Stream};
use prepull_api::text::is_display_control;
use prepull_api::wire::MAX_MESSAGE;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::{CapacityError, ProtocolError};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Bytes, Error, Message, Utf8Bytes};

use crate::{CloseCode, CountingStream, truncate_close_reason};

/// The bytes per second of the slowest link that is served. A write may take the grace plus its size at this rate.
const SLOWEST_LINK: u64 = 8 * 1024;
/// Most bytes between the ends of two messages: one of the largest size, its frames, and the next one that's read ahead. A message of
/// endless empty fragments has no size.
const MOST_BEFORE_END: u64 = 2 * MAX_MESSAGE as u64;
/// How long a close may take. Until then incoming data is read and discarded: otherwise the kernel would answer it with
/// a reset, and the peer would lose the close frame with the reason.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// The timing of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The interval of our pings. The session ends after two intervals without a byte from the peer.
    pub heartbeat: Duration,
    /// How long a write may take in addition to its size at 8 KiB/s.
    pub write_grace: Duration,
}

/// What [`Channel::next`] returns.
#[derive(Debug)]
pub enum ChannelEvent {
    /// A message arrived.
    Text(Utf8Bytes),
    /// A ping or a pong arrived.
    Control,
    /// The pending write is done: [`Channel::start_send`] may be called again.
    Writable,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelEnd {
    /// The peer closed the session.
    #[error("closed by the peer: {reason} ({code})")]
    ByPeer {
        /// The close code of RFC 6455.
        code: u16,
        /// The peer's reason.
        reason: String,
    },
    /// The connection ended without a close frame.
    #[error("the connection was cut")]
    Cut,
    /// Nothing arrived for two heartbeats.
    #[error("nothing was received for {0:?}")]
    Silent(Duration),
    /// A write was not done in time.
    #[error("the peer reads too slowly: a write was not done after {0:?}")]
    Stalled(Duration),
    /// A message or frame exceeded the size limit.
    #[error("message of {size} bytes; at most {limit} are accepted")]
    TooLarge {
        /// The size of the message, as far as it is known.
        size: usize,
        /// The largest accepted size.
        limit: usize,
    },
    /// The peer violated the websocket protocol or sent a binary frame.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// TCP or TLS failed.
    #[error("connection failed")]
    Io(#[source] std::io::Error),
}

impl ChannelEnd {
    /// The close code for the peer; `None` if it can no longer be sent.
    pub fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::ByPeer { .. } | Self::Cut | Self::Io(_) => None,
            Self::Silent(_) | Self::Stalled(_) => Some(CloseCode::Policy),
            Self::TooLarge { .. } => Some(CloseCode::Size),
            Self::Protocol(_) => Some(CloseCode::Protocol),
        }
    }
}

impl From<Error> for ChannelEnd {
    fn from(error: Error) -> Self {
        match error {
            Error::ConnectionClosed
            | Error::AlreadyClosed
            | Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) => Self::Cut,
            Error::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Self::Cut,
            Error::Io(error) => Self::Io(error),
            Error::Capacity(CapacityError::MessageTooLong { size, max_size }) => {
                Self::TooLarge { size, limit: max_size }
            }
            other => Self::Protocol(other.to_string()),
        }
    }
}

/// One websocket. Cancel-safe: the future of [`Self::next`] may be dropped and [`Self::next`] called again.
#[derive(Debug)]
pub struct Channel<S> {
    // Boxed: with TLS it takes several KiB, and every future that a channel moves through would reserve space for it.
    socket: Box<WebSocketStream<CountingStream<S>>>,
    terms: Terms,
    last_received: Instant,
    next_ping: Instant,
    pending_write: Option<PendingWrite>,
    /// Bytes that had come by the end of the last message, and by the last [`Self::take_received`].
    bytes_at_end: u64,
    bytes_taken: u64,
}

/// A write in progress, and its deadline.
#[derive(Clone, Copy, Debug)]
struct PendingWrite {
    timeout: Duration,
    deadline: Instant,
}

/// The outcome of polling the socket.
enum SocketOutcome {
    Written(Result<(), Error>),
    Read(Option<Result<Message, Error>>),
    /// More than [`MOST_BEFORE_END`] bytes have come since the last message.
    Endless,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Channel<S> {
    /// Wraps a websocket after its handshake.
    pub fn new(socket: WebSocketStream<CountingStream<S>>, terms: Terms) -> Self {
        let now = Instant::now();
        Self {
            socket: Box::new(socket),
            terms,
            last_received: now,
            next_ping: now + terms.heartbeat,
            pending_write: None,
            bytes_at_end: 0,
            bytes_taken: 0,
        }
    }

    /// Changes the timing from now on: the edge learns it from `Welcome`.
    pub fn set_terms(&mut self, terms: Terms) {
        let now = Instant::now();
        self.terms = terms;
        self.last_received = now;
        self.next_ping = now + terms.heartbeat;
    }

    /// The bytes that have come since the last call, without those of TLS. Messages have fewer: frames without content take some
    /// as well.
    pub fn take_received(&mut self) -> u64 {
        let received = self.socket.get_ref().observer().0;
        received - std::mem::replace(&mut self.bytes_taken, received)
    }

    /// Whether [`Self::start_send`] may be called now. If not, wait for [`ChannelEvent::Writable`].
    pub fn is_writable(&self) -> bool {
        self.pending_write.is_none()
    }

    /// Starts to write a message. [`Self::next`] completes the write while it keeps reading, so that two peers that
    /// write at once do not block each other. Only call this if [`Self::is_writable`].
    pub fn start_send(&mut self, text: Utf8Bytes) -> Result<(), ChannelEnd> {
        self.start_write(Message::Text(text))
    }

    fn start_write(&mut self, message: Message) -> Result<(), ChannelEnd> {
        let at_slowest = Duration::from_secs(message.len() as u64 / SLOWEST_LINK);
        let timeout = self.terms.write_grace + at_slowest;
        self.pending_write = Some(PendingWrite { timeout, deadline: Instant::now() + timeout });
        Ok(Pin::new(&mut *self.socket).start_send(message)?)
    }

    /// Waits for the next event. With `read` false nothing is read, for a caller without room for a message: TCP then
    /// slows the peer down, and its silence does not end the session.
    pub async fn next(&mut self, read: bool) -> Result<ChannelEvent, ChannelEnd> {
        loop {
            if !read {
                self.last_received = Instant::now();
            }
            let silent_at = self.last_received + 2 * self.terms.heartbeat;
            let mut wake = self.next_ping;
            if let Some(write) = self.pending_write {
                wake = wake.min(write.deadline);
            }
            if read {
                wake = wake.min(silent_at);
            }
            tokio::select! {
                // Arrived data counts before an expired deadline.
                biased;
                io = poll_fn(|cx| self.poll_io(cx, read)) => match io {
                    SocketOutcome::Written(done) => {
                        done?;
                        return Ok(ChannelEvent::Writable);
                    }
                    SocketOutcome::Read(Some(Ok(message))) => {
                        if let Some(event) = interpret_message(message)? {
                            return Ok(event);
                        }
                    }
                    SocketOutcome::Read(Some(Err(error))) => return Err(error.into()),
                    SocketOutcome::Read(None) => return Err(ChannelEnd::Cut),
                    SocketOutcome::Endless => {
                        return Err(ChannelEnd::Protocol("a message of fragments without an end".to_owned()));
                    }
                },
                () = sleep_until(wake) => self.check_clock(read)?,
            }
        }
    }

    fn check_clock(&mut self, read: bool) -> Result<(), ChannelEnd> {
        let now = Instant::now();
        if let Some(write) = self.pending_write
            && write.deadline <= now
        {
            return Err(ChannelEnd::Stalled(write.timeout));
        }
        let silence = 2 * self.terms.heartbeat;
        // Computed again, because `last_received` moves with every byte.
        if read && self.last_received + silence <= now {
            return Err(ChannelEnd::Silent(silence));
        }
        if self.next_ping <= now {
            self.next_ping = now + self.terms.heartbeat;
            // A pending write shows the peer as much as a ping would.
            if self.is_writable() {
                self.start_write(Message::Ping(Bytes::new()))?;
            }
        }
        Ok(())
    }

    fn poll_io(&mut self, cx: &mut Context<'_>, read: bool) -> Poll<SocketOutcome> {
        if self.pending_write.is_some()
            && let Poll::Ready(done) = Pin::new(&mut *self.socket).poll_flush(cx)
        {
            self.pending_write = None;
            return Poll::Ready(SocketOutcome::Written(done));
        }
        if read {
            let before = self.socket.get_ref().observer().0;
            let polled = Pin::new(&mut *self.socket).poll_next(cx);
            let received = self.socket.get_ref().observer().0;
            if received != before {
                self.last_received = Instant::now();
            }
            if polled.is_ready() {
                self.bytes_at_end = received;
            } else if received - self.bytes_at_end > MOST_BEFORE_END {
                return Poll::Ready(SocketOutcome::Endless);
            }
            return polled.map(SocketOutcome::Read);
        }
        Poll::Pending
    }

    /// Closes the session with a reason, within two seconds even if the peer doesn't answer.
    pub async fn close(self, code: CloseCode, reason: &str) {
        self.close_after(None, code, reason).await;
    }

    /// Sends a last message if the peer still reads, and then does as [`Self::close`].
    pub async fn close_after(mut self, last: Option<Utf8Bytes>, code: CloseCode, reason: &str) {
        let frame = CloseFrame { code, reason: truncate_close_reason(reason).into() };
        let farewell = async {
            if let Some(last) = last {
                // Also completes a pending write.
                let _ = futures::SinkExt::send(&mut *self.socket, Message::Text(last)).await;
            }
            // An error means that the peer is gone.
            let _ = self.socket.close(Some(frame)).await;
            let stream = self.socket.get_mut();
            let _ = stream.shutdown().await;
            let mut rest = vec![0; 4096];
            while matches!(stream.read(&mut rest).await, Ok(1..)) {}
        };
        let _ = timeout(CLOSE_GRACE, farewell).await;
    }
}

/// Translates a websocket message into an event.
fn interpret_message(message: Message) -> Result<Option<ChannelEvent>, ChannelEnd> {
    match message {
        Message::Text(text) => Ok(Some(ChannelEvent::Text(text))),
        Message::Ping(_) | Message::Pong(_) => Ok(Some(ChannelEvent::Control)),
        Message::Binary(_) => {
            Err(ChannelEnd::Protocol("messages are text frames, and this one is binary".to_owned()))
        }
        Message::Close(Some(frame)) => {
            Err(ChannelEnd::ByPeer { code: frame.code.into(), reason: replace_controls(&frame.reason) })
        }
        Message::Close(None) => {
            Err(ChannelEnd::ByPeer { code: CloseCode::Status.into(), reason: "no reason".to_owned() })
        }
        // Never read: raw frames are only for writing.
        Message::Frame(_) => Ok(None),
    }
}

/// Replaces control characters: the peer's reason is logged, and a line break would start a forged line.
fn replace_controls(text: &str) -> String {
    text.chars().map(|c| if is_display_control(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests;
