//! What the halves say to each other.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use prepull_api::crd::kruise::{ImageTagPullPolicy, SandboxConfig, SecretObject};
use prepull_api::task::{JobUid, NodeName};

/// What an ImagePullJob wants in the NodeImage of each of its nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// The job, as it stands in a tag's ownerReferences.
    pub owner: ObjectReference,
    /// The key in `spec.images`: the familiar name, `nginx` and not `docker.io/library/nginx`.
    pub image: String,
    /// The tag, or the digest where the reference has one.
    pub tag: String,
    /// `pullPolicy` of the tag.
    pub limits: ImageTagPullPolicy,
    /// `imagePullPolicy` of the tag.
    pub image_pull_policy: Option<String>,
    /// In the job's namespace.
    pub secrets: Vec<SecretObject>,
    /// `sandboxConfig` of the image.
    pub sandbox: Option<SandboxConfig>,
}

/// What the NodeImages tell the jobs. About a node in this order: [`News::Node`], then the others.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// The node has a NodeImage, with these labels.
    Node {
        /// Which.
        node: NodeName,
        /// Of the NodeImage, which are those of the Node.
        labels: Arc<BTreeMap<String, String>>,
    },
    /// The node has no NodeImage any more.
    NodeGone(NodeName),
    /// Whether the node has a session. Offline, before anything else was said.
    Online(NodeName, bool),
    /// How the wish of a job stands on a node. Told whenever it changes, for every tag that has the job as an owner
    /// when the NodeImage is first seen, and once in answer to each [`super::jobs::Action::Ask`], also where that
    /// changed nothing; [`Standing::Absent`] only where something else was told before.
    Standing {
        /// The owner.
        job: JobUid,
        /// Where.
        node: NodeName,
        /// The key in `spec.images`. A job whose image was changed is not misled by tags of the old one.
        image: String,
        /// The tag, or the digest.
        tag: String,
        /// How.
        standing: Standing,
    },
}

/// How the wish of a job stands on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The NodeImage has no tag that the job owns: not yet, or somebody removed it.
    Absent,
    /// Wanted, and neither succeeded nor failed.
    Open,
    /// The image is there, since this moment.
    Succeeded(Timestamp),
    /// It failed, at this moment.
    Failed(Timestamp),
}

/// Whether a tag is to stay for the sake of one of its owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// There is no such job: the tag loses this owner.
    Gone,
    /// The job is over: the tag is removed when its time to live is.
    Over,
    /// The job counts on the tag, which stays, whatever its time to live says.
    Active,
}
