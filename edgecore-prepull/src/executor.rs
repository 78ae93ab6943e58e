//! Carries out one task: checks, then images a few at a time, each with its own tries.
//!
//! ```text
//!  Work ─▶ checks ─▶ image ─▶ present? ─▶ key ─▶ pull ─┬─▶ ImageEnded … ─▶ Ended
//!                      ▲                               │
//!                      └── wait (exponential, jitter) ◀┘ transient, and tries are left
//! ```
//!
//! The deadline and a stop drop whatever is under way, which ends it in the runtime as well.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use prepull_api::task::{
    CheckItem, CheckOutcome, ImageOutcome, ImagePhase, ImageResult, ImageTask, TaskOutcome,
};
use prepull_api::wire::{Key, Progress, bounded_reason};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tracing::{Instrument, info, info_span, warn};

use crate::agent::{Event, TaskEnd, Terms, Work, summary};
use crate::checks::{self, Readings};
use crate::config::Limits;
use crate::puller::{ErrorClass, PullError, Puller};
use crate::tunnel::backoff::{Backoff, random};

mod board;
#[cfg(test)]
mod tests;

use board::Board;

/// Between two tries of an image.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Between two looks at a runtime that does not answer. It is no try: nothing was asked of a registry.
const RUNTIME_RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// Between two `Progress` of a task; the protocol's own bound.
const PROGRESS: Duration = Duration::from_secs(1);

/// Starts tasks. They share the permits, so that a node pulls so many images at a time and no more.
#[derive(Debug)]
pub struct Executor<P> {
    shared: Arc<Shared<P>>,
}

impl<P> Clone for Executor<P> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

#[derive(Debug)]
struct Shared<P> {
    puller: P,
    limits: Limits,
    parallel: NonZeroUsize,
    /// First come, first served; a task queues for as many as it could use and no more, so that tasks take turns.
    permits: Semaphore,
    /// One pull of a reference at a time: whoever comes second finds it present.
    references: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
}

/// A task that is being carried out. Dropping it leaves the task alone.
#[derive(Debug)]
pub struct Running {
    terms: watch::Sender<Terms>,
    stop: Option<oneshot::Sender<String>>,
}

impl Running {
    /// New keys and a new deadline.
    pub fn renew(&self, terms: Terms) {
        self.terms.send_replace(terms);
    }

    /// Ends the task with what is done by now.
    pub fn stop(&mut self, reason: String) {
        if let Some(stop) = self.stop.take() {
            // It ended by itself at the same moment.
            let _ = stop.send(reason);
        }
    }
}

impl<P: Puller> Executor<P> {
    /// `parallel` images at a time over all tasks.
    pub fn new(puller: P, limits: Limits, parallel: NonZeroUsize) -> Self {
        let permits = Semaphore::new(parallel.get());
        Self { shared: Arc::new(Shared { puller, limits, parallel, permits, references: Mutex::default() }) }
    }

    /// What pulls.
    pub fn puller(&self) -> &P {
        &self.shared.puller
    }

    /// Carries out a task. Everything about it comes as events, the last of which is [`Event::Ended`], or
    /// [`Event::Crashed`] should the task die.
    pub fn start(&self, work: Work, events: mpsc::Sender<Event>) -> Running {
        let (terms, current) = watch::channel(work.terms.clone());
        let (stop, stopped) = oneshot::channel();
        let shared = self.shared.clone();
        let id = work.task.id.clone();
        let span = info_span!("task", task = %id, title = work.task.title);
        tokio::spawn(async move {
            let inner = tokio::spawn({
                let (events, id) = (events.clone(), id.clone());
                let job = Job { shared, board: Board::new(&work), work, terms: current, events };
                async move {
                    let end = job.run(stopped).await;
                    info!(outcome = ?end.outcome, reason = end.reason, "task ended");
                    job.tell(Event::Ended(id, end)).await;
                }
                .instrument(span)
            });
            if let Err(error) = inner.await {
                let reason = format!("the agent failed in the middle of the task: {error}");
                let _ = events.send(Event::Crashed { task: id, reason }).await;
            }
        });
        Running { terms, stop: Some(stop) }
    }
}

/// One task under way.
struct Job<P> {
    shared: Arc<Shared<P>>,
    work: Work,
    terms: watch::Receiver<Terms>,
    events: mpsc::Sender<Event>,
    board: Board,
}

/// What the checks found, and how the images stand, for whoever ends the task early.
enum Finish {
    Regular(CheckOutcome),
    Deadline,
    Stopped(String),
}

impl<P: Puller> Job<P> {
    async fn run(&self, stopped: oneshot::Receiver<String>) -> TaskEnd {
        let finish = tokio::select! {
            biased;
            reason = stopped => match reason {
                Ok(reason) => Finish::Stopped(reason),
                // Nobody is left who could stop it: the program ends.
                Err(_) => std::future::pending().await,
            },
            () = self.deadline() => Finish::Deadline,
            check = self.carry_out() => Finish::Regular(check),
            () = self.report() => Finish::Deadline, // never: it reports until it is dropped
        };
        let check = self.board.check();
        match finish {
            Finish::Regular(check) if !check.passed => {
                let images = self.board.results(ImageOutcome::Failed, "not pulled: the checks failed");
                TaskEnd {
                    outcome: TaskOutcome::Failed,
                    reason: bounded_reason(&check.reason),
                    check: Some(check),
                    images,
                }
            }
            Finish::Regular(check) => {
                let images = self.board.results(ImageOutcome::Stopped, "");
                let (outcome, reason) = summary(&self.work.task, &images);
                TaskEnd { outcome, reason, check: Some(check), images }
            }
            Finish::Deadline => {
                let images = self
                    .board
                    .results(ImageOutcome::Stopped, "not finished when the deadline of the node passed");
                let missing = images.iter().filter(|image| !image.outcome.is_there()).count();
                let reason = format!(
                    "the deadline of the node (timeoutSeconds) passed with {missing} of {} images missing",
                    images.len()
                );
                TaskEnd { outcome: TaskOutcome::DeadlineExceeded, reason, check, images }
            }
            Finish::Stopped(reason) => {
                let reason = format!("cancelled: {reason}");
                let images = self.board.results(ImageOutcome::Stopped, &reason);
                TaskEnd { outcome: TaskOutcome::Cancelled, reason: bounded_reason(&reason), check, images }
            }
        }
    }

    async fn tell(&self, event: Event) {
        // The agent's queue is closed only when the program ends.
        let _ = self.events.send(event).await;
    }

    /// Resolves when the time of the task is over; a renewal moves it.
    async fn deadline(&self) {
        let mut terms = self.terms.clone();
        loop {
            let until = terms.borrow_and_update().deadline;
            tokio::select! {
                () = tokio::time::sleep_until(until.into()) => return,
                changed = terms.changed() => if changed.is_err() {
                    tokio::time::sleep_until(until.into()).await;
                    return;
                }
            }
        }
    }

    /// Sends what changed, once a second.
    async fn report(&self) {
        let mut ticks = tokio::time::interval(PROGRESS);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let images = self.board.news();
            if !images.is_empty() {
                self.tell(Event::Progress(Progress { task: self.work.task.id.clone(), images })).await;
            }
        }
    }

    async fn carry_out(&self) -> CheckOutcome {
        let check = match &self.work.check {
            Some(check) if check.passed => check.clone(),
            _ => {
                let check = self.check().await;
                self.board.checked(check.clone());
                self.tell(Event::Checked(self.work.task.id.clone(), check.clone())).await;
                check
            }
        };
        if check.passed {
            let open = (0..self.work.task.images.len()).filter(|index| self.board.is_open(*index));
            stream::iter(open)
                .for_each_concurrent(self.shared.parallel.get(), |index| async move {
                    let image = &self.work.task.images[index];
                    let span = info_span!("image", image = image.reference);
                    let result = self.image(index, image).instrument(span).await;
                    self.board.ended(index, result.clone());
                    self.tell(Event::ImageEnded { task: self.work.task.id.clone(), index, result }).await;
                })
                .await;
        }
        check
    }

    async fn check(&self) -> CheckOutcome {
        let items = &self.work.task.checks;
        let disk = if items.contains(&CheckItem::Disk) { self.filesystem().await } else { Ok(None) };
        match disk {
            Ok(disk) => {
                let readings = Readings { disk, load: checks::load(), memory: checks::memory() };
                checks::judge(items, &self.shared.limits, &readings)
            }
            Err(error) => CheckOutcome { passed: false, reason: format!("disk: {error}") },
        }
    }

    /// Waits for a runtime that is down: it may be restarting.
    async fn filesystem(&self) -> Result<Option<prepull_api::wire::Filesystem>, PullError> {
        let mut backoff = Backoff::new(RUNTIME_RETRY.0, RUNTIME_RETRY.1);
        loop {
            match self.shared.puller.filesystem().await {
                Ok(filesystem) => return Ok(Some(filesystem)),
                Err(error) if error.class == ErrorClass::RuntimeDown => {
                    tokio::time::sleep(backoff.next(random())).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Brings one image to its end.
    async fn image(&self, index: usize, image: &ImageTask) -> ImageResult {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut runtime_backoff = Backoff::new(RUNTIME_RETRY.0, RUNTIME_RETRY.1);
        let mut attempts = 0;
        loop {
            let error = match self.attempt(index, image, &mut attempts).await {
                Ok(result) => return result,
                Err(error) => error,
            };
            let is_last = match error.class {
                ErrorClass::RuntimeDown => false,
                ErrorClass::Transient => attempts > image.retries,
                ErrorClass::Auth | ErrorClass::NotFound | ErrorClass::Permanent => true,
            };
            if is_last {
                warn!(attempts, class = error.class.as_str(), reason = error.message, "image failed");
                return failed(&error.message, attempts);
            }
            let wait = match error.class {
                ErrorClass::RuntimeDown => runtime_backoff.next(random()),
                // Not at once, even where the dice say so: a registry that has had enough needs a moment.
                _ => (backoff.next(random())).max(RETRY.0 / 4),
            };
            info!(
                attempts,
                class = error.class.as_str(),
                reason = error.message,
                ?wait,
                "image to be tried again"
            );
            self.board.backing_off(index, attempts, &error.message);
            tokio::time::sleep(wait).await;
        }
    }

    /// One try. `attempts` counts those that reached for a registry.
    async fn attempt(
        &self,
        index: usize,
        image: &ImageTask,
        attempts: &mut u32,
    ) -> Result<ImageResult, PullError> {
        use prepull_api::task::PullPolicy;

        let turn = self.shared.turn(&image.reference);
        let _turn = turn.lock().await;
        // The semaphore is never closed.
        let _permit = self.shared.permits.acquire().await;
        if image.policy != PullPolicy::Always {
            let present = self.shared.puller.present(&image.reference).await?;
            match (present, image.policy) {
                (Some(present), _) => {
                    return Ok(ImageResult {
                        outcome: ImageOutcome::Present,
                        digest: present.digest,
                        reason: String::new(),
                        bytes: self.board.bytes(index),
                        attempts: *attempts,
                    });
                }
                (None, PullPolicy::Never) => {
                    let reason = format!("{} is not present and its pull policy is Never", image.reference);
                    return Ok(failed(&reason, 0));
                }
                (None, PullPolicy::Always | PullPolicy::IfNotPresent) => {}
            }
        }
        let key = self.terms.borrow().keys.get(index).cloned();
        let credentials = match key.as_deref() {
            None | Some(Key::Anonymous) => vec![None],
            Some(Key::Credentials { credentials }) => credentials.iter().map(Some).collect(),
            Some(Key::Unavailable { reason }) => return Ok(failed(reason, 0)),
        };
        *attempts += 1;
        self.board.pulling(index, *attempts);
        let began = Instant::now();
        let mut refused: Option<PullError> = None;
        for credential in credentials {
            let sink = |bytes| self.board.advance(index, bytes);
            match self.shared.puller.pull(&image.reference, credential, &sink).await {
                Ok(pulled) => {
                    info!(took = ?began.elapsed(), attempts = *attempts, digest = pulled.digest, "image pulled");
                    return Ok(ImageResult {
                        outcome: ImageOutcome::Pulled,
                        digest: pulled.digest,
                        reason: String::new(),
                        bytes: pulled.bytes.or_else(|| self.board.bytes(index)),
                        attempts: *attempts,
                    });
                }
                // Another one may be let in, or may see what this one must not. The first answer is kept, unless
                // a later one got further than the door.
                Err(error) if matches!(error.class, ErrorClass::Auth | ErrorClass::NotFound) => {
                    if refused.as_ref().is_none_or(|first| first.class < error.class) {
                        refused = Some(error);
                    }
                }
                Err(error) => {
                    if error.class == ErrorClass::RuntimeDown {
                        *attempts -= 1;
                    }
                    return Err(error);
                }
            }
        }
        // There was at least one credential, or its absence, and each was refused.
        Err(refused.unwrap_or_else(|| PullError::new(ErrorClass::Permanent, "there is no credential to try")))
    }
}

impl<P> Shared<P> {
    fn turn(&self, reference: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.references.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(reference).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.insert(reference.to_owned(), Arc::downgrade(&turn));
        turn
    }
}

fn failed(reason: &str, attempts: u32) -> ImageResult {
    let reason = bounded_reason(reason);
    ImageResult { outcome: ImageOutcome::Failed, digest: None, reason, bytes: None, attempts }
}

/// Where an image stands while nobody has a result.
fn waiting(index: usize) -> prepull_api::task::ImageProgress {
    prepull_api::task::ImageProgress {
        // At most MAX_IMAGES.
        index: u32::try_from(index).unwrap_or(u32::MAX),
        phase: ImagePhase::Waiting,
        bytes: None,
        attempts: 0,
        reason: String::new(),
    }
}
