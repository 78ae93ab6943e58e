//! Carries one task out: the checks, then the images, a few at a time over the whole node.
//!
//! - An image that waits between two tries holds no place.
//! - A task asks for no more places than the node has, so that a long task does not starve a short one.
//! - The deadline is enforced here, by the monotonic clock. What runs then is dropped, which stops it in the
//!   runtime as well.

mod board;
mod image;
mod login;
mod once;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use prepull_api::task::{CheckItem, CheckOutcome, ImageOutcome, ImageProgress, ImageResult, TaskOutcome};
use prepull_api::wire::{Key, truncate_reason};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::backoff::{self, Backoff};
use crate::config::Limits;
use crate::images::providers::Providers;
use crate::images::puller::{ErrorClass, Puller};
use crate::tasks::agent::{TaskEnd, Terms, Work, summary};
use crate::tasks::checks::{self, Readings};
use board::Board;
use once::Once;

/// The shortest time between two progress reports of a task, whatever the cloud asks for.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// The first report comes early: somebody may be watching.
const FIRST_REPORT: Duration = Duration::from_millis(200);

/// The ceilings of the waits between two tries of an image, the first and the last. A node has minutes, mostly:
/// longer waits would waste them.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What the executor says of a task while it works on it.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The checks ended.
    Checked(CheckOutcome),
    /// The images of which there is something new to say.
    Progress(Vec<ImageProgress>),
    /// An image ended for good.
    ImageEnded {
        /// Index into the task's images.
        index: usize,
        /// How.
        result: ImageResult,
    },
}

/// What whoever started a task may change while it runs.
#[derive(Clone, Debug)]
pub struct Control {
    /// Deadline and keys.
    pub terms: Terms,
    /// Set to stop the task; says why.
    pub stop: Option<String>,
}

/// How often progress is told, and to whom. Shared by all tasks of the node.
#[derive(Debug)]
pub struct Pace {
    interval: AtomicU64,
    session: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        let pace = Self { interval: AtomicU64::new(0), session: AtomicU64::new(0) };
        pace.set_interval(SHORTEST_INTERVAL);
        pace
    }
}

impl Pace {
    /// The interval, though never below one second.
    pub fn set_interval(&self, interval: Duration) {
        let millis = u64::try_from(interval.max(SHORTEST_INTERVAL).as_millis()).unwrap_or(u64::MAX);
        self.interval.store(millis, Ordering::Relaxed);
    }

    /// Somebody new listens, who has not heard what was told before.
    pub fn new_listener(&self) {
        self.session.fetch_add(1, Ordering::Relaxed);
    }

    fn interval(&self) -> Duration {
        Duration::from_millis(self.interval.load(Ordering::Relaxed))
    }
}

/// Carries tasks out, all of a node's.
#[derive(Debug)]
pub struct Executor<P> {
    puller: Arc<P>,
    parallel: usize,
    /// One for each pull that may run on the node.
    places: Semaphore,
    once: Once,
    limits: Limits,
    providers: Arc<Providers>,
    pace: Arc<Pace>,
    random: fn() -> f64,
}

/// What the images of one task share.
struct TaskContext<'a> {
    board: &'a Board,
    control: watch::Receiver<Control>,
    /// As many places as the node has, for this task.
    window: Semaphore,
}

impl TaskContext<'_> {
    /// The image's key as it is now: a new `Assign` may have brought another.
    fn key(&self, index: usize) -> Arc<Key> {
        let key = self.control.borrow().terms.keys.get(index).cloned();
        key.unwrap_or_else(|| {
            Arc::new(Key::Unavailable { reason: "the assignment has no key for this image".to_owned() })
        })
    }
}

impl<P: Puller> Executor<P> {
    /// For a node that pulls so many images at a time.
    pub fn new(puller: Arc<P>, parallel: NonZeroUsize, limits: Limits) -> Self {
        // The semaphore's own bound; nobody means more.
        let parallel = parallel.get().min(Semaphore::MAX_PERMITS);
        Self {
            puller,
            parallel,
            places: Semaphore::new(parallel),
            once: Once::default(),
            limits,
            providers: Arc::default(),
            pace: Arc::default(),
            random: backoff::random,
        }
    }

    /// Asks these where the credentials of a task do not do.
    #[must_use]
    pub(crate) fn with_credential_providers(mut self, providers: Arc<Providers>) -> Self {
        self.providers = providers;
        self
    }

    /// For whoever listens to the reports.
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Carries one task out. Ends by the deadline at the latest. Dropping the future stops the pulls.
    pub async fn run(
        &self,
        work: Work,
        control: watch::Receiver<Control>,
        reports: mpsc::Sender<Report>,
    ) -> TaskEnd {
        let board = Board::new(&work.done);
        let mut check = work.check.clone();
        let mut trouble = String::new();
        let ended = {
            let carry_out = async {
                if check.is_none() {
                    let outcome = self.check(&work.task.checks, &mut trouble).await;
                    let _ = reports.send(Report::Checked(outcome.clone())).await;
                    check = Some(outcome);
                }
                if check.as_ref().is_some_and(|outcome| outcome.passed) {
                    let window = Semaphore::new(self.parallel);
                    let context = TaskContext { board: &board, control: control.clone(), window };
                    self.images(&work, &context, &reports).await;
                }
            };
            tokio::select! {
                // What ended in the very moment of the deadline has ended.
                biased;
                () = carry_out => Ended::ByItself,
                reason = stopped(control.clone()) => Ended::Stopped(reason),
                () = deadline(control.clone()) => Ended::Deadline,
                never = self.tell(&board, &reports) => match never {},
            }
        };
        let end = conclude(&work, ended, check, &trouble, &board);
        if end.outcome == TaskOutcome::Cancelled {
            let images = work.task.images.iter().zip(&end.images);
            let broken =
                images.filter(|(_, result)| result.outcome == ImageOutcome::Stopped && result.attempts > 0);
            join_all(broken.map(|(image, _)| self.give_up(&image.reference))).await;
        }
        end
    }

    async fn images(&self, work: &Work, context: &TaskContext<'_>, reports: &mpsc::Sender<Report>) {
        let open = work
            .task
            .images
            .iter()
            .enumerate()
            .filter(|(index, _)| work.done.get(*index).is_none_or(Option::is_none));
        let pulls = open.map(|(index, image)| async move {
            let result = self.image(context, index, image).await;
            let ImageResult { outcome, digest, reason, .. } = &result;
            tracing::info!(image = %image.reference, ?outcome, digest, reason, attempts = result.attempts, "image ended");
            // Nobody listens any more when the agent stops.
            let _ = reports.send(Report::ImageEnded { index, result }).await;
        });
        join_all(pulls).await;
    }

    /// Runs the checks. While the runtime does not answer there is nothing to check: the deadline is the end of
    /// that.
    async fn check(&self, items: &[CheckItem], trouble: &mut String) -> CheckOutcome {
        let mut outage = Backoff::new(BACKOFF.0, BACKOFF.1);
        let disk = loop {
            if !items.contains(&CheckItem::Disk) {
                break Err("was not asked for".to_owned());
            }
            match self.puller.filesystem().await {
                Ok(filesystem) => break Ok(filesystem),
                Err(error) if error.class == ErrorClass::RuntimeDown => {
                    let wait = outage.next((self.random)());
                    tracing::warn!(%error, retry_in = ?wait, "the disk cannot be checked yet");
                    *trouble = error.message;
                    sleep(wait).await;
                }
                Err(error) => break Err(error.message),
            }
        };
        trouble.clear();
        let readings = Readings { disk, load: checks::load(), memory: checks::memory() };
        let mut outcome = checks::judge(items, &self.limits, &readings);
        outcome.reason = truncate_reason(&outcome.reason);
        outcome
    }

    /// Tells what is new on the board, for ever.
    async fn tell(&self, board: &Board, reports: &mpsc::Sender<Report>) -> std::convert::Infallible {
        let mut session = self.pace.session.load(Ordering::Relaxed);
        sleep(FIRST_REPORT).await;
        loop {
            let now = self.pace.session.load(Ordering::Relaxed);
            if now != session {
                session = now;
                board.forget_told();
            }
            // Only where there is room, so that nothing counts as told that was dropped.
            if let Ok(permit) = reports.try_reserve() {
                let news = board.news();
                if !news.is_empty() {
                    permit.send(Report::Progress(news));
                }
            }
            sleep(self.pace.interval()).await;
        }
    }
}

enum Ended {
    ByItself,
    Stopped(String),
    Deadline,
}

fn conclude(work: &Work, ended: Ended, check: Option<CheckOutcome>, trouble: &str, board: &Board) -> TaskEnd {
    let because = |text: &str, images: &[ImageResult]| {
        let missing = images.iter().filter(|image| !image.outcome.is_on_node()).count();
        let mut reason = format!("{text}; {missing} of {} images are missing", images.len());
        if !trouble.is_empty() {
            reason = format!("{reason}; {trouble}");
        }
        truncate_reason(&reason)
    };
    let (outcome, reason, images) = match ended {
        Ended::ByItself => {
            if let Some(CheckOutcome { passed: false, reason }) = &check {
                let mut images = board.results("");
                for image in images.iter_mut().filter(|image| image.outcome == ImageOutcome::Stopped) {
                    image.outcome = ImageOutcome::Failed;
                    "not pulled: the node did not pass the checks".clone_into(&mut image.reason);
                }
                (TaskOutcome::Failed, truncate_reason(&format!("check failed: {reason}")), images)
            } else {
                // All have ended, so that nothing is stopped.
                let images = board.results("stopped");
                let (outcome, reason) = summary(&work.task, &images);
                (outcome, reason, images)
            }
        }
        Ended::Stopped(reason) => {
            let images = board.results("cancelled");
            (TaskOutcome::Cancelled, because(&format!("cancelled: {reason}"), &images), images)
        }
        Ended::Deadline => {
            let images = board.results("the deadline passed");
            (TaskOutcome::DeadlineExceeded, because("the deadline passed", &images), images)
        }
    };
    TaskEnd { outcome, reason, check, images }
}

async fn stopped(mut control: watch::Receiver<Control>) -> String {
    loop {
        if let Some(reason) = &control.borrow_and_update().stop {
            return reason.clone();
        }
        if control.changed().await.is_err() {
            // Nobody can stop it any more.
            std::future::pending::<()>().await;
        }
    }
}

async fn deadline(mut control: watch::Receiver<Control>) {
    loop {
        let deadline = Instant::from_std(control.borrow_and_update().terms.deadline);
        let renewed = async {
            if control.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = renewed => {}
            () = sleep_until(deadline) => return,
        }
    }
}
