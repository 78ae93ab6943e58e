//! The pace of a job, from samples while we follow it.

use std::collections::VecDeque;
use std::time::Duration;

use super::view::JobPace;

/// What is looked back on: long enough for reports that are written every few seconds, short enough to notice a link that
/// has become slow.
const WINDOW: Duration = Duration::from_secs(60);
/// The time between two samples. There are at most 120 then.
const STEP: Duration = Duration::from_millis(500);
/// Before that, a pace is chance.
const SHORTEST: Duration = Duration::from_secs(3);

/// Samples of the last minute.
#[derive(Debug, Default)]
pub(crate) struct PaceMeter {
    samples: VecDeque<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    bytes: u64,
    done: f64,
}

impl PaceMeter {
    /// Takes in how far the job is after `at`, and returns its pace, once there is one.
    pub(crate) fn observe(&mut self, at: Duration, bytes: u64, done: f64) -> Option<JobPace> {
        if self.samples.back().is_some_and(|last| done < last.done || bytes < last.bytes) {
            // Another round: the samples of the last one don't apply.
            self.samples.clear();
        }
        if self.samples.back().is_none_or(|last| at >= last.at + STEP) {
            self.samples.push_back(Sample { at, bytes, done });
        }
        // One sample beyond the window stays, to have all of it.
        while self.samples.get(1).is_some_and(|next| at >= next.at + WINDOW) {
            self.samples.pop_front();
        }
        let first = self.samples.front()?;
        let passed = at.checked_sub(first.at).filter(|passed| *passed >= SHORTEST)?.as_secs_f64();
        #[allow(clippy::cast_precision_loss)] // it becomes a rate for people
        Some(JobPace { bytes: (bytes - first.bytes) as f64 / passed, done: (done - first.done) / passed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_pace_covers_the_last_minute() {
        let mut meter = PaceMeter::default();
        assert_eq!(meter.observe(seconds(0), 1000, 0.0), None, "what was there before has no rate");
        assert_eq!(meter.observe(seconds(2), 3000, 0.1), None);
        let first = meter.observe(seconds(10), 11_000, 0.5);
        assert_eq!(first, Some(JobPace { bytes: 1000.0, done: 0.05 }));
        // Nothing happens for a long time.
        for second in 11..90 {
            meter.observe(seconds(second), 11_000, 0.5);
        }
        assert_eq!(meter.observe(seconds(90), 11_000, 0.5), Some(JobPace::default()));
        assert!(meter.samples.len() < 130);
    }

    #[test]
    fn another_round_begins_anew() {
        let mut meter = PaceMeter::default();
        meter.observe(seconds(0), 0, 0.0);
        meter.observe(seconds(10), 100, 1.0);
        assert_eq!(meter.observe(seconds(11), 50, 0.5), None);
        assert_eq!(meter.observe(seconds(15), 90, 0.7).map(|pace| pace.bytes), Some(10.0));
    }
}
