//! Blobs that are being fetched, by digest. Only one pull of the node fetches a blob at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Mutex, MutexGuard, OnceCell, watch};

use crate::by_key::ByKey;

/// The blobs that pulls of the node want now, by digest.
pub(super) type Flights = ByKey<Flight>;

/// One wanted blob.
#[derive(Debug, Default)]
pub(super) struct Flight {
    turn: Mutex<()>,
    written: AtomicU64,
    /// Uncompressed size of the layer, once a pull has asked for it.
    unpacked: OnceCell<u64>,
    /// Number of waiting pulls that have no cap of their own.
    hurried: watch::Sender<usize>,
}

impl Flight {
    /// Waits for the turn to fetch the blob. A pull without a cap of its own lifts the cap of the pull that it waits
    /// for.
    pub(super) async fn take_turn(&self, hurried: bool) -> MutexGuard<'_, ()> {
        let _hurry = hurried.then(|| Hurry::new(&self.hurried));
        self.turn.lock().await
    }

    /// Whether a pull without a cap of its own waits for the blob.
    pub(super) fn is_hurried(&self) -> bool {
        *self.hurried.borrow() > 0
    }

    /// Waits until a pull without a cap of its own waits for the blob.
    pub(super) async fn becomes_hurried(&self) {
        // An error would mean that the sender is gone, which is a field of this.
        let _ = self.hurried.subscribe().wait_for(|waiting| *waiting > 0).await;
    }

    /// Bytes of the blob that are in the store.
    pub(super) fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    pub(super) fn set_written(&self, bytes: u64) {
        self.written.store(bytes, Ordering::Relaxed);
    }

    /// The same, unless more are known to be there.
    pub(super) fn raise_written(&self, bytes: u64) {
        self.written.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Uncompressed size of the layer. `None` if no pull has asked so far.
    pub(super) fn unpacked_size(&self) -> Option<u64> {
        self.unpacked.get().copied()
    }

    /// Uncompressed size of the layer. Uses `answer` if no pull has asked before.
    pub(super) async fn ask_unpacked(&self, answer: impl Future<Output = u64>) -> u64 {
        *self.unpacked.get_or_init(|| answer).await
    }
}

/// Counts one waiting pull until it's dropped.
struct Hurry<'a>(&'a watch::Sender<usize>);

impl<'a> Hurry<'a> {
    fn new(count: &'a watch::Sender<usize>) -> Self {
        count.send_modify(|waiting| *waiting += 1);
        Self(count)
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn an_uncapped_waiter_lifts_the_cap() {
        let flights = Flights::default();
        let [first, second, other] =
            ["sha256:a", "sha256:a", "sha256:b"].map(|digest| flights.shared_value(digest));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        let turn = first.take_turn(true).await;
        assert!(!first.is_hurried(), "it waits no more");
        let mut capped = Box::pin(second.take_turn(false));
        assert!(capped.as_mut().now_or_never().is_none() && !first.is_hurried());
        let mut uncapped = Box::pin(second.take_turn(true));
        assert_eq!(first.becomes_hurried().now_or_never(), None);
        assert!(uncapped.as_mut().now_or_never().is_none() && first.is_hurried());
        assert_eq!(first.becomes_hurried().now_or_never(), Some(()));
        drop(uncapped);
        assert!(!first.is_hurried());
        drop(turn);
        assert!(capped.as_mut().now_or_never().is_some());
    }
}
