//! Overload control: whom to send away, and when each edge is to come back.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::task::NodeName;
use prepull_api::wire::{CloudMessage, encode};
use prepull_tunnel::Utf8Bytes;
use tokio::time::Instant;

use crate::edges::EdgeMetrics;

/// Edges that are asked back per second: a fifth of what a drain asks back to a successor that has nothing else to
/// do. Each one that comes in vain costs a handshake, about a millisecond of a core with resumption.
const RETURNS_PER_SECOND: u32 = 100;
/// The shortest time that an edge is sent away for. An overload that ends sooner would not have been noticed.
const MIN_DELAY: Duration = Duration::from_secs(2);
/// The longest time that an edge is sent away for, which is also the longest that it obeys. The 60,000th edge in a
/// row reaches it.
const MAX_DELAY: Duration = Duration::from_secs(600);
/// The most nodes whose return time is remembered: as many as there are distinct times up to [`MAX_DELAY`].
const MAX_REMEMBERED: usize = 60_000;
/// The interval between two sweeps of past return times. Each sweep visits all of them.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Why an edge is sent away.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum OverloadReason {
    /// The limit of sessions is reached.
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

/// Remembers whether the controller keeps up, and gives each edge that is sent away a return time of its own: if all
/// returned at once, they would cause the next overload.
#[derive(Debug)]
pub(super) struct Overload {
    state: Mutex<State>,
    metrics: EdgeMetrics,
}

#[derive(Debug)]
struct State {
    /// The next return time that no edge has been given.
    next_free: Instant,
    /// The return time of each node. A node that comes too early is told the same time again, so that it delays
    /// no other.
    given: HashMap<NodeName, Instant>,
    /// When past return times are removed next.
    next_sweep: Instant,
    /// The controller counts as behind until this time.
    behind_until: Instant,
}

impl Overload {
    pub(super) fn new(metrics: EdgeMetrics, now: Instant) -> Self {
        let state = State { next_free: now, given: HashMap::new(), next_sweep: now, behind_until: now };
        Self { state: Mutex::new(state), metrics }
    }

    /// Notes that the controller has not taken a message for `waited`. For as long again no new session begins,
    /// since each begins with a message to the controller.
    pub(super) fn mark_controller_behind(&self, waited: Duration, now: Instant) {
        let mut state = self.lock();
        state.behind_until = state.behind_until.max(now + waited);
    }

    /// Whether the controller has recently fallen behind.
    pub(super) fn is_controller_behind(&self, now: Instant) -> bool {
        let mut state = self.lock();
        state.sweep(now);
        now < state.behind_until
    }

    /// Counts the edge as sent away, and makes the message that tells it when to come back.
    pub(super) fn goaway(&self, node: &NodeName, reason: OverloadReason, now: Instant) -> Option<Utf8Bytes> {
        self.metrics.count_sent_away(reason.label());
        let after = self.assign_return(node, now);
        // Always `Some`: the message is far below the size limit.
        encode(&CloudMessage::Goaway { after, reason: reason.to_string() }).ok().map(Utf8Bytes::from)
    }

    /// Assigns the node its return time, and tells how far away it is.
    fn assign_return(&self, node: &NodeName, now: Instant) -> Duration {
        let mut state = self.lock();
        state.sweep(now);
        if let Some(at) = state.given.get(node).filter(|at| **at > now) {
            return *at - now;
        }
        let at = state.next_free.max(now + MIN_DELAY).min(now + MAX_DELAY);
        state.next_free = at + Duration::from_secs(1) / RETURNS_PER_SECOND;
        // Nodes beyond the limit need not be remembered: they are told the longest delay, and cannot be told more.
        if state.given.len() < MAX_REMEMBERED {
            state.given.insert(node.clone(), at);
        }
        at - now
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn sweep(&mut self, now: Instant) {
        if now >= self.next_sweep && !self.given.is_empty() {
            self.given.retain(|_, at| *at > now);
            self.given.shrink_to(2 * self.given.len());
            self.next_sweep = now + SWEEP_INTERVAL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: usize) -> NodeName {
        format!("edge-{number}").as_str().into()
    }

    #[test]
    fn return_times_are_distinct_and_bounded() {
        let start = Instant::now();
        let overload = Overload::new(EdgeMetrics::default(), start);
        let returns: Vec<_> = (0..300).map(|n| overload.assign_return(&node(n), start).as_millis()).collect();
        assert_eq!((returns[0], returns[1], returns[299]), (2000, 2010, 4990));
        // A node that is sent away later does not return before one that was sent away earlier.
        assert_eq!(overload.assign_return(&node(300), start + Duration::from_secs(1)).as_millis(), 4000);
        // A past overload does not delay the next one.
        assert_eq!(overload.assign_return(&node(0), start + Duration::from_secs(60)), MIN_DELAY);
        let last = (1000..101_000).map(|n| overload.assign_return(&node(n), start)).last();
        assert_eq!(last, Some(MAX_DELAY));
        assert_eq!(overload.lock().given.len(), MAX_REMEMBERED);
    }

    #[test]
    fn a_node_that_returns_early_is_told_the_same_time_again() {
        let start = Instant::now();
        let (overload, ms) = (Overload::new(EdgeMetrics::default(), start), Duration::from_millis);
        assert_eq!(overload.assign_return(&node(0), start), ms(2000));
        for millis in 1..2000 {
            assert_eq!(overload.assign_return(&node(0), start + ms(millis)), ms(2000 - millis));
        }
        assert_eq!(overload.assign_return(&node(1), start), ms(2010));
        // It came at its time: it gets a new one.
        assert_eq!(overload.assign_return(&node(0), start + ms(2000)), MIN_DELAY);
        // Past return times are removed even if no further node is sent away.
        assert!(!overload.is_controller_behind(start + ms(3000)));
        assert_eq!(overload.lock().given.len(), 1);
        assert!(!overload.is_controller_behind(start + ms(4000)));
        assert_eq!(overload.lock().given.len(), 0);
    }

    #[test]
    fn the_controller_counts_as_behind_for_as_long_as_it_stalled() {
        let start = Instant::now();
        let (overload, second) = (Overload::new(EdgeMetrics::default(), start), Duration::from_secs(1));
        assert!(!overload.is_controller_behind(start));
        overload.mark_controller_behind(15 * second, start);
        assert!(overload.is_controller_behind(start + 14 * second));
        assert!(!overload.is_controller_behind(start + 15 * second));
    }
}
