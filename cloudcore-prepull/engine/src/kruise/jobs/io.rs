//! Inputs and actions of the jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use prepull_api::crd::kruise::{
    ImageListPullJob, ImageListPullJobStatus, ImagePullJob, ImagePullJobSpec, ImagePullJobStatus,
    PullJobTemplate,
};
use prepull_api::task::{JobUid, NodeName};
use serde::{Deserialize, Serialize};

use crate::kruise::{NodeImageUpdate, TagRequest};
use crate::shared::events::ObjectEvent;
use crate::shared::objects::{ObjectId, Unreadable};
use crate::shared::outcomes::WriteOutcome;

/// What the jobs react to.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// A NodeImage has changed. Not recorded: it comes from within the engine.
    #[serde(skip)]
    NodeImage(NodeImageUpdate),
    /// All ImagePullJobs that exist.
    PullJobs(Vec<Result<Box<ImagePullJob>, Unreadable>>),
    /// An ImagePullJob is new or has changed.
    PullJob(Result<Box<ImagePullJob>, Unreadable>),
    /// An ImagePullJob does not exist any more.
    PullJobGone(JobUid),
    /// All ImageListPullJobs that exist.
    ListJobs(Vec<Result<Box<ImageListPullJob>, Unreadable>>),
    /// An ImageListPullJob is new or has changed.
    ListJob(Result<Box<ImageListPullJob>, Unreadable>),
    /// An ImageListPullJob does not exist any more.
    ListJobGone(JobUid),
    /// All pods that exist.
    Pods(Vec<Pod>),
    /// Pods are not watched any more, since no job needs them: nothing is known of them until they're listed again.
    PodsUnwatched,
    /// A pod is new or has changed.
    Pod(Pod),
    /// A pod does not exist any more.
    PodGone {
        /// metadata.namespace
        namespace: String,
        /// metadata.name
        name: String,
    },
    /// A write has ended.
    Written {
        /// What was written.
        target: WriteTarget,
        /// How the write ended. `Gone` for a child that was to be created: an object that is not the list's has its name.
        outcome: WriteOutcome,
    },
}

/// The part of a Pod that a podSelector needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// metadata.namespace
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// metadata.labels
    pub labels: BTreeMap<String, String>,
    /// The node that it runs on; `None` if it is not scheduled, has ended (phase Succeeded or Failed), or is being
    /// deleted.
    pub node: Option<NodeName>,
}

/// What a write is about. There is at most one write of each at a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WriteTarget {
    /// The status of an ImagePullJob, or its deletion.
    PullJob(JobUid),
    /// The status of an ImageListPullJob, or its deletion.
    ListJob(JobUid),
    /// The ImagePullJob of a list for one image: its creation, its spec, or its deletion.
    Child(JobUid, String),
}

/// What the jobs ask for.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Write a tag into a node's NodeImage. Idempotent; a changed request changes the tag until the tag has ended.
    RequestTag {
        /// The node.
        node: NodeName,
        /// The tag.
        request: Arc<TagRequest>,
        /// Whether a tag that has ended is pulled once more.
        new_round: bool,
    },
    /// Write a job, or a child of a list.
    Write(JobWrite),
    /// Publish a Kubernetes event.
    Event(ObjectEvent),
    /// [`super::KruiseJobs::liveness`] of the job has changed: its tags may be removed.
    LivenessChanged(JobUid),
}

/// A write of a job, or of a child of a list.
#[derive(Clone, Debug, PartialEq)]
pub enum JobWrite {
    /// Replace the whole status of an ImagePullJob, unless its metadata.generation is another one than this: the status is
    /// about an earlier spec, then, and the write has [`WriteOutcome::Failed`].
    PullJobStatus(ObjectId, i64, Box<ImagePullJobStatus>),
    /// The same for an ImageListPullJob.
    ListJobStatus(ObjectId, i64, Box<ImageListPullJobStatus>),
    /// Delete an ImagePullJob after its `ttlSecondsAfterFinished`, unless its metadata.generation is another one than this.
    DeletePullJob(ObjectId, i64),
    /// The same for an ImageListPullJob.
    DeleteListJob(ObjectId, i64),
    /// Create an ImagePullJob that the list owns.
    CreateChild {
        /// The list.
        list: ObjectId,
        /// metadata.name of the child.
        name: String,
        /// The child's spec.
        spec: ChildSpec,
    },
    /// Replace the spec of a child.
    UpdateChild {
        /// The list.
        list: ObjectId,
        /// The child.
        child: ObjectId,
        /// Its metadata.resourceVersion: at another one the write has [`WriteOutcome::Failed`], for the child may have
        /// ended, and must be made again instead. `None`: it cannot be read, and has no end.
        version: Option<String>,
        /// The new spec.
        spec: ChildSpec,
    },
    /// Delete a child: the list no longer has its image, or it must be re-created.
    DeleteChild {
        /// The list.
        list: ObjectId,
        /// The child.
        child: ObjectId,
        /// The child's image.
        image: String,
    },
}

/// The spec of a list's child. The writes of all children share the template, which may name thousands of nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChildSpec {
    /// spec.image of the child.
    pub image: String,
    /// The rest of the spec.
    pub template: Arc<PullJobTemplate>,
}

impl From<ChildSpec> for ImagePullJobSpec {
    fn from(ChildSpec { image, template }: ChildSpec) -> Self {
        Self { image, template: Arc::unwrap_or_clone(template) }
    }
}

impl JobWrite {
    /// What is written.
    pub fn target(&self) -> WriteTarget {
        match self {
            Self::PullJobStatus(id, ..) | Self::DeletePullJob(id, _) => WriteTarget::PullJob(id.uid.clone()),
            Self::ListJobStatus(id, ..) | Self::DeleteListJob(id, _) => WriteTarget::ListJob(id.uid.clone()),
            Self::CreateChild { list, spec, .. } | Self::UpdateChild { list, spec, .. } => {
                WriteTarget::Child(list.uid.clone(), spec.image.clone())
            }
            Self::DeleteChild { list, image, .. } => WriteTarget::Child(list.uid.clone(), image.clone()),
        }
    }
}
