//! A stream that knows when its client was last heard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use prepull_tunnel::{ObservedStream, Observer};
use tokio::time::Instant;

/// The turn on a connection: ours, or the client's since some time. Clones share it.
/// One of them observes the stream to hear the client.
#[derive(Clone, Debug)]
pub(in crate::edges) struct Attention(Arc<AttentionState>);

#[derive(Debug)]
struct AttentionState {
    begun: Instant,
    /// When the client was last heard, in milliseconds since `begun`.
    heard: AtomicU64,
    busy: AtomicUsize,
}

impl Attention {
    pub(super) fn from_now() -> Self {
        let state =
            AttentionState { begun: Instant::now(), heard: AtomicU64::new(0), busy: AtomicUsize::new(0) };
        Self(Arc::new(state))
    }

    /// How long the client has sent nothing although it was its turn. What has arrived and was not read yet does not
    /// count as sent: look right after the work has been polled.
    pub(super) fn silent_for(&self, now: Instant) -> Duration {
        if self.is_busy() {
            return Duration::ZERO;
        }
        let heard = self.0.begun + Duration::from_millis(self.0.heard.load(Ordering::Relaxed));
        now.saturating_duration_since(heard)
    }

    /// Whether it is our turn.
    pub(super) fn is_busy(&self) -> bool {
        self.0.busy.load(Ordering::Relaxed) > 0
    }

    /// Makes it our turn until the guard is dropped.
    pub(in crate::edges) fn busy(&self) -> Busy {
        self.0.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Counts silence from now on.
    pub(super) fn note_heard(&self) {
        let millis = u64::try_from(self.0.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.heard.store(millis, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(in crate::edges) struct Busy(Attention);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.note_heard();
        self.0.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream that notes when its client was last heard.
pub(in crate::edges) type HeardStream<S> = ObservedStream<S, Attention>;

impl Observer for Attention {
    fn note_read(&mut self, _: usize) {
        self.note_heard();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_counts_only_while_we_are_idle() {
        let (mut client, server) = tokio::io::duplex(16);
        let mut heard = HeardStream::new(server, Attention::from_now());
        let (attention, second) = (heard.observer().clone(), Duration::from_secs(1));
        tokio::time::advance(second).await;
        assert_eq!(attention.silent_for(Instant::now()), second);
        client.write_all(b"x").await.unwrap();
        heard.read_u8().await.unwrap();
        assert_eq!(attention.silent_for(Instant::now()), Duration::ZERO);
        let busy = attention.busy();
        tokio::time::advance(second).await;
        assert_eq!(attention.silent_for(Instant::now()), Duration::ZERO);
        drop(busy);
        tokio::time::advance(2 * second).await;
        assert_eq!(attention.silent_for(Instant::now()), 2 * second);
    }
}
