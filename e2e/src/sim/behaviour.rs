//! Behaviour of simulated edges: times of pulls, and faults.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::chance::{Chance, seconds};

/// The behaviour of simulated edges. By default, pulls take no time and nothing fails.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Behaviour {
    /// Duration of one pull. The images of a task are pulled one after another.
    pub pull: PullDurations,
    /// Fraction of the images that fail, from 0 to 1.
    pub fail_rate: f64,
    /// Size of an image in bytes, for progress. With 0 no progress is reported.
    pub image_bytes: u64,
    /// Average time that an edge's connection lasts before it is lost; then the edge dials again.
    pub disconnect_every: Option<Duration>,
    /// Average time between the first connection after a restart and the next restart of an edge. It repeats its
    /// running pull, and keeps its images and its ledger.
    pub restart_every: Option<Duration>,
    /// Most losses and restarts of one edge; `None` for no bound. With a bound, a job also ends on a machine that's too
    /// slow for anything but reconnecting edges.
    pub most_faults: Option<u32>,
    /// Longest wait between two dials. The default is that of real edges: up to a minute after some short sessions.
    pub redial_within: Option<Duration>,
    /// Seed of the random numbers. The same seed gives each edge the same durations, failures and faults.
    pub seed: u64,
}

/// The distribution of the durations of pulls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PullDurations {
    /// All pulls take the same time: `100ms`.
    Fixed(Duration),
    /// Uniform between two times: `1s..10s`.
    Between(Duration, Duration),
    /// Log-normal, as for downloads over many links: the median, and the time that 19 of 20 pulls stay below, such as
    /// `5s~60s`.
    LogNormal(Duration, Duration),
}

impl Default for PullDurations {
    fn default() -> Self {
        Self::Fixed(Duration::ZERO)
    }
}

impl PullDurations {
    /// Draws the next duration.
    pub(super) fn draw(self, chance: &mut Chance) -> Duration {
        /// 95 % of a normal distribution are below the median plus this many deviations.
        const NINETEEN_OF_TWENTY: f64 = 1.645;
        match self {
            Self::Fixed(duration) => duration,
            Self::Between(from, to) => chance.between(from, to),
            Self::LogNormal(median, most) => {
                let deviation = (most.as_secs_f64() / median.as_secs_f64()).ln() / NINETEEN_OF_TWENTY;
                seconds(median.as_secs_f64() * (deviation * chance.normal()).exp())
            }
        }
    }
}

impl fmt::Display for PullDurations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(Duration::ZERO) => f.write_str("0"),
            Self::Fixed(duration) => write!(f, "{duration:?}"),
            Self::Between(from, to) => write!(f, "{from:?}..{to:?}"),
            Self::LogNormal(median, most) => write!(f, "{median:?}~{most:?}"),
        }
    }
}

impl FromStr for PullDurations {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |part: &str| {
            let part = part.trim();
            // humantime requires a unit even for 0.
            if part == "0" { Ok(Duration::ZERO) } else { humantime::parse_duration(part) }.map_err(|error| {
                format!("{part:?} is not a duration ({error}); write 100ms, 1s..10s or 5s~60s")
            })
        };
        if let Some((from, to)) = text.split_once("..") {
            let (from, to) = (parse(from)?, parse(to)?);
            return if from <= to {
                Ok(Self::Between(from, to))
            } else {
                Err(format!("{text}: the second time must not be below the first"))
            };
        }
        if let Some((median, most)) = text.split_once('~') {
            let (median, most) = (parse(median)?, parse(most)?);
            return if Duration::ZERO < median && median <= most {
                Ok(Self::LogNormal(median, most))
            } else {
                Err(format!("{text}: in MEDIAN~MOST, the median must be above 0 and not above the other"))
            };
        }
        parse(text).map(Self::Fixed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pull_times_are_parsed() {
        let cases = [
            ("0", PullDurations::default()),
            ("100ms", PullDurations::Fixed(SECOND / 10)),
            ("1s..10s", PullDurations::Between(SECOND, 10 * SECOND)),
            ("1m", PullDurations::Fixed(60 * SECOND)),
            ("5s ~ 1m", PullDurations::LogNormal(5 * SECOND, 60 * SECOND)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for bad in ["", "5", "10s..1s", "0~5s", "9s~5s", "1s..", "fast"] {
            assert!(bad.parse::<PullDurations>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pull_times_follow_their_distribution() {
        const DRAWS: usize = 10_000;
        let draw = |pull: PullDurations| {
            let mut chance = Chance::new(3, 0);
            let mut drawn: Vec<_> = (0..DRAWS).map(|_| pull.draw(&mut chance)).collect();
            drawn.sort();
            drawn
        };
        let between = draw(PullDurations::Between(SECOND, 2 * SECOND));
        assert!(between[0] >= SECOND && between[DRAWS - 1] <= 2 * SECOND);
        let spread = draw(PullDurations::LogNormal(5 * SECOND, 60 * SECOND));
        let (median, most) = (spread[DRAWS / 2].as_secs_f64(), spread[DRAWS * 95 / 100].as_secs_f64());
        assert!((4.5..5.5).contains(&median) && (54.0..66.0).contains(&most), "{median} {most}");
    }
}
