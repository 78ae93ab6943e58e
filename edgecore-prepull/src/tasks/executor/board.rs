//! Where the images of one task stand, and what of it has been told.

use std::sync::{Mutex, MutexGuard, PoisonError};

use prepull_api::task::{Bytes, ImageOutcome, ImagePhase, ImageProgress, ImageResult};
use prepull_api::wire::truncate_reason;

/// One place for each image.
#[derive(Debug)]
pub(super) struct Board {
    images: Mutex<Vec<Image>>,
}

#[derive(Clone, Debug)]
struct Image {
    now: ImageProgress,
    told: ImageProgress,
    result: Option<ImageResult>,
}

impl Board {
    /// With the images that ended before.
    pub(super) fn new(done: &[Option<ImageResult>]) -> Self {
        let image = |(index, result): (usize, &Option<ImageResult>)| {
            let untold = untold(index);
            let mut image = Image { now: untold.clone(), told: untold, result: None };
            if let Some(result) = result {
                image.end(result.clone());
            }
            image
        };
        Self { images: Mutex::new(done.iter().enumerate().map(image).collect()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Image>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut ImageProgress)) {
        if let Some(image) = self.lock().get_mut(index) {
            change(&mut image.now);
        }
    }

    /// It has to wait: for its turn, or for the runtime.
    pub(super) fn waits(&self, index: usize, phase: ImagePhase, reason: &str) {
        self.change(index, |now| {
            now.phase = phase;
            if !reason.is_empty() {
                now.reason = truncate_reason(reason);
            }
        });
    }

    /// A try begins.
    pub(super) fn tries(&self, index: usize) {
        self.change(index, |now| {
            now.phase = ImagePhase::Pulling;
            now.attempts += 1;
        });
    }

    /// The try was none: nothing could be asked.
    pub(super) fn takes_back_try(&self, index: usize) {
        self.change(index, |now| now.attempts = now.attempts.saturating_sub(1));
    }

    pub(super) fn bytes(&self, index: usize, bytes: Bytes) {
        self.change(index, |now| now.bytes = Some(bytes));
    }

    /// It ended. What the board knows of it is filled in.
    pub(super) fn ends(&self, index: usize, mut result: ImageResult) -> ImageResult {
        if let Some(image) = self.lock().get_mut(index) {
            result.attempts = image.now.attempts;
            result.bytes = result.bytes.or(image.now.bytes);
            image.end(result.clone());
        }
        result
    }

    /// What is new since the last call.
    pub(super) fn news(&self) -> Vec<ImageProgress> {
        let mut images = self.lock();
        let news = images.iter_mut().filter(|image| image.now != image.told);
        news.map(|image| {
            image.told = image.now.clone();
            image.now.clone()
        })
        .collect()
    }

    /// Whoever was told has forgotten.
    pub(super) fn forget_told(&self) {
        for (index, image) in self.lock().iter_mut().enumerate() {
            image.told = untold(index);
        }
    }

    /// All images; those that have not ended are stopped, `why` it says.
    pub(super) fn results(&self, why: &str) -> Vec<ImageResult> {
        let result = |image: &Image| {
            image.result.clone().unwrap_or_else(|| {
                let ImageProgress { index: _, phase, bytes, attempts, reason } = &image.now;
                let doing = match phase {
                    ImagePhase::Pulling => "while it was being pulled",
                    ImagePhase::Waiting if *attempts == 0 => "before its turn came",
                    ImagePhase::Waiting | ImagePhase::BackingOff | ImagePhase::Done => "between two tries",
                };
                let mut text = format!("{why} {doing}");
                if !reason.is_empty() {
                    text = format!("{text}; the last try failed: {reason}");
                }
                ImageResult {
                    outcome: ImageOutcome::Stopped,
                    digest: None,
                    id: None,
                    reason: truncate_reason(&text),
                    bytes: *bytes,
                    attempts: *attempts,
                }
            })
        };
        self.lock().iter().map(result).collect()
    }
}

impl Image {
    fn end(&mut self, result: ImageResult) {
        self.now.phase = ImagePhase::Done;
        self.now.attempts = result.attempts;
        self.now.bytes = result.bytes;
        self.now.reason.clone_from(&result.reason);
        self.result = Some(result);
    }
}

fn untold(index: usize) -> ImageProgress {
    // A task has at most MAX_IMAGES images.
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    ImageProgress { index, phase: ImagePhase::Waiting, bytes: None, attempts: 0, reason: String::new() }
}
