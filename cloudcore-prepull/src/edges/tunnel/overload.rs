//! Overload control: whom to send away, and when each edge is to come back.

use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use prepull_api::wire::{CloudMessage, encode_frame};
use prepull_engine::shared::pacing::{BucketPerKey, TokenBucket};
use prepull_tunnel::Utf8Bytes;
use tokio::time::Instant;

use crate::edges::EdgeMetrics;

/// Edges that are asked back per second: a fifth of what a drain asks back to a successor that has nothing else to
/// do. Each one that comes in vain costs a handshake, about a millisecond of a core with resumption.
const RETURNS_PER_SECOND: f64 = 100.0;
/// The shortest time that an edge is sent away for. An overload that ends sooner would not have been noticed.
const MIN_DELAY: Duration = Duration::from_secs(2);
/// The longest time that an edge is sent away for, which is also the longest that it obeys. The 60,000th edge in a
/// row reaches it.
const MAX_DELAY: Duration = Duration::from_secs(600);
/// How often one node counts as sent away, per second: once in the shortest delay. One that comes back too early, again
/// and again, delays no other.
const COUNTED_PER_SECOND: f64 = 0.5;
/// The most nodes that we tell apart: more than have a return of their own below [`MAX_DELAY`]. Further ones don't count.
const MAX_NODES: usize = 65_536;

#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum OverloadReason {
    #[error("cloudcore is overloaded: it has as many sessions as it takes")]
    SessionsFull,
    /// The controller recently did not take a message in time.
    #[error("cloudcore is overloaded: messages wait too long")]
    ControllerBehind,
    /// The controller did not take a message of this session in time.
    #[error("cloudcore is overloaded: a message was not taken within {0:?}")]
    MessageNotTaken(Duration),
}

impl OverloadReason {
    fn label(self) -> &'static str {
        match self {
            Self::SessionsFull => "full",
            Self::ControllerBehind => "behind",
            Self::MessageNotTaken(_) => "not_taken",
        }
    }
}

/// Remembers whether the controller keeps up, and spreads the returns of those that are sent away: the more there are,
/// the later the next one returns. If all returned at once, they would cause the next overload.
#[derive(Debug)]
pub(super) struct Overload {
    state: Mutex<OverloadState>,
    metrics: EdgeMetrics,
}

#[derive(Debug)]
struct OverloadState {
    /// The returns to come. It's in debt by the time until the last one.
    returns: TokenBucket<std::time::Instant>,
    /// Which nodes count as sent away once more.
    nodes: BucketPerKey<NodeName, std::time::Instant>,
    /// The controller counts as behind until this time.
    behind_until: Instant,
}

impl Overload {
    pub(super) fn new(metrics: EdgeMetrics, now: Instant) -> Self {
        let state = OverloadState {
            returns: TokenBucket::new(RETURNS_PER_SECOND, 1.0),
            nodes: BucketPerKey::new(COUNTED_PER_SECOND, 1.0, MAX_NODES),
            behind_until: now,
        };
        Self { state: Mutex::new(state), metrics }
    }

    /// Notes that the controller has not taken a message for `waited`. For as long again no new session begins,
    /// since each begins with a message to the controller.
    pub(super) fn mark_controller_behind(&self, waited: Duration, now: Instant) {
        let mut state = self.state.lock();
        state.behind_until = state.behind_until.max(now + waited);
    }

    pub(super) fn is_controller_behind(&self, now: Instant) -> bool {
        now < self.state.lock().behind_until
    }

    /// Counts the edge as sent away, and makes the message with the time to come back.
    pub(super) fn goaway(&self, node: &NodeName, reason: OverloadReason, now: Instant) -> Option<Utf8Bytes> {
        self.metrics.count_sent_away(reason.label());
        let after = self.assign_return(node, now);
        // Always `Some`: the message is far below the size limit.
        encode_frame(&CloudMessage::Goaway { after, reason: reason.to_string() }).ok().map(Utf8Bytes::from)
    }

    /// How long the node should stay away.
    fn assign_return(&self, node: &NodeName, now: Instant) -> Duration {
        let mut state = self.state.lock();
        let now = now.into_std();
        let delay = MIN_DELAY + state.returns.wait_for(0.0, now);
        if delay < MAX_DELAY && state.nodes.try_take(node, now).is_ok() {
            state.returns.take(1.0, now);
        }
        delay.min(MAX_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: usize) -> NodeName {
        format!("edge-{number}").as_str().into()
    }

    #[test]
    fn returns_are_spread_and_bounded() {
        let start = Instant::now();
        let overload = Overload::new(EdgeMetrics::default(), start);
        let returns: Vec<_> = (0..300).map(|n| overload.assign_return(&node(n), start).as_millis()).collect();
        assert_eq!((returns[0], returns[1], returns[2], returns[299]), (2000, 2000, 2010, 4980));
        // A node that is sent away later does not return before one that was sent away earlier.
        assert_eq!(overload.assign_return(&node(300), start + Duration::from_secs(1)).as_millis(), 3990);
        // A past overload does not delay the next one.
        assert_eq!(overload.assign_return(&node(0), start + Duration::from_secs(60)), MIN_DELAY);
        let last = (1000..101_000).map(|n| overload.assign_return(&node(n), start)).last();
        assert_eq!(last, Some(MAX_DELAY));
    }

    #[test]
    fn a_node_that_returns_early_delays_no_other() {
        let start = Instant::now();
        let (overload, ms) = (Overload::new(EdgeMetrics::default(), start), Duration::from_millis);
        for millis in 0..2000 {
            let after = overload.assign_return(&node(0), start + ms(millis));
            assert!(after <= MIN_DELAY + ms(10), "{after:?} after {millis} ms");
        }
        assert_eq!(overload.assign_return(&node(1), start + ms(1999)), MIN_DELAY);
    }

    #[test]
    fn after_a_stall_the_controller_counts_as_behind() {
        let start = Instant::now();
        let (overload, second) = (Overload::new(EdgeMetrics::default(), start), Duration::from_secs(1));
        assert!(!overload.is_controller_behind(start));
        overload.mark_controller_behind(15 * second, start);
        assert!(overload.is_controller_behind(start + 14 * second));
        assert!(!overload.is_controller_behind(start + 15 * second));
    }
}
