//! What goes in and out of the jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use prepull_api::crd::kruise::{
    ImageListPullJob, ImageListPullJobStatus, ImagePullJob, ImagePullJobSpec, ImagePullJobStatus,
};
use prepull_api::task::{JobUid, NodeName};
use serde::{Deserialize, Serialize};

use crate::kruise::{News, Wish};
use crate::shared::events::ObjectEvent;
use crate::shared::objects::{ObjectId, Unreadable};
use crate::shared::outcomes::WriteOutcome;

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// From the NodeImages. Not recorded: it comes from within the engine.
    #[serde(skip)]
    News(News),
    /// All ImagePullJobs that there are.
    PullJobs(Vec<Result<Box<ImagePullJob>, Unreadable>>),
    /// One is new or changed.
    PullJob(Result<Box<ImagePullJob>, Unreadable>),
    /// One is gone.
    PullJobGone(JobUid),
    /// All ImageListPullJobs that there are.
    ListJobs(Vec<Result<Box<ImageListPullJob>, Unreadable>>),
    /// One is new or changed.
    ListJob(Result<Box<ImageListPullJob>, Unreadable>),
    /// One is gone.
    ListJobGone(JobUid),
    /// All pods that there are.
    Pods(Vec<Pod>),
    /// One is new or changed.
    Pod(Pod),
    /// One is gone.
    PodGone {
        /// metadata.namespace
        namespace: String,
        /// metadata.name
        name: String,
    },
    /// A write ended.
    Written {
        /// Of this object:
        object: Object,
        /// how. Of a child that was to be made `Gone` says that somebody else's object has its name.
        outcome: WriteOutcome,
    },
}

/// What a podSelector needs to know of a Pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// metadata.namespace
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Where it runs; none where it is not scheduled, has ended (phase Succeeded or Failed), or is being deleted.
    pub node: Option<NodeName>,
}

/// What is written. At most one write of each is under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Object {
    /// The status of an ImagePullJob, or its deletion.
    PullJob(JobUid),
    /// The status of an ImageListPullJob, or its deletion.
    ListJob(JobUid),
    /// The ImagePullJob of this list for this image: made, changed or deleted.
    Child(JobUid, String),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Write the wish into the node's NodeImage. Idempotent; a changed wish changes what stands there as long as it
    /// is open. With `again` a further round is begun where the tag has ended.
    Ask {
        /// Where.
        node: NodeName,
        /// What.
        wish: Arc<Wish>,
        /// Whether what has ended is to be done once more.
        again: bool,
    },
    /// Replace the whole status.
    PullJobStatus(ObjectId, Box<ImagePullJobStatus>),
    /// Replace the whole status.
    ListJobStatus(ObjectId, Box<ImageListPullJobStatus>),
    /// Delete it: its time is over.
    DeletePullJob(ObjectId),
    /// Delete it: its time is over.
    DeleteListJob(ObjectId),
    /// Make an ImagePullJob, owned by the list.
    MakeChild {
        /// Its list.
        list: ObjectId,
        /// The child's name.
        name: String,
        /// What it says.
        spec: Box<ImagePullJobSpec>,
    },
    /// Replace the spec of a child.
    ChangeChild {
        /// Its list.
        list: ObjectId,
        /// Which.
        child: ObjectId,
        /// What it is to say.
        spec: Box<ImagePullJobSpec>,
    },
    /// Delete a child: the list does not have its image any more.
    DeleteChild {
        /// Its list.
        list: ObjectId,
        /// Which.
        child: ObjectId,
        /// Its image.
        image: String,
    },
    /// Tell people.
    Event(ObjectEvent),
    /// The job is over, or gone: the tags that it owns may go. Told once for each change of [`super::Jobs::liveness`].
    Liveness(JobUid),
}

impl Action {
    /// The object that the action writes, `None` if it writes nothing.
    pub fn written_object(&self) -> Option<Object> {
        Some(match self {
            Self::PullJobStatus(id, _) | Self::DeletePullJob(id) => Object::PullJob(id.uid.clone()),
            Self::ListJobStatus(id, _) | Self::DeleteListJob(id) => Object::ListJob(id.uid.clone()),
            Self::MakeChild { list, spec, .. } | Self::ChangeChild { list, spec, .. } => {
                Object::Child(list.uid.clone(), spec.image.clone())
            }
            Self::DeleteChild { list, image, .. } => Object::Child(list.uid.clone(), image.clone()),
            Self::Ask { .. } | Self::Event(_) | Self::Liveness(_) => return None,
        })
    }
}
