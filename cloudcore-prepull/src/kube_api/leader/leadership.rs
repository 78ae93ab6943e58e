//! The leadership of this replica, to be checked before every write.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// A handle, cheap to clone and to ask. All clones give the same answer.
///
/// A term ends by the clock: nothing has to happen, and no task has to run, for [`Self::is_leader`] to become `false`. It
/// never becomes `true` again in the same process.
#[derive(Clone, Debug)]
pub(crate) struct Leadership(Arc<SharedTerm>);

#[derive(Debug)]
struct SharedTerm {
    term: Mutex<TermState>,
    changed: Condvar,
    /// `leaseTransitions` of the Lease as it was last read.
    transitions: AtomicI64,
}

#[derive(Debug)]
enum TermState {
    /// Not yet leading, and no leader is known, for this reason.
    Standby(String),
    /// Not yet leading; this replica does.
    Following(String),
    /// Leading until then; no other replica leads before.
    Leading {
        until: Instant,
    },
    /// Leading without an election: `--leader-elect=false`.
    Undisputed,
    Released,
    Lost(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TermEnd {
    Released,
    /// The term was lost, for this reason: the process must not continue.
    Lost(String),
}

impl Leadership {
    /// The leadership of a replica that does not lead yet.
    pub(crate) fn standby() -> Self {
        let term = TermState::Standby("no leader is known yet".to_owned());
        Self(Arc::new(SharedTerm {
            term: Mutex::new(term),
            changed: Condvar::new(),
            transitions: AtomicI64::new(0),
        }))
    }

    /// The leadership of a replica without an election: it always leads.
    pub(crate) fn undisputed() -> Self {
        let leadership = Self::standby();
        *leadership.0.term.lock() = TermState::Undisputed;
        leadership
    }

    /// Whether this replica may write now. Ask right before the write.
    pub(crate) fn is_leader(&self) -> bool {
        self.is_leader_at(Instant::now())
    }

    /// Like [`Self::is_leader`], at another time.
    pub(crate) fn is_leader_at(&self, now: Instant) -> bool {
        match *self.0.term.lock() {
            TermState::Leading { until } => now < until,
            TermState::Undisputed => true,
            TermState::Standby(_) | TermState::Following(_) | TermState::Released | TermState::Lost(_) => {
                false
            }
        }
    }

    /// Why this replica does not lead, for people; `None` while it leads.
    pub(crate) fn why_not(&self) -> Option<String> {
        let now = Instant::now();
        match &*self.0.term.lock() {
            TermState::Standby(why) | TermState::Lost(why) => Some(why.clone()),
            TermState::Following(leader) => Some(format!("{leader} leads")),
            TermState::Leading { until } => (now >= *until).then(|| OVERDUE.to_owned()),
            TermState::Undisputed => None,
            TermState::Released => Some("the Lease was released".to_owned()),
        }
    }

    /// The leader that this replica stands by for; `None` if it knows of none.
    pub(crate) fn leader(&self) -> Option<String> {
        match &*self.0.term.lock() {
            TermState::Following(leader) => Some(leader.clone()),
            _ => None,
        }
    }

    /// How often the Lease had changed hands when it was last read.
    pub(crate) fn transitions(&self) -> i64 {
        self.0.transitions.load(Ordering::Relaxed)
    }

    pub(super) fn saw_transitions(&self, transitions: i64) {
        self.0.transitions.store(transitions, Ordering::Relaxed);
    }

    /// Records why no leader is known. Has no effect once a term has begun.
    pub(super) fn stand_by(&self, why: String) {
        self.wait_as(TermState::Standby(why));
    }

    /// Records who leads instead. Has no effect once a term has begun.
    pub(super) fn follow_leader(&self, leader: String) {
        self.wait_as(TermState::Following(leader));
    }

    fn wait_as(&self, waiting: TermState) {
        let mut term = self.0.term.lock();
        if matches!(*term, TermState::Standby(_) | TermState::Following(_)) {
            *term = waiting;
        }
    }

    /// Begins a term, or extends it, until then. `false` if that time has passed, or if the earlier term is over: another
    /// replica may have held the Lease in between.
    pub(super) fn leads_until(&self, until: Instant, now: Instant) -> bool {
        let mut term = self.0.term.lock();
        let goes_on = match *term {
            TermState::Standby(_) | TermState::Following(_) => now < until,
            TermState::Leading { until: before } => now < before && now < until,
            TermState::Undisputed | TermState::Released | TermState::Lost(_) => false,
        };
        if goes_on {
            *term = TermState::Leading { until };
            self.0.changed.notify_all();
        }
        goes_on
    }

    /// Ends the term because another replica holds the Lease.
    pub(super) fn lose_term(&self, why: String) {
        self.end_term(TermState::Lost(why));
    }

    /// Ends the term because the Lease is about to be released.
    pub(super) fn release(&self) {
        self.end_term(TermState::Released);
    }

    fn end_term(&self, end: TermState) {
        let mut term = self.0.term.lock();
        if matches!(*term, TermState::Leading { .. }) {
            *term = end;
            self.0.changed.notify_all();
        }
    }

    /// Blocks until the term ends, by the clock or otherwise.
    pub(super) fn wait_for_end(&self) -> TermEnd {
        let mut term = self.0.term.lock();
        loop {
            let until = match &*term {
                TermState::Leading { until } => *until,
                TermState::Lost(why) => return TermEnd::Lost(why.clone()),
                TermState::Standby(_)
                | TermState::Following(_)
                | TermState::Undisputed
                | TermState::Released => {
                    return TermEnd::Released;
                }
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                *term = TermState::Lost(OVERDUE.to_owned());
                continue;
            }
            self.0.changed.wait_for(&mut term, left);
        }
    }
}

/// The reason of a term that ended by the clock.
const OVERDUE: &str = "the Lease was not renewed within --lease-renew-deadline";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_expired_term_does_not_resume() {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        assert!(!leadership.is_leader_at(now));
        assert!(leadership.leads_until(now + SECOND, now));
        assert!(leadership.is_leader_at(now + SECOND / 2));
        assert!(!leadership.is_leader_at(now + SECOND));
        // The answer to a renewal comes too late: another replica may have led in between.
        assert!(!leadership.leads_until(now + 3 * SECOND, now + SECOND));
        assert!(!leadership.is_leader_at(now + SECOND));
        // In time.
        assert!(leadership.leads_until(now + 2 * SECOND, now + SECOND / 2));
        assert!(leadership.is_leader_at(now + SECOND));
    }

    #[test]
    fn an_overdue_term_does_not_begin() {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        assert!(!leadership.leads_until(now, now));
        assert!(leadership.leads_until(now + SECOND, now), "the next attempt may");
    }

    #[test]
    fn a_lost_term_does_not_come_back() {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        assert!(leadership.leads_until(now + SECOND, now));
        leadership.lose_term("b leads".to_owned());
        assert!(!leadership.is_leader_at(now));
        assert!(!leadership.leads_until(now + SECOND, now));
        leadership.release();
        assert_eq!(leadership.wait_for_end(), TermEnd::Lost("b leads".to_owned()));
        assert_eq!(leadership.why_not().as_deref(), Some("b leads"));
    }

    #[test]
    fn a_standby_names_the_leader() {
        let (leadership, now) = (Leadership::standby(), Instant::now());
        leadership.follow_leader("a".to_owned());
        assert_eq!(
            (leadership.leader().as_deref(), leadership.why_not().as_deref()),
            (Some("a"), Some("a leads"))
        );
        leadership.stand_by("the Lease cannot be acquired".to_owned());
        assert_eq!(leadership.leader(), None, "it could not take over");
        leadership.follow_leader("a".to_owned());
        assert!(leadership.leads_until(now + 60 * SECOND, now));
        leadership.follow_leader("a".to_owned());
        assert_eq!((leadership.leader(), leadership.why_not()), (None, None));
        assert!(Leadership::undisputed().is_leader_at(now + 3600 * SECOND));
    }
}
