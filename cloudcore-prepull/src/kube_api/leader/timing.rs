//! The times of an election.

use std::time::Duration;

/// The lower limit of the retry period, in which each replica reads the Lease once.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);

/// The times of an election, with the meaning that they have in `kube-controller-manager --help`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    /// How long the others wait after they last saw the Lease change.
    pub(super) duration: Duration,
    /// How long the leader leads after the start of its last successful renewal.
    pub(super) renew_deadline: Duration,
    pub(super) retry_period: Duration,
}

impl Timing {
    /// Fails for times with which there could be two leaders, or none for long.
    pub(crate) fn new(
        duration: Duration,
        renew_deadline: Duration,
        retry_period: Duration,
    ) -> Result<Self, TimingError> {
        if retry_period < SHORTEST_PERIOD {
            return Err(TimingError::Period(retry_period));
        }
        if renew_deadline <= retry_period {
            return Err(TimingError::Deadline { renew_deadline, retry_period });
        }
        if duration <= renew_deadline {
            return Err(TimingError::Duration { duration, renew_deadline });
        }
        Ok(Self { duration, renew_deadline, retry_period })
    }

    /// The limit for one attempt, which reads and writes: half of the time that is left one period after the last
    /// renewal, so that an attempt that hangs leaves time for another one.
    pub(super) fn attempt_limit(&self) -> Duration {
        self.renew_deadline.saturating_sub(self.retry_period) / 2
    }
}

/// Times that do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TimingError {
    /// The retry period is below [`SHORTEST_PERIOD`].
    #[error("--lease-retry-period {0:?} is too short; it must be at least 100ms")]
    Period(Duration),
    /// The leader would have no time for a second attempt.
    #[error(
        "--lease-renew-deadline {renew_deadline:?} must be longer than --lease-retry-period {retry_period:?}, \
         or the leader ends before it has tried to renew the Lease"
    )]
    Deadline {
        /// `--lease-renew-deadline` as given.
        renew_deadline: Duration,
        /// `--lease-retry-period` as given.
        retry_period: Duration,
    },
    /// There could be two leaders at a time.
    #[error(
        "--lease-duration {duration:?} must be longer than --lease-renew-deadline {renew_deadline:?}, \
         or there can be two leaders at a time"
    )]
    Duration {
        /// `--lease-duration` as given.
        duration: Duration,
        /// `--lease-renew-deadline` as given.
        renew_deadline: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn times_that_allow_two_leaders_are_refused() {
        Timing::new(ms(15_000), ms(10_000), ms(2000)).unwrap();
        let refused = |duration, deadline, period| {
            Timing::new(ms(duration), ms(deadline), ms(period)).unwrap_err().to_string()
        };
        assert!(refused(10_000, 10_000, 2000).starts_with("--lease-duration 10s must be longer"));
        assert!(refused(15_000, 2000, 2000).starts_with("--lease-renew-deadline 2s must be longer"));
        assert!(refused(15_000, 10_000, 99).starts_with("--lease-retry-period 99ms is too short"));
    }

    #[test]
    fn a_hanging_attempt_leaves_time_for_another() {
        for (deadline, period) in [(10_000, 2000), (3000, 500), (10_000, 9000)] {
            let timing = Timing::new(ms(15_000), ms(deadline), ms(period)).unwrap();
            assert!(ms(period) + 2 * timing.attempt_limit() <= ms(deadline), "{timing:?}");
        }
    }
}
