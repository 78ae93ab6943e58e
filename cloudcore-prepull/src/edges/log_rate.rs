//! A limit for log lines that anyone who reaches a port can cause.

use std::sync::{Mutex, PoisonError};

use prepull_engine::shared::pacing::TokenBucket;
use tokio::time::Instant;

/// Lines per second, and at once.
const LINES: (f64, f64) = (5.0, 50.0);

/// Says which lines are logged.
#[derive(Debug)]
pub(super) struct LogRate(Mutex<TokenBucket<std::time::Instant>>);

impl Default for LogRate {
    fn default() -> Self {
        let (per_second, burst) = LINES;
        Self(Mutex::new(TokenBucket::new(per_second, burst)))
    }
}

impl LogRate {
    /// Whether one more line is logged now.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let mut rate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rate.try_take(1.0, now.into_std()).is_ok()
    }
}
