//! What is done about the child of one image: one thing at a time, and not again at once.

use std::time::Duration;

use jiff::Timestamp;

use crate::shared::outcomes::WriteOutcome;
use crate::shared::pacing::Backoff;

/// After this a write without effect is made again, and a name that somebody else had is tried again.
const AGAIN: Duration = Duration::from_secs(30);
/// After a write that failed: doubled each time up to the second value, as for statuses.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// To what the template says: its fingerprint.
    Make,
    Change(u64),
    Delete,
}

#[derive(Debug)]
pub(super) struct Work {
    /// The last deed.
    last: Option<Deed>,
    in_flight: bool,
    /// The last deed is not done again before this.
    not_before: Option<Timestamp>,
    backoff: Backoff,
    /// Somebody else has the child's name.
    pub(super) taken: bool,
}

impl Default for Work {
    fn default() -> Self {
        Self { last: None, in_flight: false, not_before: None, backoff: RETRY, taken: false }
    }
}

impl Work {
    /// When this may be done; `None` while something else is under way.
    pub(super) fn due(&self, deed: Deed) -> Option<Timestamp> {
        if self.in_flight {
            return None;
        }
        let waits = self.not_before.filter(|_| self.last == Some(deed));
        Some(waits.unwrap_or(Timestamp::MIN))
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.in_flight
    }

    pub(super) fn begin(&mut self, deed: Deed) {
        (self.last, self.in_flight) = (Some(deed), true);
    }

    /// It ended. Says whether the child's name turns out to be somebody else's.
    pub(super) fn ended(&mut self, outcome: WriteOutcome, now: Timestamp) -> bool {
        self.in_flight = false;
        let wait = if outcome == WriteOutcome::Failed {
            self.backoff.next_wait()
        } else {
            self.backoff.reset();
            AGAIN
        };
        self.not_before = now.checked_add(wait).ok();
        let was_taken = self.taken;
        match outcome {
            WriteOutcome::Done => self.taken = false,
            WriteOutcome::Gone => self.taken = self.last == Some(Deed::Make),
            WriteOutcome::Failed => {}
        }
        self.taken && !was_taken
    }

    /// The child has come, or has gone: what was done had its effect, and may be done again.
    pub(super) fn had_effect(&mut self, deed: Deed) {
        if self.last == Some(deed) && !self.in_flight {
            self.last = None;
        }
        if deed == Deed::Make {
            self.taken = false;
        }
    }
}
