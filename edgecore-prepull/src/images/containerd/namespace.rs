//! Requests to containerd in CRI's namespace, with a deadline.

use std::time::Duration;

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{Image, ListImagesRequest};
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

/// CRI's namespace.
pub(super) const NAMESPACE: &str = "k8s.io";

/// Largest gRPC message, which is containerd's own limit: a node may have thousands of records. Lists of blobs arrive in several
/// messages.
pub(super) const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Longest wait for a list: a slow disk takes its time over hundreds of records.
pub(super) const LIST_PATIENCE: Duration = Duration::from_secs(30);

/// gRPC header in which containerd's clients name the lease of a request.
pub(crate) const LEASE_HEADER: &str = "containerd-lease";

/// Addresses a request to CRI's namespace.
pub(super) fn namespaced<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

/// A request that adds its content to the lease.
pub(super) fn leased<T>(message: T, lease: &MetadataValue<Ascii>) -> Request<T> {
    let mut request = namespaced(message);
    request.metadata_mut().insert(LEASE_HEADER, lease.clone());
    request
}

/// The answer, or an error if it takes too long.
pub(super) async fn answer_within<T>(
    patience: Duration,
    question: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    let late = || Status::deadline_exceeded(format!("no answer within {patience:?}"));
    Ok(timeout(patience, question).await.map_err(|_| late())??.into_inner())
}

/// The answer about a thing, or `None` where there is none.
pub(super) fn unless_missing<T>(answer: Result<T, Status>) -> Result<Option<T>, Status> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// The records of images, of all or of those that one of the filters accepts.
pub(super) async fn list_images(
    images: &ImagesClient<Channel>,
    filters: Vec<String>,
    patience: Duration,
) -> Result<Vec<Image>, Status> {
    let list = async { images.clone().list(namespaced(ListImagesRequest { filters })).await };
    Ok(answer_within(patience, list).await?.images)
}
