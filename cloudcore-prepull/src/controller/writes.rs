//! When the status of a job is written, and what waits for it.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::task::{NodeName, TaskId};

/// Between two writes of one object when a start or an acknowledgement waits for it: short enough that nobody
/// waits, long enough that a burst of results makes one write.
const URGENT_GAP: Duration = Duration::from_millis(200);
/// Between two writes of one object when there is only progress to tell.
const PROGRESS_GAP: Duration = Duration::from_secs(1);
/// After a write that failed: doubled each time up to the second value. The API server may be restarting.
const WRITE_RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// What waits until the API server has a version of the status.
#[derive(Debug)]
pub(super) enum Deferred {
    /// The node's start is recorded: its task may go out.
    Dispatch(NodeName),
    /// The node's result is recorded: it may be forgotten.
    Ack(NodeName, TaskId),
}

/// Counts versions, paces the writes, and holds back what must not happen before one of them.
#[derive(Debug, Default)]
pub(super) struct Writes {
    /// Of the state in memory.
    version: u64,
    /// What the API server has.
    written: u64,
    in_flight: bool,
    urgent: bool,
    not_before: Option<Timestamp>,
    last: Option<Timestamp>,
    failures: u32,
    deferred: VecDeque<(u64, Deferred)>,
}

impl Writes {
    /// The state changed. `urgent`: something waits for it to be written.
    pub(super) fn touch(&mut self, urgent: bool) {
        self.version += 1;
        self.urgent |= urgent;
    }

    /// Holds back until the state as it is now is written. Returns what need not wait.
    pub(super) fn after(&mut self, deferred: Deferred) -> Option<Deferred> {
        if self.written >= self.version {
            return Some(deferred);
        }
        self.urgent = true;
        self.deferred.push_back((self.version, deferred));
        None
    }

    /// When the next write may be made; `None` where there is nothing to write, or one is under way.
    pub(super) fn due(&self) -> Option<Timestamp> {
        if self.in_flight || self.version == self.written {
            return None;
        }
        let gap = if self.urgent { URGENT_GAP } else { PROGRESS_GAP };
        let paced = self.last.and_then(|last| last.checked_add(gap).ok()).unwrap_or(Timestamp::MIN);
        Some(paced.max(self.not_before.unwrap_or(Timestamp::MIN)))
    }

    /// A write begins; it carries the version that is returned.
    pub(super) fn begin(&mut self, now: Timestamp) -> u64 {
        self.in_flight = true;
        self.urgent = false;
        self.last = Some(now);
        self.version
    }

    /// The write failed: another is due after a while.
    pub(super) fn failed(&mut self, now: Timestamp) {
        self.in_flight = false;
        let backoff = (WRITE_RETRY.0 * 2_u32.saturating_pow(self.failures)).min(WRITE_RETRY.1);
        self.failures = (self.failures + 1).min(10);
        self.not_before = now.checked_add(backoff).ok();
        self.urgent = true;
    }

    /// The API server has the version. Returns what waited for it, in order.
    pub(super) fn done(&mut self, version: u64) -> Vec<Deferred> {
        self.in_flight = false;
        self.failures = 0;
        self.not_before = None;
        self.written = self.written.max(version);
        let ready = self.deferred.iter().take_while(|(needs, _)| *needs <= self.written).count();
        self.deferred.drain(..ready).map(|(_, deferred)| deferred).collect()
    }
}
