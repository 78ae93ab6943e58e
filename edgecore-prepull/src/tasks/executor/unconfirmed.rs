//! Images whose parts may not be on the disk: pulls that have begun, until a flush has covered them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::images::puller::{Mark, PullError};

/// Unconfirmed images by reference. A later attempt finds the parts of an earlier one and doesn't write them again, so that its
/// own flush says nothing about them.
#[derive(Debug, Default)]
pub(super) struct UnconfirmedImages(Mutex<HashMap<String, Unconfirmed>>);

#[derive(Debug, Default)]
struct Unconfirmed {
    /// When the first attempt that may have written parts of it began.
    since: Mark,
    /// What the image was refused with, also where that mark shows nothing.
    refused: Option<PullError>,
}

impl Unconfirmed {
    fn refusal(&self) -> Option<PullError> {
        self.refused.clone().or_else(|| self.since.refusal())
    }
}

impl UnconfirmedImages {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Unconfirmed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that an attempt begins, and returns the mark of the first one.
    pub(super) fn begin(&self, reference: &str, now: &Mark) -> Mark {
        let first = || Unconfirmed { since: now.clone(), refused: None };
        self.lock().entry(reference.to_owned()).or_insert_with(first).since.clone()
    }

    /// Why parts of the image may be damaged, if so.
    pub(super) fn refusal(&self, reference: &str) -> Option<PullError> {
        self.lock().get(reference).and_then(Unconfirmed::refusal)
    }

    /// Confirms the image after its flush.
    ///
    /// # Errors
    /// The disk has refused this flush or another one since the image's first attempt.
    pub(super) fn confirm(&self, reference: &str, flushed: Result<(), PullError>) -> Result<(), PullError> {
        let mut images = self.lock();
        let refusal = || images.get(reference).and_then(Unconfirmed::refusal);
        let Some(error) = flushed.err().or_else(refusal) else {
            images.remove(reference);
            return Ok(());
        };
        images.entry(reference.to_owned()).or_default().refused = Some(error.clone());
        Err(error)
    }

    /// The image is on the disk, or all of its parts are gone.
    pub(super) fn forget(&self, reference: &str) {
        self.lock().remove(reference);
    }
}
