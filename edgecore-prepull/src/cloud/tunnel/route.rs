//! The choice of the next address and of the wait before dialling it. Pure.
//!
//! A *round* is one attempt at each address. There's no wait within a round, because an address without a listener is
//! normal: a standby doesn't listen. There's a wait between rounds, so that after an outage the edges return spread
//! over time.

use std::num::NonZeroUsize;
use std::time::Duration;

/// The longest wait that a `Goaway` may ask for. A drain is over in minutes, and a wrong value must not keep a node
/// away for days.
const LONGEST_GOAWAY: Duration = Duration::from_secs(600);

/// How an attempt at the current address ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptEnd {
    /// No session was established.
    Failed,
    /// A session broke off. As far as we know, the address still works.
    Lost,
    /// A session ended because its server hangs or is shutting down, so that the next attempt would hang as well.
    Gone,
    /// The server sent `Goaway`: it's shutting down or overloaded.
    Goaway {
        /// The wait that it asked for.
        after: Duration,
    },
    /// The edge ended the session itself in order to use its new certificate.
    Renewed,
}

/// The position in the list of addresses, and the waits so far.
#[derive(Debug)]
pub(super) struct Route {
    addresses: NonZeroUsize,
    index: usize,
    /// Attempts in this round.
    tried: usize,
    waits: RoundWaits,
    stable_after: Duration,
}

/// The waits between rounds: a random part of the first wait plus all the time waited so far. So no edge stays away for
/// much more than twice as long as the cloud.
///
/// If every round doubled the ceiling, however short its random wait was, a few of ten thousand edges would try five
/// times within the two seconds of a restart, and then wait for half a minute.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundWaits {
    /// The ceiling of the first wait.
    first: Duration,
    /// The ceiling of any wait.
    last: Duration,
    waited: Duration,
}

impl RoundWaits {
    pub(super) fn new(first: Duration, last: Duration) -> Self {
        Self { first, last, waited: Duration::ZERO }
    }

    /// The next wait; `chance`, from 0 to 1, is the jitter.
    fn next(&mut self, chance: f64) -> Duration {
        let ceiling = (self.first + self.waited).min(self.last);
        let wait = ceiling.mul_f64(chance.clamp(0.0, 1.0));
        // Anything beyond the last ceiling makes no difference.
        self.waited = (self.waited + wait).min(self.last);
        wait
    }

    fn reset(&mut self) {
        self.waited = Duration::ZERO;
    }
}

impl Route {
    /// A route that begins at the first address. A session of at least `stable_after` resets the waits.
    pub(super) fn new(addresses: NonZeroUsize, waits: RoundWaits, stable_after: Duration) -> Self {
        Self { addresses, index: 0, tried: 0, waits, stable_after }
    }

    /// The index of the address to dial.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Moves on after an attempt; `lasted` is the duration of its session, if there was one. Returns the wait before the
    /// next attempt; `chance`, from 0 to 1, is the jitter.
    pub(super) fn advance(&mut self, ended: AttemptEnd, lasted: Option<Duration>, chance: f64) -> Duration {
        if lasted.is_some_and(|lasted| lasted >= self.stable_after) {
            self.waits.reset();
        }
        self.tried += 1;
        let round_goes_on = ended == AttemptEnd::Failed && self.tried < self.addresses.get();
        if !round_goes_on {
            self.tried = 0;
        }
        // Stay at an address that worked; otherwise move on to the next one.
        if !matches!(ended, AttemptEnd::Lost | AttemptEnd::Renewed) {
            self.index = (self.index + 1) % self.addresses;
        }
        match ended {
            AttemptEnd::Failed if round_goes_on => Duration::ZERO,
            AttemptEnd::Failed | AttemptEnd::Lost | AttemptEnd::Gone => self.waits.next(chance),
            // The wait applies to the other addresses too: cloudcore spreads its edges to protect the replica that
            // takes over.
            AttemptEnd::Goaway { after } => after.min(LONGEST_GOAWAY),
            // This isn't a failure.
            AttemptEnd::Renewed => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn route(addresses: usize) -> Route {
        let waits = RoundWaits::new(Duration::from_secs(1), MINUTE);
        Route::new(addresses.try_into().unwrap(), waits, MINUTE)
    }

    /// The index and the wait in seconds after each end, with the jitter at its highest.
    fn steps(addresses: usize, ends: &[(AttemptEnd, Option<u64>)]) -> Vec<(usize, u64)> {
        let mut route = route(addresses);
        let mut go = |(ended, lasted): &(AttemptEnd, Option<u64>)| {
            let wait = route.advance(*ended, lasted.map(Duration::from_secs), 1.0);
            (route.index(), wait.as_secs())
        };
        ends.iter().map(&mut go).collect()
    }

    #[test]
    fn only_rounds_have_a_wait_that_doubles() {
        let failed = (AttemptEnd::Failed, None);
        for (addresses, expected) in [
            (1, vec![(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (0, 60), (0, 60)]),
            (2, vec![(1, 0), (0, 1), (1, 0), (0, 2), (1, 0), (0, 4)]),
            (3, vec![(1, 0), (2, 0), (0, 1), (1, 0), (2, 0), (0, 2)]),
        ] {
            assert_eq!(steps(addresses, &vec![failed; expected.len()]), expected);
        }
    }

    #[test]
    fn the_next_round_keeps_a_working_address() {
        let goaway = AttemptEnd::Goaway { after: Duration::from_secs(7) };
        let long = AttemptEnd::Goaway { after: 10 * LONGEST_GOAWAY };
        for (ended, expected) in [
            // The session was with the second of three addresses.
            (AttemptEnd::Lost, (1, 1)),
            (AttemptEnd::Renewed, (1, 0)),
            (AttemptEnd::Gone, (2, 1)),
            (goaway, (2, 7)),
            (long, (2, 600)),
        ] {
            let failed = (AttemptEnd::Failed, None);
            let served = (ended, Some(5));
            let steps = steps(3, &[failed, served, failed, failed, failed]);
            let (at, _) = expected;
            // The rest of the round: each other address once.
            let round = [((at + 1) % 3, 0), ((at + 2) % 3, 0)];
            assert_eq!(steps[..4], [(1, 0), expected, round[0], round[1]], "{ended:?}");
            assert_eq!(steps[4].0, at, "{ended:?}");
            assert!(steps[4].1 > 0, "{ended:?}: a round is over");
        }
    }

    #[test]
    fn a_goaway_is_obeyed_without_a_session() {
        let goaway = AttemptEnd::Goaway { after: Duration::from_secs(7) };
        assert_eq!(steps(2, &[(goaway, None), (goaway, None)]), [(1, 7), (0, 7)]);
    }

    #[test]
    fn only_a_stable_session_resets_the_waits() {
        let lost = |lasted| (AttemptEnd::Lost, Some(lasted));
        assert_eq!(
            steps(2, &[lost(1), lost(59), lost(59), lost(60), lost(1)]),
            [(0, 1), (0, 2), (0, 4), (0, 1), (0, 2)]
        );
    }

    #[test]
    fn no_edge_stays_away_twice_as_long() {
        // Pseudo-random numbers from 0 to 1, the same in every run.
        let mut state = 1_u64;
        let mut chance = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from(u32::try_from(state >> 32).unwrap()) / f64::from(u32::MAX)
        };
        for away in [1500, 2200, 5000, 20_000].map(Duration::from_millis) {
            let back = (0..10_000).map(|_| {
                // The session is lost, and each attempt is refused immediately until the cloud is back.
                let (mut route, mut ended, mut now) = (route(1), AttemptEnd::Lost, Duration::ZERO);
                while now < away {
                    now += route.advance(
                        ended,
                        Some(3 * MINUTE).filter(|_| ended == AttemptEnd::Lost),
                        chance(),
                    );
                    ended = AttemptEnd::Failed;
                }
                now
            });
            let last = back.max().unwrap();
            assert!(
                last <= 2 * away + Duration::from_secs(1),
                "away {away:?}: the last one is back at {last:?}"
            );
        }
    }

    #[test]
    fn a_failover_takes_at_most_one_wait() {
        // A stable session breaks off, its server is gone, and the second server has taken over.
        let steps = steps(2, &[(AttemptEnd::Lost, Some(3600)), (AttemptEnd::Failed, None)]);
        assert_eq!(steps, [(0, 1), (1, 0)]);
    }
}
