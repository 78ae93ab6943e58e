//! Where each image of a task stands.

use std::sync::{Mutex, MutexGuard, PoisonError};

use prepull_api::task::{Bytes, CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult};
use prepull_api::wire::bounded_reason;

use super::waiting;
use crate::agent::Work;

pub(super) struct Board {
    state: Mutex<State>,
}

struct State {
    check: Option<CheckOutcome>,
    results: Vec<Option<ImageResult>>,
    moments: Vec<ImageProgress>,
    changed: Vec<bool>,
}

impl Board {
    pub(super) fn new(work: &Work) -> Self {
        let count = work.task.images.len();
        let mut results = work.done.clone();
        results.resize(count, None);
        let moments = (0..count).map(waiting).collect();
        Self {
            state: Mutex::new(State {
                check: work.check.clone(),
                results,
                moments,
                changed: vec![false; count],
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves nothing half done that matters.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut ImageProgress)) {
        let mut state = self.state();
        change(&mut state.moments[index]);
        state.changed[index] = true;
    }

    pub(super) fn checked(&self, check: CheckOutcome) {
        self.state().check = Some(check);
    }

    pub(super) fn check(&self) -> Option<CheckOutcome> {
        self.state().check.clone()
    }

    pub(super) fn is_open(&self, index: usize) -> bool {
        self.state().results[index].is_none()
    }

    pub(super) fn pulling(&self, index: usize, attempts: u32) {
        self.change(index, |moment| {
            moment.phase = ImagePhase::Pulling;
            moment.attempts = attempts;
        });
    }

    pub(super) fn advance(&self, index: usize, bytes: Bytes) {
        self.change(index, |moment| moment.bytes = Some(bytes));
    }

    pub(super) fn backing_off(&self, index: usize, attempts: u32, reason: &str) {
        self.change(index, |moment| {
            moment.phase = ImagePhase::BackingOff;
            moment.attempts = attempts;
            moment.reason = bounded_reason(reason);
        });
    }

    pub(super) fn ended(&self, index: usize, result: ImageResult) {
        self.change(index, |moment| {
            moment.phase = ImagePhase::Done;
            moment.bytes = result.bytes;
            moment.attempts = result.attempts;
            moment.reason.clone_from(&result.reason);
        });
        self.state().results[index] = Some(result);
    }

    pub(super) fn bytes(&self, index: usize) -> Option<Bytes> {
        self.state().moments[index].bytes
    }

    /// What changed since the last call.
    pub(super) fn news(&self) -> Vec<ImageProgress> {
        let mut state = self.state();
        let fresh = vec![false; state.moments.len()];
        let changed = std::mem::replace(&mut state.changed, fresh);
        state
            .moments
            .iter()
            .zip(changed)
            .filter(|(_, changed)| *changed)
            .map(|(moment, _)| moment.clone())
            .collect()
    }

    /// All images; those that did not end are filled in.
    pub(super) fn results(&self, otherwise: ImageOutcome, reason: &str) -> Vec<ImageResult> {
        let state = self.state();
        let open = |moment: &ImageProgress| ImageResult {
            outcome: otherwise,
            digest: None,
            // What the last try failed with tells more than that time ran out.
            reason: bounded_reason(&match moment.reason.as_str() {
                "" => reason.to_owned(),
                last => format!("{reason}; the last try failed with: {last}"),
            }),
            bytes: moment.bytes,
            attempts: moment.attempts,
        };
        let pairs = state.results.iter().zip(&state.moments);
        pairs.map(|(result, moment)| result.clone().unwrap_or_else(|| open(moment))).collect()
    }
}
