//! Turns: how many neighbours are served at a time, and when one loses its turn to another.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::task::NodeName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

/// Blobs that are served at a time: to as many neighbours as the cloud sends here, and some that it has sent before. Each
/// takes about half a MiB of memory.
const SERVED: usize = 6;
/// Whole blobs that are served at a time while the processors have more to do than they can: the box's own work comes first.
/// Blobs that are still arriving cost no more than their arrival, and the site waits for them.
const SERVED_WHEN_BUSY: usize = 2;
/// Turns of one reader. An image arrives in three streams, and each of them may be from here.
const PER_READER: usize = 3;
/// Longest wait for a turn. The neighbour waits longer for an answer.
pub(super) const TURN: Duration = Duration::from_secs(8);
/// Bytes a second that a reader has to take while others wait for its turn.
const FLOOR: u64 = 32 * 1024;
/// Time of waiting for a reader over which its rate is averaged. Buffers of the kernel hide shorter pauses.
const OVER: Duration = Duration::from_secs(15);
/// Longest time in which a reader takes no bytes at all.
const STUCK: Duration = Duration::from_secs(300);

/// The turns of this node.
#[derive(Debug)]
pub(super) struct Turns {
    all: Arc<Semaphore>,
    when_busy: Arc<Semaphore>,
    waiting: AtomicUsize,
    readers: Mutex<HashMap<NodeName, Vec<Reading>>>,
}

/// A blob that a neighbour reads, or waits to read.
#[derive(Debug)]
struct Reading {
    digest: String,
    end: CancellationToken,
}

/// The permission to be served, until it's dropped.
#[derive(Debug)]
pub(super) struct ReaderTurn {
    turns: Arc<Turns>,
    reader: NodeName,
    digest: String,
    end: CancellationToken,
    permits: Vec<OwnedSemaphorePermit>,
}

impl Default for Turns {
    fn default() -> Self {
        let [all, when_busy] = [SERVED, SERVED_WHEN_BUSY].map(|turns| Arc::new(Semaphore::new(turns)));
        Self { all, when_busy, waiting: AtomicUsize::new(0), readers: Mutex::default() }
    }
}

impl Turns {
    /// Lets a reader wait for its turn. `None`: it has enough of them. `end` is cancelled when the reader asks for the same blob
    /// again: its first connection is dead then.
    pub(super) fn enter_queue(
        self: &Arc<Self>,
        reader: &NodeName,
        digest: &str,
        end: &CancellationToken,
    ) -> Option<ReaderTurn> {
        let mut readers = self.lock();
        let readings = readers.entry(reader.clone()).or_default();
        if let Some(before) = readings.iter().position(|reading| reading.digest == digest) {
            readings.swap_remove(before).end.cancel();
        }
        if readings.len() >= PER_READER {
            return None;
        }
        readings.push(Reading { digest: digest.to_owned(), end: end.clone() });
        Some(ReaderTurn {
            turns: Arc::clone(self),
            reader: reader.clone(),
            digest: digest.to_owned(),
            end: end.clone(),
            permits: Vec::new(),
        })
    }

    /// Whether a neighbour waits for a turn.
    pub(super) fn are_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Vec<Reading>>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReaderTurn {
    /// Waits until the reader can be served. `false` if that takes too long.
    pub(super) async fn wait_to_serve(&mut self, is_busy: bool) -> bool {
        let Self { turns, permits, .. } = self;
        turns.waiting.fetch_add(1, Ordering::Relaxed);
        let _wait = Wait(turns);
        let coming = async {
            for turns in [Some(&turns.all), is_busy.then_some(&turns.when_busy)].into_iter().flatten() {
                // An error would mean that the semaphore is closed; these never are.
                permits.extend(Arc::clone(turns).acquire_owned().await.ok());
            }
        };
        timeout(TURN, coming).await.is_ok()
    }
}

/// Counts a reader that waits, until it's dropped.
struct Wait<'a>(&'a Turns);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for ReaderTurn {
    fn drop(&mut self) {
        let mut readers = self.turns.lock();
        // If its end is cancelled, another connection has its place.
        if !self.end.is_cancelled()
            && let Some(readings) = readers.get_mut(&self.reader)
        {
            readings.retain(|reading| reading.digest != self.digest);
            if readings.is_empty() {
                readers.remove(&self.reader);
            }
        }
    }
}

/// The pace at which a reader takes what it is offered. Time in which we have nothing to offer doesn't count.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The last piece, until the reader has taken it.
    offered: Option<(u64, Instant)>,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// The reader has taken what was offered, and wants more.
    pub(super) fn note_taken(&mut self, now: Instant) {
        self.waited += self.offered.take().map_or(Duration::ZERO, |(_, since)| now - since);
    }

    /// So many bytes are offered.
    pub(super) fn note_offered(&mut self, bytes: u64, now: Instant) {
        self.bytes += bytes;
        self.offered = Some((bytes, now));
    }

    /// Whether the reader loses its turn.
    pub(super) fn is_too_slow(&mut self, are_others_waiting: bool, now: Instant) -> bool {
        let current = self.offered.map_or(Duration::ZERO, |(_, since)| now - since);
        let waited = self.waited + current;
        if current >= OVER {
            return are_others_waiting || current >= STUCK;
        }
        if waited < OVER {
            return false;
        }
        let is_slow = self.bytes < FLOOR * waited.as_secs();
        // The piece that is on its way counts again, in favour of the reader.
        self.waited = Duration::ZERO;
        self.bytes = self.offered.as_mut().map_or(0, |(bytes, since)| {
            *since = now;
            *bytes
        });
        is_slow && are_others_waiting
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_reader_has_one_turn_for_a_blob() {
        let turns = Arc::new(Turns::default());
        let enter = |digest: &str, end: &CancellationToken| turns.enter_queue(&"a".into(), digest, end);
        let [end, other] = [CancellationToken::new(), CancellationToken::new()];
        let first = enter("1", &end);
        assert!(first.is_some() && !end.is_cancelled());
        let again = enter("1", &other);
        assert!(again.is_some() && end.is_cancelled(), "it has come back");
        let new = || CancellationToken::new();
        let others = (enter("2", &new()).unwrap(), enter("3", &new()).unwrap());
        assert!(enter("4", &new()).is_none(), "its turns are used up");
        drop((first, others));
        assert!(!other.is_cancelled());
        assert!(enter("4", &new()).is_some());
        drop(again);
        assert!(!other.is_cancelled(), "its last bytes are still on their way");
        assert!(turns.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_a_turn_has_an_end() {
        let turns = Arc::new(Turns::default());
        let come = async |reader: &str, is_busy| {
            let mut turn = turns.enter_queue(&reader.into(), "1", &CancellationToken::new()).unwrap();
            turn.wait_to_serve(is_busy).await.then_some(turn)
        };
        let busy = (come("a", true).await.unwrap(), come("b", true).await.unwrap());
        assert!(come("c", true).await.is_none(), "the processors are busy");
        let others = (come("c", false).await, come("d", false).await, come("e", false).await);
        let last = come("f", false).await;
        assert!(others.0.is_some() && others.1.is_some() && others.2.is_some() && last.is_some());
        let mut waiting = Box::pin(come("g", false));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(turns.are_wanted());
        drop(busy);
        assert!(waiting.await.is_some());
        assert!(!turns.are_wanted());
    }

    #[test]
    fn a_slow_reader_gives_its_turn_up() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut pace = Pace::default();
        pace.note_offered(4 << 20, at(0));
        pace.note_taken(at(0));
        assert!(!pace.is_too_slow(true, at(100)), "we had nothing to offer");
        pace.note_offered(1, at(100));
        assert!(!pace.is_too_slow(true, at(114)));
        assert!(pace.is_too_slow(true, at(115)), "it takes nothing");
        assert!(!pace.is_too_slow(false, at(115)), "no other reader wants its turn");
        assert!(pace.is_too_slow(false, at(400)), "stuck");
        for (each, expected) in [(FLOOR * 9 / 10, true), (FLOOR, false)] {
            let mut pace = Pace::default();
            let slow = (0..60).any(|second| {
                pace.note_offered(each, at(second));
                pace.note_taken(at(second + 1));
                pace.is_too_slow(true, at(second + 1))
            });
            assert_eq!(slow, expected, "{each} bytes a second");
        }
    }
}
