//! How often something may be done: a token bucket, and the doubling wait after a failure.

use std::time::{Duration, Instant};

use jiff::Timestamp;

/// A point in time as some clock tells it: the engine's [`Timestamp`], or the monotonic [`Instant`] of a program.
pub trait Moment: Copy {
    /// The time that has passed since `earlier`; none where a clock was set back.
    fn since(self, earlier: Self) -> Duration;
    /// The moment that is `wait` later.
    #[must_use]
    fn after(self, wait: Duration) -> Self;
}

impl Moment for Timestamp {
    fn since(self, earlier: Self) -> Duration {
        self.duration_since(earlier).try_into().unwrap_or_default()
    }

    fn after(self, wait: Duration) -> Self {
        self.checked_add(wait).unwrap_or(Self::MAX)
    }
}

impl Moment for Instant {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    fn after(self, wait: Duration) -> Self {
        self + wait
    }
}

/// A token bucket: full at first, refilled at a constant rate up to its burst.
///
/// It may go into debt, so that a single cost that is larger than the burst delays what follows rather than never
/// passing.
#[derive(Clone, Debug)]
pub struct TokenBucket<T> {
    per_second: f64,
    burst: f64,
    level: f64,
    /// When `level` was right; `None` before the first use.
    counted: Option<T>,
}

impl<T: Moment> TokenBucket<T> {
    /// A full bucket: `burst` tokens at once, then `per_second`.
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second, burst, level: burst, counted: None }
    }

    /// Takes `cost` in any case. Returns how long it takes until the debt is paid.
    pub fn take(&mut self, cost: f64, now: T) -> Duration {
        self.refill(now);
        self.level -= cost;
        self.wait_until(0.0)
    }

    /// Takes `cost` if it is there; otherwise takes nothing, and says how long it takes until it is there.
    pub fn try_take(&mut self, cost: f64, now: T) -> Result<(), Duration> {
        let wait = self.wait_for(cost, now);
        if !wait.is_zero() {
            return Err(wait);
        }
        self.level -= cost;
        Ok(())
    }

    /// How long it takes until `cost` is there.
    pub fn wait_for(&mut self, cost: f64, now: T) -> Duration {
        self.refill(now);
        self.wait_until(cost)
    }

    /// When `cost` is there, as far as is known without asking what time it is; `None` before the first use, when the
    /// bucket is full.
    pub fn ready_at(&self, cost: f64) -> Option<T> {
        Some(self.counted?.after(self.wait_until(cost)))
    }

    /// Whether as much is there as there can be: nothing has been taken of late.
    pub fn is_full(&mut self, now: T) -> bool {
        self.refill(now);
        self.level >= self.burst
    }

    /// How much is there; negative while in debt.
    pub fn level(&mut self, now: T) -> f64 {
        self.refill(now);
        self.level
    }

    fn wait_until(&self, level: f64) -> Duration {
        Duration::from_secs_f64((level - self.level).max(0.0) / self.per_second)
    }

    fn refill(&mut self, now: T) {
        if let Some(counted) = self.counted {
            let passed = now.since(counted).as_secs_f64();
            self.level = (self.level + passed * self.per_second).min(self.burst);
        }
        self.counted = Some(now);
    }
}

/// An exponential backoff: the wait after a failure, doubled with each further one, until something succeeds.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Waits `first` after the first failure, and never longer than `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// Counts a failure. Returns how long to wait before the next try.
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.first.saturating_mul(2_u32.saturating_pow(self.failures)).min(self.longest);
        self.failures = self.failures.saturating_add(1);
        wait
    }

    /// Something succeeded: the next failure is a first one.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Whether nothing has succeeded since the last failure.
    pub fn has_failed(&self) -> bool {
        self.failures > 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(1_000_000_000 + millis).unwrap()
    }

    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn a_bucket_refills_up_to_its_burst() {
        let mut bucket = TokenBucket::new(10.0, 2.0);
        assert!(bucket.is_full(at(0)));
        assert_eq!(bucket.try_take(1.0, at(0)), Ok(()));
        assert_eq!(bucket.try_take(1.0, at(0)), Ok(()));
        assert_eq!(bucket.try_take(1.0, at(0)), Err(100 * MILLISECOND));
        assert_eq!(bucket.ready_at(1.0), Some(at(100)));
        assert_eq!(bucket.try_take(1.0, at(100)), Ok(()));
        assert!(bucket.is_full(at(9_000)));
        assert_eq!(bucket.take(12.0, at(9_000)), Duration::from_secs(1));
        assert_eq!(bucket.try_take(0.5, at(10_000)), Err(50 * MILLISECOND));
    }

    #[test]
    fn a_bucket_in_debt_says_how_much_it_lacks() {
        let mut bucket = TokenBucket::new(10.0, 2.0);
        assert_eq!((bucket.level(at(0)), bucket.ready_at(1.0)), (2.0, Some(at(0))));
        bucket.take(5.0, at(0));
        assert_eq!((bucket.level(at(0)), bucket.level(at(100))), (-3.0, -2.0));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "an Instant comes from nowhere else")]
    fn an_instant_is_a_moment_like_any_other() {
        let now = Instant::now();
        let later = now.after(MILLISECOND);
        assert_eq!((later.since(now), now.since(later)), (MILLISECOND, Duration::ZERO));
    }

    #[test]
    fn a_clock_that_is_set_back_takes_nothing_out_of_a_bucket() {
        let mut bucket = TokenBucket::new(20.0, 60.0);
        assert_eq!(bucket.try_take(1.0, at(3_600_000)), Ok(()));
        assert_eq!(bucket.try_take(59.0, at(0)), Ok(()));
        assert_eq!(bucket.try_take(1.0, at(50)), Ok(()));
    }

    #[test]
    fn the_wait_doubles_up_to_the_longest_and_begins_anew_after_a_success() {
        let mut backoff = Backoff::new(250 * MILLISECOND, Duration::from_secs(5));
        assert!(!backoff.has_failed());
        let waits: Vec<_> = (0..7).map(|_| backoff.next_wait().as_millis()).collect();
        assert_eq!(waits, [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000]);
        assert!(backoff.has_failed());
        backoff.reset();
        assert!(!backoff.has_failed());
        assert_eq!(backoff.next_wait().as_millis(), 250);
    }

    proptest! {
        #[test]
        fn no_more_than_the_burst_and_the_rate_pass_in_any_time(
            per_second in 1_u32..200,
            burst in 1_u32..200,
            pauses in proptest::collection::vec(0_i64..500, 1..200),
        ) {
            let mut bucket = TokenBucket::new(f64::from(per_second), f64::from(burst));
            let (mut now, mut passed) = (0, 0_u32);
            for pause in pauses {
                now += pause;
                passed += u32::from(bucket.try_take(1.0, at(now)).is_ok());
                #[allow(clippy::cast_precision_loss, reason = "minutes at most")]
                let allowed = f64::from(burst) + f64::from(per_second) * now as f64 / 1_000.0;
                prop_assert!(f64::from(passed) <= allowed + 0.001, "{passed} passed within {now} ms");
            }
        }

        #[test]
        fn what_is_refused_passes_after_the_wait_that_was_named(
            per_second in 0.1_f64..200.0,
            burst in 1.0_f64..200.0,
            costs in proptest::collection::vec(0.1_f64..1.0, 1..100),
        ) {
            let mut bucket = TokenBucket::new(per_second, burst);
            let mut now = at(0);
            for cost in costs {
                if let Err(wait) = bucket.try_take(cost, now) {
                    prop_assert_eq!(bucket.ready_at(cost), Some(now + wait));
                    // A Timestamp counts nanoseconds, and a wait is rounded to them.
                    now = now + wait + Duration::from_nanos(1);
                    prop_assert_eq!(bucket.try_take(cost, now), Ok(()));
                }
            }
        }

        #[test]
        fn a_wait_is_never_shorter_than_the_one_before(first in 1_u64..10_000, factor in 1_u32..1_000, tries in 1..100) {
            let first = Duration::from_millis(first);
            let mut backoff = Backoff::new(first, first * factor);
            let waits: Vec<_> = (0..tries).map(|_| backoff.next_wait()).collect();
            prop_assert_eq!(waits[0], first);
            prop_assert!(waits.is_sorted() && waits.iter().all(|wait| *wait <= first * factor));
        }
    }
}
