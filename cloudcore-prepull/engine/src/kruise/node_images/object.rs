//! A node's NodeImage as the API server has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prepull_api::crd::kruise::{ImageSpec, ImageTagSpec, NodeImage, NodeImageSpec, NodeImageStatus};
use prepull_api::task::JobUid;

use super::spec_edit::jobs_of;
use crate::kruise::TagKey;

/// What is known of a node's NodeImage.
#[derive(Debug)]
pub(super) enum ObjectState {
    /// There is none: it is created if the node should have one.
    Absent,
    /// There is one with a field of the wrong type. It is left alone until it is corrected or deleted.
    Unreadable,
    /// There is one that is being deleted. It is left alone until it is gone, and is created anew then.
    Terminating,
    /// There is one, and the node is driven to its spec.
    Present(Observed),
}

/// A NodeImage in the version that was seen last.
#[derive(Debug)]
pub(super) struct Observed {
    pub(super) uid: String,
    /// metadata.resourceVersion
    pub(super) version: String,
    pub(super) labels: Arc<BTreeMap<String, String>>,
    pub(super) spec: NodeImageSpec,
    /// `None` if the status has never been written.
    pub(super) status: Option<NodeImageStatus>,
}

impl ObjectState {
    pub(super) fn present(&self) -> Option<&Observed> {
        match self {
            Self::Present(observed) => Some(observed),
            Self::Absent | Self::Unreadable | Self::Terminating => None,
        }
    }

    /// The jobs that own tags.
    pub(super) fn owners(&self) -> BTreeSet<JobUid> {
        let images = self.present().into_iter().flat_map(|object| object.spec.images.values());
        images.flat_map(|image| &image.tags).flat_map(jobs_of).collect()
    }
}

impl Observed {
    pub(super) fn new(object: NodeImage) -> Self {
        let NodeImage { metadata, spec, status } = object;
        Self {
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.unwrap_or_default(),
            labels: Arc::new(metadata.labels.unwrap_or_default()),
            spec,
            status,
        }
    }

    /// Whether this is an earlier version than `other`, or an object of the same name that was deleted before it: versions
    /// count over the whole store. They are numbers that rise (KEP-5504, and etcd's revisions before it); if they are not,
    /// whatever comes last counts.
    pub(super) fn is_older_than(&self, other: &Self) -> bool {
        matches!((self.version.parse::<u64>(), other.version.parse::<u64>()), (Ok(this), Ok(other)) if this < other)
    }

    pub(super) fn tag(&self, key: &TagKey) -> Option<(&ImageSpec, &ImageTagSpec)> {
        let image = self.spec.images.get(&key.image)?;
        image.tags.iter().find(|tag| tag.tag == key.tag).map(|tag| (image, tag))
    }
}
