//! Final state of a task, from the way in which its execution ended.

use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, TaskOutcome};
use prepull_api::wire::truncate_reason;

use super::board::ImageBoard;
use crate::tasks::agent::{Execution, TaskEnd, summary};

/// The way in which an execution ended.
pub(super) enum Ending {
    /// The checks failed, or every image has ended.
    Completed,
    /// The task was stopped, for this reason.
    Stopped(String),
    /// The deadline passed.
    DeadlineExceeded,
}

/// Sums up outcome, reason and images. `trouble` is what kept the checks from ending, if anything did.
pub(super) fn conclude(
    execution: &Execution,
    ending: Ending,
    check: Option<CheckOutcome>,
    trouble: &str,
    board: &ImageBoard,
) -> TaskEnd {
    let with_missing = |text: &str, images: &[ImageResult]| {
        let missing = images.iter().filter(|image| !image.outcome.is_on_node()).count();
        let mut reason = format!("{text}; {missing} of {} images are missing", images.len());
        if !trouble.is_empty() {
            reason = format!("{reason}; {trouble}");
        }
        truncate_reason(&reason)
    };
    let (outcome, reason, images) = match ending {
        Ending::Completed => {
            if let Some(CheckOutcome { passed: false, reason }) = &check {
                let mut images = board.results_if_stopped("");
                for image in images.iter_mut().filter(|image| image.outcome == ImageOutcome::Stopped) {
                    image.outcome = ImageOutcome::Failed;
                    "not pulled: the node did not pass the checks".clone_into(&mut image.reason);
                }
                (TaskOutcome::Failed, truncate_reason(&format!("check failed: {reason}")), images)
            } else {
                // Every image has a result, so none becomes `Stopped`.
                let images = board.results_if_stopped("stopped");
                let (outcome, reason) = summary(&execution.task, &images);
                (outcome, reason, images)
            }
        }
        Ending::Stopped(reason) => {
            let images = board.results_if_stopped("cancelled");
            (TaskOutcome::Cancelled, with_missing(&format!("cancelled: {reason}"), &images), images)
        }
        Ending::DeadlineExceeded => {
            let images = board.results_if_stopped("the deadline passed");
            (TaskOutcome::DeadlineExceeded, with_missing("the deadline passed", &images), images)
        }
    };
    TaskEnd { outcome, reason, check, images }
}
