//! The interface between the two halves: tag requests, tag states, and the liveness of jobs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{ImageTagPullPolicy, SandboxConfig, SecretObject};
use prepull_api::task::{JobUid, NodeName};

/// One tag of one image, as a NodeImage names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagKey {
    /// The key in `spec.images`: the familiar name, `nginx` and not `docker.io/library/nginx`.
    pub image: String,
    /// The tag, or the digest where the reference has one.
    pub tag: String,
}

impl TagKey {
    /// The tag of the image.
    pub fn new(image: &str, tag: &str) -> Self {
        Self { image: image.to_owned(), tag: tag.to_owned() }
    }
}

impl fmt::Display for TagKey {
    /// `name:tag`, or `name@digest`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No tag has a colon, every digest has one.
        let separator = if self.tag.contains(':') { '@' } else { ':' };
        write!(f, "{}{separator}{}", self.image, self.tag)
    }
}

/// The entry that an ImagePullJob wants in the NodeImage of each of its nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct TagRequest {
    /// The job, as the tag's ownerReferences name it.
    pub owner: ObjectReference,
    /// The image and its tag.
    pub key: TagKey,
    /// `pullPolicy` of the tag.
    pub limits: ImageTagPullPolicy,
    /// `imagePullPolicy` of the tag.
    pub image_pull_policy: Option<String>,
    /// `pullSecrets` that the image needs: they are in the job's namespace.
    pub secrets: Vec<SecretObject>,
    /// `sandboxConfig` of the image.
    pub sandbox: Option<SandboxConfig>,
}

/// What has changed of a NodeImage, for the jobs. Of each node [`NodeImageUpdate::Exists`] comes first.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeImageUpdate {
    Exists {
        node: NodeName,
        /// Labels of the NodeImage, which are those of its Node.
        labels: Arc<BTreeMap<String, String>>,
    },
    Deleted(NodeName),
    /// The node has a session (`true`), or has lost it. A node counts as offline before the first such update.
    Online(NodeName, bool),
    /// The state of a tag for one of the jobs that own it. Sent for every tag when the NodeImage is first seen, whenever
    /// a state changes, and once in answer to each [`super::jobs::Action::RequestTag`] even where nothing changed.
    /// [`TagState::Absent`] is sent only after another state.
    Tag {
        job: JobUid,
        node: NodeName,
        /// The image and its tag: after an edit of its image, a job ignores the old image's tags.
        key: TagKey,
        state: TagState,
    },
}

/// The state of a job's tag in a NodeImage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The NodeImage has no such tag that the job owns: it is not written yet, or was removed by hand.
    Absent,
    /// In the spec, and neither succeeded nor failed.
    Pending,
    /// The image is on the node since this moment.
    Succeeded(Timestamp),
    /// The pull failed at this moment.
    Failed(Timestamp),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// There is no such job: its tags lose this owner.
    Deleted,
    /// The job has finished: its tags are removed once their time to live has passed.
    Finished,
    /// The job is running: its tags stay, even beyond their time to live.
    Active,
}
