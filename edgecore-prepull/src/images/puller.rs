//! Pulling of images, independent of the container runtime: the [`Puller`] trait with its values and errors.
//!
//! The executor knows only this trait. [`cri::CriPuller`] implements it over CRI; a decorator may implement it again,
//! and tests have a fake.

pub mod cri;
mod error;
#[cfg(test)]
pub(crate) mod fake;

use std::future::Future;

use prepull_api::credentials::RegistryCredential;
use prepull_api::download::Verification;
use prepull_api::task::{Bytes, JobUid, PulledBy, SandboxMetadata, TaskId};
use prepull_api::wire::Filesystem;

use crate::images::rate::Bucket;
pub use error::{ErrorClass, PullError};

/// Receives the bytes of an image that have arrived so far, about once a second during [`Puller::pull`].
pub type ProgressSink<'a> = &'a (dyn Fn(Bytes) + Send + Sync);

/// The image to pull, the credential to pull it with, and the pod sandbox to pull it for.
#[derive(Clone, Copy, Debug)]
pub struct PullRequest<'a> {
    /// The normalised reference of the image.
    pub reference: &'a str,
    /// The registry credential to pull with; `None` pulls anonymously.
    pub credential: Option<&'a RegistryCredential>,
    /// Labels and annotations of the pod sandbox to pull for, passed on to the runtime. `None` passes on none.
    pub sandbox: Option<&'a SandboxMetadata>,
    /// How the image may be downloaded.
    pub terms: PullTerms<'a>,
    /// The reference under whose lease everything of the image is in the runtime's store already, so that it has only to
    /// be unpacked. `None` if the runtime is to download it.
    pub fetched_for: Option<&'a str>,
}

impl<'a> PullRequest<'a> {
    /// A pull of this image without a credential, a sandbox, or terms of its own.
    pub fn new(reference: &'a str) -> Self {
        let (credential, sandbox, fetched_for) = (None, None, None);
        Self { reference, credential, sandbox, terms: PullTerms::default(), fetched_for }
    }
}

/// What a task says about a download, besides what to download. Without a word: as the node itself is set up.
#[derive(Clone, Copy, Debug, Default)]
pub struct PullTerms<'a> {
    /// The task's own limit of bytes a second, which holds beside the node's.
    pub bucket: Option<&'a Bucket>,
    /// What the signatures of the image must be. `None`: they are not looked at.
    pub verification: Option<&'a Verification>,
    /// The task, if its node shares layers with its site.
    pub shared_for: Option<&'a TaskId>,
    /// Whether the site has a limit, of which only the cloud knows the node's part.
    pub site_limited: bool,
    /// The images of the node's open tasks, which aren't removed to make room.
    pub wanted: &'a [String],
}

/// Pulls images into a container runtime, and answers what the runtime has.
pub trait Puller: Send + Sync + 'static {
    /// Pulls what the reference points to now, as the policy `Always` does. Dropping the future stops the pull in
    /// the runtime too; the next pull of the reference resumes it.
    fn pull(
        &self,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> impl Future<Output = Result<Pulled, PullError>> + Send;

    /// Looks up the image that the runtime has under the reference. Asks no registry.
    fn look_up(&self, reference: &str) -> impl Future<Output = Result<Option<Present>, PullError>> + Send;

    /// Reads the free space of the file system on which the runtime keeps images.
    fn read_filesystem(&self) -> impl Future<Output = Result<Filesystem, PullError>> + Send;

    /// Bytes of images that may be removed to make room for another one. None of those in `wanted` is among them.
    fn removable(&self, wanted: &[String]) -> impl Future<Output = u64> + Send {
        let _ = wanted;
        std::future::ready(0)
    }

    /// Sets whether anybody wants to know of progress, which may take the runtime's time to learn.
    fn set_heard(&self, heard: bool) {
        let _ = heard;
    }

    /// Writes to the disk what was just pulled, unless it's [`Pulled::is_flushed`]: a runtime that answers a pull may have it
    /// in memory only, and images that lost their files in a power cut still count as present. Callers at the same time
    /// may share a flush.
    fn flush(&self) -> impl Future<Output = ()> + Send;

    /// Releases what unfinished pulls of this reference have fetched. Called when nobody will resume them.
    fn give_up(&self, reference: &str) -> impl Future<Output = ()> + Send;

    /// Releases what unfinished pulls of other references than these have fetched: what is older than a day, or `all`.
    /// Returns whether anything that unfinished pulls have fetched may be left.
    fn release_unwanted(&self, wanted: &[String], all: bool) -> impl Future<Output = bool> + Send;

    /// Keeps an image that the runtime has from the kubelet's garbage collection, until [`Self::unpin`] for this job.
    /// Returns whether the runtime reports the image as pinned, which is what the kubelet goes by.
    fn pin(
        &self,
        reference: &str,
        id: Option<&str>,
        job: &JobUid,
    ) -> impl Future<Output = Result<bool, PullError>> + Send;

    /// Ends [`Self::pin`] for these jobs, or for all. An image that another job pins stays pinned.
    fn unpin(&self, jobs: Unpinned<'_>) -> impl Future<Output = Result<(), PullError>> + Send;

    /// Lists jobs for which images are pinned, at most [`prepull_api::wire::MAX_PINNING_JOBS`]. `None` if the runtime does
    /// not know, or cannot pin.
    fn pinning_jobs(&self) -> impl Future<Output = Option<Vec<JobUid>>> + Send;

    /// Asks the runtime for its name and version: `containerd 1.6.20`.
    fn read_version(&self) -> impl Future<Output = Result<String, PullError>> + Send;
}

/// The jobs whose pins end.
#[derive(Clone, Copy, Debug)]
pub enum Unpinned<'a> {
    /// These jobs.
    Jobs(&'a [JobUid]),
    /// Every job: the agent leaves the machine.
    All,
}

/// Description of an image that was just pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Digest of the manifest or index that the reference points to, `sha256:…`. `None` if the runtime does not
    /// tell it.
    pub digest: Option<String>,
    /// Image id in the runtime: the digest of the image's configuration, `sha256:…`.
    pub id: Option<String>,
    /// Compressed size of the layers. `None` if the runtime does not tell it.
    pub bytes: Option<Bytes>,
    /// What is wrong although the image was pulled: it has no valid signature, and the job only wants to know. At most
    /// [`prepull_api::wire::MAX_REASON`] bytes.
    pub warning: Option<String>,
    /// Whether it's on the disk as a whole, so that it outlives a power cut.
    pub is_flushed: bool,
    /// Who has downloaded it.
    pub by: PulledBy,
    /// Why that was not the agent; empty if it was. At most [`prepull_api::wire::MAX_NOTE`] bytes.
    pub why_not_agent: String,
    /// Bytes that neighbours of the site have delivered. `None` if none has.
    pub from_peers: Option<u64>,
    /// Why the site shares nothing with this node, although the task asks for it; empty otherwise. At most
    /// [`prepull_api::wire::MAX_NOTE`] bytes.
    pub why_not_shared: String,
}

/// Description of an image that the runtime already has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// Digest of the manifest or index that the reference points to, `sha256:…`. `None` for an image that was
    /// imported or built on the node.
    pub digest: Option<String>,
    /// Image id in the runtime: the digest of the image's configuration, `sha256:…`.
    pub id: Option<String>,
}
