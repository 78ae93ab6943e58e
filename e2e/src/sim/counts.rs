//! What the edges of a fleet count together.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Shared by all edges.
pub(super) struct Counts {
    pub(super) connected: watch::Sender<usize>,
    /// Which roll call it is, and how many have answered: see [`super::Fleet::call_the_roll`].
    pub(super) present: watch::Sender<(u64, usize)>,
    pub(super) pulls: AtomicU64,
    pub(super) whole: AtomicU64,
    pub(super) twice: AtomicU64,
    pub(super) tasks: AtomicUsize,
    pub(super) running: AtomicUsize,
    pub(super) most_running: AtomicUsize,
    pub(super) received: AtomicU64,
    pub(super) ended: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) heard: AtomicU64,
    pub(super) said: AtomicU64,
    pub(super) sessions: AtomicU64,
    pub(super) cuts: AtomicU64,
    pub(super) restarts: AtomicU64,
    first_task: AtomicU64,
    last_task: AtomicU64,
    /// What the times count from.
    born: Instant,
}

/// What a fleet has done so far. The numbers count from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Sessions that are up now.
    pub connected: usize,
    /// Sessions that came up.
    pub sessions: u64,
    /// Connections that were cut on purpose.
    pub cuts: u64,
    /// Edges that were restarted on purpose.
    pub restarts: u64,
    /// Tasks that came in. One that is assigned again is counted once.
    pub tasks: u64,
    /// Tasks that came to an end on their edge.
    pub ended: u64,
    /// Those among them that did not succeed.
    pub failed: u64,
    /// Pulls that were begun.
    pub pulls: u64,
    /// Pulls that brought an image.
    pub whole: u64,
    /// Images that were whole and that a task set out to pull again. 0, or something is wrong.
    pub pulled_twice: u64,
    /// Edges that are at work now,
    pub running: u64,
    /// and were at the same time, at most.
    pub most_at_once: usize,
    /// Tasks that the edges hold: not acknowledged yet.
    pub open: usize,
    /// Messages from the cloud.
    pub heard: u64,
    /// Messages for the cloud; those said while there was no session are counted, and lost.
    pub said: u64,
}

impl Counts {
    pub(super) fn new() -> Self {
        Self {
            connected: watch::Sender::default(),
            present: watch::Sender::default(),
            pulls: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            twice: AtomicU64::new(0),
            tasks: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            received: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            said: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            first_task: AtomicU64::new(u64::MAX),
            last_task: AtomicU64::new(0),
            born: Instant::now(),
        }
    }

    pub(super) fn tally(&self) -> Tally {
        let number = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        Tally {
            connected: *self.connected.borrow(),
            sessions: number(&self.sessions),
            cuts: number(&self.cuts),
            restarts: number(&self.restarts),
            tasks: number(&self.received),
            ended: number(&self.ended),
            failed: number(&self.failed),
            pulls: number(&self.pulls),
            whole: number(&self.whole),
            pulled_twice: number(&self.twice),
            running: self.running.load(Ordering::SeqCst) as u64,
            most_at_once: self.most_running.load(Ordering::SeqCst),
            open: self.tasks.load(Ordering::SeqCst),
            heard: number(&self.heard),
            said: number(&self.said),
        }
    }

    /// A task came in.
    pub(super) fn received(&self) {
        let now = u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.first_task.fetch_min(now, Ordering::SeqCst);
        self.last_task.fetch_max(now, Ordering::SeqCst);
        self.received.fetch_add(1, Ordering::SeqCst);
    }

    /// When the first and the last task came in, since [`Self::forget_times`].
    pub(super) fn times(&self) -> Option<(Instant, Instant)> {
        let first = self.first_task.load(Ordering::SeqCst);
        let at = |nanos| self.born + Duration::from_nanos(nanos);
        (first != u64::MAX).then(|| (at(first), at(self.last_task.load(Ordering::SeqCst))))
    }

    pub(super) fn forget_times(&self) {
        self.first_task.store(u64::MAX, Ordering::SeqCst);
        self.last_task.store(0, Ordering::SeqCst);
    }

    /// An edge went to work.
    pub(super) fn works(&self) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
    }

    /// An edge rests, with or without having ended its task.
    pub(super) fn rests(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}
