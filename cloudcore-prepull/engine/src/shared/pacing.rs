//! Rate limits: a token bucket, one for each of many keys, and the doubling wait after a failure.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use jiff::Timestamp;

/// A point in time of some clock: the engine's [`Timestamp`], or the monotonic [`Instant`] of a program.
pub trait Moment: Copy {
    /// The time that has passed since `earlier`; none where a clock was set back.
    fn time_since(self, earlier: Self) -> Duration;
    /// The moment that is `wait` later.
    #[must_use]
    fn later_by(self, wait: Duration) -> Self;
}

impl Moment for Timestamp {
    fn time_since(self, earlier: Self) -> Duration {
        self.duration_since(earlier).try_into().unwrap_or_default()
    }

    fn later_by(self, wait: Duration) -> Self {
        self.checked_add(wait).unwrap_or(Self::MAX)
    }
}

impl Moment for Instant {
    fn time_since(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    fn later_by(self, wait: Duration) -> Self {
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

    /// Takes `cost` if it is there; otherwise takes nothing, and returns the wait until it is there.
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
        Some(self.counted?.later_by(self.wait_until(cost)))
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
            let passed = now.time_since(counted).as_secs_f64();
            self.level = (self.level + passed * self.per_second).min(self.burst);
        }
        self.counted = Some(now);
    }
}

/// A token bucket for each of many keys, all with the same rate. It remembers only the keys that were busy lately,
/// since a full bucket needs no entry.
#[derive(Clone, Debug)]
pub struct BucketPerKey<K, T> {
    full: TokenBucket<T>,
    most: usize,
    buckets: HashMap<K, TokenBucket<T>>,
    /// With this many keys, those with a full bucket are dropped.
    sweep_at: usize,
    /// When that was done last.
    swept: Option<T>,
}

/// Fewer keys than these are not worth a sweep.
const MIN_SWEEP: usize = 64;
/// The shortest time between two sweeps while no key can be dropped. Each visits all keys.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

impl<K: Clone + Eq + Hash, T: Moment> BucketPerKey<K, T> {
    /// Buckets of `burst` tokens at once and then `per_second`, for at most `most` busy keys.
    pub fn new(per_second: f64, burst: f64, most: usize) -> Self {
        let full = TokenBucket::new(per_second, burst);
        Self { full, most, buckets: HashMap::new(), sweep_at: MIN_SWEEP.min(most), swept: None }
    }

    /// Takes one token of the key; otherwise takes nothing, and returns the wait until there is one.
    ///
    /// While as many keys are busy as are remembered, a further one gets nothing.
    pub fn try_take(&mut self, key: &K, now: T) -> Result<(), Duration> {
        self.bucket(key, now)?.try_take(1.0, now)
    }

    /// Takes one token of the key in any case.
    pub fn take(&mut self, key: &K, now: T) {
        if let Ok(bucket) = self.bucket(key, now) {
            bucket.take(1.0, now);
        }
    }

    /// How long it takes until the key has a token.
    pub fn wait_for(&mut self, key: &K, now: T) -> Duration {
        self.buckets.get_mut(key).map_or(Duration::ZERO, |bucket| bucket.wait_for(1.0, now))
    }

    fn bucket(&mut self, key: &K, now: T) -> Result<&mut TokenBucket<T>, Duration> {
        if !self.buckets.contains_key(key) {
            self.sweep(now);
            if self.buckets.len() >= self.most {
                return Err(SWEEP_INTERVAL);
            }
        }
        Ok(self.buckets.entry(key.clone()).or_insert_with(|| self.full.clone()))
    }

    fn sweep(&mut self, now: T) {
        let is_recent = self.swept.is_some_and(|swept| now.time_since(swept) < SWEEP_INTERVAL);
        if self.buckets.len() < self.sweep_at || (self.buckets.len() >= self.most && is_recent) {
            return;
        }
        self.buckets.retain(|_, bucket| !bucket.is_full(now));
        self.sweep_at = (2 * self.buckets.len()).max(MIN_SWEEP).min(self.most);
        self.buckets.shrink_to(self.sweep_at);
        self.swept = Some(now);
    }
}

/// How much later a node's own windows may let its time be over. They recur weekly; a node that is not open for long enough
/// within a week would keep its slot, and the wave, for as long as it likes.
pub(crate) const OWN_WINDOWS: Duration = Duration::from_secs(7 * 24 * 3600);

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
    fn a_bucket_in_debt_reports_its_debt() {
        let mut bucket = TokenBucket::new(10.0, 2.0);
        assert_eq!((bucket.level(at(0)), bucket.ready_at(1.0)), (2.0, Some(at(0))));
        bucket.take(5.0, at(0));
        assert_eq!((bucket.level(at(0)), bucket.level(at(100))), (-3.0, -2.0));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "an Instant comes from nowhere else")]
    fn an_instant_works_as_a_moment() {
        let now = Instant::now();
        let later = now.later_by(MILLISECOND);
        assert_eq!((later.time_since(now), now.time_since(later)), (MILLISECOND, Duration::ZERO));
    }

    #[test]
    fn a_clock_set_back_drains_no_bucket() {
        let mut bucket = TokenBucket::new(20.0, 60.0);
        assert_eq!(bucket.try_take(1.0, at(3_600_000)), Ok(()));
        assert_eq!(bucket.try_take(59.0, at(0)), Ok(()));
        assert_eq!(bucket.try_take(1.0, at(50)), Ok(()));
    }

    #[test]
    fn waits_double_and_reset_on_success() {
        let mut backoff = Backoff::new(250 * MILLISECOND, Duration::from_secs(5));
        assert!(!backoff.has_failed());
        let waits: Vec<_> = (0..7).map(|_| backoff.next_wait().as_millis()).collect();
        assert_eq!(waits, [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000]);
        assert!(backoff.has_failed());
        backoff.reset();
        assert!(!backoff.has_failed());
        assert_eq!(backoff.next_wait().as_millis(), 250);
    }

    #[test]
    fn each_key_has_its_own_bucket() {
        let mut buckets = BucketPerKey::new(1.0, 2.0, 100);
        let taken = |buckets: &mut BucketPerKey<u32, Timestamp>, key, millis| {
            (0..10).filter(|_| buckets.try_take(&key, at(millis)).is_ok()).count()
        };
        assert_eq!((taken(&mut buckets, 1, 0), taken(&mut buckets, 2, 0)), (2, 2));
        assert_eq!(buckets.wait_for(&1, at(0)), 1000 * MILLISECOND);
        assert_eq!(buckets.wait_for(&3, at(0)), Duration::ZERO);
        assert_eq!((taken(&mut buckets, 1, 1000), taken(&mut buckets, 3, 1000)), (1, 2));
        buckets.take(&4, at(1000));
        assert_eq!(taken(&mut buckets, 4, 1000), 1);
    }

    #[test]
    fn only_busy_keys_are_remembered() {
        let mut buckets = BucketPerKey::new(1.0, 1.0, 100);
        let passed = |buckets: &mut BucketPerKey<i64, Timestamp>, keys: std::ops::Range<i64>, millis| {
            keys.filter(|key| buckets.try_take(key, at(millis)).is_ok()).count()
        };
        // A thousand keys, one every 100 ms: ten are busy at a time.
        for key in 0..1000 {
            assert_eq!(passed(&mut buckets, key..key + 1, 100 * key), 1);
        }
        assert!(buckets.buckets.len() <= MIN_SWEEP, "{}", buckets.buckets.len());
        // A sweep that frees little is repeated only when there are twice as many.
        let mut busy = BucketPerKey::new(1.0, 1.0, 1000);
        assert_eq!(passed(&mut busy, 0..100, 0), 100);
        assert_eq!(busy.sweep_at, 2 * MIN_SWEEP);
        // With as many busy keys as are remembered, others wait for them.
        assert_eq!(passed(&mut buckets, 2000..3000, 200_000), 100);
        assert_eq!(passed(&mut buckets, 3000..4000, 200_900), 0);
        assert_eq!(passed(&mut buckets, 3000..4000, 201_000), 100);
        // A key that is free within a second has its place until then: looking through all for each newcomer costs more.
        let mut quick = BucketPerKey::new(10.0, 1.0, 100);
        assert_eq!(passed(&mut quick, 0..200, 0), 100);
        assert_eq!((passed(&mut quick, 200..201, 500), passed(&mut quick, 200..201, 1000)), (0, 1));
    }

    proptest! {
        #[test]
        fn burst_and_rate_bound_every_interval(
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
        fn a_refused_request_passes_after_its_wait(
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
        fn waits_never_get_shorter(first in 1_u64..10_000, factor in 1_u32..1_000, tries in 1..100) {
            let first = Duration::from_millis(first);
            let mut backoff = Backoff::new(first, first * factor);
            let waits: Vec<_> = (0..tries).map(|_| backoff.next_wait()).collect();
            prop_assert_eq!(waits[0], first);
            prop_assert!(waits.is_sorted() && waits.iter().all(|wait| *wait <= first * factor));
        }
    }
}
