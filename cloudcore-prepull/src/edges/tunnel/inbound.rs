//! The rate limits of one node's incoming messages, over all its sessions.

use std::time::{Duration, Instant as StdInstant};

use prepull_engine::shared::pacing::TokenBucket;
use tokio::time::Instant;

/// The sustained messages per second of a node. The protocol requires at most one `Progress` a second for each of
/// 64 tasks, and some `Accepted` and pongs: less than half of this.
const MESSAGES_PER_SECOND: f64 = 150.0;
/// The burst of messages: after an outage, a `Result` and an `Accepted` for each of 64 tasks, with a margin.
const MESSAGE_BURST: f64 = 400.0;
/// The sustained bytes per second of a node: one `Progress` a second for 64 tasks with a few images each is half of
/// it.
const BYTES_PER_SECOND: f64 = 512.0 * 1024.0;
/// The burst of bytes: after an outage, the results of one node are a few KiB each, rarely some 100 KiB.
const BYTE_BURST: f64 = 4.0 * 1024.0 * 1024.0;
/// The most messages other than results that may exceed the rate although reading was delayed for each: three seconds'
/// worth of the rate, which no agent of ours comes near. The count is reset when the node has come to rest rather than
/// at the first message within the rate: on a busy machine reading resumes a little late, so that there always is one.
const MAX_DELAYED: u32 = 450;
/// The refilled part of the message burst from which a node counts as at rest.
const REST_LEVEL: f64 = MESSAGE_BURST / 4.0;

/// Limits the messages and bytes that one node may send. Excess is delayed, which TCP passes on to the peer. Results
/// never end a session, since the edge sends them again until they are acknowledged.
#[derive(Clone, Debug)]
pub(super) struct InboundLimit {
    messages: TokenBucket<StdInstant>,
    bytes: TokenBucket<StdInstant>,
    /// Messages that exceeded the rate since the node was last at rest.
    delayed: u32,
    /// Whether the node has sent a message of a kind that only a newer version knows.
    has_sent_unknown: bool,
}

/// The peer keeps sending although its messages are delayed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flooding;

impl InboundLimit {
    pub(super) fn new() -> Self {
        Self {
            messages: TokenBucket::new(MESSAGES_PER_SECOND, MESSAGE_BURST),
            bytes: TokenBucket::new(BYTES_PER_SECOND, BYTE_BURST),
            delayed: 0,
            has_sent_unknown: false,
        }
    }

    /// Whether a message of a kind that only a newer version knows is the first one.
    pub(super) fn is_first_unknown(&mut self) -> bool {
        !std::mem::replace(&mut self.has_sent_unknown, true)
    }

    /// How long to wait before the first message of a session is read.
    pub(super) fn owed(&mut self, now: Instant) -> Duration {
        let now = now.into_std();
        self.messages.wait_for(0.0, now).max(self.bytes.wait_for(0.0, now))
    }

    /// Counts a `Hello` like the answers to its tasks, and returns how long to pause reading.
    pub(super) fn count_hello(&mut self, tasks: usize, bytes: u64, now: Instant) -> Duration {
        for _ in 0..tasks {
            self.messages.take(1.0, now.into_std());
        }
        // It never floods: the session has waited until nothing was owed.
        self.count_message(bytes, true, now).unwrap_or_default()
    }

    /// Counts the bytes that came last in a session, such as an invalid message that has ended it.
    pub(super) fn count_end(&mut self, bytes: u64, now: Instant) {
        // A few MiB, which an f64 holds exactly.
        #[allow(clippy::cast_precision_loss)]
        self.bytes.take(bytes as f64, now.into_std());
    }

    /// Whether the node is at rest: nothing of its bursts is used.
    pub(super) fn is_full(&mut self, now: Instant) -> bool {
        let now = now.into_std();
        self.messages.is_full(now) && self.bytes.is_full(now)
    }

    /// Counts an incoming message and the bytes that have come with it, and returns how long to pause reading.
    pub(super) fn count_message(
        &mut self,
        bytes: u64,
        is_result: bool,
        now: Instant,
    ) -> Result<Duration, Flooding> {
        let now = now.into_std();
        let by_count = self.messages.take(1.0, now);
        // A few MiB, which an f64 holds exactly.
        #[allow(clippy::cast_precision_loss)]
        let by_size = self.bytes.take(bytes as f64, now);
        if self.messages.level(now) >= REST_LEVEL {
            self.delayed = 0;
        } else if !by_count.is_zero() && !is_result {
            self.delayed += 1;
            if self.delayed > MAX_DELAYED {
                return Err(Flooding);
            }
        }
        Ok(by_count.max(by_size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends for ten minutes as fast as messages are read. Returns how many were sent.
    fn send_for_ten_minutes(
        bytes: u64,
        is_result: impl Fn(u32) -> bool,
        pause: Duration,
    ) -> (u32, Result<(), Flooding>) {
        let start = Instant::now();
        let (mut now, mut inbound, mut sent) = (start, InboundLimit::new(), 0);
        while now < start + Duration::from_secs(600) {
            match inbound.count_message(bytes, is_result(sent), now) {
                Ok(delay) => now += delay.max(pause),
                Err(flooding) => return (sent, Err(flooding)),
            }
            sent += 1;
        }
        (sent, Ok(()))
    }

    #[test]
    fn the_busiest_honest_edge_is_not_delayed() {
        assert_eq!(send_for_ten_minutes(2000, |_| false, Duration::from_millis(10)).0, 60_000);
    }

    #[test]
    fn results_never_end_the_session() {
        let (sent, outcome) = send_for_ten_minutes(1000, |_| true, Duration::ZERO);
        assert_eq!(outcome, Ok(()));
        assert!((90_000..91_000).contains(&sent), "{sent}");
        let (sent, outcome) = send_for_ten_minutes(1024 * 1024, |_| true, Duration::ZERO);
        assert_eq!(outcome, Ok(()));
        assert!((300..310).contains(&sent), "{sent}");
    }

    #[test]
    fn large_progress_never_ends_the_session() {
        assert_eq!(send_for_ten_minutes(100_000, |_| false, Duration::ZERO).1, Ok(()));
    }

    #[test]
    fn a_flood_ends_the_session() {
        let (sent, outcome) = send_for_ten_minutes(30, |_| false, Duration::ZERO);
        assert_eq!(outcome, Err(Flooding));
        assert!(sent < 1000, "{sent}");
    }

    #[test]
    fn a_flood_ends_a_late_reading_session() {
        let late = Duration::from_millis(20);
        let (mut now, mut sent) = (Instant::now(), 0);
        let mut inbound = InboundLimit::new();
        while let Ok(delay) = inbound.count_message(30, false, now) {
            now += if delay.is_zero() { delay } else { delay + late };
            sent += 1;
            assert!(sent < 10_000, "the flood did not end");
        }
        assert!(sent > 800, "{sent}");
    }

    #[test]
    fn a_hello_counts_like_its_tasks() {
        let (now, mut inbound) = (Instant::now(), InboundLimit::new());
        assert!(inbound.is_full(now));
        for _ in 0..6 {
            assert!(inbound.count_hello(64, 8192, now).is_zero());
        }
        assert!(inbound.owed(now).is_zero() && !inbound.is_full(now));
        inbound.count_hello(64, 8192, now);
        let owed = inbound.owed(now);
        assert!(!owed.is_zero() && inbound.owed(now + owed).is_zero());
        let later = now + Duration::from_secs(10);
        assert!(inbound.is_full(later));
        inbound.count_end(5 * 1024 * 1024, later);
        assert!(!inbound.owed(later).is_zero());
    }

    #[test]
    fn rest_resets_the_delayed_message_count() {
        let mut now = Instant::now();
        let mut inbound = InboundLimit::new();
        // After each outage, the node sends more than the burst.
        for _ in 0..10 {
            for _ in 0..600 {
                now += inbound.count_message(30, false, now).unwrap();
            }
            now += Duration::from_secs(1);
        }
    }
}
