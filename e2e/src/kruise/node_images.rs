//! NodeImages of a test: one of them, one of its tags, and how many nodes are at work.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use futures::TryStreamExt;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use prepull_api::crd::kruise::{ImageTagSpec, ImageTagStatus, NodeImage, NodeImageSpec, PullPhase};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::object::KruiseObject;
use crate::cluster::Cluster;

/// The NodeImage of one node.
pub type KruiseNodeImage = KruiseObject<NodeImage>;

/// One tag of a NodeImage.
#[derive(Clone)]
pub struct NodeImageTag {
    of: KruiseNodeImage,
    image: String,
    name: String,
}

impl Cluster {
    /// The NodeImage of a node, which exists or will.
    pub fn node_image(&self, node: &str) -> KruiseNodeImage {
        KruiseObject::new(self, Api::all(self.client()), node)
    }

    /// Watches from now on how many nodes have open tags.
    pub fn nodes_at_work(&self) -> OpenTagWatch {
        OpenTagWatch::watch(Api::all(self.client()))
    }

    /// Creates an empty NodeImage, as a user might.
    pub async fn create_node_image(&self, name: &str) -> Result<KruiseNodeImage> {
        let made = NodeImage::new(name, NodeImageSpec::default());
        Api::all(self.client()).create(&PostParams::default(), &made).await?;
        Ok(self.node_image(name))
    }
}

/// Splits a reference into the key of a NodeImage and the tag, or digest, below it.
pub fn name_and_tag(reference: &str) -> (&str, &str) {
    if let Some((name, digest)) = reference.split_once('@') {
        let last = name.rfind('/').map_or(0, |slash| slash + 1);
        let name = name[last..].find(':').map_or(name, |colon| &name[..last + colon]);
        return (name, digest);
    }
    reference.rsplit_once(':').unwrap_or((reference, "latest"))
}

impl KruiseNodeImage {
    /// A tag of an image.
    pub fn tag(&self, image: &str, tag: &str) -> NodeImageTag {
        NodeImageTag { of: self.clone(), image: image.to_owned(), name: tag.to_owned() }
    }

    /// The tag that a reference names.
    pub fn referenced_tag(&self, reference: &str) -> NodeImageTag {
        let (image, tag) = name_and_tag(reference);
        self.tag(image, tag)
    }

    /// Waits until neither spec nor status has an image.
    pub async fn is_empty(&self) -> Result<NodeImage> {
        self.until_met("is empty", |object| {
            let status = object.status.as_ref();
            object.spec.images.is_empty() && status.is_none_or(|status| status.image_statuses.is_empty())
        })
        .await
    }
}

impl NodeImageTag {
    /// The entries of the tag in spec and status.
    fn find_entries(&self, object: &NodeImage) -> (Option<ImageTagSpec>, Option<ImageTagStatus>) {
        let spec = object.spec.images.get(&self.image);
        let spec = spec.and_then(|image| image.tags.iter().find(|tag| tag.tag == self.name)).cloned();
        let status = object.status.as_ref().and_then(|status| status.image_statuses.get(&self.image));
        let status = status.and_then(|image| image.tags.iter().find(|tag| tag.tag == self.name)).cloned();
        (spec, status)
    }

    /// Waits until the entries in spec and status satisfy a condition; `what` names it in errors.
    pub async fn until_met(
        &self,
        what: &str,
        mut is_met: impl FnMut(Option<&ImageTagSpec>, Option<&ImageTagStatus>) -> bool,
    ) -> Result<(Option<ImageTagSpec>, Option<ImageTagStatus>)> {
        self.of
            .until_some(&format!("{}:{} {what}", self.image, self.name), |object| {
                let (spec, status) = self.find_entries(object);
                is_met(spec.as_ref(), status.as_ref()).then_some((spec, status))
            })
            .await
    }

    /// Waits until the tag is in the spec, and returns its entry.
    pub async fn is_requested(&self) -> Result<ImageTagSpec> {
        let (spec, _) = self.until_met("is in the spec", |spec, _| spec.is_some()).await?;
        Ok(spec.unwrap_or_default())
    }

    /// Reads the entry in the status, if there is one.
    pub async fn status(&self) -> Result<Option<ImageTagStatus>> {
        Ok(self.find_entries(&self.of.get().await?).1)
    }

    /// Reads the entry in the spec, if there is one.
    pub async fn spec(&self) -> Result<Option<ImageTagSpec>> {
        Ok(self.find_entries(&self.of.get().await?).0)
    }

    /// Waits until the tag has succeeded. Fails at once if it has failed.
    pub async fn succeeds(&self) -> Result<ImageTagStatus> {
        self.ends_as(PullPhase::Succeeded).await
    }

    /// Waits until the tag has failed. Fails at once if it has succeeded.
    pub async fn fails(&self) -> Result<ImageTagStatus> {
        self.ends_as(PullPhase::Failed).await
    }

    /// Waits until the version in the spec has ended, and checks its phase.
    async fn ends_as(&self, phase: PullPhase) -> Result<ImageTagStatus> {
        let ended = |spec: Option<&ImageTagSpec>, status: Option<&ImageTagStatus>| {
            spec.zip(status).is_some_and(|(spec, status)| status.has_ended(spec.version))
        };
        let (_, status) = self.until_met(&format!("is {phase:?}"), ended).await?;
        let status = status.unwrap_or_default();
        if status.phase != phase {
            let object = self.of.get().await.ok();
            bail!(
                "{}:{} is {:?}, not {phase:?}\n{}",
                self.image,
                self.name,
                status.phase,
                self.of.diagnosis(object.as_ref())
            );
        }
        Ok(status)
    }

    /// Waits until the tag is neither in the spec nor in the status.
    pub async fn is_gone(&self) -> Result<()> {
        self.until_met("is gone", |spec, status| spec.is_none() && status.is_none()).await?;
        Ok(())
    }
}

/// A watch of how many nodes have open tags, which are in the spec and have not ended. Ends when dropped.
pub struct OpenTagWatch {
    counts: watch::Receiver<OpenTagCounts>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct OpenTagCounts {
    now: usize,
    most: usize,
    /// Largest number of open tags of one node.
    most_tags: usize,
}

impl OpenTagWatch {
    fn watch(api: Api<NodeImage>) -> Self {
        let (sender, counts) = watch::channel(OpenTagCounts::default());
        let task = tokio::spawn(async move {
            let mut changes = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
            let (mut open, mut seen) = (BTreeMap::new(), BTreeSet::new());
            loop {
                // After an error, the watch tries again.
                let Ok(Some(event)) = changes.try_next().await else { continue };
                match event {
                    watcher::Event::Init => seen = BTreeSet::new(),
                    watcher::Event::InitApply(object) => {
                        seen.insert(object.name_any());
                        open.insert(object.name_any(), open_tags(&object));
                    }
                    watcher::Event::InitDone => open.retain(|name, _| seen.contains(name)),
                    watcher::Event::Apply(object) => {
                        open.insert(object.name_any(), open_tags(&object));
                    }
                    watcher::Event::Delete(object) => {
                        open.remove(&object.name_any());
                    }
                }
                sender.send_modify(|counts| {
                    counts.now = open.values().filter(|tags| **tags > 0).count();
                    counts.most = counts.most.max(counts.now);
                    counts.most_tags = open.values().copied().max().unwrap_or(0).max(counts.most_tags);
                });
            }
        });
        Self { counts, task }
    }

    /// Number of nodes that have open tags now.
    pub fn nodes_now(&self) -> usize {
        self.counts.borrow().now
    }

    /// Largest number of nodes that had open tags at the same time.
    pub fn most_nodes(&self) -> usize {
        self.counts.borrow().most
    }
}

impl Drop for OpenTagWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Counts the tags that are in the spec and have not ended.
fn open_tags(object: &NodeImage) -> usize {
    let ended = |name: &str, tag: &ImageTagSpec| {
        let image = object.status.as_ref().and_then(|status| status.image_statuses.get(name));
        let status = image.and_then(|image| image.tags.iter().find(|status| status.tag == tag.tag));
        status.is_some_and(|status| status.has_ended(tag.version))
    };
    let tags = object.spec.images.iter().flat_map(|(name, image)| image.tags.iter().map(move |t| (name, t)));
    tags.filter(|(name, tag)| !ended(name, tag)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_split() {
        for (reference, expected) in [
            ("127.0.0.1:5000/team/app:v1", ("127.0.0.1:5000/team/app", "v1")),
            ("nginx:1.9.1", ("nginx", "1.9.1")),
            ("host:5000/app@sha256:ab", ("host:5000/app", "sha256:ab")),
            ("host:5000/app:v1@sha256:ab", ("host:5000/app", "sha256:ab")),
        ] {
            assert_eq!(name_and_tag(reference), expected, "{reference}");
        }
    }
}
