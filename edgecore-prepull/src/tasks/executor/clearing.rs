//! The removal of images: chosen once, recorded, and then carried out image by image.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use prepull_api::task::{
    ImageRemoval, KeepCode, LAST_REMOVAL, Removal, RemovalOutcome, RemovalResult, TaskOutcome,
};
use prepull_api::wire::truncate_reason;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use super::control::{TaskControl, wait_for_change};
use super::image::{FIRST_BACKOFF, ImagePulls, LAST_BACKOFF};
use super::progress::TaskUpdate;
use super::window::wait_until;
use crate::backoff::Backoff;
use crate::clock::CloudClock;
use crate::images::puller::{ErrorClass, HeldImage, PullError, Puller, Removed};
use crate::tasks::agent::Execution;
use crate::tasks::removal::{
    NodeHoldings, PlannedRemoval, RemovalRecord, choose_images, kept_image, stays_by_now,
};

/// Retries after an error other than an absent runtime, as for the checks: it's a problem of the node.
const RETRIES: u32 = 3;
/// How far the removal of a task has come.
#[derive(Debug)]
pub(super) struct RemovalBoard(Mutex<RemovalCourse>);

#[derive(Debug, Default)]
struct RemovalCourse {
    /// `None` before the images are chosen.
    record: Option<RemovalRecord>,
    /// Whether the runtime was asked to remove the first image without an end.
    has_begun: bool,
    /// Whether no further image may go.
    is_stopping: bool,
}

impl RemovalBoard {
    /// A board with what was recorded before a restart.
    pub(super) fn new(recorded: Option<RemovalRecord>) -> Self {
        Self(Mutex::new(RemovalCourse { record: recorded, ..RemovalCourse::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, RemovalCourse> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> Option<RemovalRecord> {
        self.lock().record.clone()
    }

    /// Takes a record in which each image has an end, or hasn't begun to go.
    fn set(&self, record: RemovalRecord) {
        let mut course = self.lock();
        (course.record, course.has_begun) = (Some(record), false);
    }

    /// Notes that the runtime removes an image from now on. Returns whether it may.
    fn begin(&self) -> bool {
        let mut course = self.lock();
        course.has_begun |= !course.is_stopping;
        !course.is_stopping
    }

    /// Notes that the runtime has ended, so that no image is going.
    fn note_lost(&self) {
        self.lock().has_begun = false;
    }

    fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Lets no further image go, and continues the removal until the one that has begun to go has ended: without the request
    /// the runtime may stop between two of its names, and we wouldn't learn what it has freed.
    pub(super) async fn finish(&self, carry_out: impl Future<Output = ()>) {
        {
            let mut course = self.lock();
            course.is_stopping = true;
            if !course.has_begun {
                return;
            }
        }
        let answered = timeout(LAST_REMOVAL, carry_out).await;
        let mut course = self.lock();
        if answered.is_ok() || !course.has_begun {
            return;
        }
        let mut planned = course.record.iter_mut().flat_map(|record| &mut record.planned);
        if let Some(planned) = planned.find(|planned| planned.end.is_none()) {
            let text =
                format!("the container runtime did not remove it within {LAST_REMOVAL:?}, and still may");
            let error = PullError::new(ErrorClass::RuntimeDown, text);
            planned.end = Some(failed_removal(&planned.image, &error));
        }
    }

    /// The result as it is now.
    pub(super) fn result(&self, removal: &Removal) -> Option<RemovalResult> {
        self.read().map(|record| record.result(removal.dry_run))
    }
}

/// Carries out the removal of a task.
pub(super) async fn remove_images<P: Puller>(
    images: &ImagePulls<P>,
    execution: &Execution,
    board: &RemovalBoard,
    mut control: watch::Receiver<TaskControl>,
    updates: &mpsc::Sender<TaskUpdate>,
) {
    let Some(removal) = &execution.task.removal else { return };
    let mut record = if let Some(record) = board.read() {
        record
    } else {
        wait_until(true, control.clone(), &images.clock).await;
        let mut patience = RetryPatience::default();
        let record = loop {
            match plan_removal(images, execution, removal).await {
                Ok(record) => break record,
                Err(error) if !patience.wait(&error).await => break all_failed(removal, &error),
                Err(_) => {}
            }
        };
        board.set(record.clone());
        record
    };
    // The receiver is gone when the agent stops.
    let _ = updates.send(TaskUpdate::Removal(Box::new(record.clone()))).await;
    if removal.dry_run || record.planned.is_empty() {
        return;
    }
    while !control.borrow_and_update().may_remove {
        wait_for_change(&mut control).await;
    }
    for at in 0..record.planned.len() {
        let planned = &record.planned[at];
        if planned.end.is_some() {
            continue;
        }
        if board.is_stopping() {
            return;
        }
        wait_until(true, control.clone(), &images.clock).await;
        let mut patience = RetryPatience::default();
        let end = loop {
            match remove_one(images, execution, removal, board, planned).await {
                Ok(end) => break end,
                Err(error) => {
                    if is_absent(&error) {
                        board.note_lost();
                    }
                    if !patience.wait(&error).await {
                        break failed_removal(&planned.image, &error);
                    }
                }
            }
        };
        let ImageRemoval { image, outcome, code, reason, bytes } = &end;
        let code = code.map(KeepCode::as_str);
        tracing::info!(image, ?outcome, code, reason, bytes, "removal of an image ended");
        record.planned[at].end = Some(end);
        board.set(record.clone());
        let _ = updates.send(TaskUpdate::Removal(Box::new(record.clone()))).await;
    }
}

/// Chooses the images, and weighs them.
async fn plan_removal<P: Puller>(
    images: &ImagePulls<P>,
    execution: &Execution,
    removal: &Removal,
) -> Result<RemovalRecord, PullError> {
    let held = images.puller.held_images().await?;
    let wanted = images.wanted.names_but(&execution.task.id);
    let mut record = choose_images(
        removal,
        NodeHoldings { held: &held, wanted: &wanted, now: time_by_both(&images.clock) },
    );
    let ids: Vec<String> = record.planned.iter().map(|planned| planned.id.clone()).collect();
    if !ids.is_empty() {
        let weights = images.puller.weigh(&ids).await?;
        for (planned, bytes) in record.planned.iter_mut().zip(weights) {
            planned.bytes = bytes;
        }
    }
    Ok(record)
}

/// Removes one image, unless something needs it by now. Pulls of its names wait for that.
async fn remove_one<P: Puller>(
    images: &ImagePulls<P>,
    execution: &Execution,
    removal: &Removal,
    board: &RemovalBoard,
    planned: &PlannedRemoval,
) -> Result<ImageRemoval, PullError> {
    let PlannedRemoval { id, names, image, bytes, end: _ } = planned;
    // Before the runtime is asked what it has: none of its names moves to another image until this one is gone.
    let guards = images.try_lock_all(names);
    if guards.is_none() {
        return Ok(kept_image(image, KeepCode::Wanted, String::new()));
    }
    let wanted = images.wanted.names_but(&execution.task.id);
    let mut stays = None;
    let agrees = |held: &[HeldImage]| {
        let now = time_by_both(&images.clock);
        stays = stays_by_now(removal, NodeHoldings { held, wanted: &wanted, now }, planned);
        if stays.is_none() && !board.begin() {
            stays = Some(kept_image(image, KeepCode::Stopped, String::new()));
        }
        stays.is_none()
    };
    let ended = images.puller.remove(id, agrees).await?;
    let removed = |bytes| ImageRemoval {
        image: image.clone(),
        outcome: RemovalOutcome::Removed,
        bytes,
        ..ImageRemoval::default()
    };
    Ok(match (ended, stays) {
        (Removed::Freed(freed), _) => removed(freed),
        (Removed::Declined, Some(stays)) => stays,
        // It was there when it was chosen, so it went before a restart of the agent or of the runtime.
        (Removed::Absent | Removed::Declined, _) => removed(*bytes),
    })
}

/// The earlier of the cloud's time and this machine's, by which the runtime dates images. By the later one, an image that came
/// a minute ago would count as days old if the machine's clock is behind.
fn time_by_both(clock: &CloudClock) -> SystemTime {
    clock.wall().min(SystemTime::now())
}

/// Waits between attempts.
struct RetryPatience {
    backoff: Backoff,
    failures: u32,
}

impl Default for RetryPatience {
    fn default() -> Self {
        Self { backoff: Backoff::new(FIRST_BACKOFF, LAST_BACKOFF), failures: 0 }
    }
}

impl RetryPatience {
    /// Waits until another attempt makes sense: always while the runtime doesn't answer, and a few times after other errors.
    /// Returns whether it does. The deadline of the task ends this.
    async fn wait(&mut self, error: &PullError) -> bool {
        self.failures += u32::from(!is_absent(error));
        if self.failures > RETRIES || error.class == ErrorClass::Permanent {
            return false;
        }
        let wait = self.backoff.next(1.0);
        tracing::warn!(%error, retry_in = ?wait, "cannot remove images yet");
        sleep(wait).await;
        true
    }
}

/// Whether the runtime is gone, and with it what it was asked for.
fn is_absent(error: &PullError) -> bool {
    matches!(error.class, ErrorClass::RuntimeDown | ErrorClass::RuntimeLost)
}

fn failed_removal(image: &str, error: &PullError) -> ImageRemoval {
    let reason = truncate_reason(&error.message);
    let (image, outcome) = (image.to_owned(), RemovalOutcome::Failed);
    ImageRemoval { image, outcome, reason, ..ImageRemoval::default() }
}

/// Nothing could be chosen.
fn all_failed(removal: &Removal, error: &PullError) -> RemovalRecord {
    let names = removal.images.iter().chain(&removal.repositories);
    RemovalRecord { planned: Vec::new(), kept: names.map(|name| failed_removal(name, error)).collect() }
}

/// The outcome of a removal that has ended, and why it failed, if it did.
pub(super) fn summarize_removal(result: Option<&RemovalResult>) -> (TaskOutcome, String) {
    let images = result.map(|result| result.images.as_slice()).unwrap_or_default();
    let mut failed = images.iter().filter(|image| image.outcome == RemovalOutcome::Failed);
    match failed.next() {
        None => (TaskOutcome::Succeeded, String::new()),
        Some(first) => {
            let more = match failed.count() {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            let reason = format!("{} can't be removed{more}: {}", first.image, first.reason);
            (TaskOutcome::Failed, truncate_reason(&reason))
        }
    }
}
