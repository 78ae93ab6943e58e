//! When there is more to do than can be done: who is sent away, and until when.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::wire::{CloudMessage, encode};
use prepull_tunnel::Utf8Bytes;
use tokio::time::Instant;

/// Edges that are asked back for each second: a fifth of what a drain asks back to a successor that has nothing else
/// to do. Each that comes in vain costs a handshake, about a millisecond of a core with resumption.
const RETURNS_PER_SECOND: u32 = 100;
/// The least that an edge is sent away for: an overload that is over sooner is none that anybody would have seen.
const LEAST: Duration = Duration::from_secs(2);
/// The most: as long as an edge obeys. Reached by the 60,000th in a row.
const MOST: Duration = Duration::from_secs(600);

/// Gives each edge that is sent away a time of its own to come back, so that they do not all come at once, which
/// would be the next overload. Knows as well whether the controller keeps up.
#[derive(Debug)]
pub(super) struct Overload {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The next time that is nobody's yet.
    next_return: Instant,
    /// Until when the controller is taken to be behind.
    behind_until: Instant,
}

impl Overload {
    pub(super) fn new(now: Instant) -> Self {
        Self { state: Mutex::new(State { next_return: now, behind_until: now }) }
    }

    /// The controller has not taken a message for this long: for as long again nobody new is let in, since each
    /// begins with a message to it.
    pub(super) fn is_behind(&self, waited: Duration, now: Instant) {
        let mut state = self.state();
        state.behind_until = state.behind_until.max(now + waited);
    }

    /// Whether the controller has fallen behind of late.
    pub(super) fn lasts(&self, now: Instant) -> bool {
        now < self.state().behind_until
    }

    /// When the next one is to come back.
    pub(super) fn next_return(&self, now: Instant) -> Duration {
        let mut state = self.state();
        let at = state.next_return.max(now + LEAST).min(now + MOST);
        state.next_return = at + Duration::from_secs(1) / RETURNS_PER_SECOND;
        at - now
    }

    /// What the next one is told.
    pub(super) fn goaway(&self, reason: &str, now: Instant) -> Option<Utf8Bytes> {
        let goaway = CloudMessage::Goaway { after: self.next_return(now), reason: reason.to_owned() };
        // Far below the limit of a message: it always can be.
        encode(&goaway).ok().map(Utf8Bytes::from)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gets_a_time_of_its_own_and_none_waits_longer_than_it_would() {
        let start = Instant::now();
        let overload = Overload::new(start);
        let returns: Vec<_> = (0..300).map(|_| overload.next_return(start).as_millis()).collect();
        assert_eq!((returns[0], returns[1], returns[299]), (2000, 2010, 4990));
        // Those who come later do not come before those who came first.
        assert_eq!(overload.next_return(start + Duration::from_secs(1)).as_millis(), 4000);
        // What is over leaves nothing behind.
        assert_eq!(overload.next_return(start + Duration::from_secs(60)), LEAST);
        let last = (0..100_000).map(|_| overload.next_return(start)).last();
        assert_eq!(last, Some(MOST));
    }

    #[test]
    fn a_controller_that_fell_behind_is_left_alone_for_as_long_again() {
        let start = Instant::now();
        let (overload, second) = (Overload::new(start), Duration::from_secs(1));
        assert!(!overload.lasts(start));
        overload.is_behind(15 * second, start);
        assert!(overload.lasts(start + 14 * second));
        assert!(!overload.lasts(start + 15 * second));
    }
}
