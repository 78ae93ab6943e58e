//! When there is more to do than can be done: who is sent away, and until when.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::task::NodeName;
use prepull_api::wire::{CloudMessage, encode};
use prepull_tunnel::Utf8Bytes;
use tokio::time::Instant;

use super::Meters;

/// Edges that are asked back for each second: a fifth of what a drain asks back to a successor that has nothing else
/// to do. Each that comes in vain costs a handshake, about a millisecond of a core with resumption.
const RETURNS_PER_SECOND: u32 = 100;
/// The least that an edge is sent away for: an overload that is over sooner is none that anybody would have seen.
const LEAST: Duration = Duration::from_secs(2);
/// The most: as long as an edge obeys. Reached by the 60,000th in a row.
const MOST: Duration = Duration::from_secs(600);
/// Nodes whose time is remembered: as many as there are times until then.
const REMEMBERED: usize = 60_000;
/// Between two looks whose time has passed: each goes through all of them.
const FORGET: Duration = Duration::from_secs(1);

/// Why an edge is sent away.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum Why {
    /// The bound on sessions is reached.
    #[error("cloudcore is overloaded: it has as many sessions as it takes")]
    Full,
    /// The controller has fallen behind of late.
    #[error("cloudcore is overloaded: messages wait too long")]
    Behind,
    /// The controller has not taken what this one said.
    #[error("cloudcore is overloaded: a message was not taken within {0:?}")]
    NotTaken(Duration),
}

impl Why {
    fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Behind => "behind",
            Self::NotTaken(_) => "not_taken",
        }
    }
}

/// Gives each edge that is sent away a time of its own to come back, so that they do not all come at once, which
/// would be the next overload. Knows as well whether the controller keeps up.
#[derive(Debug)]
pub(super) struct Overload {
    state: Mutex<State>,
    meters: Meters,
}

#[derive(Debug)]
struct State {
    /// The next time that is nobody's yet.
    next_return: Instant,
    /// The time that each was given: who comes before it is told it once more, and moves nobody else's.
    given: HashMap<NodeName, Instant>,
    /// When those are looked through next.
    forget: Instant,
    /// Until when the controller is taken to be behind.
    behind_until: Instant,
}

impl Overload {
    pub(super) fn new(meters: Meters, now: Instant) -> Self {
        let state = State { next_return: now, given: HashMap::new(), forget: now, behind_until: now };
        Self { state: Mutex::new(state), meters }
    }

    /// The controller has not taken a message for this long: for as long again nobody new is let in, since each
    /// begins with a message to it.
    pub(super) fn is_behind(&self, waited: Duration, now: Instant) {
        let mut state = self.state();
        state.behind_until = state.behind_until.max(now + waited);
    }

    /// Whether the controller has fallen behind of late.
    pub(super) fn lasts(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.forget_what_passed(now);
        now < state.behind_until
    }

    /// When this one is to come back.
    fn next_return(&self, node: &NodeName, now: Instant) -> Duration {
        let mut state = self.state();
        state.forget_what_passed(now);
        if let Some(at) = state.given.get(node).filter(|at| **at > now) {
            return *at - now;
        }
        let at = state.next_return.max(now + LEAST).min(now + MOST);
        state.next_return = at + Duration::from_secs(1) / RETURNS_PER_SECOND;
        // Who does not fit in is told the most in any case, and nobody can be told more.
        if state.given.len() < REMEMBERED {
            state.given.insert(node.clone(), at);
        }
        at - now
    }

    /// What this one is told.
    pub(super) fn goaway(&self, node: &NodeName, why: Why, now: Instant) -> Option<Utf8Bytes> {
        self.meters.sent_away(why.label());
        let goaway = CloudMessage::Goaway { after: self.next_return(node, now), reason: why.to_string() };
        // Far below the limit of a message: it always can be.
        encode(&goaway).ok().map(Utf8Bytes::from)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn forget_what_passed(&mut self, now: Instant) {
        if now >= self.forget && !self.given.is_empty() {
            self.given.retain(|_, at| *at > now);
            self.given.shrink_to(2 * self.given.len());
            self.forget = now + FORGET;
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
    fn each_gets_a_time_of_its_own_and_none_waits_longer_than_it_would() {
        let start = Instant::now();
        let overload = Overload::new(Meters::default(), start);
        let returns: Vec<_> = (0..300).map(|n| overload.next_return(&node(n), start).as_millis()).collect();
        assert_eq!((returns[0], returns[1], returns[299]), (2000, 2010, 4990));
        // Those who come later do not come before those who came first.
        assert_eq!(overload.next_return(&node(300), start + Duration::from_secs(1)).as_millis(), 4000);
        // What is over leaves nothing behind.
        assert_eq!(overload.next_return(&node(0), start + Duration::from_secs(60)), LEAST);
        let last = (1000..101_000).map(|n| overload.next_return(&node(n), start)).last();
        assert_eq!(last, Some(MOST));
        assert_eq!(overload.state().given.len(), REMEMBERED);
    }

    #[test]
    fn whoever_does_not_wait_is_told_the_same_time_and_moves_nobody_elses() {
        let start = Instant::now();
        let (overload, ms) = (Overload::new(Meters::default(), start), Duration::from_millis);
        assert_eq!(overload.next_return(&node(0), start), ms(2000));
        for millis in 1..2000 {
            assert_eq!(overload.next_return(&node(0), start + ms(millis)), ms(2000 - millis));
        }
        assert_eq!(overload.next_return(&node(1), start), ms(2010));
        // It came in time: it gets another.
        assert_eq!(overload.next_return(&node(0), start + ms(2000)), LEAST);
        // What has passed is forgotten, also when nobody is sent away any more.
        assert!(!overload.lasts(start + ms(3000)));
        assert_eq!(overload.state().given.len(), 1);
        assert!(!overload.lasts(start + ms(4000)));
        assert_eq!(overload.state().given.len(), 0);
    }

    #[test]
    fn a_controller_that_fell_behind_is_left_alone_for_as_long_again() {
        let start = Instant::now();
        let (overload, second) = (Overload::new(Meters::default(), start), Duration::from_secs(1));
        assert!(!overload.lasts(start));
        overload.is_behind(15 * second, start);
        assert!(overload.lasts(start + 14 * second));
        assert!(!overload.lasts(start + 15 * second));
    }
}
