//! Inputs and actions of the NodeImages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prepull_api::crd::kruise::{NodeImageSpec, NodeImageStatus};
use prepull_api::image::NormalizedReference;
use prepull_api::overriders::SecretRef;
use prepull_api::task::{JobUid, NodeName, Task, TaskId};
use prepull_api::wire::CloudMessage;
use serde::{Deserialize, Serialize};

use super::compact::CompactNodeImage;
use crate::kruise::NodeImageUpdate;
use crate::shared::access::KeysSent;
use crate::shared::events::ObjectEvent;
use crate::shared::objects::Unreadable;
use crate::shared::outcomes::DispatchOutcome;

/// What the NodeImages react to.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// A list of all NodeImages begins: what is written from now on may be missing in it.
    NodeImagesListing,
    /// All NodeImages that exist.
    NodeImages(Vec<Result<Box<CompactNodeImage>, Unreadable>>),
    /// A NodeImage is new or has changed.
    NodeImage(Result<Box<CompactNodeImage>, Unreadable>),
    /// A NodeImage does not exist any more.
    NodeImageGone {
        /// metadata.name
        name: NodeName,
        /// metadata.uid
        uid: String,
    },
    /// A dispatch has ended.
    Dispatched {
        /// The node.
        node: NodeName,
        /// The task that was dispatched.
        task: TaskId,
        /// How the dispatch ended.
        outcome: DispatchOutcome,
        /// The credentials that were sent. `None`: the tag names no secret.
        #[serde(default)]
        keys: Option<KeysSent>,
    },
    /// A write of the node's NodeImage has ended.
    Written(NodeName, WrittenNodeImage),
    /// The node has a free task slot again.
    SlotFreed(NodeName),
    /// The liveness of a job has changed: it has finished, or is deleted.
    LivenessChanged(JobUid),
}

/// How a write of a NodeImage ended.
#[derive(Debug, Serialize, Deserialize)]
pub enum WrittenNodeImage {
    /// It was made. With the object as it is now; `None` if it was deleted.
    Done(Option<Box<CompactNodeImage>>),
    /// It was refused, since the object is another one than the write expected. With the object as it is now, if there is
    /// one.
    Refused(Option<Box<CompactNodeImage>>),
    /// The write failed, or its outcome is unknown: try again with the state of that time.
    Failed,
    /// The object would have been too large for the API server, or for etcd.
    TooLarge,
}

/// What the NodeImages ask for.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the credentials, and send the task.
    Dispatch(Box<TagDispatch>),
    /// Send a message to the node if it has a session.
    Send(NodeName, CloudMessage),
    /// Write the node's NodeImage. There is at most one write of each at a time.
    Write(NodeName, NodeImageWrite),
    /// Tell the jobs what has changed.
    NotifyJobs(NodeImageUpdate),
    /// Publish a Kubernetes event.
    Event(ObjectEvent),
}

/// A task to send to a node for a tag.
#[derive(Clone, Debug, PartialEq)]
pub struct TagDispatch {
    /// The node.
    pub node: NodeName,
    /// The task. The dispatcher sets its image's key once the credentials are known.
    pub task: Task,
    /// What is pulled: entries of secrets are matched with this reference.
    pub reference: NormalizedReference,
    /// The secrets that may have an entry for the reference, in order.
    pub secrets: Vec<SecretRef>,
    /// The jobs that the tag is pulled for; none where it was written by hand.
    pub jobs: Vec<JobUid>,
    /// The secrets that one of these jobs names, each in its own namespace: the right to create a job there includes
    /// their use, as with pods. The other secrets need the consent of their owners, since a NodeImage's owner
    /// references may have been written by hand.
    pub of_jobs: Vec<SecretRef>,
    /// How long the task may take from now on.
    pub remaining: Duration,
}

/// A write of a NodeImage.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeImageWrite {
    /// Create it, empty, with these labels.
    Create(Arc<BTreeMap<String, String>>),
    /// Delete this object, and no other one of its name.
    Delete {
        /// metadata.uid
        uid: String,
    },
    /// Replace the labels of this version of the object.
    Labels {
        /// metadata.uid
        uid: String,
        /// metadata.resourceVersion
        version: String,
        /// All labels.
        labels: Arc<BTreeMap<String, String>>,
    },
    /// Replace the spec of this version of the object.
    Spec {
        /// metadata.uid
        uid: String,
        /// metadata.resourceVersion
        version: String,
        /// The whole spec.
        spec: Box<NodeImageSpec>,
    },
    /// Replace the status of this version of the object.
    Status {
        /// metadata.uid
        uid: String,
        /// metadata.resourceVersion
        version: String,
        /// The whole status.
        status: Box<NodeImageStatus>,
    },
}
