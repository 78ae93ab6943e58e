//! The writes of one status: one at a time, paced, and only when something changed.

use std::time::Duration;

use jiff::Timestamp;

use crate::shared::writes::{Pace, Writes};

/// Nobody waits for a status: what changes is written as fast as the pace allows.
const NO_LONGER: (Duration, Duration) = (Duration::ZERO, Duration::ZERO);

#[derive(Debug)]
pub(super) struct Writing<S> {
    /// What the API server has; `None` where that is not known, or nothing.
    stored: Option<S>,
    sent: Option<(u64, S)>,
    writes: Writes,
}

impl<S: Clone + PartialEq> Writing<S> {
    pub(super) fn new(stored: Option<S>) -> Self {
        Self { stored, sent: None, writes: Writes::default() }
    }

    pub(super) fn stored(&self) -> Option<&S> {
        self.stored.as_ref()
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.sent.is_some()
    }

    /// Something may have changed.
    pub(super) fn touch(&mut self, pace: Pace) {
        self.writes.touch(pace);
    }

    pub(super) fn due(&self) -> Option<Timestamp> {
        self.writes.due(NO_LONGER)
    }

    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// What is to be written, if it is not what the API server has.
    pub(super) fn begin(&mut self, status: S, now: Timestamp) -> Option<S> {
        if self.stored.as_ref() == Some(&status) {
            self.writes.settle();
            return None;
        }
        self.sent = Some((self.writes.begin(now), status.clone()));
        Some(status)
    }

    /// A write ended. Where it failed it may have been made all the same.
    pub(super) fn ended(&mut self, done: bool, now: Timestamp) {
        match self.sent.take() {
            Some((version, status)) if done => {
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
