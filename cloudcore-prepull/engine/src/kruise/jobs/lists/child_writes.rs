//! The writes of a list's child for one image: one at a time, and none that had no effect in quick succession.

use std::time::Duration;

use jiff::Timestamp;

use crate::shared::outcomes::WriteOutcome;
use crate::shared::pacing::Backoff;

/// Before a write that had no effect is repeated, or a name is tried that another object had.
const REPEAT: Duration = Duration::from_secs(30);
/// The waits after writes that failed, as for statuses.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildWrite {
    Create,
    /// Replace the spec; the list's template has this fingerprint.
    Update(u64),
    Delete,
}

#[derive(Debug)]
pub(super) struct ChildWrites {
    last: Option<ChildWrite>,
    in_flight: bool,
    /// Before this the last write is not repeated; another one may be made.
    not_before: Option<Timestamp>,
    backoff: Backoff,
    /// Whether the last write was not made.
    is_refused: bool,
    /// Whether an object that does not belong to the list has the child's name.
    is_name_taken: bool,
    /// The fingerprint of the list's work, if a child was deleted for it: a policy may give each child another one, so
    /// none is deleted twice for the same.
    deleted_for: Option<u64>,
}

impl Default for ChildWrites {
    fn default() -> Self {
        Self {
            last: None,
            in_flight: false,
            not_before: None,
            backoff: RETRY,
            is_refused: false,
            is_name_taken: false,
            deleted_for: None,
        }
    }
}

impl ChildWrites {
    /// Whether a child that has finished may be deleted, so that the next one does this work.
    pub(super) fn may_run_again(&self, work: u64) -> bool {
        self.deleted_for != Some(work)
    }

    /// The list wants this work. An earlier one may come back with another edit, and is done again then.
    pub(super) fn want_work(&mut self, work: u64) {
        self.deleted_for.take_if(|known| *known != work);
    }

    /// A child is deleted, and the next one does this work.
    pub(super) fn note_deletion(&mut self, work: u64) {
        self.deleted_for = Some(work);
    }

    /// When the write may be made; `None` while one is in flight.
    pub(super) fn due_at(&self, write: ChildWrite) -> Option<Timestamp> {
        if self.in_flight {
            return None;
        }
        let wait = self.not_before.filter(|_| self.last == Some(write));
        Some(wait.unwrap_or(Timestamp::MIN))
    }

    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    pub(super) fn is_name_taken(&self) -> bool {
        self.is_name_taken
    }

    /// Whether the child could not be created, perhaps because another object has its name.
    pub(super) fn waits_for_name(&self) -> bool {
        self.last == Some(ChildWrite::Create) && !self.in_flight && self.is_refused
    }

    /// Lets the last write be repeated at once.
    pub(super) fn retry(&mut self) {
        self.not_before = None;
    }

    pub(super) fn begin_write(&mut self, write: ChildWrite) {
        (self.last, self.in_flight) = (Some(write), true);
    }

    /// Ends the write that is in flight. Returns whether the child's name turns out to be taken.
    pub(super) fn end_write(&mut self, outcome: WriteOutcome, now: Timestamp) -> bool {
        self.in_flight = false;
        self.is_refused = outcome != WriteOutcome::Done;
        let wait = if outcome == WriteOutcome::Failed {
            self.backoff.next_wait()
        } else {
            self.backoff.reset();
            REPEAT
        };
        self.not_before = now.checked_add(wait).ok();
        let was_taken = self.is_name_taken;
        match outcome {
            WriteOutcome::Done => self.is_name_taken = false,
            WriteOutcome::Gone => self.is_name_taken = self.last == Some(ChildWrite::Create),
            WriteOutcome::Failed if self.last == Some(ChildWrite::Delete) => self.deleted_for = None,
            WriteOutcome::Failed => {}
        }
        self.is_name_taken && !was_taken
    }

    /// The child has come or gone: the write had its effect, and may be repeated at once.
    pub(super) fn confirm(&mut self, write: ChildWrite) {
        if self.last == Some(write) && !self.in_flight {
            self.last = None;
        }
        if write == ChildWrite::Create {
            self.is_name_taken = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    #[test]
    fn only_a_refused_creation_waits_for_a_name() {
        for (write, outcome, waits) in [
            (ChildWrite::Create, WriteOutcome::Gone, true),
            (ChildWrite::Create, WriteOutcome::Failed, true),
            (ChildWrite::Create, WriteOutcome::Done, false),
            (ChildWrite::Update(1), WriteOutcome::Failed, false),
        ] {
            let mut writes = ChildWrites::default();
            writes.begin_write(write);
            writes.end_write(outcome, NOW);
            assert_eq!(writes.waits_for_name(), waits, "{write:?} {outcome:?}");
            writes.begin_write(write);
            assert!(!writes.waits_for_name());
        }
    }

    #[test]
    fn a_child_that_comes_may_be_made_again() {
        let mut writes = ChildWrites::default();
        writes.begin_write(ChildWrite::Create);
        assert!(writes.end_write(WriteOutcome::Gone, NOW));
        writes.confirm(ChildWrite::Delete);
        assert!(writes.is_name_taken() && writes.due_at(ChildWrite::Create) > Some(NOW));
        writes.confirm(ChildWrite::Create);
        assert_eq!(
            (writes.is_name_taken(), writes.due_at(ChildWrite::Create)),
            (false, Some(Timestamp::MIN))
        );
    }
}
