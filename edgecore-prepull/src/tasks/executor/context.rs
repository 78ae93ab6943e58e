//! The context that the images of one task share.

use prepull_api::download::Verification;
use prepull_api::task::TaskId;
use tokio::sync::{Semaphore, watch};

use super::board::ImageBoard;
use super::control::TaskControl;
use crate::images::rate::Bucket;

/// State that the images of one task share.
pub(super) struct TaskContext<'a> {
    pub(super) task: &'a TaskId,
    pub(super) board: &'a ImageBoard,
    pub(super) control: watch::Receiver<TaskControl>,
    /// As many permits as the node has. Without them, the images of a long task would queue for the node's permits all
    /// at the same time and starve a short task.
    pub(super) task_permits: Semaphore,
    /// The signature that the node itself demands, in place of that of the job.
    pub(super) verification: Option<Verification>,
    /// The cap of the task.
    pub(super) bucket: &'a Bucket,
    /// The cap of its site.
    pub(super) site: &'a Bucket,
}

impl TaskContext<'_> {
    /// Whether the job or the node demands a signature.
    pub(super) fn needs_signature(&self) -> bool {
        self.verification.is_some() || self.control.borrow().terms.download.verify.is_some()
    }
}
