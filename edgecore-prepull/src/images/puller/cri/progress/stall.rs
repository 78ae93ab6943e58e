//! Detection of downloads that no longer receive bytes.
//!
//! A pull has stalled if it waits for bytes and received none within the limit: none for its layers in progress, or
//! none for any pull's layers. A layer that hasn't received bytes while others make progress may only be waiting for
//! its turn: the transfer service of containerd 2.1 has three downloads for all images together, and also opens waiting
//! ones. If the active ones are dead, they are given up first, and the waiting one comes next. If nothing of the image
//! is being written, the runtime unpacks, or we know nothing.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::images::containerd::Ingest;

/// A connection that receives no byte for this long is given up, and the next attempt resumes it. Without this limit, a
/// connection that a router has forgotten hangs until the kernel's keepalive ends it, or forever: containerd 1.6 has no
/// timeout of its own. containerd writes in steps of 1 MiB on each connection, so the limit is multiplied by the number
/// of connections: any link that carries more than 6 KiB/s in total survives.
pub(super) const LIMIT: Duration = Duration::from_secs(180);

/// The stage of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullStage {
    /// No layer of the image is known yet.
    Resolving {
        /// Whether its layers may be there, so that the runtime may be unpacking them.
        may_unpack: bool,
    },
    /// The layers are known.
    Fetching {
        /// Layers that are being written.
        written: usize,
        /// Bytes of those layers that have received some in this pull. `None` if there are none.
        begun: Option<u64>,
    },
}

/// Watches the bytes of one pull, and those of all others.
#[derive(Debug)]
pub(super) struct StallDetector {
    begun: SystemTime,
    /// [`LIMIT`], except in tests on real runtimes.
    limit: Duration,
    store: HashMap<String, u64>,
    store_moved: Instant,
    /// The bytes of the layers in progress, and the time of their last change.
    own: Option<(u64, Instant)>,
}

impl StallDetector {
    pub(super) fn new(begun: SystemTime, limit: Duration, now: Instant) -> Self {
        Self { begun, limit, store: HashMap::new(), store_moved: now, own: None }
    }

    /// Takes the state of the store, and the number of layers that other pulls are writing. Returns the limit if the
    /// pull has stalled.
    pub(super) fn observe(
        &mut self,
        ingests: &HashMap<String, Ingest>,
        stage: PullStage,
        others: usize,
        now: Instant,
    ) -> Option<Duration> {
        let store: HashMap<_, _> =
            ingests.iter().map(|(digest, ingest)| (digest.clone(), ingest.offset)).collect();
        if store != self.store {
            self.store = store;
            self.store_moved = now;
        }
        let (waits, own) = match stage {
            PullStage::Resolving { may_unpack } => (!may_unpack, 0),
            PullStage::Fetching { written, begun } => {
                let unchanged = self.own.filter(|(before, _)| Some(*before) == begun);
                self.own = unchanged.or(begun.map(|bytes| (bytes, now)));
                (written > 0, written)
            }
        };
        if !waits {
            self.store_moved = now;
            return None;
        }
        let active = |ingest: &&Ingest| ingest.last_write.is_some_and(|last| last >= self.begun);
        let active = ingests.values().filter(active).count();
        let connections = if self.own.is_none() && others > 0 {
            // One more than theirs, so that they are given up before this one.
            active.max(own + others) + 1
        } else {
            active.max(own).max(1)
        };
        let limit = self.limit * u32::try_from(connections).unwrap_or(u32::MAX);
        let stalled = |since: Instant| now.duration_since(since) >= limit;
        (self.own.is_some_and(|(_, since)| stalled(since)) || stalled(self.store_moved)).then_some(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESOLVING: PullStage = PullStage::Resolving { may_unpack: false };

    /// A detector, and a store with blobs that the pull has written up to these offsets.
    struct Scene {
        begun: Instant,
        stall: StallDetector,
    }

    impl Scene {
        fn new() -> Self {
            let begun = Instant::now();
            Self { begun, stall: StallDetector::new(SystemTime::UNIX_EPOCH, LIMIT, begun) }
        }

        fn at(&mut self, seconds: u64, offsets: &[u64], stage: PullStage) -> Option<u64> {
            self.beside(0, seconds, offsets, stage)
        }

        fn beside(&mut self, others: usize, seconds: u64, offsets: &[u64], stage: PullStage) -> Option<u64> {
            let written = Some(SystemTime::UNIX_EPOCH);
            let ingest = |(n, offset): (usize, &u64)| {
                (format!("sha256:{n}"), Ingest { offset: *offset, last_write: written })
            };
            let ingests = offsets.iter().enumerate().map(ingest).collect();
            let now = self.begun + Duration::from_secs(seconds);
            self.stall.observe(&ingests, stage, others, now).map(|limit| limit.as_secs())
        }
    }

    fn fetching(done: u64) -> PullStage {
        PullStage::Fetching { written: 1, begun: (done > 0).then_some(done) }
    }

    #[test]
    fn a_download_without_a_byte_stalls() {
        let mut scene = Scene::new();
        assert_eq!(scene.at(1, &[5], fetching(5)), None);
        assert_eq!(scene.at(100, &[6], fetching(6)), None);
        assert_eq!(scene.at(279, &[6], fetching(6)), None);
        assert_eq!(scene.at(280, &[6], fetching(6)), Some(180));
        assert_eq!(scene.at(281, &[7], fetching(7)), None);
    }

    #[test]
    fn many_connections_share_a_slow_link() {
        // Nine connections of 1 MiB each at 6 KiB/s in total step at about the same time, every 25 minutes.
        let mut scene = Scene::new();
        let three = |done| PullStage::Fetching { written: 3, begun: (done > 0).then_some(done) };
        assert_eq!(scene.at(1, &[0; 9], three(0)), None);
        assert_eq!(scene.at(1500, &[0; 9], three(0)), None);
        assert_eq!(scene.at(1501, &[1; 9], three(3)), None);
        assert_eq!(scene.at(1501 + 1619, &[1; 9], three(3)), None);
        assert_eq!(scene.at(1501 + 1620, &[1; 9], three(3)), Some(1620));
    }

    #[test]
    fn waiting_for_a_turn_is_no_stall() {
        // Another image has all places; ours is open and stays at zero.
        let mut scene = Scene::new();
        for minute in 0..60 {
            assert_eq!(scene.at(minute * 60, &[minute, 0], fetching(0)), None);
        }
        // The others have ended, and nothing moves.
        assert_eq!(scene.at(3600, &[0], fetching(0)), None);
        assert_eq!(scene.at(3780, &[0], fetching(0)), Some(180));
    }

    #[test]
    fn a_waiting_download_outlives_dead_ones() {
        // Three dead connections of another image; ours is opened beside them.
        let (mut dead, mut waiting) = (Scene::new(), Scene::new());
        let three = |done| PullStage::Fetching { written: 3, begun: Some(done) };
        assert_eq!(dead.beside(1, 0, &[1, 1, 1, 0], three(3)), None);
        for second in 0..720 {
            assert_eq!(dead.beside(1, second, &[1, 1, 1, 0], three(3)), None);
            assert_eq!(waiting.beside(3, second, &[1, 1, 1, 0], fetching(0)), None);
        }
        assert_eq!(dead.beside(1, 720, &[1, 1, 1, 0], three(3)), Some(720));
        assert_eq!(waiting.beside(3, 720, &[1, 1, 1, 0], fetching(0)), None);
        assert_eq!(waiting.beside(3, 900, &[1, 1, 1, 0], fetching(0)), Some(900), "for ever is too long");
    }

    #[test]
    fn waiting_for_another_layer_is_no_stall() {
        let mut scene = Scene::new();
        let two = PullStage::Fetching { written: 2, begun: Some(1) };
        assert_eq!(scene.at(1, &[1, 0, 1], two), None);
        // The first layer is complete, its place belongs to another image, and the second layer stays at zero.
        for minute in 1..60 {
            assert_eq!(scene.at(minute * 60, &[0, minute], fetching(0)), None);
        }
        assert_eq!(scene.at(3600, &[1, 60], fetching(1)), None);
        assert_eq!(scene.at(3959, &[1, 419], fetching(1)), None);
        assert_eq!(scene.at(3960, &[1, 420], fetching(1)), Some(360), "it has begun, and stopped");
    }

    #[test]
    fn a_started_download_stalls_regardless_of_others() {
        let mut scene = Scene::new();
        assert_eq!(scene.at(0, &[0, 0], fetching(0)), None);
        assert_eq!(scene.at(1, &[1, 1], fetching(1)), None);
        assert_eq!(scene.at(360, &[359, 1], fetching(1)), None);
        assert_eq!(scene.at(361, &[360, 1], fetching(1)), Some(360));
    }

    #[test]
    fn unpacking_is_no_stall() {
        let mut scene = Scene::new();
        let unpacking = PullStage::Fetching { written: 0, begun: None };
        assert_eq!(scene.at(1, &[9], fetching(9)), None);
        assert_eq!(scene.at(2, &[], unpacking), None);
        assert_eq!(scene.at(4000, &[], unpacking), None);
        // The next layer begins.
        assert_eq!(scene.at(4001, &[0], fetching(0)), None);
        assert_eq!(scene.at(4100, &[0], fetching(0)), None);
        assert_eq!(scene.at(4181, &[0], fetching(0)), Some(180));
    }

    #[test]
    fn a_hanging_resolve_stalls_unless_unpacking() {
        let mut scene = Scene::new();
        assert_eq!(scene.at(179, &[], RESOLVING), None);
        assert_eq!(scene.at(180, &[], RESOLVING), Some(180));
        let mut scene = Scene::new();
        assert_eq!(scene.at(3000, &[], PullStage::Resolving { may_unpack: true }), None);
        assert_eq!(scene.at(3001, &[], RESOLVING), None);
    }
}
