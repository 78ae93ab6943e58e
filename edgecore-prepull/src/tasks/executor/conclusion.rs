//! The final state of a task, derived from the end of its execution.

use prepull_api::failure::FailureCode;
use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, TaskOutcome};
use prepull_api::wire::truncate_reason;

use super::board::ImageBoard;
use super::clearing::{self, RemovalBoard};
use crate::images::puller::PullError;
use crate::tasks::agent::{Execution, TaskEnd, summarize_results};

/// The end of an execution.
pub(super) enum ExecutionEnd {
    /// The checks failed, or every image has ended.
    Completed,
    /// The task was stopped, for this reason.
    Stopped(String),
    /// The deadline passed.
    DeadlineExceeded,
}

/// Sums up outcome, reason and images. `trouble` is the error that kept the checks from ending, if any.
pub(super) fn conclude(
    execution: &Execution,
    ending: ExecutionEnd,
    check: Option<CheckOutcome>,
    trouble: Option<&PullError>,
    (board, removals): (&ImageBoard, &RemovalBoard),
) -> TaskEnd {
    let removal = execution.task.removal.as_ref().and_then(|removal| removals.result(removal));
    let with_missing = |text: &str, images: &[ImageResult]| {
        let missing = images.iter().filter(|image| !image.outcome.is_on_node()).count();
        let mut reason = match (&execution.task.removal, &removal) {
            _ if execution.task.upgrade.is_some() => format!("{text} before the upgrade had ended"),
            (None, _) => format!("{text}; {missing} of {} images are missing", images.len()),
            (Some(_), None) => format!("{text} before the images to remove were chosen"),
            (Some(_), Some(removal)) => format!("{text}; {} images were removed", removal.removed),
        };
        if let Some(trouble) = trouble {
            reason = format!("{reason}; {trouble}");
        }
        truncate_reason(&reason)
    };
    let (outcome, reason, images) = match ending {
        ExecutionEnd::Completed => {
            if let Some(CheckOutcome { passed: false, reason }) = &check {
                let mut images = board.results_if_stopped("", |_| FailureCode::CheckFailed);
                for image in images.iter_mut().filter(|image| image.outcome == ImageOutcome::Stopped) {
                    image.outcome = ImageOutcome::Failed;
                    "not pulled: the node did not pass the checks".clone_into(&mut image.reason);
                }
                (TaskOutcome::Failed, truncate_reason(&format!("check failed: {reason}")), images)
            } else {
                // Every image has a result, so none becomes `Stopped`.
                let images = board.results_if_stopped("stopped", |_| FailureCode::Internal);
                let (outcome, reason) = match &execution.task.removal {
                    Some(_) => clearing::summarize_removal(removal.as_ref()),
                    None => summarize_results(&execution.task, &images),
                };
                (outcome, reason, images)
            }
        }
        ExecutionEnd::Stopped(reason) => {
            let images = board.results_if_stopped("cancelled", |_| FailureCode::Cancelled);
            (TaskOutcome::Cancelled, with_missing(&format!("cancelled: {reason}"), &images), images)
        }
        ExecutionEnd::DeadlineExceeded => {
            // The error that delayed the image is more informative than the deadline.
            let trouble = trouble.map(|trouble| trouble.code);
            let images = board.results_if_stopped("the deadline passed", |last| {
                last.or(trouble).unwrap_or(FailureCode::Timeout)
            });
            (TaskOutcome::DeadlineExceeded, with_missing("the deadline passed", &images), images)
        }
    };
    TaskEnd { outcome, reason, check, images, removal }
}
