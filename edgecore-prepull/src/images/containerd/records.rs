//! Image records, by name, in containerd's Images service.

use std::collections::HashMap;
use std::time::Duration;

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{CreateImageRequest, Image, UpdateImageRequest};
use prepull_registry::manifest::Descriptor;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::namespace::namespaced;
use super::to_wire;

/// Label of the records that containerd's CRI manages. Its own pulls set it, too.
const MANAGED: (&str, &str) = ("io.cri-containerd.image", "managed");
/// Longest wait for an answer, which takes one write into containerd's database.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writer of image records.
#[derive(Clone, Debug)]
pub(crate) struct ImageRecords {
    images: ImagesClient<Channel>,
}

impl ImageRecords {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { images: ImagesClient::new(channel) }
    }

    /// Points a name to an image, and replaces its earlier target. Other labels of the record are kept. The CRI notices
    /// through an event of containerd.
    pub(crate) async fn set_target(&self, name: &str, target: &Descriptor) -> Result<(), Status> {
        let (label, value) = MANAGED;
        let labels = HashMap::from([(label.to_owned(), value.to_owned())]);
        let image =
            Image { name: name.to_owned(), labels, target: Some(to_wire(target)), ..Image::default() };
        let write = async {
            let create = CreateImageRequest { image: Some(image.clone()), ..CreateImageRequest::default() };
            match self.images.clone().create(namespaced(create)).await {
                Err(status) if status.code() == Code::AlreadyExists => {
                    let mut update =
                        UpdateImageRequest { image: Some(image), ..UpdateImageRequest::default() };
                    update.update_mask.get_or_insert_default().paths =
                        vec!["target".to_owned(), format!("labels.{label}")];
                    self.images.clone().update(namespaced(update)).await.map(drop)
                }
                created => created.map(drop),
            }
        };
        let silent = |_| Err(Status::deadline_exceeded("containerd does not write the image's record"));
        timeout(PATIENCE, write).await.unwrap_or_else(silent)
    }
}
