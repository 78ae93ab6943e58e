//! The current state of each image of a task, and the part of it that has been reported.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{ByteProgress, ImageOutcome, ImagePhase, ImageProgress, ImageResult};
use prepull_api::wire::truncate_reason;
use tokio::time::Instant;

use crate::images::puller::PullError;

/// One row per image of a task.
#[derive(Debug)]
pub(super) struct ImageBoard {
    rows: Mutex<Vec<ImageRow>>,
    waits: Mutex<WaitReason>,
}

/// The reason for which the whole task waits; empty if it doesn't.
#[derive(Debug, Default)]
struct WaitReason {
    current: String,
    reported: String,
}

#[derive(Clone, Debug)]
struct ImageRow {
    current: ImageProgress,
    reported: ImageProgress,
    result: Option<ImageResult>,
    /// Start of the first attempt.
    began: Option<Instant>,
}

impl ImageBoard {
    /// A board with the results of images that ended before a restart.
    pub(super) fn new(done: &[Option<ImageResult>]) -> Self {
        let row = |(index, result): (usize, &Option<ImageResult>)| {
            let initial = initial_progress(index);
            let mut row = ImageRow { current: initial.clone(), reported: initial, result: None, began: None };
            if let Some(result) = result {
                row.end_with(result.clone());
            }
            row
        };
        Self { rows: Mutex::new(done.iter().enumerate().map(row).collect()), waits: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ImageRow>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut ImageProgress)) {
        if let Some(row) = self.lock().get_mut(index) {
            change(&mut row.current);
        }
    }

    /// Records that the image waits for its next attempt, after this failure.
    pub(super) fn begin_backoff(&self, index: usize, error: &PullError) {
        self.change(index, |current| {
            current.phase = ImagePhase::BackingOff;
            current.reason = truncate_reason(&error.message);
            current.code = Some(error.code);
        });
    }

    /// Counts the start of an attempt.
    pub(super) fn begin_attempt(&self, index: usize) {
        if let Some(row) = self.lock().get_mut(index) {
            row.current.phase = ImagePhase::Pulling;
            row.current.attempts += 1;
            row.began.get_or_insert_with(Instant::now);
        }
    }

    /// Time since the start of the first attempt. `None` if there was none.
    pub(super) fn time_since_first_attempt(&self, index: usize) -> Option<Duration> {
        let began = self.lock().get(index)?.began?;
        Some(began.elapsed())
    }

    /// Takes the attempt back, because the runtime could ask no registry.
    pub(super) fn retract_attempt(&self, index: usize) {
        self.change(index, |current| current.attempts = current.attempts.saturating_sub(1));
    }

    /// Takes the attempt back, because the task may not download any more, or must do so differently. The content
    /// stays.
    pub(super) fn interrupt_attempt(&self, index: usize) {
        self.change(index, |current| {
            current.phase = ImagePhase::Waiting;
            current.attempts = current.attempts.saturating_sub(1);
        });
    }

    fn lock_waits(&self) -> MutexGuard<'_, WaitReason> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the reason for a wait. Returns whether it's new.
    pub(super) fn set_waits(&self, waits: String) -> bool {
        let mut now = self.lock_waits();
        let is_new = now.current != waits;
        now.current = waits;
        is_new
    }

    /// The reason for which the task waits; empty if it doesn't.
    pub(super) fn wait_reason(&self) -> String {
        self.lock_waits().current.clone()
    }

    /// Whether the reason for waiting has changed since the last call.
    pub(super) fn take_new_waits(&self) -> bool {
        let mut waits = self.lock_waits();
        let is_new = waits.current != waits.reported;
        let WaitReason { current, reported } = &mut *waits;
        reported.clone_from(current);
        is_new
    }

    pub(super) fn set_bytes(&self, index: usize, bytes: ByteProgress) {
        self.change(index, |current| current.bytes = Some(bytes));
    }

    /// Ends the image. Returns the result with the attempts and bytes of the board.
    pub(super) fn end_image(&self, index: usize, mut result: ImageResult) -> ImageResult {
        if let Some(row) = self.lock().get_mut(index) {
            result.attempts = row.current.attempts;
            result.bytes = result.bytes.or(row.current.bytes);
            row.end_with(result.clone());
        }
        result
    }

    /// Returns the images that have changed since the last call.
    pub(super) fn take_changes(&self) -> Vec<ImageProgress> {
        let mut rows = self.lock();
        let changed = rows.iter_mut().filter(|row| row.current != row.reported);
        changed
            .map(|row| {
                row.reported = row.current.clone();
                row.current.clone()
            })
            .collect()
    }

    /// Makes [`Self::take_changes`] return every image that has begun.
    pub(super) fn mark_all_unreported(&self) {
        self.lock_waits().reported.clear();
        for (index, row) in self.lock().iter_mut().enumerate() {
            row.reported = initial_progress(index);
        }
    }

    /// Returns one result per image. Images that haven't ended become `Stopped` for this reason; `code_of` derives
    /// their code from that of their last failure.
    pub(super) fn results_if_stopped(
        &self,
        why: &str,
        code_of: impl Fn(Option<FailureCode>) -> FailureCode,
    ) -> Vec<ImageResult> {
        let result = |row: &ImageRow| {
            row.result.clone().unwrap_or_else(|| {
                let ImageProgress { index: _, phase, bytes, attempts, reason, code } = &row.current;
                let moment = match phase {
                    ImagePhase::Pulling => "during its pull",
                    ImagePhase::Waiting if *attempts == 0 => "before its pull began",
                    _ => "between two attempts",
                };
                let mut text = format!("{why} {moment}");
                if !reason.is_empty() {
                    text = format!("{text}; the last attempt failed: {reason}");
                }
                ImageResult {
                    reason: truncate_reason(&text),
                    code: Some(code_of(*code)),
                    bytes: *bytes,
                    attempts: *attempts,
                    ..ImageResult::new(ImageOutcome::Stopped)
                }
            })
        };
        self.lock().iter().map(result).collect()
    }
}

impl ImageRow {
    fn end_with(&mut self, result: ImageResult) {
        self.current.phase = ImagePhase::Done;
        self.current.attempts = result.attempts;
        self.current.bytes = result.bytes;
        self.current.reason.clone_from(&result.reason);
        self.current.code = result.code;
        self.result = Some(result);
    }
}

fn initial_progress(index: usize) -> ImageProgress {
    // A task has at most MAX_IMAGES images, so the index fits.
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    ImageProgress {
        index,
        phase: ImagePhase::Waiting,
        bytes: None,
        attempts: 0,
        reason: String::new(),
        code: None,
    }
}
