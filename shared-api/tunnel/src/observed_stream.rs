//! A stream that reports the bytes read from it to an observer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream that reports the bytes read from it to an observer.
#[derive(Debug)]
pub struct ObservedStream<S, O> {
    stream: S,
    observer: O,
}

/// Receives the number of bytes read from a stream.
pub trait Observer: Unpin {
    /// This many bytes were read. Never 0.
    fn note_read(&mut self, bytes: usize);
}

/// The number of bytes read so far. On a slow link, a large message takes longer than the silence that ends a session;
/// the count shows that it is arriving.
#[derive(Debug, Default)]
pub struct ByteCount(pub(crate) u64);

/// A stream that counts the bytes read from it.
pub type CountingStream<S> = ObservedStream<S, ByteCount>;

impl Observer for ByteCount {
    fn note_read(&mut self, bytes: usize) {
        self.0 += bytes as u64;
    }
}

impl<S, O> ObservedStream<S, O> {
    /// Wraps a stream.
    pub fn new(stream: S, observer: O) -> Self {
        Self { stream, observer }
    }

    /// The wrapped stream.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// The observer.
    pub fn observer(&self) -> &O {
        &self.observer
    }
}

impl<S: AsyncRead + Unpin, O: Observer> AsyncRead for ObservedStream<S, O> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.observer.note_read(read);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin, O: Unpin> AsyncWrite for ObservedStream<S, O> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
