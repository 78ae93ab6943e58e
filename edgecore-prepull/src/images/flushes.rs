//! Flushes that images share: a flush that begins after an image or a layer was unpacked covers it for every caller.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use super::filesystem::{FlushError, flush_filesystem};

/// One flush of the image file system at a time.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// Number of the last flush that began.
    begun: AtomicU64,
    /// Number of the last flush that ended. Locked while one runs.
    ended: Mutex<u64>,
}

impl Flushes {
    /// Brings to disk all data that was written before this call. All callers must pass the same directory.
    pub(crate) async fn flush(&self, directory: PathBuf) -> Result<(), FlushError> {
        let flush = async {
            let path = directory.clone();
            let flushed = spawn_blocking(move || flush_filesystem(&directory)).await;
            flushed.unwrap_or_else(|error| Err(FlushError::Refused { path, source: io::Error::other(error) }))
        };
        self.share_flush(flush).await
    }

    /// Waits for a successful flush that began after this call. Starts one unless another caller already has.
    async fn share_flush<E>(&self, flush: impl Future<Output = Result<(), E>>) -> Result<(), E> {
        let earlier = self.begun.load(Ordering::Relaxed);
        let mut ended = self.ended.lock().await;
        if *ended > earlier {
            return Ok(());
        }
        // Only the holder of the lock increments it.
        let number = self.begun.load(Ordering::Relaxed) + 1;
        self.begun.store(number, Ordering::Relaxed);
        flush.await?;
        *ended = number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn callers_during_a_flush_share_the_next() {
        let flushes = Flushes::default();
        let made = AtomicU64::new(0);
        let flush = || async {
            made.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_secs(10)).await;
            Ok::<_, Infallible>(())
        };
        let begun = Instant::now();
        let come = |after| {
            let (flushes, flush) = (&flushes, &flush);
            async move {
                sleep(Duration::from_secs(after)).await;
                let Ok(()) = flushes.share_flush(flush()).await;
                begun.elapsed().as_secs()
            }
        };
        let covered = futures::future::join_all([0, 1, 2, 9].map(come)).await;
        assert_eq!((covered, made.load(Ordering::Relaxed)), (vec![10, 20, 20, 20], 2));
        let Ok(()) = flushes.share_flush(flush()).await;
        assert_eq!((begun.elapsed().as_secs(), made.load(Ordering::Relaxed)), (30, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_flush_covers_no_caller() {
        let flushes = Flushes::default();
        let flush = || async {
            sleep(Duration::from_secs(10)).await;
            Ok::<_, Infallible>(())
        };
        let begun = Instant::now();
        let given_up = tokio::time::timeout(Duration::from_secs(3), flushes.share_flush(flush()));
        let waits = async {
            sleep(Duration::from_secs(1)).await;
            let Ok(()) = flushes.share_flush(flush()).await;
            begun.elapsed().as_secs()
        };
        let (given_up, covered) = tokio::join!(given_up, waits);
        assert!(given_up.is_err());
        assert_eq!(covered, 13);
    }

    #[tokio::test]
    async fn a_failed_flush_covers_no_caller() {
        let flushes = Flushes::default();
        let flush = |made: Result<(), &'static str>| {
            flushes.share_flush(async move {
                tokio::task::yield_now().await;
                made
            })
        };
        let made = tokio::join!(flush(Err("first")), flush(Err("second")), flush(Ok(())));
        assert_eq!(made, (Err("first"), Err("second"), Ok(())));
    }
}
