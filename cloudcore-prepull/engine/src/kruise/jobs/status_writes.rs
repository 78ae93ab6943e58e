//! The writes of one job's status: one at a time, paced, and only if something has changed.

use std::time::Duration;

use jiff::Timestamp;

use crate::shared::writes::{Pace, Writes};

/// The gaps for results and for progress, where they are longer than a second: these statuses have none, since each of
/// their writes is urgent.
const NO_LONGER_GAPS: (Duration, Duration) = (Duration::ZERO, Duration::ZERO);

#[derive(Debug)]
pub(super) struct StatusWrites<S> {
    /// The status that the API server has; `None` if it has none, or if that is not known.
    stored: Option<S>,
    /// The status whose write is in flight, and the version of the state that it carries.
    in_flight: Option<(u64, S)>,
    writes: Writes,
}

impl<S: Clone + PartialEq> StatusWrites<S> {
    pub(super) fn new(stored: Option<S>) -> Self {
        Self { stored, in_flight: None, writes: Writes::default() }
    }

    pub(super) fn stored(&self) -> Option<&S> {
        self.stored.as_ref()
    }

    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Marks the status as possibly changed.
    pub(super) fn touch(&mut self, pace: Pace) {
        self.writes.touch(pace);
    }

    /// When the next write may be made; `None` if nothing is to be written, or a write is in flight.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.writes.due(NO_LONGER_GAPS)
    }

    /// Begins a write, unless the API server has this status. Returns what to write.
    pub(super) fn begin(&mut self, status: S, now: Timestamp) -> Option<S> {
        if self.stored.as_ref() == Some(&status) {
            self.writes.settle();
            return None;
        }
        self.in_flight = Some((self.writes.begin(now), status.clone()));
        Some(status)
    }

    /// Ends a write. One that failed may have been made all the same, so that it is not known what is stored.
    pub(super) fn end(&mut self, succeeded: bool, now: Timestamp) {
        match self.in_flight.take() {
            Some((version, status)) if succeeded => {
                self.writes.done(version);
                self.stored = Some(status);
            }
            Some(_) => {
                self.writes.failed(now);
                self.stored = None;
            }
            None => {}
        }
    }
}
