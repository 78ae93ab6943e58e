//! The wait of a task for registry secrets that can't be read for now: the API server, or its key service, is in
//! trouble.

use std::time::Duration;

use crate::shared::pacing::Backoff;

/// Between two tries: 5 s, doubled up to a minute. A waiting task holds no slot, and a secret may stay unreadable for
/// hours.
const RETRY: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));

/// The tries of one task so far, and the time that they and the waits between them have taken: it counts against the
/// time that the task may take.
#[derive(Clone, Debug)]
pub(crate) struct Postponement {
    backoff: Backoff,
    spent: Duration,
}

impl Default for Postponement {
    fn default() -> Self {
        Self { backoff: RETRY, spent: Duration::ZERO }
    }
}

impl Postponement {
    /// A try has failed that took `tried`; all of them together may take `limit`. Returns how long to wait before the
    /// next one; `None` where no time would be left for that.
    pub(crate) fn next_wait(&mut self, tried: Duration, limit: Duration) -> Option<Duration> {
        self.spent = self.spent.saturating_add(tried);
        let wait = self.backoff.next_wait();
        let spent = self.spent.saturating_add(wait);
        (spent < limit).then(|| {
            self.spent = spent;
            wait
        })
    }

    /// The same for a task with its time already running.
    pub(crate) fn next_wait_in_its_time(&mut self) -> Duration {
        self.backoff.next_wait()
    }

    /// The last wait has ended this much earlier.
    pub(crate) fn end_wait_early(&mut self, left: Duration) {
        self.spent = self.spent.saturating_sub(left);
    }

    /// The time that the tries and the waits have taken.
    pub(crate) fn spent(&self) -> Duration {
        self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_wait_leaves_time_to_pull() {
        let (mut postponement, limit) = (Postponement::default(), Duration::from_secs(35 + 40 + 4 * 2));
        let waits = std::iter::from_fn(|| postponement.next_wait(Duration::from_secs(2), limit));
        let waits: Vec<_> = waits.map(|wait| wait.as_secs()).collect();
        assert_eq!(waits, [5, 10, 20]);
        // The fourth try has been made as well; the wait after it would take the rest.
        assert_eq!(postponement.spent(), Duration::from_secs(35 + 4 * 2));
    }
}
