//! Requests to containerd in CRI's namespace, with a deadline.

use std::time::Duration;

use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Request, Response, Status};

/// CRI's namespace.
pub(super) const NAMESPACE: &str = "k8s.io";

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
