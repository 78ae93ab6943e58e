//! Random numbers from a seed: the same seed gives the same fleet, the same faults, the same kills.

use std::time::Duration;

/// Longest duration that is drawn, in seconds, so that it fits every clock.
const LONGEST: f64 = 365.0 * 24.0 * 3600.0;

/// A stream of random numbers (SplitMix64: Steele, Lea, Flood 2014), small enough for one in each edge.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// Creates stream number `stream` of a seed.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        // The mixer makes neighbouring streams independent.
        let mut chance = Self(seed ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03));
        Self(chance.next())
    }

    /// Draws 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws uniformly from 0 up to but excluding 1.
    pub fn part(&mut self) -> f64 {
        // 32 bits convert without loss, and are fine enough here.
        f64::from(u32::try_from(self.next() >> 32).unwrap_or(u32::MAX)) / (f64::from(u32::MAX) + 1.0)
    }

    /// Draws a number below `count`; 0 for 0.
    pub fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % count.max(1) as u64).unwrap_or_default()
    }

    /// Draws true with this probability.
    pub(crate) fn happens(&mut self, rate: f64) -> bool {
        self.part() < rate
    }

    /// Draws uniformly between two durations.
    pub fn between(&mut self, from: Duration, to: Duration) -> Duration {
        from + to.saturating_sub(from).mul_f64(self.part())
    }

    /// Draws the wait for the next of random events with this mean distance (exponential distribution).
    pub fn wait(&mut self, mean: Duration) -> Duration {
        seconds(-mean.as_secs_f64() * (1.0 - self.part()).ln())
    }

    /// Draws from the normal distribution with mean 0 and deviation 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.part(), self.part());
        (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }
}

/// Converts seconds to a duration, limited to a year.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds.is_finite() { seconds.clamp(0.0, LONGEST) } else { LONGEST })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_has_reproducible_distinct_streams() {
        let draw = |seed, stream| {
            let mut chance = Chance::new(seed, stream);
            (0..100).map(|_| chance.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7, 1), draw(7, 1));
        assert!(draw(7, 1).iter().all(|number| !draw(7, 2).contains(number)));
        assert!(draw(7, 1).iter().all(|number| !draw(8, 1).contains(number)));
    }

    #[test]
    fn draws_have_the_mean_of_their_distribution() {
        const DRAWS: u32 = 10_000;
        let mut chance = Chance::new(1, 1);
        let mut mean = |draw: &mut dyn FnMut(&mut Chance) -> f64| {
            (0..DRAWS).map(|_| draw(&mut chance)).sum::<f64>() / f64::from(DRAWS)
        };
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 0.05, "{found} {expected}");
        near(mean(&mut Chance::part), 0.5);
        near(mean(&mut |chance| f64::from(u8::from(chance.happens(0.2)))), 0.2);
        near(mean(&mut |chance| chance.wait(Duration::from_secs(1)).as_secs_f64()), 1.0);
        near(mean(&mut Chance::normal), 0.0);
        let (from, to) = (Duration::from_secs(1), Duration::from_secs(2));
        near(mean(&mut |chance| chance.between(from, to).as_secs_f64()), 1.5);
    }
}
