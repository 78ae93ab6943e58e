//! Pulls single images: attempts, backoff, and the limits that all tasks of the node share.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{ByteProgress, ImageOutcome, ImageResult, ImageTask, PullPolicy, TaskId};
use prepull_api::wire::{PullKey, truncate_reason};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::{sleep, timeout};

use super::context::TaskContext;
use super::control::{current_key, pull_deadline};
use super::locks::{RecentPull, ReferenceGuard, ReferenceLocks};
use super::login::{PullAttempt, pull_with_key};
use super::pinning::pin_image;
use super::wanted::WantedImages;
use super::window::{wait_for_other_way, wait_until, wait_until_closed};
use crate::backoff::{self, Backoff};
use crate::clock::CloudClock;
use crate::images::providers::Providers;
use crate::images::puller::{
    DiskWatch, ErrorClass, FlushMark, Present, PullError, PullTerms, Pulled, Puller, Reservation,
};
use crate::metrics::AgentMetrics;
use crate::tasks::NOT_KNOWN;

/// First ceiling of the wait between two attempts, which doubles with each failure.
pub(super) const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Last ceiling of the wait between two attempts. A task usually has minutes; longer waits would waste them.
pub(super) const LAST_BACKOFF: Duration = Duration::from_secs(30);
/// Longest wait that a registry may request. A registry that rate-limits asks for seconds or minutes; one with a bug,
/// or an impostor, must not delay a task's other attempts until the deadline. If we retry too early, a registry repeats
/// its request.
const LONGEST_ASKED_WAIT: Duration = Duration::from_secs(600);

/// Number of times the runtime may end during the pull of an image before that counts as a failed attempt: an upgrade
/// restarts it once or twice, but an image that needs more memory than there is crashes it each time.
const PARDONED_OUTAGES: u32 = 2;

/// Pulls images for all tasks of the node, a limited number at a time.
#[derive(Debug)]
pub(super) struct ImagePulls<P> {
    pub(super) puller: Arc<P>,
    pub(super) providers: Arc<Providers>,
    /// Source of random numbers from 0 to 1.
    pub(super) random: fn() -> f64,
    /// Clock for windows.
    pub(super) clock: Arc<CloudClock>,
    parallel: usize,
    /// One permit per concurrent pull on the node.
    node_permits: Semaphore,
    locks: ReferenceLocks,
    pub(super) wanted: WantedImages,
    /// Counts failed attempts.
    pub(super) metrics: Option<Arc<AgentMetrics>>,
    /// Whether unfinished pulls may have left content in the runtime, also before a restart.
    leftovers: AtomicBool,
    /// References that the runtime has pulled and the disk has refused, each with the error, until we see that the image is
    /// gone. Pulling again may not repair it.
    refused: Mutex<HashMap<String, RefusedImage>>,
}

/// An image that the disk has refused.
#[derive(Debug)]
struct RefusedImage {
    /// Its id in the runtime: under the same reference another image may come.
    id: Option<String>,
    error: PullError,
}

impl RefusedImage {
    /// Whether it's the image that is there now. Without an id it may be.
    fn may_be(&self, present: &Present) -> bool {
        self.id.is_none() || present.id.is_none() || self.id == present.id
    }
}

impl<P: Puller> ImagePulls<P> {
    pub(super) fn new(puller: Arc<P>, parallel: NonZeroUsize) -> Self {
        // A semaphore has an upper bound of permits.
        let parallel = parallel.get().min(Semaphore::MAX_PERMITS);
        Self {
            puller,
            providers: Arc::default(),
            random: backoff::random_fraction,
            clock: Arc::default(),
            parallel,
            node_permits: Semaphore::new(parallel),
            locks: ReferenceLocks::default(),
            wanted: WantedImages::default(),
            metrics: None,
            leftovers: AtomicBool::new(true),
            refused: Mutex::default(),
        }
    }

    pub(super) fn may_have_leftovers(&self) -> bool {
        self.leftovers.load(Ordering::Relaxed)
    }

    pub(super) fn note_leftovers(&self) {
        self.leftovers.store(true, Ordering::Relaxed);
    }

    /// Clears the note of leftovers. A pull that begins from now on sets it again.
    pub(super) fn begin_tidying(&self) {
        self.leftovers.store(false, Ordering::Relaxed);
    }

    /// Backoff between two attempts, or between two requests to a runtime that doesn't answer.
    pub(super) fn new_backoff() -> Backoff {
        Backoff::new(FIRST_BACKOFF, LAST_BACKOFF)
    }

    /// Permits for the images of one task.
    pub(super) fn task_permits(&self) -> Semaphore {
        Semaphore::new(self.parallel)
    }

    /// Repeats attempts until the node has the image, or no further attempt is allowed.
    pub(super) async fn pull(
        &self,
        context: &TaskContext<'_>,
        index: usize,
        image: &ImageTask,
    ) -> ImageResult {
        let board = context.board;
        let (mut failures, mut outages) = (0, 0);
        let mut backoff = Self::new_backoff();
        let mut result = loop {
            let error = match self.attempt(context, index, image).await {
                Ok(Some(result)) => break result,
                // It continues later without losing an attempt.
                Ok(None) => continue,
                Err(error) => error,
            };
            if let Some(metrics) = &self.metrics {
                metrics.count_failed_try(error.class, error.code);
            }
            // After a transient error, the next attempt or another task resumes the pull. On a full disk, the fetched
            // content is in the way of that attempt. If the disk was only estimated to get full, it isn't.
            let resumable = match error.class {
                ErrorClass::Transient
                | ErrorClass::NoRoom
                | ErrorClass::RuntimeDown
                | ErrorClass::RuntimeLost => true,
                ErrorClass::NoSpace | ErrorClass::Auth | ErrorClass::NotFound | ErrorClass::Permanent => {
                    false
                }
            };
            match error.class {
                _ if resumable => {}
                // Even if another task wants it, because that one needs the room too.
                ErrorClass::NoSpace => self.give_up(&image.reference).await,
                _ => self.give_up_unless_wanted(context.task, &image.reference).await,
            }
            match error.class {
                ErrorClass::RuntimeDown => {}
                ErrorClass::RuntimeLost if outages < PARDONED_OUTAGES => {
                    outages += 1;
                    board.retract_attempt(index);
                }
                ErrorClass::Transient
                | ErrorClass::NoSpace
                | ErrorClass::NoRoom
                | ErrorClass::RuntimeLost
                    if failures < image.retries =>
                {
                    failures += 1;
                }
                _ => break failed_result(&error),
            }
            // At least half of the ceiling, so that we don't give up on a restarting registry within a second. It's
            // added to the wait that the registry requests from the whole fleet at the same time.
            let asked = error.retry_after.unwrap_or_default().min(LONGEST_ASKED_WAIT);
            let wait = asked + backoff.next(0.5 + (self.random)() / 2.0);
            let (class, code) = (error.class.as_str(), error.code.as_str());
            tracing::warn!(image = %image.reference, code, class, %error, retry_in = ?wait, "pull failed, trying again");
            board.begin_backoff(index, &error);
            sleep(wait).await;
        };
        pin_image(&*self.puller, context, image, &mut result).await;
        board.end_image(index, result)
    }

    /// Whether all of these images are present and need no request to a registry.
    pub(super) async fn needs_no_link(&self, images: impl Iterator<Item = &ImageTask>) -> bool {
        for image in images {
            let is_there = match image.policy {
                PullPolicy::Never | PullPolicy::Other => true,
                PullPolicy::IfNotPresent => {
                    matches!(self.puller.look_up(&image.reference).await, Ok(Some(_)))
                }
                PullPolicy::Always => false,
            };
            if !is_there {
                return false;
            }
        }
        true
    }

    /// The result of an image that the runtime has. If a restart or a deadline came before the flush of its pull, that is made
    /// up for now.
    ///
    /// # Errors
    /// The disk refuses the flush, or has refused that of its pull. The kernel reports that once, so we remember it.
    async fn report_present(&self, reference: &str, present: Present) -> Result<ImageResult, PullError> {
        let flushed = if self.puller.has_unflushed() { self.puller.flush().await } else { Ok(()) };
        let mut refused = self.refused();
        if let Err(error) = flushed {
            refused.insert(reference.to_owned(), RefusedImage { id: present.id.clone(), error });
        }
        match refused.get(reference) {
            Some(known) if known.may_be(&present) => Err(known.error.clone()),
            _ => Ok(already_present(present)),
        }
    }

    /// Pulls, and watches the disks meanwhile.
    async fn pull_watched(
        &self,
        attempt: PullAttempt<'_, P>,
        key: &PullKey,
        asking: &AtomicBool,
    ) -> Result<(Pulled, DiskWatch), PullError> {
        let watch = self.puller.watch_disk().await;
        let terms = PullTerms { since: Some(&watch.mark), ..attempt.terms };
        let pulled = pull_with_key(PullAttempt { terms, ..attempt }, &self.providers, key, asking).await?;
        Ok((pulled, watch))
    }

    /// Brings an image that was pulled since the mark to the disk.
    async fn flush_pulled(
        &self,
        reference: &str,
        pulled: &Pulled,
        since: &FlushMark,
    ) -> Result<(), PullError> {
        let flushed = if pulled.is_flushed {
            Ok(())
        } else {
            self.puller.flush().await.and_then(|()| PullError::of_mark(since).map_or(Ok(()), Err))
        };
        let mut refused = self.refused();
        match (&flushed, refused.get(reference)) {
            // The runtime had it, and has written nothing again.
            (Ok(()), Some(known)) if known.id == pulled.id => return Err(known.error.clone()),
            (Ok(()), _) => _ = refused.remove(reference),
            (Err(error), _) => {
                let of_pull = RefusedImage { id: pulled.id.clone(), error: error.clone() };
                refused.insert(reference.to_owned(), of_pull);
            }
        }
        flushed
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<String, RefusedImage>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the refusal of an image that isn't there any more.
    async fn forget_absent(&self, reference: &str) -> Result<(), PullError> {
        let is_refused = self.refused().contains_key(reference);
        if is_refused && self.puller.look_up(reference).await?.is_none() {
            self.refused().remove(reference);
        }
        Ok(())
    }

    /// Releases the reference for this task, unless another task will resume it.
    pub(super) async fn give_up_unless_wanted(&self, task: &TaskId, reference: &str) {
        if !self.wanted.by_another(task, reference) {
            self.give_up(reference).await;
        }
    }

    /// Keeps pulls of these names waiting. `None` if one is running.
    pub(super) fn try_lock_all(&self, names: &[String]) -> Option<Vec<ReferenceGuard>> {
        self.locks.try_lock_all(names)
    }

    /// Keeps tasks of the node waiting for an image that's removed to make room, unless one wants it.
    pub(super) fn reserve(&self, names: &[String]) -> Option<Reservation> {
        let guards = self.try_lock_all(names)?;
        (!self.wanted.has_any(names)).then(|| Box::new(guards) as Reservation)
    }

    /// Has the puller release the content of unfinished pulls of this reference, unless one is running.
    async fn give_up(&self, reference: &str) {
        if let Some(_guard) = self.locks.try_lock(reference) {
            self.puller.give_up(reference).await;
        }
    }

    /// Pulls the image, once the task may download. `None`: the window has closed in between, or the required
    /// signatures have changed.
    async fn attempt(
        &self,
        context: &TaskContext<'_>,
        index: usize,
        image: &ImageTask,
    ) -> Result<Option<ImageResult>, PullError> {
        match image.policy {
            // Looking at present images takes no link.
            PullPolicy::Never => {}
            PullPolicy::Other => return Err(unknown_policy()),
            PullPolicy::IfNotPresent => {
                let is_open = context.control.borrow().terms.window_state(self.clock.wall()).is_open;
                if !is_open && let Some(present) = self.puller.look_up(&image.reference).await? {
                    return self.report_present(&image.reference, present).await.map(Some);
                }
                wait_until(true, context.control.clone(), &self.clock).await;
            }
            // Even by digest: the runtime asks the registry, which may refuse the job's credential.
            PullPolicy::Always => wait_until(true, context.control.clone(), &self.clock).await,
        }
        // The lock comes first: an image that waits for another pull of the same reference must not hold a permit that
        // a different image could use.
        let mut recent = self.locks.lock(&image.reference).await;
        let of_task = acquire_permit(&context.task_permits).await;
        let of_node = acquire_permit(&self.node_permits).await;

        let key = current_key(&context.control, index);
        match image.policy {
            PullPolicy::Never | PullPolicy::IfNotPresent => {
                if let Some(present) = self.puller.look_up(&image.reference).await? {
                    drop((of_task, of_node));
                    return self.report_present(&image.reference, present).await.map(Some);
                }
                self.refused().remove(&image.reference);
                if image.policy == PullPolicy::Never {
                    return Err(not_present());
                }
            }
            PullPolicy::Always | PullPolicy::Other => {
                // The previous pull may not have checked its signature.
                let recent = recent.as_ref().filter(|_| !context.needs_signature());
                if let Some(pulled) = recent.and_then(|recent| recent.if_pulled_with(&key)) {
                    let Pulled { digest, id, .. } = pulled.clone();
                    return Ok(Some(already_present(Present { digest, id })));
                }
                self.forget_absent(&image.reference).await?;
            }
        }

        // Only now: an image that's present needs no key.
        if let PullKey::Unavailable { reason } = &*key {
            let error = PullError::new(ErrorClass::Permanent, reason);
            return Err(error.with_code(FailureCode::SecretUnusable));
        }

        let (download, deadline) = {
            let terms = &context.control.borrow().terms;
            if !terms.window_state(self.clock.wall()).is_open {
                return Ok(None);
            }
            (terms.download.clone(), pull_deadline(terms, image.timeout, &self.clock))
        };
        let terms = PullTerms {
            bucket: Some(context.bucket),
            verification: context.verification.as_ref().or(download.verify.as_ref()),
            shared_for: download.share.then_some(context.task),
            site: Some(context.site),
            site_limited: download.site_rate.is_some(),
            deadline: Some(deadline),
            deltas: download.deltas,
            wanted: &self.wanted.references(),
            reserve: Some(&|names| self.reserve(names)),
            since: None,
        };
        let (board, arrived, asking) = (context.board, watch::Sender::new(false), AtomicBool::new(false));
        self.note_leftovers();
        board.begin_attempt(index);
        let progress = |bytes: ByteProgress| {
            board.set_bytes(index, bytes);
            arrived.send_replace(bytes.total > 0 && bytes.done >= bytes.total);
        };
        let pull = PullAttempt { puller: &*self.puller, image, terms, progress: &progress };
        let pull = self.pull_watched(pull, &key, &asking);
        let interrupted = async {
            tokio::select! {
                () = wait_until_closed(&context.control, &arrived, &self.clock) => {}
                () = wait_for_other_way(context.control.clone(), &download) => {}
            }
        };
        let pulled = tokio::select! {
            // Biased: a pull that ends at the very moment when the window closes has ended.
            biased;
            pulled = within_limit(image.timeout, &asking, pull) => pulled,
            () = interrupted => {
                board.interrupt_attempt(index);
                return Ok(None);
            }
        };
        match pulled {
            Ok((pulled, watch)) => {
                // The image now needs the disk; the next one can use the link.
                drop((of_task, of_node));
                // Before we report it: an image that's reported as pulled must survive a power cut.
                self.flush_pulled(&image.reference, &pulled, &watch.mark).await?;
                *recent = Some(RecentPull::new(&key, &pulled));
                Ok(Some(just_pulled(pulled)))
            }
            Err(error) => {
                if error.class == ErrorClass::RuntimeDown {
                    board.retract_attempt(index);
                }
                Err(error)
            }
        }
    }
}

/// Limits one attempt to `timeoutSeconds`. Dropping the attempt stops the pull in the runtime; the next one resumes it.
async fn within_limit<T>(
    limit: Option<Duration>,
    asking: &AtomicBool,
    attempt: impl Future<Output = Result<T, PullError>>,
) -> Result<T, PullError> {
    let Some(limit) = limit else { return attempt.await };
    timeout(limit, attempt).await.unwrap_or_else(|_| {
        let mut message = format!("not pulled within timeoutSeconds ({}s)", limit.as_secs_f64());
        if asking.load(Ordering::Relaxed) {
            message.push_str(": the node's credential providers had not answered yet");
        }
        Err(PullError::new(ErrorClass::Transient, message).with_code(FailureCode::Timeout))
    })
}

async fn acquire_permit(permits: &Semaphore) -> Option<SemaphorePermit<'_>> {
    // This can't fail: an error would mean a closed semaphore, and we never close these.
    permits.acquire().await.ok()
}

fn failed_result(error: &PullError) -> ImageResult {
    ImageResult {
        reason: truncate_reason(&error.message),
        code: Some(error.code),
        ..ImageResult::new(ImageOutcome::Failed)
    }
}

fn just_pulled(pulled: Pulled) -> ImageResult {
    let Pulled { digest, id, bytes, warning, is_flushed: _, facts, from_peers } = pulled;
    let reason = warning.unwrap_or_default();
    ImageResult { reason, facts, from_peers, ..on_node(ImageOutcome::Pulled, digest, id, bytes) }
}

fn not_present() -> PullError {
    let message = "the image is not present, and its pull policy is Never";
    PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::NotPresent)
}

fn unknown_policy() -> PullError {
    let message = format!("its pull policy is {NOT_KNOWN}");
    PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::Internal)
}

pub(super) fn already_present(present: Present) -> ImageResult {
    let Present { digest, id } = present;
    on_node(ImageOutcome::Present, digest, id, None)
}

fn on_node(
    outcome: ImageOutcome,
    digest: Option<String>,
    id: Option<String>,
    bytes: Option<ByteProgress>,
) -> ImageResult {
    ImageResult { digest, id, bytes, ..ImageResult::new(outcome) }
}
