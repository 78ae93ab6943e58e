//! The containerd namespace in which CRI keeps images.

use tonic::Request;
use tonic::metadata::MetadataValue;

/// Addresses a request to CRI's namespace, `k8s.io`.
pub(super) fn namespaced<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static("k8s.io"));
    request
}
