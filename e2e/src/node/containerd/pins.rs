//! Labels and pins of images in containerd and its CRI.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result};
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{GetImageRequest, Image, UpdateImageRequest};
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{ImageSpec, ImageStatusRequest, VersionRequest};
use prost_types::FieldMask;
use tonic::Request;

use super::{Containerd, NAMESPACE};

impl Containerd {
    /// Labels of the record of an image, by its name or its id.
    pub async fn labels_of(&self, name: &str) -> Result<BTreeMap<String, String>> {
        Ok(self.record_of(name).await?.labels.into_iter().collect())
    }

    /// Sets a label of an image's record, like a foreign tool.
    pub async fn set_label(&self, name: &str, label: &str, value: &str) -> Result<()> {
        let labels = HashMap::from([(label.to_owned(), value.to_owned())]);
        let request = UpdateImageRequest {
            image: Some(Image { labels, ..self.record_of(name).await? }),
            update_mask: Some(FieldMask { paths: vec![format!("labels.{label}")] }),
            ..UpdateImageRequest::default()
        };
        ImagesClient::new(self.channel().await?).update(namespaced(request)?).await?;
        Ok(())
    }

    /// Whether CRI reports the image as pinned, because the kubelet relies on that.
    pub async fn is_pinned(&self, name: &str) -> Result<bool> {
        Ok(self.status_of(name).await?.pinned)
    }

    /// Id of an image, `sha256:…`.
    pub async fn image_id(&self, name: &str) -> Result<String> {
        Ok(self.status_of(name).await?.id)
    }

    /// Version of the running containerd, such as `1.6.20~ds1`.
    pub async fn version(&self) -> Result<String> {
        let request = VersionRequest { version: "v1".to_owned() };
        let answer = RuntimeServiceClient::new(self.channel().await?).version(request).await?;
        Ok(answer.into_inner().runtime_version)
    }

    async fn status_of(&self, name: &str) -> Result<k8s_cri::v1::Image> {
        let image = Some(ImageSpec { image: name.to_owned(), ..ImageSpec::default() });
        let answer = self.cri().await?.image_status(ImageStatusRequest { image, verbose: false }).await?;
        answer.into_inner().image.with_context(|| format!("CRI has no image {name}"))
    }

    async fn record_of(&self, name: &str) -> Result<Image> {
        let request = namespaced(GetImageRequest { name: name.to_owned() })?;
        let answer = ImagesClient::new(self.channel().await?).get(request).await;
        let answer = answer.with_context(|| format!("cannot read the record of {name}"))?;
        answer.into_inner().image.with_context(|| format!("no record of {name}"))
    }
}

fn namespaced<T>(message: T) -> Result<Request<T>> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
    Ok(request)
}
