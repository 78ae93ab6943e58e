//! The rates that a session may send at, with the clock passed in.

use std::time::Duration;

use prepull_engine::shared::pacing::TokenBucket;
use tokio::time::Instant;

/// A token bucket on the monotonic clock.
pub(crate) type Bucket = TokenBucket<std::time::Instant>;

/// Messages a second that a session may send in the long run. The most that the protocol asks for is one
/// `Progress` a second for each of 64 tasks and some `Accepted` and pongs; twice that is not.
const MESSAGES_PER_SECOND: f64 = 150.0;
/// Messages at once: after an outage, a `Result` and an `Accepted` for each of 64 tasks, and then some.
const MESSAGE_BURST: f64 = 400.0;
/// Bytes a second in the long run: a `Progress` a second of 64 tasks with a few images each is half of it.
const BYTES_PER_SECOND: f64 = 512.0 * 1024.0;
/// Bytes at once: the results of one node after an outage are a few KiB each, seldom some 100 KiB.
const BYTE_BURST: f64 = 4.0 * 1024.0 * 1024.0;
/// Messages other than results that came in faster than the rate although reading was held back for each: three
/// seconds' worth of what the rate allows. No agent of ours comes near the rate. They are forgotten when the node has
/// come to rest, rather than at the first message that was in time: on a busy machine reading goes on a little later
/// than it might, and then there always is one.
const FLOOD: u32 = 450;
/// What of the burst is there again when a node has come to rest.
const AT_REST: f64 = MESSAGE_BURST / 4.0;

/// Keeps one session's share of the cloud's attention. What is beyond is delayed (the peer feels it through
/// TCP); results are only ever delayed, since they are sent again until they are heard.
#[derive(Clone, Debug)]
pub(super) struct Inbound {
    messages: Bucket,
    bytes: Bucket,
    delayed: u32,
}

/// The peer does not stop where it is held back.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flooding;

impl Inbound {
    pub(super) fn new() -> Self {
        Self {
            messages: Bucket::new(MESSAGES_PER_SECOND, MESSAGE_BURST),
            bytes: Bucket::new(BYTES_PER_SECOND, BYTE_BURST),
            delayed: 0,
        }
    }

    /// Counts a message that came in. The answer is how long nothing more is to be read.
    pub(super) fn admit(
        &mut self,
        bytes: usize,
        is_result: bool,
        now: Instant,
    ) -> Result<Duration, Flooding> {
        let now = now.into_std();
        let by_count = self.messages.take(1.0, now);
        // A message is at most 1 MiB, which an f64 holds exactly.
        #[allow(clippy::cast_precision_loss)]
        let by_size = self.bytes.take(bytes as f64, now);
        if self.messages.level(now) >= AT_REST {
            self.delayed = 0;
        } else if !by_count.is_zero() && !is_result {
            self.delayed += 1;
            if self.delayed > FLOOD {
                return Err(Flooding);
            }
        }
        Ok(by_count.max(by_size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends as fast as it is read, for ten minutes.
    fn run(bytes: usize, is_result: impl Fn(u32) -> bool, pause: Duration) -> (u32, Result<(), Flooding>) {
        let start = Instant::now();
        let (mut now, mut inbound, mut sent) = (start, Inbound::new(), 0);
        while now < start + Duration::from_secs(600) {
            match inbound.admit(bytes, is_result(sent), now) {
                Ok(delay) => now += delay.max(pause),
                Err(flooding) => return (sent, Err(flooding)),
            }
            sent += 1;
        }
        (sent, Ok(()))
    }

    #[test]
    fn the_busiest_honest_edge_is_not_held_back() {
        assert_eq!(run(2000, |_| false, Duration::from_millis(10)).0, 60_000);
    }

    #[test]
    fn results_are_delayed_but_never_end_the_session() {
        let (sent, outcome) = run(1000, |_| true, Duration::ZERO);
        assert_eq!(outcome, Ok(()));
        assert!((90_000..91_000).contains(&sent), "{sent}");
        let (sent, outcome) = run(1024 * 1024, |_| true, Duration::ZERO);
        assert_eq!(outcome, Ok(()));
        assert!((300..310).contains(&sent), "{sent}");
    }

    #[test]
    fn large_progress_is_delayed_only() {
        assert_eq!(run(100_000, |_| false, Duration::ZERO).1, Ok(()));
    }

    #[test]
    fn a_flood_ends_the_session() {
        let (sent, outcome) = run(30, |_| false, Duration::ZERO);
        assert_eq!(outcome, Err(Flooding));
        assert!(sent < 1000, "{sent}");
    }

    #[test]
    fn a_flood_ends_the_session_also_where_reading_goes_on_late() {
        let late = Duration::from_millis(20);
        let (mut now, mut sent) = (Instant::now(), 0);
        let mut inbound = Inbound::new();
        while let Ok(delay) = inbound.admit(30, false, now) {
            now += if delay.is_zero() { delay } else { delay + late };
            sent += 1;
            assert!(sent < 10_000, "it goes on and on");
        }
        assert!(sent > 800, "{sent}");
    }

    #[test]
    fn a_node_that_has_come_to_rest_begins_anew() {
        let mut now = Instant::now();
        let mut inbound = Inbound::new();
        // Each outage brings some more than the burst.
        for _ in 0..10 {
            for _ in 0..600 {
                now += inbound.admit(30, false, now).unwrap();
            }
            now += Duration::from_secs(1);
        }
    }
}
