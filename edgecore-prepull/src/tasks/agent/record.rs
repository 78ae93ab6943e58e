//! What the ledger keeps of a task.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, Task, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::truncate_reason;
use serde::{Deserialize, Serialize};

/// Counts up with each change of [`TaskRecord`] that an older agent would misread.
pub const RECORD_FORMAT: u32 = 1;

/// A moment by the clock on the wall, for what must survive a restart: milliseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WallClock(pub u64);

impl WallClock {
    /// Before 1970 is 1970.
    pub fn of(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    fn until(self, later: Self) -> Duration {
        Duration::from_millis(later.0.saturating_sub(self.0))
    }
}

/// One task as the ledger keeps it. It has no field that could hold a credential: after a restart the cloud
/// sends the keys again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskRecord {
    /// [`RECORD_FORMAT`] of whoever wrote it.
    pub format: u32,
    /// What was asked for.
    pub task: Task,
    /// When it was accepted.
    pub accepted: WallClock,
    /// When the deadline was last set: on acceptance, and with every further `Assign`.
    pub deadline_set: WallClock,
    /// Time that was left at that moment.
    #[serde(with = "prepull_api::task::millis")]
    pub remaining: Duration,
    /// The outcome of the checks, once they ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckOutcome>,
    /// The images that ended, by index. Empty once there is a [`Self::result`], which has them all.
    #[serde(default)]
    pub images: Vec<Option<ImageResult>>,
    /// The end of the task, kept until the cloud has acknowledged it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<TaskResult>,
}

impl TaskRecord {
    /// A task just accepted.
    pub fn new(task: Task, remaining: Duration, now: WallClock) -> Self {
        let images = vec![None; task.images.len()];
        Self {
            format: RECORD_FORMAT,
            task,
            accepted: now,
            deadline_set: now,
            remaining,
            check: None,
            images,
            result: None,
        }
    }

    /// The id of the task.
    pub fn id(&self) -> &TaskId {
        &self.task.id
    }

    /// Sets the deadline anew.
    pub fn renew(&mut self, remaining: Duration, now: WallClock) {
        self.remaining = remaining;
        self.deadline_set = now;
    }

    /// Time left after a restart. An edge may come up with its clock in 1970: a clock that stands before the
    /// moment when the deadline was set tells nothing, so all of the time is given again, and never more.
    pub fn left(&self, now: WallClock) -> Duration {
        let deadline = self.deadline_set.plus(self.remaining);
        if now < self.deadline_set { self.remaining } else { now.until(deadline) }
    }

    /// Time since the acceptance, by the wall clock.
    pub fn age(&self, now: WallClock) -> Duration {
        self.accepted.until(now)
    }

    /// The images with what has not ended filled in as stopped.
    pub fn images_stopped(&self, reason: &str) -> Vec<ImageResult> {
        let stopped = || ImageResult {
            outcome: ImageOutcome::Stopped,
            digest: None,
            id: None,
            reason: truncate_reason(reason),
            bytes: None,
            attempts: 0,
        };
        (0..self.task.images.len())
            .map(|index| self.images.get(index).cloned().flatten().unwrap_or_else(stopped))
            .collect()
    }
}

/// How the images of a task add up: the outcome, and a sentence for a person where one failed.
pub fn summary(task: &Task, images: &[ImageResult]) -> (TaskOutcome, String) {
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
