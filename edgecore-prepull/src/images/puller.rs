//! Pulling of images, independent of the container runtime: the [`Puller`] trait with its values and errors.
//!
//! The executor knows only this trait. [`cri::CriPuller`] implements it over CRI; a decorator may implement it again,
//! and tests have a fake.

pub mod cri;
mod error;
#[cfg(test)]
pub(crate) mod fake;

use std::future::Future;
use std::time::{Duration, SystemTime};

use prepull_api::credentials::RegistryCredential;
use prepull_api::download::{Deltas, Verification};
use prepull_api::image::Reference;
use prepull_api::task::{ByteProgress, ImageFacts, JobUid, KeepCode, SandboxMetadata, TaskId};
use prepull_api::wire::Filesystem;
use tokio::time::Instant;

pub use crate::images::flushes::{DiskWatch, FlushMark};
use crate::images::rate::Bucket;
pub use error::{ErrorClass, PullError};

/// Receives the bytes of an image that have arrived so far, about once a second during [`Puller::pull`].
pub type ProgressSink<'a> = &'a (dyn Fn(ByteProgress) + Send + Sync);

/// Has the tasks of the node wait for an image with these names, until the reservation is dropped: it's about to be removed.
/// `None` if a task wants it or pulls it.
pub type Reserve<'a> = &'a (dyn Fn(&[String]) -> Option<Reservation> + Send + Sync);

/// See [`Reserve`].
pub type Reservation = Box<dyn Send>;

/// The image to pull, the credential to pull it with, and the pod sandbox to pull it for.
#[derive(Clone, Copy)]
pub struct PullRequest<'a> {
    /// The normalised reference of the image.
    pub reference: &'a str,
    /// The registry credential to pull with; `None` pulls anonymously.
    pub credential: Option<&'a RegistryCredential>,
    /// Labels and annotations of the pod sandbox to pull for, passed on to the runtime. `None` passes on none.
    pub sandbox: Option<&'a SandboxMetadata>,
    /// Terms of the download.
    pub terms: PullTerms<'a>,
    /// The reference whose lease already holds the whole image in the runtime's store, so that only unpacking is left.
    /// `None` if the runtime should download it.
    pub fetched_for: Option<&'a str>,
}

impl<'a> PullRequest<'a> {
    /// A pull of this image without a credential, a sandbox, or terms of its own.
    pub fn new(reference: &'a str) -> Self {
        let (credential, sandbox, fetched_for) = (None, None, None);
        Self { reference, credential, sandbox, terms: PullTerms::default(), fetched_for }
    }
}

/// The download terms of a task. By default, only the node's own settings apply.
#[derive(Clone, Copy, Default)]
pub struct PullTerms<'a> {
    /// The task's own limit of bytes a second, in addition to the node's.
    pub bucket: Option<&'a Bucket>,
    /// Required signatures of the image. `None`: signatures aren't checked.
    pub verification: Option<&'a Verification>,
    /// The task, if its node shares layers with its site.
    pub shared_for: Option<&'a TaskId>,
    /// Whether the site has a limit, which the cloud divides between its nodes.
    pub site_limited: bool,
    /// That limit as a whole, for what the node fetches without a word from the cloud.
    pub site: Option<&'a Bucket>,
    /// When the pull fails, as far as it's known now.
    pub deadline: Option<Instant>,
    /// Whether the image may be rebuilt from an earlier one and a delta.
    pub deltas: Deltas,
    /// The images of the node's open tasks, which must not be removed to make room.
    pub wanted: &'a [String],
    /// Asked right before an image is removed for it. By default, all but `wanted` may go.
    pub reserve: Option<Reserve<'a>>,
    /// Taken before this attempt wrote anything: what the disk has refused since may be of this image. `None`: not watched.
    pub since: Option<&'a FlushMark>,
}

/// A name of an image as the runtime has it, in its normal form if it's a reference.
pub(crate) fn normalized_name(text: &str) -> String {
    Reference::parse(text).map_or_else(|_| text.to_owned(), |reference| reference.normalized().to_string())
}

/// Pulls images into a container runtime, and looks up its images.
pub trait Puller: Send + Sync + 'static {
    /// Pulls the image that the reference points to now, like the policy `Always`. Dropping the future stops the pull
    /// in the runtime too; the next pull of the reference resumes it.
    fn pull(
        &self,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> impl Future<Output = Result<Pulled, PullError>> + Send;

    /// Looks up the image that the runtime has under the reference, without asking a registry.
    fn look_up(&self, reference: &str) -> impl Future<Output = Result<Option<Present>, PullError>> + Send;

    /// Reads a file of an image that is on the node. `id` is that of a [`Pulled`]: by now, the reference may have another
    /// image.
    ///
    /// # Errors
    /// The image isn't there or isn't unpacked, its files aren't in directories of containerd's, or it has no regular file
    /// of at most `most` bytes at the path.
    fn read_file(
        &self,
        _id: &str,
        _path: &str,
        _most: u64,
    ) -> impl Future<Output = Result<Vec<u8>, String>> + Send {
        async { Err("the agent reads no files of this runtime's images".to_owned()) }
    }

    /// Reads the free space of the file system with the runtime's images.
    fn read_filesystem(&self) -> impl Future<Output = Result<Filesystem, PullError>> + Send;

    /// Bytes of images that may be removed to make room for another one. Images in `wanted` don't count.
    fn removable_bytes(&self, wanted: &[String]) -> impl Future<Output = u64> + Send {
        let _ = wanted;
        std::future::ready(0)
    }

    /// Lists the images of the runtime, and what needs each of them.
    fn held_images(&self) -> impl Future<Output = Result<Vec<HeldImage>, PullError>> + Send {
        std::future::ready(Err(cannot_remove()))
    }

    /// The bytes that removing these images would free, of each after those before it. An image that isn't there frees
    /// nothing.
    fn weigh(&self, ids: &[String]) -> impl Future<Output = Result<Vec<u64>, PullError>> + Send {
        let _ = ids;
        std::future::ready(Err(cannot_remove()))
    }

    /// Removes an image with all of its names, if it's there and the caller agrees, by what the runtime has at this moment. What
    /// is gone is gone for good: a power cut brings back nothing.
    fn remove(
        &self,
        id: &str,
        agrees: impl FnOnce(&[HeldImage]) -> bool + Send,
    ) -> impl Future<Output = Result<Removed, PullError>> + Send {
        let _ = (id, agrees);
        std::future::ready(Err(cannot_remove()))
    }

    /// Whether neighbours can read a layer while it arrives.
    fn can_stream_layers(&self) -> impl Future<Output = bool> + Send {
        std::future::ready(false)
    }

    /// Sets whether progress is wanted at the moment. Collecting it may take the runtime some time.
    fn set_progress_wanted(&self, wanted: bool) {
        let _ = wanted;
    }

    /// Watches the disks of the images, before something is written there. A success is true only if no flush was refused
    /// since, not even one of another caller.
    fn watch_disk(&self) -> impl Future<Output = DiskWatch> + Send;

    /// Writes freshly pulled images to disk, unless they are [`Pulled::is_flushed`]. A runtime may answer a pull while
    /// the files are only in memory, and images that lost their files in a power cut still count as present. Concurrent
    /// callers may share a flush.
    ///
    /// # Errors
    /// The kernel couldn't write all of it, so that images may be damaged. A disk that the agent doesn't see is no error.
    fn flush(&self) -> impl Future<Output = Result<(), PullError>> + Send;

    /// Whether the disk may lack files of present images: the runtime has pulled since the last [`Self::flush`] that
    /// succeeded, or may have pulled before this program began.
    fn has_unflushed(&self) -> bool;

    /// Releases the content of unfinished pulls of this reference. Call it when no task will resume them.
    fn give_up(&self, reference: &str) -> impl Future<Output = ()> + Send;

    /// Releases the content of unfinished pulls of all other references that began at least this long ago. Returns whether
    /// such content may be left. It takes seconds for each, so `wanted` is asked before each one.
    fn release_unwanted(
        &self,
        wanted: impl Fn() -> Vec<String> + Send + Sync,
        least_age: Duration,
    ) -> impl Future<Output = bool> + Send;

    /// Protects an image of the runtime from the kubelet's garbage collection, until [`Self::unpin`] for this job.
    /// Returns whether the runtime reports the image as pinned, because the kubelet relies on that.
    fn pin(
        &self,
        reference: &str,
        id: Option<&str>,
        job: &JobUid,
    ) -> impl Future<Output = Result<bool, PullError>> + Send;

    /// Ends [`Self::pin`] for these jobs, or for all. An image that another job pins stays pinned.
    fn unpin(&self, jobs: JobsToUnpin<'_>) -> impl Future<Output = Result<(), PullError>> + Send;

    /// Lists jobs with pinned images, at most [`prepull_api::wire::MAX_PINNING_JOBS`]. `None` if the runtime doesn't
    /// know, or can't pin.
    fn pinning_jobs(&self) -> impl Future<Output = Option<Vec<JobUid>>> + Send;

    /// Asks the runtime for its name and version: `containerd 1.6.20`.
    fn read_version(&self) -> impl Future<Output = Result<String, PullError>> + Send;
}

fn cannot_remove() -> PullError {
    PullError::new(ErrorClass::Permanent, "this puller removes no images")
}

/// An image of the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldImage {
    /// Its id in the runtime.
    pub id: String,
    /// Its tags and digests.
    pub names: Vec<String>,
    /// What needs it: a container, or a pin.
    pub needed: Option<KeepCode>,
    /// When the runtime got it, or got it last under another name. `None` if the runtime doesn't say.
    pub created: Option<SystemTime>,
    /// Bytes by the runtime's own count.
    pub size: u64,
}

/// How the removal of an image ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removed {
    /// It's gone, and these bytes are free.
    Freed(u64),
    /// It wasn't there any more.
    Absent,
    /// It's there, and the caller doesn't agree.
    Declined,
}

/// The jobs to unpin.
#[derive(Clone, Copy, Debug)]
pub enum JobsToUnpin<'a> {
    /// These jobs.
    Jobs(&'a [JobUid]),
    /// Every job, because the agent is being uninstalled.
    All,
}

/// Description of an image that was just pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Digest of the manifest or index that the reference points to, `sha256:…`. `None` if the runtime doesn't report
    /// it.
    pub digest: Option<String>,
    /// Image id in the runtime: the digest of the image's configuration, `sha256:…`.
    pub id: Option<String>,
    /// Compressed size of the layers. `None` if the runtime doesn't report it.
    pub bytes: Option<ByteProgress>,
    /// A problem of an image that was pulled nevertheless: it has no valid signature, and the job only wants a warning.
    /// At most [`prepull_api::wire::MAX_REASON`] bytes.
    pub warning: Option<String>,
    /// Whether the whole image is on disk, so that it survives a power cut.
    pub is_flushed: bool,
    /// Facts for the result: the pullers fill in what they know.
    pub facts: ImageFacts,
    /// Bytes from neighbours of the site. `None` if there were none.
    pub from_peers: Option<u64>,
}

/// Description of an image that the runtime already has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// Digest of the manifest or index that the reference points to, `sha256:…`. `None` for an image that was imported
    /// or built on the node.
    pub digest: Option<String>,
    /// Image id in the runtime: the digest of the image's configuration, `sha256:…`.
    pub id: Option<String>,
}
