//! Counters that all edges of a fleet share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prepull_api::task::JobUid;
use tokio::sync::watch;

/// The counters of a fleet.
pub(super) struct FleetCounters {
    /// Sessions that are up now.
    pub(super) connected: watch::Sender<usize>,
    /// Number of the roll call, and how many edges have connected since: see [`super::Fleet::start_roll_call`].
    pub(super) present: watch::Sender<(u64, usize)>,
    pub(super) pulls: AtomicU64,
    pub(super) whole: AtomicU64,
    /// Complete images that their task pulled again, by job.
    twice: Mutex<BTreeMap<JobUid, u64>>,
    pub(super) tasks: AtomicUsize,
    pub(super) running: AtomicUsize,
    pub(super) most_running: AtomicUsize,
    pub(super) received: AtomicU64,
    pub(super) ended: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) received_messages: AtomicU64,
    pub(super) sent_messages: AtomicU64,
    pub(super) sessions: AtomicU64,
    pub(super) cuts: AtomicU64,
    pub(super) restarts: AtomicU64,
    first_task: AtomicU64,
    last_task: AtomicU64,
    /// Origin of `first_task` and `last_task`.
    born: Instant,
}

/// Counts of a fleet since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetTally {
    /// Sessions that are up now.
    pub connected: usize,
    /// Sessions that came up.
    pub sessions: u64,
    /// Connections that were cut on purpose.
    pub cuts: u64,
    /// Edges that were restarted on purpose.
    pub restarts: u64,
    /// Tasks that arrived. A task that is assigned again is counted once.
    pub tasks: u64,
    /// Tasks that ended on their edge.
    pub ended: u64,
    /// Tasks that ended without success.
    pub failed: u64,
    /// Pulls that were begun.
    pub pulls: u64,
    /// Pulls that completed.
    pub whole: u64,
    /// Complete images that their task pulled again. Must be 0.
    pub pulled_twice: u64,
    /// Edges that are at work now.
    pub running: u64,
    /// Largest number of edges that were at work at the same time.
    pub most_at_once: usize,
    /// Tasks in the ledgers, which are not acknowledged yet.
    pub open: usize,
    /// Messages from the cloud.
    pub received_messages: u64,
    /// Messages to the cloud, including those that were lost without a session.
    pub sent_messages: u64,
}

impl FleetCounters {
    pub(super) fn new() -> Self {
        Self {
            connected: watch::Sender::default(),
            present: watch::Sender::default(),
            pulls: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            twice: Mutex::default(),
            tasks: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            received: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            received_messages: AtomicU64::new(0),
            sent_messages: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            first_task: AtomicU64::new(u64::MAX),
            last_task: AtomicU64::new(0),
            born: Instant::now(),
        }
    }

    /// Counts a complete image of this job that's pulled again.
    pub(super) fn pull_twice(&self, job: &JobUid) {
        *self.twice.lock().unwrap_or_else(PoisonError::into_inner).entry(job.clone()).or_default() += 1;
    }

    /// Complete images of these jobs that were pulled again.
    pub(super) fn pulled_twice(&self, counts: impl Fn(&JobUid) -> bool) -> u64 {
        let twice = self.twice.lock().unwrap_or_else(PoisonError::into_inner);
        twice.iter().filter(|(job, _)| counts(job)).map(|(_, images)| images).sum()
    }

    pub(super) fn tally(&self) -> FleetTally {
        let number = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        FleetTally {
            connected: *self.connected.borrow(),
            sessions: number(&self.sessions),
            cuts: number(&self.cuts),
            restarts: number(&self.restarts),
            tasks: number(&self.received),
            ended: number(&self.ended),
            failed: number(&self.failed),
            pulls: number(&self.pulls),
            whole: number(&self.whole),
            pulled_twice: self.pulled_twice(|_| true),
            running: self.running.load(Ordering::SeqCst) as u64,
            most_at_once: self.most_running.load(Ordering::SeqCst),
            open: self.tasks.load(Ordering::SeqCst),
            received_messages: number(&self.received_messages),
            sent_messages: number(&self.sent_messages),
        }
    }

    /// Counts a task that arrived.
    pub(super) fn count_task(&self) {
        let now = u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.first_task.fetch_min(now, Ordering::SeqCst);
        self.last_task.fetch_max(now, Ordering::SeqCst);
        self.received.fetch_add(1, Ordering::SeqCst);
    }

    /// Arrival of the first and the last task since [`Self::reset_task_times`].
    pub(super) fn times(&self) -> Option<(Instant, Instant)> {
        let first = self.first_task.load(Ordering::SeqCst);
        let at = |nanos| self.born + Duration::from_nanos(nanos);
        (first != u64::MAX).then(|| (at(first), at(self.last_task.load(Ordering::SeqCst))))
    }

    pub(super) fn reset_task_times(&self) {
        self.first_task.store(u64::MAX, Ordering::SeqCst);
        self.last_task.store(0, Ordering::SeqCst);
    }

    /// Counts an edge that begins to work.
    pub(super) fn begin_work(&self) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
    }

    /// Counts an edge that stops working, whether or not its task has ended.
    pub(super) fn end_work(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}
