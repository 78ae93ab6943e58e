//! The credentials that nodes got with their tasks, and whether these open the layers of neighbours.

use serde::{Deserialize, Serialize};

/// The credentials that a task was sent with, for the images that name secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeysSent {
    /// At least one of these images got none.
    Missing,
    /// Each of them got some. Equal fingerprints mean equal credentials, within one run of cloudcore-prepull.
    All(u64),
}

/// Whether a node may read the layers of its task from neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerAccess {
    /// It may: no image needs a key, or the entitlement is that of nodes without keys.
    Open,
    /// If these are the credentials that the cloud gave last for the same images.
    Keys(u64),
    /// Not yet: an earlier leader sent the task, and it is sent once more.
    Awaited,
    /// No: an earlier leader sent the task, and it has succeeded. It may serve.
    Ended,
}
