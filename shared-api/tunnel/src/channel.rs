//! One websocket with its heartbeat and its deadlines.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Sink, Stream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::{CapacityError, ProtocolError};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Bytes, Error, Message, Utf8Bytes};

use crate::{CloseCode, Metered, close_reason};

/// The slowest link that is served. A message may take the grace and its size at this rate, no longer.
const SLOWEST_LINK: u64 = 8 * 1024;
/// How long a close may take. What the peer still sends is thrown away so that the kernel does not answer it
/// with a reset, which would overtake the close frame and with it the reason.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// The timing of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// A ping goes out this often; two of them without a byte from the peer end the session.
    pub heartbeat: Duration,
    /// What a write may take beyond its size at 8 KiB/s.
    pub write_grace: Duration,
}

/// What [`Channel::next`] has seen.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Text(Utf8Bytes),
    /// A ping or a pong of the peer.
    Control,
    /// The write that was under way is done: [`Channel::start_send`] may be called.
    Writable,
}

/// Why a session is over.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The peer closed it.
    #[error("closed by the peer: {reason} ({code})")]
    ByPeer {
        /// Why, as RFC 6455 numbers it.
        code: u16,
        /// Why, in the peer's words.
        reason: String,
    },
    /// The peer went away without a word.
    #[error("the connection was cut")]
    Cut,
    /// Nothing came in for two heartbeats.
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    /// A write did not end in time.
    #[error("the peer reads too slowly: a write was not done after {0:?}")]
    Stalled(Duration),
    /// A message or frame beyond the limit.
    #[error("message of {size} bytes; at most {limit} are accepted")]
    TooLarge {
        /// Of the message, as far as it is known.
        size: usize,
        /// What is accepted.
        limit: usize,
    },
    /// Not the websocket protocol, or a binary frame.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// TCP or TLS failed.
    #[error("connection failed")]
    Io(#[source] std::io::Error),
}

impl Ended {
    /// The code that tells the peer, where there is something to tell.
    pub fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::ByPeer { .. } | Self::Cut | Self::Io(_) => None,
            Self::Silent(_) | Self::Stalled(_) => Some(CloseCode::Policy),
            Self::TooLarge { .. } => Some(CloseCode::Size),
            Self::Protocol(_) => Some(CloseCode::Protocol),
        }
    }
}

impl From<Error> for Ended {
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

/// One websocket. Cancel safe: [`Self::next`] may be dropped at any await and called again.
#[derive(Debug)]
pub struct Channel<S> {
    // Boxed: it is some KiB with TLS in it, and every future that a channel is moved through would hold a
    // copy's room.
    socket: Box<WebSocketStream<Metered<S>>>,
    terms: Terms,
    heard: Instant,
    next_ping: Instant,
    writing: Option<Write>,
}

/// A write that is under way.
#[derive(Clone, Copy, Debug)]
struct Write {
    allowed: Duration,
    until: Instant,
}

enum Io {
    Written(Result<(), Error>),
    Read(Option<Result<Message, Error>>),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Channel<S> {
    /// Takes over a websocket whose handshake is done.
    pub fn new(socket: WebSocketStream<Metered<S>>, terms: Terms) -> Self {
        let now = Instant::now();
        Self { socket: Box::new(socket), terms, heard: now, next_ping: now + terms.heartbeat, writing: None }
    }

    /// From here on, other timing: the edge learns it from `Welcome`.
    pub fn set_terms(&mut self, terms: Terms) {
        let now = Instant::now();
        self.terms = terms;
        self.heard = now;
        self.next_ping = now + terms.heartbeat;
    }

    /// What the websocket runs on.
    pub fn stream(&self) -> &S {
        self.socket.get_ref().get_ref()
    }

    /// Whether [`Self::start_send`] may be called now. Where not, [`Event::Writable`] will say so.
    pub fn is_writable(&self) -> bool {
        self.writing.is_none()
    }

    /// Starts to write a message; [`Self::next`] carries it out, while it goes on reading: two peers that
    /// write to each other must not wait for each other. To be called only where [`Self::is_writable`].
    pub fn start_send(&mut self, text: Utf8Bytes) -> Result<(), Ended> {
        self.start(Message::Text(text))
    }

    fn start(&mut self, message: Message) -> Result<(), Ended> {
        let at_slowest = Duration::from_secs(message.len() as u64 / SLOWEST_LINK);
        let allowed = self.terms.write_grace + at_slowest;
        self.writing = Some(Write { allowed, until: Instant::now() + allowed });
        Ok(Pin::new(&mut *self.socket).start_send(message)?)
    }

    /// Waits for what happens next. With `read` false nothing is read, for as long as the caller has no room
    /// for a message: the peer then feels it through TCP, and its silence is not held against it.
    pub async fn next(&mut self, read: bool) -> Result<Event, Ended> {
        loop {
            if !read {
                self.heard = Instant::now();
            }
            let silent_at = self.heard + 2 * self.terms.heartbeat;
            let mut wake = self.next_ping;
            if let Some(write) = self.writing {
                wake = wake.min(write.until);
            }
            if read {
                wake = wake.min(silent_at);
            }
            tokio::select! {
                // What has arrived is looked at before the clock is.
                biased;
                io = poll_fn(|cx| self.poll_io(cx, read)) => match io {
                    Io::Written(done) => {
                        done?;
                        return Ok(Event::Writable);
                    }
                    Io::Read(Some(Ok(message))) => {
                        if let Some(event) = accept(message)? {
                            return Ok(event);
                        }
                    }
                    Io::Read(Some(Err(error))) => return Err(error.into()),
                    Io::Read(None) => return Err(Ended::Cut),
                },
                () = sleep_until(wake) => self.check_clock(read)?,
            }
        }
    }

    fn check_clock(&mut self, read: bool) -> Result<(), Ended> {
        let now = Instant::now();
        if let Some(write) = self.writing
            && write.until <= now
        {
            return Err(Ended::Stalled(write.allowed));
        }
        let silence = 2 * self.terms.heartbeat;
        // `heard` moves with every byte, so the deadline is computed again rather than taken from before.
        if read && self.heard + silence <= now {
            return Err(Ended::Silent(silence));
        }
        if self.next_ping <= now {
            self.next_ping = now + self.terms.heartbeat;
            // A write that is under way tells the peer as much as a ping.
            if self.is_writable() {
                self.start(Message::Ping(Bytes::new()))?;
            }
        }
        Ok(())
    }

    fn poll_io(&mut self, cx: &mut Context<'_>, read: bool) -> Poll<Io> {
        if self.writing.is_some()
            && let Poll::Ready(done) = Pin::new(&mut *self.socket).poll_flush(cx)
        {
            self.writing = None;
            return Poll::Ready(Io::Written(done));
        }
        if read {
            let before = self.socket.get_ref().received();
            let polled = Pin::new(&mut *self.socket).poll_next(cx);
            if self.socket.get_ref().received() != before {
                self.heard = Instant::now();
            }
            return polled.map(Io::Read);
        }
        Poll::Pending
    }

    /// Says why and hangs up, within two seconds whatever the peer does.
    pub async fn close(self, code: CloseCode, reason: &str) {
        self.close_after(None, code, reason).await;
    }

    /// As [`Self::close`], after a last message, where the peer still reads.
    pub async fn close_after(mut self, last: Option<Utf8Bytes>, code: CloseCode, reason: &str) {
        let frame = CloseFrame { code, reason: close_reason(reason).into() };
        let farewell = async {
            if let Some(last) = last {
                // Waits for the write that is under way, if there is one.
                let _ = futures::SinkExt::send(&mut *self.socket, Message::Text(last)).await;
            }
            // An error here means that there is nobody left to tell.
            let _ = self.socket.close(Some(frame)).await;
            let stream = self.socket.get_mut();
            let _ = stream.shutdown().await;
            let mut rest = vec![0; 4096];
            while matches!(stream.read(&mut rest).await, Ok(1..)) {}
        };
        let _ = timeout(CLOSE_GRACE, farewell).await;
    }
}

fn accept(message: Message) -> Result<Option<Event>, Ended> {
    match message {
        Message::Text(text) => Ok(Some(Event::Text(text))),
        Message::Ping(_) | Message::Pong(_) => Ok(Some(Event::Control)),
        Message::Binary(_) => {
            Err(Ended::Protocol("messages are text frames, and this one is binary".to_owned()))
        }
        Message::Close(Some(frame)) => {
            Err(Ended::ByPeer { code: frame.code.into(), reason: printable(&frame.reason) })
        }
        Message::Close(None) => {
            Err(Ended::ByPeer { code: CloseCode::Status.into(), reason: "no reason".to_owned() })
        }
        // Only made by the caller of a write.
        Message::Frame(_) => Ok(None),
    }
}

/// The peer's words end up in logs, where a line break would start a line of their own.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests;
