//! An open task of a node, for observers of the engine.

use jiff::Timestamp;

/// A task that a node has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskInHand {
    /// Name of the ImagePrePullJob; None for a tag of a NodeImage.
    pub job: Option<String>,
    /// The references that are pulled, in the order of the task.
    pub images: Vec<String>,
    /// When the node started, which is before it was sent the task. None where only the edge knows.
    pub started: Option<Timestamp>,
}
