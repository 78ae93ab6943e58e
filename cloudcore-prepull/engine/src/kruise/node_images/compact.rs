//! A NodeImage as it is kept: as little as it can be restored from. With twenty images that is 4 KiB instead of 50.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use prepull_api::crd::kruise::{
    ImageSpec, ImageStatus, ImageTagSpec, ImageTagStatus, NodeImage, NodeImageSpec, NodeImageStatus,
    PullPhase,
};
use prepull_api::task::{JobUid, NodeName};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::owners::jobs_of;
use super::shared_parts::{ImageTerms, NodeImageLabels, SharedParts, TagTerms};
use crate::kruise::TagKey;

/// See the module. In recordings it is a whole NodeImage.
#[derive(Debug)]
pub struct CompactNodeImage {
    name: Box<str>,
    uid: Box<str>,
    /// metadata.resourceVersion
    pub(super) version: Box<str>,
    deleted: Option<Timestamp>,
    pub(super) labels: Arc<NodeImageLabels>,
    spec: Groups<Arc<ImageTerms>, CompactTag>,
    /// `None` if the status has never been written.
    status: Option<Box<CompactStatus>>,
}

#[derive(Debug)]
pub(super) struct CompactTag {
    pub(super) name: Arc<str>,
    pub(super) created: Option<Timestamp>,
    pub(super) version: i64,
    pub(super) terms: Arc<TagTerms>,
}

#[derive(Debug)]
struct CompactStatus {
    desired: i32,
    succeeded: i32,
    failed: i32,
    pulling: i32,
    waiting: i32,
    images: Groups<(), TagStatus>,
}

#[derive(Debug)]
pub(super) struct TagStatus {
    name: Arc<str>,
    pub(super) phase: PullPhase,
    pub(super) progress: i32,
    pub(super) started: Option<Timestamp>,
    completed: Option<Timestamp>,
    pub(super) version: i64,
    image_id: Option<Arc<str>>,
    message: Arc<str>,
}

impl TagStatus {
    /// When the given version of the request succeeded or failed.
    pub(super) fn ended_at(&self, version: i64) -> Option<Timestamp> {
        self.completed.filter(|_| self.version == version)
    }
}

/// Items by the images that they belong to, which are sorted by name.
#[derive(Debug)]
struct Groups<T, I> {
    /// The name, what holds for all items, and where the items end; they begin where those of the image before end.
    images: Box<[(Arc<str>, T, usize)]>,
    items: Box<[I]>,
}

impl<T, I> Groups<T, I> {
    fn new(groups: impl Iterator<Item = (Arc<str>, T, Vec<I>)>) -> Self {
        let (mut images, mut items) = (Vec::new(), Vec::new());
        for (name, terms, of_image) in groups {
            items.extend(of_image);
            images.push((name, terms, items.len()));
        }
        Self { images: images.into(), items: items.into() }
    }

    fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &T, &[I])> {
        (0..self.images.len()).filter_map(|index| self.group_at(index))
    }

    fn get(&self, name: &str) -> Option<(&T, &[I])> {
        let index = self.images.binary_search_by(|(known, ..)| (**known).cmp(name)).ok()?;
        self.group_at(index).map(|(_, terms, items)| (terms, items))
    }

    fn group_at(&self, index: usize) -> Option<(&Arc<str>, &T, &[I])> {
        let (name, terms, end) = self.images.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.images[before].2);
        Some((name, terms, &self.items[begin..*end]))
    }
}

impl CompactNodeImage {
    /// Keeps what the engine needs of the object. `parts` are shared with other NodeImages.
    pub fn new(object: NodeImage, parts: &mut SharedParts) -> Self {
        let NodeImage { metadata, spec, status } = object;
        let spec = Groups::new(spec.images.into_iter().map(|(name, image)| {
            let ImageSpec { pull_secrets, tags, sandbox_config } = image;
            let terms = parts.image_terms(&ImageTerms { pull_secrets, sandbox_config });
            let tags = tags.into_iter().map(|tag| CompactTag::new(tag, parts)).collect();
            (parts.text(&name), terms, tags)
        }));
        let status = status.map(|status| Box::new(CompactStatus::new(status, parts)));
        Self {
            name: metadata.name.unwrap_or_default().into(),
            uid: metadata.uid.unwrap_or_default().into(),
            version: metadata.resource_version.unwrap_or_default().into(),
            deleted: metadata.deletion_timestamp.map(|time| time.0),
            labels: parts.labels(&metadata.labels.unwrap_or_default()),
            spec,
            status,
        }
    }

    /// Shares its parts with other NodeImages than before.
    pub(super) fn share(&mut self, parts: &mut SharedParts) {
        self.labels = parts.labels(&self.labels);
        for (name, terms, _) in &mut self.spec.images {
            (*name, *terms) = (parts.text(name), parts.image_terms(terms));
        }
        for tag in &mut self.spec.items {
            (tag.name, tag.terms) = (parts.text(&tag.name), parts.tag_terms(&tag.terms));
        }
        let Some(status) = &mut self.status else { return };
        for (name, ..) in &mut status.images.images {
            *name = parts.text(name);
        }
        for tag in &mut status.images.items {
            (tag.name, tag.message) = (parts.text(&tag.name), parts.text(&tag.message));
            tag.image_id = tag.image_id.as_deref().map(|id| parts.text(id));
        }
    }

    /// metadata.name, which is the node's.
    pub fn name(&self) -> NodeName {
        NodeName(self.name.to_string())
    }

    /// metadata.uid
    pub fn uid(&self) -> &str {
        &self.uid
    }

    pub(super) fn is_being_deleted(&self) -> bool {
        self.deleted.is_some()
    }

    /// Whether this is an earlier version than `other`, or an object of the same name that was deleted before it: versions
    /// count over the whole store. They are numbers that rise (KEP-5504, and etcd's revisions before it); if they are not,
    /// the last one counts.
    pub(super) fn is_older_than(&self, other: &Self) -> bool {
        matches!((self.version.parse::<u64>(), other.version.parse::<u64>()), (Ok(this), Ok(other)) if this < other)
    }

    pub(super) fn images(&self) -> impl Iterator<Item = (&Arc<str>, &ImageTerms, &[CompactTag])> {
        self.spec.iter().map(|(name, terms, tags)| (name, &**terms, tags))
    }

    pub(super) fn tag(&self, key: &TagKey) -> Option<(&ImageTerms, &CompactTag)> {
        let (terms, tags) = self.spec.get(&key.image)?;
        tags.iter().find(|tag| *tag.name == key.tag).map(|tag| (&**terms, tag))
    }

    /// The status of a tag, of any version.
    pub(super) fn status_of(&self, image: &str, tag: &str) -> Option<&TagStatus> {
        let ((), tags) = self.status.as_ref()?.images.get(image)?;
        tags.iter().find(|found| *found.name == *tag)
    }

    pub(super) fn is_owned_by_any(&self, is_meant: impl Fn(&JobUid) -> bool) -> bool {
        self.spec.items.iter().any(|tag| jobs_of(&tag.terms.owner_references).any(|job| is_meant(&job)))
    }

    /// The spec as the API server has it.
    pub(super) fn restore_spec(&self) -> NodeImageSpec {
        let images =
            self.images().map(|(name, terms, tags)| (name.to_string(), Self::restore_image(terms, tags)));
        NodeImageSpec { images: images.collect() }
    }

    pub(super) fn restore_image(terms: &ImageTerms, tags: &[CompactTag]) -> ImageSpec {
        ImageSpec {
            pull_secrets: terms.pull_secrets.clone(),
            tags: tags.iter().map(CompactTag::restore).collect(),
            sandbox_config: terms.sandbox_config.clone(),
        }
    }

    /// The status as the API server has it.
    pub(super) fn restore_status(&self) -> Option<NodeImageStatus> {
        self.status.as_ref().map(|status| status.restore())
    }

    /// The object as the API server has it, without the metadata that the engine does not need.
    pub(super) fn restore(&self) -> NodeImage {
        let metadata = ObjectMeta {
            name: Some(self.name.to_string()),
            uid: Some(self.uid.to_string()),
            resource_version: Some(self.version.to_string()),
            labels: Some((*self.labels).clone()),
            deletion_timestamp: self.deleted.map(Time),
            ..ObjectMeta::default()
        };
        NodeImage { metadata, spec: self.restore_spec(), status: self.restore_status() }
    }
}

impl CompactTag {
    fn new(tag: ImageTagSpec, parts: &mut SharedParts) -> Self {
        let ImageTagSpec { tag: name, created_at, pull_policy, owner_references, version, image_pull_policy } =
            tag;
        let terms = TagTerms { pull_policy, owner_references, image_pull_policy };
        Self {
            name: parts.text(&name),
            created: created_at.map(|time| time.0),
            version,
            terms: parts.tag_terms(&terms),
        }
    }

    fn restore(&self) -> ImageTagSpec {
        let TagTerms { pull_policy, owner_references, image_pull_policy } = (*self.terms).clone();
        ImageTagSpec {
            tag: self.name.to_string(),
            created_at: self.created.map(Time),
            pull_policy,
            owner_references,
            version: self.version,
            image_pull_policy,
        }
    }
}

impl CompactStatus {
    fn new(status: NodeImageStatus, parts: &mut SharedParts) -> Self {
        let NodeImageStatus { desired, succeeded, failed, pulling, waiting, image_statuses } = status;
        let images = Groups::new(image_statuses.into_iter().map(|(name, image)| {
            let tags = image.tags.into_iter().map(|tag| TagStatus::new(tag, parts)).collect();
            (parts.text(&name), (), tags)
        }));
        Self { desired, succeeded, failed, pulling, waiting, images }
    }

    fn restore(&self) -> NodeImageStatus {
        let image = |tags: &[TagStatus]| ImageStatus { tags: tags.iter().map(TagStatus::restore).collect() };
        let Self { desired, succeeded, failed, pulling, waiting, images } = self;
        NodeImageStatus {
            desired: *desired,
            succeeded: *succeeded,
            failed: *failed,
            pulling: *pulling,
            waiting: *waiting,
            image_statuses: images.iter().map(|(name, (), tags)| (name.to_string(), image(tags))).collect(),
        }
    }
}

impl TagStatus {
    fn new(status: ImageTagStatus, parts: &mut SharedParts) -> Self {
        let ImageTagStatus { tag, phase, progress, start_time, completion_time, version, image_id, message } =
            status;
        Self {
            name: parts.text(&tag),
            phase,
            progress,
            started: start_time.map(|time| time.0),
            completed: completion_time.map(|time| time.0),
            version,
            image_id: image_id.map(|id| parts.text(&id)),
            message: parts.text(&message),
        }
    }

    fn restore(&self) -> ImageTagStatus {
        ImageTagStatus {
            tag: self.name.to_string(),
            phase: self.phase,
            progress: self.progress,
            start_time: self.started.map(Time),
            completion_time: self.completed.map(Time),
            version: self.version,
            image_id: self.image_id.as_deref().map(str::to_owned),
            message: self.message.to_string(),
        }
    }
}

impl From<NodeImage> for CompactNodeImage {
    /// Shares nothing.
    fn from(object: NodeImage) -> Self {
        Self::new(object, &mut SharedParts::default())
    }
}

impl Serialize for CompactNodeImage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.restore().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for CompactNodeImage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NodeImage::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_is_restored() {
        let object: NodeImage = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1alpha1",
            "kind": "NodeImage",
            "metadata": {
                "name": "edge-1", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"},
                "deletionTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"images": {
                "empty": {"tags": []},
                "nginx": {
                    "pullSecrets": [{"namespace": "shop", "name": "registry"}],
                    "sandboxConfig": {"labels": {"l": "1"}, "annotations": {"a": "2"}},
                    "tags": [
                        {"tag": "1", "version": 3, "createdAt": "2026-01-01T00:00:01Z", "imagePullPolicy": "Always",
                         "pullPolicy": {"timeoutSeconds": 1, "backoffLimit": 2, "ttlSecondsAfterFinished": 3,
                                        "activeDeadlineSeconds": 4},
                         "ownerReferences": [{"apiVersion": "apps.kruise.io/v1alpha1", "kind": "ImagePullJob",
                                              "name": "j", "namespace": "shop", "uid": "job"}]},
                        {"tag": "1"}, {"tag": "2"},
                    ],
                },
            }},
            "status": {
                "desired": 1, "succeeded": 2, "failed": 3, "pulling": 4, "waiting": 5,
                "imageStatuses": {"gone": {"tags": [
                    {"tag": "1", "phase": "Failed", "progress": 6, "startTime": "2026-01-01T00:00:02Z",
                     "completionTime": "2026-01-01T00:00:03Z", "version": 7, "imageID": "id", "message": "m"},
                    {"tag": "2"},
                ]}},
            },
        }))
        .unwrap();
        let mut parts = SharedParts::default();
        let compact = CompactNodeImage::new(object.clone(), &mut parts);
        assert_eq!(compact.restore(), object);
        let mut same = CompactNodeImage::from(object.clone());
        same.share(&mut parts);
        assert_eq!(same.restore(), object);
        for same in [same, CompactNodeImage::new(object, &mut parts)] {
            assert!(Arc::ptr_eq(&same.spec.images[1].1, &compact.spec.images[1].1));
            assert!(Arc::ptr_eq(&same.spec.items[0].terms, &compact.spec.items[0].terms));
        }
        assert_eq!(["job", "j"].map(|uid| compact.is_owned_by_any(|job| job.0 == uid)), [true, false]);
        assert_eq!(compact.tag(&TagKey::new("nginx", "1")).map(|(_, tag)| tag.version), Some(3));
        assert!(compact.tag(&TagKey::new("empty", "1")).is_none());
        assert_eq!(compact.status_of("gone", "1").and_then(|tag| tag.ended_at(7)).map(|_| ()), Some(()));
        assert!(compact.status_of("gone", "1").and_then(|tag| tag.ended_at(6)).is_none());
    }
}
