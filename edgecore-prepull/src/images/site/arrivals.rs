//! Blobs that are arriving, as neighbours may read them: from the file of containerd's ingest, up to the last byte that
//! containerd has acknowledged.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Digests whose spoiled bytes we remember: a reader of them asks again within seconds.
const SPOILED: usize = 64;

/// The blobs that pulls of this node are filling now, by digest.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(Mutex<ArrivalBook>);

#[derive(Debug, Default)]
struct ArrivalBook {
    files: HashMap<String, Arrival>,
    /// How often we threw away the bytes of a blob because their digest was wrong.
    spoiled: VecDeque<(String, u32)>,
}

/// A blob that is arriving, for one reader.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub(super) file: Arc<File>,
    pub(super) size: u64,
    written: watch::Receiver<u64>,
}

/// The pull that fills a blob. When it's dropped, readers get what has been written, and no more.
#[derive(Debug)]
pub(crate) struct Arriving {
    arrivals: Arc<Arrivals>,
    digest: String,
    written: watch::Sender<u64>,
}

impl Arrivals {
    /// Offers a blob to neighbours, with the bytes that it has now.
    pub(crate) fn offer_blob(
        self: &Arc<Self>,
        digest: &str,
        size: u64,
        written: u64,
        file: File,
    ) -> Arriving {
        let (sender, written) = watch::channel(written);
        let arrival = Arrival { file: Arc::new(file), size, written };
        self.lock().files.insert(digest.to_owned(), arrival);
        Arriving { arrivals: Arc::clone(self), digest: digest.to_owned(), written: sender }
    }

    pub(super) fn get(&self, digest: &str) -> Option<Arrival> {
        self.lock().files.get(digest).cloned()
    }

    /// Notes that the bytes so far had another digest. A neighbour that has read them from here throws them away as well, and
    /// none begins to read them any more: it would take them for the next version.
    pub(crate) fn note_spoiled(&self, digest: &str) {
        let mut book = self.lock();
        book.files.remove(digest);
        let version = book.version(digest);
        book.spoiled.retain(|(spoiled, _)| spoiled != digest);
        book.spoiled.push_back((digest.to_owned(), version + 1));
        if book.spoiled.len() > SPOILED {
            book.spoiled.pop_front();
        }
    }

    /// The version of a blob's bytes. It changes when those so far were thrown away.
    pub(super) fn version(&self, digest: &str) -> u32 {
        self.lock().version(digest)
    }

    fn lock(&self) -> MutexGuard<'_, ArrivalBook> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ArrivalBook {
    fn version(&self, digest: &str) -> u32 {
        self.spoiled.iter().find(|(spoiled, _)| spoiled == digest).map_or(0, |(_, version)| *version)
    }
}

impl Arrival {
    /// Waits for bytes after this offset. Returns how many there are up to the last one; `None` if no more will come.
    pub(super) async fn bytes_beyond(&mut self, offset: u64) -> Option<u64> {
        // When the pull ends, what it has written still counts.
        let _ = self.written.wait_for(|written| *written > offset).await;
        let written = *self.written.borrow();
        written.checked_sub(offset).filter(|bytes| *bytes > 0)
    }
}

impl Arriving {
    /// Notes that containerd has acknowledged so many bytes.
    pub(crate) fn advance(&self, written: u64) {
        self.written.send_if_modified(|before| std::mem::replace(before, written) != written);
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.arrivals.lock().files.remove(&self.digest);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn readers_get_bytes_as_they_arrive() {
        let arrivals = Arc::new(Arrivals::default());
        let arriving = arrivals.offer_blob("a", 100, 10, tempfile::tempfile().unwrap());
        let mut reader = arrivals.get("a").unwrap();
        assert_eq!(reader.bytes_beyond(0).now_or_never(), Some(Some(10)));
        assert_eq!(reader.bytes_beyond(10).now_or_never(), None, "it waits");
        arriving.advance(30);
        assert_eq!(reader.bytes_beyond(10).now_or_never(), Some(Some(20)));
        drop(arriving);
        assert!(arrivals.get("a").is_none());
        assert_eq!(reader.bytes_beyond(10).now_or_never(), Some(Some(20)), "what has arrived is there");
        assert_eq!(reader.bytes_beyond(30).now_or_never(), Some(None));
    }

    #[test]
    fn spoiled_bytes_change_the_version() {
        let arrivals = Arc::new(Arrivals::default());
        assert_eq!(arrivals.version("a"), 0);
        for version in 1..=2 {
            let _arriving = arrivals.offer_blob("a", 100, 10, tempfile::tempfile().unwrap());
            arrivals.note_spoiled("a");
            assert!(arrivals.get("a").is_none());
            assert_eq!((arrivals.version("a"), arrivals.version("b")), (version, 0));
        }
        (0..SPOILED).for_each(|other| arrivals.note_spoiled(&other.to_string()));
        assert_eq!(arrivals.version("a"), 0, "forgotten");
    }
}
