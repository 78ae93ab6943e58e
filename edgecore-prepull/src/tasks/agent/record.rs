//! The ledger's record of a task.

use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::task::{
    CheckOutcome, ImageOutcome, ImageResult, RemovalResult, Task, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::truncate_reason;
use serde::{Deserialize, Serialize};

use super::time::{Now, WallClock};
use crate::boot::BootTime;
use crate::tasks::NOT_KNOWN;
use crate::tasks::removal::RemovalRecord;

/// Format of [`TaskRecord`]. Increase it with each change that an older agent would misread.
pub(crate) const RECORD_FORMAT: u32 = 3;
/// Formats of records that older agents can read: of pulls, and of removals.
const FORMAT_OF_PULLS: u32 = 1;
pub(super) const FORMAT_OF_REMOVALS: u32 = 2;

/// One task in the ledger. No field can hold a credential: after a restart the cloud sends the keys again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskRecord {
    /// Format in which the record was written.
    pub format: u32,
    /// The task as it was accepted.
    pub task: Task,
    /// Time at which the task was accepted.
    pub accepted: WallClock,
    /// Time at which the deadline was last set: on acceptance, and by each further `Assign`.
    pub deadline_set: WallClock,
    /// Time that was left to the deadline when it was last set.
    #[serde(with = "prepull_api::task::millis")]
    pub remaining: Duration,
    /// The same as time since boot. `None` in a record of an older agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_set_boot: Option<BootTime>,
    /// Whether the task has windows. Then the node can't compute its remaining time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_windows: bool,
    /// Outcome of the checks. `None` until they have run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckOutcome>,
    /// Results of the images that have ended, by index. Empty once there is a [`Self::result`], which has them all.
    #[serde(default)]
    pub images: Vec<Option<ImageResult>>,
    /// How far the removal has come. `None` until its images are chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<RemovalRecord>,
    /// Final result of the task, kept until the cloud has acknowledged it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<TaskResult>,
}

impl TaskRecord {
    /// Record of a task that was just accepted.
    pub(crate) fn new(task: Task, remaining: Duration, now: Now) -> Self {
        let images = vec![None; task.images.len()];
        Self {
            // An agent without removals would take the task for one without images, and one without upgrades would only pull.
            format: match &task {
                Task { upgrade: Some(_), .. } => RECORD_FORMAT,
                Task { removal: Some(_), .. } => FORMAT_OF_REMOVALS,
                Task { .. } => FORMAT_OF_PULLS,
            },
            task,
            accepted: now.wall(),
            deadline_set: now.wall(),
            remaining,
            deadline_set_boot: now.boot,
            has_windows: false,
            check: None,
            images,
            removal: None,
            result: None,
        }
    }

    /// Replaces values that only a newer agent knows: the cloud may be too old for them.
    pub(crate) fn without_unknown(mut self) -> Self {
        let TaskRecord { images, result, .. } = &mut self;
        if let Some(result) = result.as_mut().filter(|result| result.outcome == TaskOutcome::Other) {
            result.outcome = TaskOutcome::Failed;
        }
        let of_result = result.iter_mut().flat_map(|result| &mut result.images);
        for image in images.iter_mut().flatten().chain(of_result) {
            if image.outcome == ImageOutcome::Other {
                image.outcome = ImageOutcome::Failed;
                image.code.get_or_insert(FailureCode::Internal);
                if image.reason.is_empty() {
                    image.reason = format!("its end, which a newer agent has recorded, is {NOT_KNOWN}");
                }
            }
        }
        self
    }

    /// Id of the task.
    pub fn id(&self) -> &TaskId {
        &self.task.id
    }

    /// Sets a new deadline.
    pub(super) fn set_deadline(&mut self, remaining: Duration, now: Now) {
        self.remaining = remaining;
        self.deadline_set = now.wall();
        self.deadline_set_boot = now.boot;
    }

    /// Computes the time left after a restart of the agent, which is never more than before. After a reboot it's all of
    /// it: an edge may boot with a clock that is years off, so we don't know how long the machine was off, and the
    /// cloud must decide before the task ends. The wall clock counts only for the record of an older agent, and not if
    /// it's behind the record.
    pub(super) fn time_left(&self, now: Now) -> Duration {
        if let Some((set, now)) = self.deadline_set_boot.zip(now.boot) {
            return now
                .elapsed_since(set)
                .map_or(self.remaining, |since| self.remaining.saturating_sub(since));
        }
        let deadline = self.deadline_set.plus(self.remaining);
        if now.wall() < self.deadline_set { self.remaining } else { now.wall().time_until(deadline) }
    }

    /// Computes the time since the acceptance by the wall clock.
    pub(super) fn age(&self, now: WallClock) -> Duration {
        self.accepted.time_until(now)
    }

    /// What has become of the images to remove so far.
    pub(super) fn removal_result(&self) -> Option<RemovalResult> {
        let dry_run = self.task.removal.as_ref()?.dry_run;
        self.removal.as_ref().map(|record| record.result(dry_run))
    }

    /// Returns one result per image: images that have not ended become `Stopped` with this reason and code.
    pub(super) fn results_if_stopped(&self, reason: &str, code: FailureCode) -> Vec<ImageResult> {
        let stopped = || ImageResult {
            reason: truncate_reason(reason),
            code: Some(code),
            ..ImageResult::new(ImageOutcome::Stopped)
        };
        (0..self.task.images.len())
            .map(|index| self.images.get(index).cloned().flatten().unwrap_or_else(stopped))
            .collect()
    }
}

/// Sums up the results of the images: the outcome of the task, and a sentence for a person if an image failed.
pub fn summarize_results(task: &Task, images: &[ImageResult]) -> (TaskOutcome, String) {
    let failed: Vec<_> =
        images.iter().zip(&task.images).filter(|(result, _)| !result.outcome.is_on_node()).collect();
    let Some((first, image)) = failed.first() else { return (TaskOutcome::Succeeded, String::new()) };
    let reason = match failed.len() {
        1 => format!("{}: {}", image.image, first.reason),
        more => {
            format!("{more} of {} images failed, the first: {}: {}", images.len(), image.image, first.reason)
        }
    };
    (TaskOutcome::Failed, truncate_reason(&reason))
}
