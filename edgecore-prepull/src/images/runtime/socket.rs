//! gRPC channels over a unix socket.

use std::error::Error;
use std::future::Future;
use std::io;
use std::path::Path;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// The socket cannot be connected to.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct NotConnected(pub(super) io::Error);

/// Distinguishes a runtime that was absent from one that went away during the request.
pub(in crate::images) fn was_not_connected(status: &Status) -> bool {
    std::iter::successors(status.source(), |&cause| cause.source()).any(<dyn Error>::is::<NotConnected>)
}

pub(super) async fn connect(path: &Path) -> Result<UnixStream, NotConnected> {
    UnixStream::connect(path).await.map_err(NotConnected)
}

/// A channel that connects on its first request, and again after each loss of the connection. Must be called within a
/// tokio runtime.
pub(super) fn lazy_channel<F>(connect: impl Fn() -> F + Send + 'static) -> Channel
where
    F: Future<Output = Result<UnixStream, NotConnected>> + Send + 'static,
{
    let connector = tower::service_fn(move |_| {
        let stream = connect();
        async move { stream.await.map(TokioIo::new) }
    });
    // tonic needs an address; a unix socket has none, and the connector ignores it.
    Endpoint::from_static("http://runtime.invalid").connect_with_connector_lazy(connector)
}
