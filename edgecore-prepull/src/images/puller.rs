//! What pulls images. The agent and its executor know this trait only, so that a simulation can stand in for
//! a container runtime.

pub mod cri;
mod errors;
#[cfg(test)]
pub(crate) mod fake;
mod lease;
mod progress;
pub mod socket;

use std::future::Future;

use prepull_api::credentials::RegistryCredential;
use prepull_api::task::{Bytes, SandboxMetadata};
use prepull_api::wire::Filesystem;

pub use errors::{ErrorClass, PullError};

/// Takes how far a pull is, now and then, from within [`Puller::pull`].
pub type ProgressSink<'a> = &'a (dyn Fn(Bytes) + Send + Sync);

/// What to pull, as whom, and for which pod.
#[derive(Clone, Copy, Debug)]
pub struct PullRequest<'a> {
    /// The normalised reference.
    pub reference: &'a str,
    /// None: anonymously.
    pub credential: Option<&'a RegistryCredential>,
    /// None: the runtime is told of no pod.
    pub sandbox: Option<&'a SandboxMetadata>,
}

/// A container runtime, as far as images go.
pub trait Puller: Send + Sync + 'static {
    /// Pulls what the reference points to now, as `Always` means it. Dropping the future stops the pull in the
    /// runtime as well.
    fn pull(
        &self,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> impl Future<Output = Result<Pulled, PullError>> + Send;

    /// What the runtime has under the reference; asks no registry.
    fn present(&self, reference: &str) -> impl Future<Output = Result<Option<Present>, PullError>> + Send;

    /// Where the runtime keeps images.
    fn filesystem(&self) -> impl Future<Output = Result<Filesystem, PullError>> + Send;

    /// Nobody will go on with a pull of this reference that broke: what it left may be removed.
    fn give_up(&self, reference: &str) -> impl Future<Output = ()> + Send {
        let _ = reference;
        std::future::ready(())
    }

    /// Name and version of the runtime: `containerd 1.6.20`.
    fn version(&self) -> impl Future<Output = Result<String, PullError>> + Send;
}

/// A request to containerd's own API, about what CRI keeps there.
fn namespaced<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request
        .metadata_mut()
        .insert("containerd-namespace", tonic::metadata::MetadataValue::from_static("k8s.io"));
    request
}

/// An image that was pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Of the manifest, or of the index, that the reference points to: `sha256:…`.
    pub digest: Option<String>,
    /// The image's own id in the runtime: `sha256:…` of its configuration.
    pub id: Option<String>,
    /// Absent where the runtime cannot tell.
    pub bytes: Option<Bytes>,
}

/// An image that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// Of the manifest, or of the index, that the reference points to: `sha256:…`. Absent for an image that
    /// was imported or built and has none.
    pub digest: Option<String>,
    /// The image's own id in the runtime: `sha256:…` of its configuration.
    pub id: Option<String>,
}
