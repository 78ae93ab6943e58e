//! What a simulated fleet is like.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::chance::{Chance, seconds};

/// How simulated edges fare. The default: pulls take no time, and nothing ever goes wrong.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Behaviour {
    /// What one image takes. The images of a task are pulled one after another.
    pub pull: PullTime,
    /// The part of the images that fail, from 0 to 1.
    pub fail_rate: f64,
    /// Bytes of an image that the progress counts. 0: no progress is reported.
    pub image_bytes: u64,
    /// Each edge loses its connection so often, on the average, and dials again.
    pub disconnect_every: Option<Duration>,
    /// Each edge is restarted so often, on the average: what it was pulling is begun again; what it had pulled,
    /// and what its ledger says, stays.
    pub restart_every: Option<Duration>,
    /// Each waits no longer than this between two dials. As real edges do, unless told otherwise: after some sessions
    /// that did not last, up to a minute.
    pub redial_within: Option<Duration>,
    /// The same number gives the same durations, failures and faults, edge by edge.
    pub seed: u64,
}

/// How long pulls take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PullTime {
    /// All the same: `100ms`.
    Fixed(Duration),
    /// Evenly between two: `1s..10s`.
    Between(Duration, Duration),
    /// Log-normal, as downloads over many links are: half of them take up to the first, 19 of 20 up to the
    /// second, and some take very long: `5s~60s`.
    LogNormal(Duration, Duration),
}

impl Default for PullTime {
    fn default() -> Self {
        Self::Fixed(Duration::ZERO)
    }
}

impl PullTime {
    /// The next one.
    pub(super) fn draw(self, chance: &mut Chance) -> Duration {
        /// So many deviations above the median lie 95 % of a normal distribution.
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

impl fmt::Display for PullTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(Duration::ZERO) => f.write_str("0"),
            Self::Fixed(duration) => write!(f, "{duration:?}"),
            Self::Between(from, to) => write!(f, "{from:?}..{to:?}"),
            Self::LogNormal(median, most) => write!(f, "{median:?}~{most:?}"),
        }
    }
}

impl FromStr for PullTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |part: &str| {
            let part = part.trim();
            // "0" needs no unit.
            if part == "0" { Ok(Duration::ZERO) } else { humantime::parse_duration(part) }
                .map_err(|error| format!("{part:?} is no duration ({error}); write 100ms, 1s..10s or 5s~60s"))
        };
        if let Some((from, to)) = text.split_once("..") {
            let (from, to) = (parse(from)?, parse(to)?);
            return if from <= to {
                Ok(Self::Between(from, to))
            } else {
                Err(format!("{text}: it ends before it begins"))
            };
        }
        if let Some((median, most)) = text.split_once('~') {
            let (median, most) = (parse(median)?, parse(most)?);
            return if Duration::ZERO < median && median <= most {
                Ok(Self::LogNormal(median, most))
            } else {
                Err(format!("{text}: MEDIAN~MOST, where the median is above 0 and not above the other"))
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
    fn pull_times_are_read() {
        let cases = [
            ("0", PullTime::default()),
            ("100ms", PullTime::Fixed(SECOND / 10)),
            ("1s..10s", PullTime::Between(SECOND, 10 * SECOND)),
            ("1m", PullTime::Fixed(60 * SECOND)),
            ("5s ~ 1m", PullTime::LogNormal(5 * SECOND, 60 * SECOND)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for bad in ["", "5", "10s..1s", "0~5s", "9s~5s", "1s..", "fast"] {
            assert!(bad.parse::<PullTime>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_drawn_lies_where_it_should() {
        const DRAWS: usize = 10_000;
        let draw = |pull: PullTime| {
            let mut chance = Chance::new(3, 0);
            let mut drawn: Vec<_> = (0..DRAWS).map(|_| pull.draw(&mut chance)).collect();
            drawn.sort();
            drawn
        };
        let between = draw(PullTime::Between(SECOND, 2 * SECOND));
        assert!(between[0] >= SECOND && between[DRAWS - 1] <= 2 * SECOND);
        let spread = draw(PullTime::LogNormal(5 * SECOND, 60 * SECOND));
        let (median, most) = (spread[DRAWS / 2].as_secs_f64(), spread[DRAWS * 95 / 100].as_secs_f64());
        assert!((4.5..5.5).contains(&median) && (54.0..66.0).contains(&most), "{median} {most}");
    }
}
