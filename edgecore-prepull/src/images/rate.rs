//! A limit of bytes a second that several streams share.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Largest turn in bytes. Streams that read pieces of different sizes get equal shares only if a turn is small.
const TURN: u64 = 16 * 1024;
/// Fewest turns a second, over all streams, so that a new rate soon takes effect.
const TURNS_PER_SECOND: u64 = 20;
/// Largest time to catch up after a pause, or after a late timer: half a percent of ten seconds. The rate must hold
/// within five percent over ten seconds.
const CATCH_UP: Duration = Duration::from_millis(50);

/// A token bucket of bytes. Concurrent streams get equal shares.
#[derive(Debug)]
pub struct Bucket {
    /// Bytes a second; 0 for no limit.
    rate: AtomicU64,
    /// Start of the next turn. The stream that waits for it holds the lock, which is fair.
    next_turn: Mutex<Instant>,
}

impl Bucket {
    /// A bucket with this many bytes a second, or without a limit.
    pub fn new(rate: Option<NonZeroU64>) -> Self {
        Self { rate: AtomicU64::new(rate.map_or(0, NonZeroU64::get)), next_turn: Mutex::new(Instant::now()) }
    }

    /// Changes the rate, also for streams that are waiting.
    pub fn set_rate(&self, rate: Option<NonZeroU64>) {
        self.rate.store(rate.map_or(0, NonZeroU64::get), Ordering::Relaxed);
    }

    /// The rate in bytes a second.
    pub fn rate(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.rate.load(Ordering::Relaxed))
    }

    /// Takes this many bytes, and returns when the rate has allowed them. If it's dropped during the wait, the bytes
    /// that it hasn't got yet don't count.
    pub async fn take(&self, bytes: usize) {
        let mut left = u64::try_from(bytes).unwrap_or(u64::MAX);
        while left > 0 {
            if self.rate().is_none() {
                return;
            }
            let mut next_turn = self.next_turn.lock().await;
            sleep_until(*next_turn).await;
            let Some(rate) = self.rate() else { return };
            let piece = left.min((rate.get() / TURNS_PER_SECOND).clamp(1, TURN));
            // A twentieth of a second at most, or at the lowest rates the second of a single byte.
            let takes = Duration::from_nanos(piece.saturating_mul(1_000_000_000) / rate);
            let earliest = Instant::now().checked_sub(CATCH_UP).unwrap_or(*next_turn);
            *next_turn = (*next_turn).max(earliest) + takes;
            left -= piece;
        }
    }
}

#[cfg(test)]
mod tests;
