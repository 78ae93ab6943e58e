//! Which address to dial next, and after how long. Knows neither sockets nor a clock.
//!
//! A *round* is one try of each address. Within it nobody waits: an address that is not served is an ordinary
//! thing, since a standby does not listen. Between two rounds the backoff applies, so that all the edges of a
//! cloud that is gone come back spread over time.

use std::num::NonZeroUsize;
use std::time::Duration;

use super::backoff::Backoff;

/// The longest that a `Goaway` is obeyed: a drain is over in minutes, and a mistake must not cost a node for
/// days.
const LONGEST_GOAWAY: Duration = Duration::from_secs(600);

/// How a try of the present address ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// No session came of it.
    Failed,
    /// A session broke off. The address works, as far as is known.
    Lost,
    /// A session ended, and its server hangs or is leaving: it would hold the next try up as well.
    Gone,
    /// The server is going away, or has too much to do.
    Goaway {
        /// Not before this.
        after: Duration,
    },
    /// We ended it ourselves, and come again at once.
    Renewed,
}

/// A way through the addresses.
#[derive(Debug)]
pub(super) struct Route {
    addresses: NonZeroUsize,
    at: usize,
    /// In this round.
    tried: usize,
    backoff: Backoff,
    stable_after: Duration,
}

impl Route {
    /// Begins at the first address. A session that lasted for `stable_after` was a good one: the waits start again
    /// from the first.
    pub(super) fn new(addresses: NonZeroUsize, backoff: Backoff, stable_after: Duration) -> Self {
        Self { addresses, at: 0, tried: 0, backoff, stable_after }
    }

    /// The address to dial.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Goes on after a try whose session, if there was one, lasted for so long. Returns the wait before the next
    /// try; `chance` is from 0 to 1.
    pub(super) fn after(&mut self, ended: Ended, lasted: Option<Duration>, chance: f64) -> Duration {
        if lasted.is_some_and(|lasted| lasted >= self.stable_after) {
            self.backoff.reset();
        }
        self.tried += 1;
        let round_goes_on = ended == Ended::Failed && self.tried < self.addresses.get();
        if !round_goes_on {
            self.tried = 0;
        }
        // A new round begins where it went well, or else with the others.
        if !matches!(ended, Ended::Lost | Ended::Renewed) {
            self.at = (self.at + 1) % self.addresses;
        }
        match ended {
            Ended::Failed if round_goes_on => Duration::ZERO,
            Ended::Failed | Ended::Lost | Ended::Gone => self.backoff.next(chance),
            // Also before the others are tried: cloudcore spreads its edges for the sake of whoever takes them.
            Ended::Goaway { after } => after.min(LONGEST_GOAWAY),
            // Nothing is wrong, and the cloud is there.
            Ended::Renewed => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn route(addresses: usize) -> Route {
        let backoff = Backoff::new(Duration::from_secs(1), MINUTE);
        Route::new(addresses.try_into().unwrap(), backoff, MINUTE)
    }

    /// Where it goes, and after how many seconds, with the chance always at its highest.
    fn steps(addresses: usize, ends: &[(Ended, Option<u64>)]) -> Vec<(usize, u64)> {
        let mut route = route(addresses);
        let mut go = |(ended, lasted): &(Ended, Option<u64>)| {
            let wait = route.after(*ended, lasted.map(Duration::from_secs), 1.0);
            (route.at(), wait.as_secs())
        };
        ends.iter().map(&mut go).collect()
    }

    #[test]
    fn a_round_is_without_waits_and_the_next_one_waits_longer() {
        let failed = (Ended::Failed, None);
        for (addresses, expected) in [
            (1, vec![(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (0, 60), (0, 60)]),
            (2, vec![(1, 0), (0, 1), (1, 0), (0, 2), (1, 0), (0, 4)]),
            (3, vec![(1, 0), (2, 0), (0, 1), (1, 0), (2, 0), (0, 2)]),
        ] {
            assert_eq!(steps(addresses, &vec![failed; expected.len()]), expected);
        }
    }

    #[test]
    fn the_end_of_a_session_says_where_the_next_round_begins() {
        let goaway = Ended::Goaway { after: Duration::from_secs(7) };
        let long = Ended::Goaway { after: 10 * LONGEST_GOAWAY };
        for (ended, expected) in [
            // The second of three served; its server came back, or the others are tried in turn.
            (Ended::Lost, (1, 1)),
            (Ended::Renewed, (1, 0)),
            (Ended::Gone, (2, 1)),
            (goaway, (2, 7)),
            (long, (2, 600)),
        ] {
            let failed = (Ended::Failed, None);
            let served = (ended, Some(5));
            let steps = steps(3, &[failed, served, failed, failed, failed]);
            let (at, _) = expected;
            // The whole round from there, each address once.
            let round = [((at + 1) % 3, 0), ((at + 2) % 3, 0)];
            assert_eq!(steps[..4], [(1, 0), expected, round[0], round[1]], "{ended:?}");
            assert_eq!(steps[4].0, at, "{ended:?}");
            assert!(steps[4].1 > 0, "{ended:?}: a round is over");
        }
    }

    #[test]
    fn a_goaway_without_a_session_counts_as_well() {
        let goaway = Ended::Goaway { after: Duration::from_secs(7) };
        assert_eq!(steps(2, &[(goaway, None), (goaway, None)]), [(1, 7), (0, 7)]);
    }

    #[test]
    fn only_a_session_that_lasted_starts_the_waits_anew() {
        let lost = |lasted| (Ended::Lost, Some(lasted));
        assert_eq!(
            steps(2, &[lost(1), lost(59), lost(59), lost(60), lost(1)]),
            [(0, 1), (0, 2), (0, 4), (0, 1), (0, 2)]
        );
    }

    #[test]
    fn a_failover_takes_one_wait_at_the_most() {
        // A good session breaks off, its server is gone, the second of two has taken over.
        let steps = steps(2, &[(Ended::Lost, Some(3600)), (Ended::Failed, None)]);
        assert_eq!(steps, [(0, 1), (1, 0)]);
    }
}
