//! Images in the CRI: listing, use by containers, and removal.

use std::collections::BTreeSet;

use k8s_cri::v1::{ImageSpec, ListContainersRequest, ListImagesRequest, RemoveImageRequest};

use super::Runtime;
use crate::images::fetch::unused::{ListedImage, Listing};
use crate::images::puller::PullError;
use crate::images::puller::cri::ask;

impl Runtime {
    /// Lists images, and their use by containers.
    pub(in crate::images::fetch) async fn list(&self) -> Result<Listing, PullError> {
        let images = ListImagesRequest::default();
        let images = ask(&self.endpoint, "", self.images.clone().list_images(images)).await?.images;
        let listed = images.into_iter().map(|image| ListedImage {
            id: image.id,
            names: image.repo_tags.into_iter().chain(image.repo_digests).collect(),
            is_pinned: image.pinned,
            size: image.size,
        });
        let images = listed.collect();
        Ok(Listing { images, used: self.used().await? })
    }

    /// The ids and names in use by containers. Ended containers count: the kubelet keeps them for their logs, and
    /// doesn't remove their images either.
    pub(in crate::images::fetch) async fn used(&self) -> Result<BTreeSet<String>, PullError> {
        let all = ListContainersRequest::default();
        let containers = ask(&self.endpoint, "", self.cri.clone().list_containers(all)).await?.containers;
        let names = containers.into_iter().flat_map(|container| {
            let spec = container.image.unwrap_or_default();
            [container.image_id, container.image_ref, spec.image, spec.user_specified_image]
        });
        Ok(names.filter(|name| !name.is_empty()).collect())
    }

    /// Removes an image with all its names. containerd answers after its garbage collection.
    pub(in crate::images::fetch) async fn remove(&self, id: &str) -> Result<(), PullError> {
        let image = ImageSpec { image: id.to_owned(), ..ImageSpec::default() };
        let request = RemoveImageRequest { image: Some(image) };
        ask(&self.endpoint, id, self.images.clone().remove_image(request)).await.map(drop)
    }
}
