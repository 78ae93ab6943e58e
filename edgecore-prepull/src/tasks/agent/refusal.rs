//! Answers to tasks that the agent refuses.

use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageOutcome, ImageResult, Task, TaskOutcome, TaskResult};
use prepull_api::wire::{MAX_IMAGES, truncate_reason};

use super::io::{AgentEffect, send_result};

/// Builds the result of a refused task. It isn't written to disk: a restart loses nothing, because the same task would
/// be refused again.
pub(super) fn refuse(task: &Task, outcome: TaskOutcome, reason: &str) -> AgentEffect {
    let (image_outcome, code) = match outcome {
        TaskOutcome::Failed => (ImageOutcome::Failed, FailureCode::Internal),
        _ => (ImageOutcome::Stopped, FailureCode::Cancelled),
    };
    let image = || ImageResult { code: Some(code), ..ImageResult::new(image_outcome) };
    send_result(TaskResult {
        removal: None,
        task: task.id.clone(),
        outcome,
        reason: truncate_reason(reason),
        check: None,
        images: task.images.iter().take(MAX_IMAGES).map(|_| image()).collect(),
        took: Duration::ZERO,
    })
}
