//! Kubernetes events, as the engines ask for them.

use crate::shared::objects::ObjectId;

/// The kinds of objects that events are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObjectKind {
    /// KubeEdge's job.
    ImagePrePullJob,
    /// Kruise's job of one image.
    ImagePullJob,
    /// Kruise's job of several images.
    ImageListPullJob,
    /// Kruise's images of one node.
    NodeImage,
    /// A node itself.
    Node,
}

impl ObjectKind {
    /// The kind as objects and references have it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ImagePrePullJob => "ImagePrePullJob",
            Self::ImagePullJob => "ImagePullJob",
            Self::ImageListPullJob => "ImageListPullJob",
            Self::NodeImage => "NodeImage",
            Self::Node => "Node",
        }
    }
}

/// A Kubernetes event about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    /// The object's kind.
    pub kind: ObjectKind,
    /// The object.
    pub object: ObjectId,
    /// Whether its type is Warning rather than Normal.
    pub warning: bool,
    /// One of [`crate::shared::reasons`].
    pub reason: &'static str,
    /// One sentence, at most 1,024 bytes (the API server's limit).
    pub note: String,
}
