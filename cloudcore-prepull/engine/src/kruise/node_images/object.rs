//! A node's NodeImage as the API server has it.

use super::compact::CompactNodeImage;

#[derive(Debug, Default)]
pub(super) enum ObjectState {
    /// There is none: it is created if the node should have one.
    #[default]
    Absent,
    /// There is one with a field of the wrong type. It is left alone until it is corrected or deleted.
    Unreadable,
    /// There is one that is being deleted. It is left alone until it is gone, and is created again then.
    Terminating,
    /// There is one in this version, the last one that was seen, and the node is driven to its spec.
    Present(CompactNodeImage),
}

impl ObjectState {
    pub(super) fn present(&self) -> Option<&CompactNodeImage> {
        match self {
            Self::Present(object) => Some(object),
            Self::Absent | Self::Unreadable | Self::Terminating => None,
        }
    }
}
