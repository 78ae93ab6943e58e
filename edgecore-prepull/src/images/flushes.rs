//! Flushes that images share: a flush that begins after an image or a layer was unpacked covers it for every caller.
//!
//! The kernel reports once that it couldn't write something, for the whole file system, and to the first that asks. So each
//! refusal is remembered, and charged to all who were writing by then: they took a [`FlushMark`] before.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use super::filesystem::{
    FlushError, OpenDirectory, SharedDirectory, flush_filesystem, flush_other_filesystem,
};
use crate::by_key::ByKey;
use crate::one_question::OneQuestion;

/// Where a runtime keeps what it has of images. Each directory may be on a disk of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageDirectories {
    /// Unpacked images.
    pub(crate) unpacked: PathBuf,
    /// containerd's directory, which contains the content store. For other runtimes it's the directory of unpacked images.
    pub(crate) root: PathBuf,
}

/// Flushes of file systems: one of each directory at a time, shared by all who ask for it meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    by_directory: ByKey<SharedFlush>,
    /// containerd's directories, once they are known. CRI doesn't report both.
    known: SyncMutex<Option<ImageDirectories>>,
}

impl Flushes {
    /// Notes which directories containerd uses.
    pub(crate) fn set_directories(&self, directories: ImageDirectories) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(directories);
    }

    /// The directories that containerd uses, if they are known.
    pub(crate) fn directories(&self) -> Option<ImageDirectories> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes a mark of these directories, and keeps them open.
    pub(crate) async fn watch(&self, directories: &ImageDirectories) -> DiskWatch {
        let mark = self.mark(directories);
        let mut open = Vec::new();
        for ((flush, _), directory) in mark.0.iter().zip([&directories.unpacked, &directories.root]) {
            open.extend(flush.keep_open(directory).await);
        }
        DiskWatch { mark, _open: open }
    }

    /// Takes a mark of these directories.
    pub(crate) fn mark(&self, directories: &ImageDirectories) -> FlushMark {
        let marked = |flush: Arc<SharedFlush>| {
            let refusals = flush.count_refusals();
            (flush, refusals)
        };
        let ImageDirectories { unpacked, root } = directories;
        let of_root = (root != unpacked).then(|| self.of_root(directories));
        FlushMark([Some(self.of_unpacked(unpacked)), of_root].into_iter().flatten().map(marked).collect())
    }

    /// Brings to disk all data that was written to these directories before this call. A file system with both is flushed once.
    pub(crate) async fn flush_both(&self, directories: &ImageDirectories) -> Result<(), FlushError> {
        let ImageDirectories { unpacked, root } = directories;
        self.flush(unpacked).await?;
        if root == unpacked {
            return Ok(());
        }
        let (of, other) = (root.clone(), unpacked.clone());
        let flush = move |held: &SharedDirectory| flush_other_filesystem(&of, held, &other);
        self.of_root(directories).flush(root, flush).await
    }

    /// Brings to disk all data that was written to the file system of this directory before this call.
    pub(crate) async fn flush(&self, directory: &Path) -> Result<(), FlushError> {
        let of = directory.to_path_buf();
        let flush = move |held: &SharedDirectory| flush_filesystem(&of, held);
        self.of_unpacked(directory).flush(directory, flush).await
    }

    fn of_unpacked(&self, directory: &Path) -> Arc<SharedFlush> {
        self.by_directory.shared_value(&directory.to_string_lossy())
    }

    fn of_root(&self, ImageDirectories { unpacked, root }: &ImageDirectories) -> Arc<SharedFlush> {
        self.by_directory.shared_value(&format!("{} apart from {}", root.display(), unpacked.display()))
    }
}

/// A moment before a caller writes. What its file systems refuse later may be what the caller has written, also if
/// another one asks for that flush.
#[derive(Clone, Debug, Default)]
pub struct FlushMark(Vec<(Arc<SharedFlush>, u64)>);

impl FlushMark {
    /// Passes if nothing was refused since.
    pub(crate) fn check(&self) -> Result<(), FlushError> {
        self.0.iter().find_map(|(flush, refusals)| flush.refused_since(*refusals)).map_or(Ok(()), Err)
    }
}

/// A [`FlushMark`] whose directories stay open. A flush then also reports what another process was the first to hear, such as a
/// containerd that flushes its layers: the kernel reports each loss once to every file that was open before. With no watch,
/// the directory isn't open, so that its disk can be unmounted.
#[derive(Debug, Default)]
pub struct DiskWatch {
    /// When it began.
    pub(crate) mark: FlushMark,
    _open: Vec<OpenDirectory>,
}

#[cfg(test)]
impl Flushes {
    /// A flush of another caller is refused.
    pub(crate) fn refuse(&self, directories: &ImageDirectories) {
        let source = Arc::new(io::Error::other("lost"));
        let path = directories.unpacked.clone();
        self.of_unpacked(&directories.unpacked).note_refusal(&FlushError::Refused { path, source });
    }
}

#[cfg(test)]
impl From<FlushMark> for DiskWatch {
    fn from(mark: FlushMark) -> Self {
        Self { mark, _open: Vec::new() }
    }
}

/// One flush at a time. It goes on if its callers are dropped: the kernel can't be interrupted, and another call would keep
/// another thread.
#[derive(Debug, Default)]
struct SharedFlush {
    /// Number of the last flush that began.
    begun: AtomicU64,
    /// Number of the last flush that succeeded.
    succeeded: AtomicU64,
    /// Number of refusals, and the last of them.
    refusals: SyncMutex<(u64, Option<FlushError>)>,
    /// Locked while a flush runs.
    turn: Arc<Mutex<()>>,
    held: Arc<SharedDirectory>,
    opening: OneQuestion,
}

impl SharedFlush {
    fn count_refusals(&self) -> u64 {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// The last refusal, if there were more than this many.
    fn refused_since(&self, refusals: u64) -> Option<FlushError> {
        let known = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        known.1.clone().filter(|_| known.0 > refusals)
    }

    fn note_refusal(&self, error: &FlushError) {
        let mut known = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (known.0 + 1, Some(error.clone()));
    }

    /// Opens the directory. `None` if that isn't possible, which the flush then reports.
    async fn keep_open(&self, directory: &Path) -> Option<OpenDirectory> {
        let (held, path) = (Arc::clone(&self.held), directory.to_path_buf());
        self.opening.ask(move || held.open(&path)).await.ok()?.ok()
    }

    async fn flush(
        self: Arc<Self>,
        directory: &Path,
        flush: impl FnOnce(&SharedDirectory) -> Result<(), FlushError> + Send + 'static,
    ) -> Result<(), FlushError> {
        let (path, held) = (directory.to_path_buf(), Arc::clone(&self.held));
        let flush = async {
            spawn_blocking(move || flush(&held)).await.unwrap_or_else(|error| {
                Err(FlushError::Refused { path, source: Arc::new(io::Error::other(error)) })
            })
        };
        self.share(flush).await
    }

    /// Waits for a successful flush that began after this call. Starts one unless another caller already has.
    ///
    /// # Errors
    /// A flush was refused while this call waited, even if another caller began it.
    async fn share(
        self: Arc<Self>,
        flush: impl Future<Output = Result<(), FlushError>> + Send + 'static,
    ) -> Result<(), FlushError> {
        let (begun, refusals) = (self.begun.load(Ordering::Relaxed), self.count_refusals());
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if let Some(error) = self.refused_since(refusals) {
            return Err(error);
        }
        if self.succeeded.load(Ordering::Relaxed) > begun {
            return Ok(());
        }
        // Only the holder of the lock increments it.
        let number = self.begun.load(Ordering::Relaxed) + 1;
        self.begun.store(number, Ordering::Relaxed);
        let running = tokio::spawn(async move {
            let flushed = flush.await;
            match &flushed {
                Ok(()) => self.succeeded.store(number, Ordering::Relaxed),
                Err(error @ FlushError::Refused { .. }) => self.note_refusal(error),
                Err(FlushError::NotSeen { .. }) => {}
            }
            drop(turn);
            flushed
        });
        match running.await {
            Ok(flushed) => flushed,
            Err(died) => std::panic::resume_unwind(died.into_panic()),
        }
    }
}

/// Whether the disk may lack files of an image that the runtime has pulled. At the start, we know nothing of earlier pulls.
#[derive(Debug)]
pub(crate) struct UnflushedPulls {
    /// Number of the last beginning or end of a pull. The start counts as one.
    noted: AtomicU64,
    /// The same number, as far as flushes cover it.
    covered: AtomicU64,
}

/// A pull in progress. Its end is noted when it's dropped, because the runtime may have the image then.
#[derive(Debug)]
pub(crate) struct NotedPull<'a>(&'a UnflushedPulls);

impl UnflushedPulls {
    /// Notes that the runtime pulls from now on.
    pub(crate) fn begin_pull(&self) -> NotedPull<'_> {
        self.noted.fetch_add(1, Ordering::Relaxed);
        NotedPull(self)
    }

    /// Whether a pull isn't covered.
    pub(crate) fn has_any(&self) -> bool {
        self.covered.load(Ordering::Relaxed) < self.noted.load(Ordering::Relaxed)
    }

    /// The number that a flush from now on covers.
    pub(crate) fn last_noted(&self) -> u64 {
        self.noted.load(Ordering::Relaxed)
    }

    /// A flush has succeeded that began after [`Self::last_noted`] was this number.
    pub(crate) fn cover(&self, number: u64) {
        self.covered.fetch_max(number, Ordering::Relaxed);
    }
}

impl Default for UnflushedPulls {
    fn default() -> Self {
        Self { noted: AtomicU64::new(1), covered: AtomicU64::new(0) }
    }
}

impl Drop for NotedPull<'_> {
    fn drop(&mut self) {
        self.0.noted.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;

    /// A flush of ten seconds, which is counted.
    fn slow(made: &Arc<AtomicU64>) -> impl Future<Output = Result<(), FlushError>> + Send + use<> {
        let made = Arc::clone(made);
        async move {
            made.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_secs(10)).await;
            Ok(())
        }
    }

    fn shared() -> (Arc<SharedFlush>, Arc<AtomicU64>) {
        (Arc::default(), Arc::default())
    }

    #[tokio::test(start_paused = true)]
    async fn callers_during_a_flush_share_the_next() {
        let (flushes, made) = shared();
        let begun = Instant::now();
        let come = |after| {
            let (flushes, made) = (Arc::clone(&flushes), &made);
            async move {
                sleep(Duration::from_secs(after)).await;
                flushes.share(slow(made)).await.unwrap();
                begun.elapsed().as_secs()
            }
        };
        let covered = futures::future::join_all([0, 1, 2, 9].map(come)).await;
        assert_eq!((covered, made.load(Ordering::Relaxed)), (vec![10, 20, 20, 20], 2));
        flushes.share(slow(&made)).await.unwrap();
        assert_eq!((begun.elapsed().as_secs(), made.load(Ordering::Relaxed)), (30, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_flush_covers_no_later_caller() {
        let (flushes, made) = shared();
        let begun = Instant::now();
        let given_up = tokio::time::timeout(Duration::from_secs(3), Arc::clone(&flushes).share(slow(&made)));
        let waits = async {
            sleep(Duration::from_secs(1)).await;
            Arc::clone(&flushes).share(slow(&made)).await.unwrap();
            begun.elapsed().as_secs()
        };
        let (given_up, covered) = tokio::join!(given_up, waits);
        assert!(given_up.is_err());
        assert_eq!((covered, made.load(Ordering::Relaxed)), (20, 2));
    }

    #[tokio::test]
    async fn abandoned_flushes_keep_one_thread() {
        let flushes = Flushes::default();
        let made = Arc::<AtomicU64>::default();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(SyncMutex::new(released));
        for _ in 0..4 {
            let (made, released) = (Arc::clone(&made), Arc::clone(&released));
            let hangs = move |_: &SharedDirectory| {
                made.fetch_add(1, Ordering::Relaxed);
                let _ = released.lock().unwrap().recv();
                Ok(())
            };
            let flush = flushes.by_directory.shared_value("/a").flush(Path::new("/a"), hangs);
            assert!(tokio::time::timeout(Duration::from_millis(20), flush).await.is_err());
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
        drop(release);
        flushes.by_directory.shared_value("/a").flush(Path::new("/a"), |_| Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn a_failed_flush_fails_all_who_wait() {
        let (flushes, _) = shared();
        let flush = |made: Result<(), &'static str>| {
            let source = |text| Arc::new(io::Error::other(text));
            let made = made.map_err(|text| FlushError::Refused { path: "/".into(), source: source(text) });
            Arc::clone(&flushes).share(async move {
                tokio::task::yield_now().await;
                made
            })
        };
        let made = tokio::join!(flush(Err("first")), flush(Err("second")), flush(Ok(())));
        let first = |made: Result<(), FlushError>| made.unwrap_err().to_string().contains("first");
        assert!(first(made.0) && first(made.1) && first(made.2));
        flush(Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn a_refusal_fails_all_who_write() {
        let flushes = Flushes::default();
        let here = PathBuf::from("/");
        let directories = ImageDirectories { unpacked: here.clone(), root: here.clone() };
        let writes = flushes.mark(&directories);
        let refuse = |_: &SharedDirectory| {
            Err(FlushError::Refused { path: "/".into(), source: Arc::new(io::Error::other("lost")) })
        };
        // Another caller's, which has ended by the time that this one asks.
        assert!(flushes.of_unpacked(&here).flush(&here, refuse).await.is_err());
        flushes.of_unpacked(&here).flush(&here, |_| Ok(())).await.unwrap();
        assert!(writes.check().unwrap_err().to_string().contains("lost"));
        assert!(flushes.watch(&directories).await.mark.check().is_ok(), "it writes again");
    }

    #[tokio::test]
    async fn a_watched_directory_stays_open() {
        let directory = tempfile::TempDir::new().unwrap();
        let here = directory.path().to_path_buf();
        let directories = ImageDirectories { unpacked: here.clone(), root: here.clone() };
        let flushes = Flushes::default();
        let watch = flushes.watch(&directories).await;
        let held = Arc::clone(&flushes.of_unpacked(&here).held);
        assert!(held.is_open());
        let opened = held.open(&here).unwrap();
        assert!(Arc::ptr_eq(&held.open(&here).unwrap(), &opened), "a flush uses it");
        std::fs::rename(&here, here.with_extension("old")).unwrap();
        std::fs::create_dir(&here).unwrap();
        assert!(!Arc::ptr_eq(&held.open(&here).unwrap(), &opened), "another disk is there now");
        std::fs::remove_dir(here.with_extension("old")).unwrap();
        drop(opened);
        let mark = watch.mark.clone();
        drop(watch);
        assert!(!held.is_open(), "a mark alone keeps nothing open");
        mark.check().unwrap();
    }

    #[tokio::test]
    async fn every_directory_has_its_own_flushes() {
        let existing = tempfile::TempDir::new().unwrap();
        let absent = existing.path().join("absent");
        let flushes = Flushes::default();
        let [first, second] = [(); 2].map(|()| flushes.flush(existing.path()));
        let made = tokio::join!(first, second, flushes.flush(&absent));
        assert!(matches!(made, (Ok(()), Ok(()), Err(_))), "{made:?}");
    }

    #[tokio::test]
    async fn the_content_store_is_flushed_too() {
        let existing = tempfile::TempDir::new().unwrap();
        let here = existing.path().to_path_buf();
        let absent = here.join("absent");
        let flushes = Flushes::default();
        for (unpacked, root, sees) in [(&here, &here, true), (&here, &absent, false), (&absent, &here, false)]
        {
            let directories = ImageDirectories { unpacked: unpacked.clone(), root: root.clone() };
            assert_eq!(flushes.flush_both(&directories).await.is_ok(), sees, "{directories:?}");
        }
    }

    #[test]
    fn a_flush_covers_pulls_that_ended_before() {
        let pulls = UnflushedPulls::default();
        assert!(pulls.has_any(), "the start");
        pulls.cover(pulls.last_noted());
        assert!(!pulls.has_any());
        let pull = pulls.begin_pull();
        let during = pulls.last_noted();
        drop(pull);
        pulls.cover(during);
        assert!(pulls.has_any(), "it ended during the flush");
        let after = pulls.last_noted();
        pulls.cover(after);
        pulls.cover(during);
        assert!(!pulls.has_any());
    }
}
