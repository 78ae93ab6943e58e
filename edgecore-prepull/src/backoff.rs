//! Waits between attempts: exponential backoff with full jitter.

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

/// A wait is a random part of a ceiling that doubles, so that a fleet that was cut off at one moment comes back spread
/// over time.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    last: Duration,
    ceiling: Duration,
}

impl Backoff {
    /// A backoff with a ceiling that starts at `first` and doubles up to `last`.
    pub(crate) fn new(first: Duration, last: Duration) -> Self {
        Self { first, last, ceiling: first }
    }

    /// The next wait: `chance`, from 0 to 1, times the ceiling, which then doubles.
    pub(crate) fn next(&mut self, chance: f64) -> Duration {
        let wait = self.ceiling.mul_f64(chance.clamp(0.0, 1.0));
        self.ceiling = (self.ceiling * 2).min(self.last);
        wait
    }

    /// Starts again from the first ceiling, after a success.
    pub(crate) fn reset(&mut self) {
        self.ceiling = self.first;
    }
}

/// A number from 0 to 1, evenly distributed. It comes from the operating system, so that edges cloned from one disk
/// draw different numbers.
pub(crate) fn random_fraction() -> f64 {
    let mut bytes = [0; 4];
    // Where the system has no random bytes, TLS fails as well; any number will do.
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX),
        Err(_) => 0.5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_doubles_until_a_reset() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let ceilings: Vec<u64> = (0..8).map(|_| backoff.next(1.0).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.next(0.5), Duration::from_secs(30));
        assert_eq!(backoff.next(0.0), Duration::ZERO);
        backoff.reset();
        assert_eq!(backoff.next(0.25), Duration::from_millis(250));
    }

    #[test]
    fn random_numbers_are_within_0_and_1() {
        let drawn: Vec<f64> = (0..100).map(|_| random_fraction()).collect();
        assert!(drawn.iter().all(|chance| (0.0..=1.0).contains(chance)));
        assert!(drawn.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 0.1));
    }
}
