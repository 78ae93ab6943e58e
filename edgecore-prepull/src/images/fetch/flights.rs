//! Blobs that are being fetched, by digest: one fetch of each at a time over all pulls of the node.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::{Mutex, MutexGuard, OnceCell};

use crate::by_key::ByKey;

/// The blobs that pulls of the node want now, by digest.
pub(super) type Flights = ByKey<Flight>;

/// One blob that somebody wants.
#[derive(Debug, Default)]
pub(super) struct Flight {
    turn: Mutex<()>,
    written: AtomicU64,
    /// Bytes that the blob, a layer, unpacks to, once somebody has had to know.
    unpacked: OnceCell<u64>,
    /// Number of pulls that wait for it and whose task has no cap.
    hurried: AtomicUsize,
}

impl Flight {
    /// Waits until nobody else fetches the blob. A pull without a cap of its own lifts that of the pull it waits for.
    pub(super) async fn take_turn(&self, hurried: bool) -> MutexGuard<'_, ()> {
        let _hurry = hurried.then(|| Hurry::new(&self.hurried));
        self.turn.lock().await
    }

    /// Whether a pull without a cap of its own waits for the blob.
    pub(super) fn is_hurried(&self) -> bool {
        self.hurried.load(Ordering::Relaxed) > 0
    }

    /// Bytes of the blob that are in the store.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    pub(super) fn set_written(&self, bytes: u64) {
        self.written.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that the layer unpacks to. `None` if nobody has asked so far.
    pub(super) fn unpacked(&self) -> Option<u64> {
        self.unpacked.get().copied()
    }

    /// Bytes that the layer unpacks to, by this answer if nobody has asked before.
    pub(super) async fn ask_unpacked(&self, answer: impl Future<Output = u64>) -> u64 {
        *self.unpacked.get_or_init(|| answer).await
    }
}

/// Counts one who waits, until it is dropped.
struct Hurry<'a>(&'a AtomicUsize);

impl<'a> Hurry<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn one_at_a_time_fetches_a_digest_and_whoever_is_uncapped_lifts_the_cap_while_it_waits() {
        let flights = Flights::default();
        let [first, second, other] = ["sha256:a", "sha256:a", "sha256:b"].map(|digest| flights.of(digest));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        let turn = first.take_turn(true).await;
        assert!(!first.is_hurried(), "it waits no more");
        let mut capped = Box::pin(second.take_turn(false));
        assert!(capped.as_mut().now_or_never().is_none() && !first.is_hurried());
        let mut uncapped = Box::pin(second.take_turn(true));
        assert!(uncapped.as_mut().now_or_never().is_none() && first.is_hurried());
        drop(uncapped);
        assert!(!first.is_hurried());
        drop(turn);
        assert!(capped.as_mut().now_or_never().is_some());
    }
}
