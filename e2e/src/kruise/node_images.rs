//! NodeImages of a test: one of them, and one of its tags.

use anyhow::{Result, bail};
use kube::api::{Api, PostParams};
use prepull_api::crd::kruise::{ImageTagSpec, ImageTagStatus, NodeImage, NodeImageSpec, PullPhase};

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
