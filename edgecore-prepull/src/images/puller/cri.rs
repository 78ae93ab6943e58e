//! The [`Puller`] over CRI: containerd or CRI-O download and unpack.

mod credential;
mod progress;
mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    ImageFsInfoRequest, ImageSpec, ImageStatusRequest, PodSandboxConfig, PullImageRequest, VersionRequest,
};
use prepull_api::credentials::RegistryCredential;
use prepull_api::download::{Verification, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_api::task::{JobUid, PulledBy, SandboxMetadata};
use prepull_api::wire::Filesystem;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Response, Status};

use self::credential::to_auth_config;
pub(in crate::images) use self::credential::{is_registry_token_alone, unusable};
use self::progress::{PullWatcher, Stalled};
use self::status::to_error_of_pull;
pub(in crate::images) use self::status::{is_connection_failure, to_pull_error};
use super::{
    DiskWatch, ErrorClass, JobsToUnpin, Present, ProgressSink, PullError, PullRequest, Pulled, Puller,
};
use crate::images::containerd::{Containerd, ContentStore, LEASE_HEADER, Leases, Owner, Pins};
use crate::images::filesystem::{FlushError, read_filesystem};
use crate::images::flushes::{Flushes, ImageDirectories, UnflushedPulls};
use crate::images::runtime::RuntimeEndpoint;
use crate::one_question::OneQuestion;

/// Largest gRPC message: containerd sends up to 16 MiB, while tonic refuses more than 4 MiB by default.
pub(in crate::images) const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Longest wait for an answer, except for pulls. A runtime that's busy unpacking answers late, but not this late. The
/// kubelet waits two minutes; the agent retries anyway.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Number and interval of looks at a pinned image: containerd's CRI notices new labels through an event. Versions
/// before 1.6.25 and 1.7.10 never report it.
const PIN_LOOKS: (u32, Duration) = (20, Duration::from_millis(50));

/// Client of a container runtime at a unix socket. It connects on its first request, and again after each loss of the
/// connection.
#[derive(Clone, Debug)]
pub struct CriPuller {
    endpoint: RuntimeEndpoint,
    channel: Channel,
    images: ImageServiceClient<Channel>,
    runtime: RuntimeServiceClient<Channel>,
    content: Arc<ContentStore>,
    watcher: Arc<PullWatcher>,
    leases: Arc<Leases>,
    pins: Arc<Pins>,
    flushes: Arc<Flushes>,
    unflushed: Arc<UnflushedPulls>,
    filesystem: OneQuestion,
}

impl CriPuller {
    /// A client of the runtime at this endpoint. Must be called within a tokio runtime; does not connect yet.
    pub fn new(endpoint: RuntimeEndpoint) -> Self {
        Self::with_owner(endpoint, Owner::Agent)
    }

    /// The same for a person who pulls by hand, perhaps beside an agent.
    pub(crate) fn by_hand(endpoint: RuntimeEndpoint) -> Self {
        Self::with_owner(endpoint, Owner::Person)
    }

    fn with_owner(endpoint: RuntimeEndpoint, owner: Owner) -> Self {
        let channel = endpoint.connect_lazily();
        let content = Arc::new(ContentStore::new(channel.clone()));
        let leases = Arc::new(Leases::new(channel.clone(), owner));
        Self {
            endpoint,
            images: ImageServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            runtime: RuntimeServiceClient::new(channel.clone()),
            watcher: Arc::new(PullWatcher::new(Arc::clone(&content), Arc::clone(&leases))),
            content,
            pins: Arc::new(Pins::new(channel.clone())),
            leases,
            flushes: Arc::default(),
            unflushed: Arc::default(),
            filesystem: OneQuestion::default(),
            channel,
        }
    }

    /// The API of the containerd behind the endpoint, if it is one.
    pub(crate) fn containerd(&self) -> Containerd {
        let Self { endpoint, channel, content, leases, flushes, .. } = self;
        Containerd {
            channel: channel.clone(),
            endpoint: endpoint.clone(),
            store: Arc::clone(content),
            leases: Arc::clone(leases),
            flushes: Arc::clone(flushes),
        }
    }

    /// Number of leases of the agent's unfinished pulls. `None` if the runtime has no leases, or doesn't answer.
    pub(crate) async fn count_leases(&self) -> Option<usize> {
        self.leases.count().await
    }

    /// The same with another time after which a download without progress is given up. Tests on real runtimes can't
    /// wait for minutes.
    #[must_use]
    pub fn with_stall_limit(self, limit: Duration) -> Self {
        let watcher = PullWatcher::new(Arc::clone(&self.content), Arc::clone(&self.leases));
        let watcher = watcher.with_stall_limit(limit);
        Self { watcher: Arc::new(watcher), ..self }
    }

    async fn read_image_status(&self, reference: &str) -> Result<Option<k8s_cri::v1::Image>, PullError> {
        let request = ImageStatusRequest { image: Some(image_spec(reference)), verbose: false };
        let answer = self.ask(reference, self.images.clone().image_status(request)).await?;
        Ok(answer.image)
    }

    async fn ask<T>(
        &self,
        reference: &str,
        question: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, PullError> {
        ask(&self.endpoint, reference, question).await
    }

    /// Rejects a credential that the runtime would ignore, because the pull would then be anonymous.
    async fn check_usable(&self, credential: &RegistryCredential) -> Result<(), PullError> {
        if !is_registry_token_alone(credential) {
            return Ok(());
        }
        let runtime = self.read_version().await?;
        if runtime.starts_with("docker ") { Ok(()) } else { Err(unusable(credential, &runtime)) }
    }

    /// Asks for the runtime's image directory.
    async fn read_mountpoint(&self) -> Result<String, PullError> {
        let answer = self.ask("", self.images.clone().image_fs_info(ImageFsInfoRequest {})).await?;
        let mountpoint = answer.image_filesystems.into_iter().find_map(|usage| Some(usage.fs_id?.mountpoint));
        mountpoint.ok_or_else(|| {
            PullError::new(ErrorClass::Transient, "the container runtime does not say where it keeps images")
        })
    }

    /// The directories that containerd uses, or the one that CRI reports. Before 1.7, containerd's CRI ignores a `root_path`.
    async fn image_directories(&self) -> Result<ImageDirectories, PullError> {
        if let Some(directories) = self.flushes.directories() {
            return Ok(directories);
        }
        let unpacked = PathBuf::from(self.read_mountpoint().await?);
        Ok(ImageDirectories { root: unpacked.clone(), unpacked })
    }

    /// Finds the id of an image that was just pulled. containerd, and CRI-O since 1.36, answer the pull with the id.
    /// cri-dockerd and older CRI-Os answer with a repository and a digest, so we must ask for the id.
    async fn find_id(&self, reference: &str, image_ref: &str) -> Option<String> {
        if let Some(id) = parse_image_id(image_ref) {
            return Some(id);
        }
        let image = self.read_image_status(reference).await.ok().flatten()?;
        parse_image_id(&image.id)
    }

    /// Finds the digest that the reference of a present image points to. We ask containerd's own API first: CRI lists
    /// all digests that the image has ever had in the repository, and doesn't show which one belongs to the reference.
    async fn find_digest(&self, reference: &str) -> Option<String> {
        if let Some((_, digest)) = reference.split_once('@') {
            return Some(digest.to_owned());
        }
        if let Some(digest) = self.content.image_digest(reference).await {
            return Some(digest);
        }
        let image = self.read_image_status(reference).await.ok().flatten()?;
        pick_digest(reference, &image.repo_digests)
    }
}

impl Puller for CriPuller {
    async fn pull(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, PullError> {
        let PullRequest { reference, credential, sandbox, terms, fetched_for } = request;
        let warning = refuse_unverified(terms.verification.filter(|_| fetched_for.is_none()))?;
        if let Some(credential) = credential {
            self.check_usable(credential).await?;
        }
        let mut request = tonic::Request::new(PullImageRequest {
            image: Some(image_spec(reference)),
            auth: credential.map(to_auth_config),
            sandbox_config: sandbox.map(to_sandbox_config),
        });
        let lease = self.leases.acquire(fetched_for.unwrap_or(reference)).await;
        if let Some(lease) = lease.clone() {
            request.metadata_mut().insert(LEASE_HEADER, lease);
        }
        let mut images = self.images.clone();
        let _noted = self.unflushed.begin_pull();
        let stalled = async {
            // If it was fetched before, nothing arrives now.
            match lease.filter(|_| fetched_for.is_none()) {
                Some(lease) => self.watcher.watch(lease).report_until_stalled(progress).await,
                None => std::future::pending().await,
            }
        };
        let image_ref = tokio::select! {
            answer = images.pull_image(request) => {
                answer.map_err(|status| to_error_of_pull(&status, reference, &self.endpoint))?.into_inner().image_ref
            }
            Stalled(after) = stalled => {
                return Err(PullError::new(
                    ErrorClass::Transient,
                    format!("nothing of the image arrived for {} s; the connection seems dead", after.as_secs()),
                )
                .with_code(FailureCode::Unreachable));
            }
        };
        // The pull has succeeded. The rest only describes the image, so no failure below may fail the pull.
        let release = async {
            // Otherwise the fetcher owns the lease, which may hold more than the runtime's records do yet.
            if fetched_for.is_none() {
                self.leases.release(reference).await;
            }
        };
        let ((), digest, id) =
            tokio::join!(release, self.find_digest(reference), self.find_id(reference, &image_ref));
        let bytes = match &digest {
            Some(digest) => self.content.image_size(digest).await,
            None => None,
        };
        Ok(Pulled { digest, id, bytes, warning, facts: PulledBy::Runtime.into(), ..Pulled::default() })
    }

    async fn look_up(&self, reference: &str) -> Result<Option<Present>, PullError> {
        let Some(image) = self.read_image_status(reference).await? else { return Ok(None) };
        Ok(Some(Present { digest: self.find_digest(reference).await, id: parse_image_id(&image.id) }))
    }

    async fn read_filesystem(&self) -> Result<Filesystem, PullError> {
        let mountpoint = self.read_mountpoint().await?;
        // statvfs may block for long if the file system's server is dead.
        let read = self.filesystem.ask(move || read_image_filesystem(&mountpoint)).await;
        read.unwrap_or_else(|error| Err(PullError::new(ErrorClass::Transient, error.to_string())))
    }

    fn set_progress_wanted(&self, wanted: bool) {
        self.watcher.set_progress_wanted(wanted);
    }

    async fn watch_disk(&self) -> DiskWatch {
        match self.image_directories().await {
            Ok(directories) => self.flushes.watch(&directories).await,
            // Only refusals of its own flush count then.
            Err(_) => DiskWatch::default(),
        }
    }

    async fn flush(&self) -> Result<(), PullError> {
        let covers = self.unflushed.last_noted();
        let unseen = match self.image_directories().await {
            Ok(directories) => match self.flushes.flush_both(&directories).await {
                Ok(()) => {
                    self.unflushed.cover(covers);
                    return Ok(());
                }
                Err(FlushError::Refused { path, source }) => return Err(PullError::of_flush(&path, &source)),
                Err(error @ FlushError::NotSeen { .. }) => error.to_string(),
            },
            Err(error) => error.message,
        };
        // The image is there: only a power cut within the next minute could harm it.
        tracing::warn!(
            error = unseen,
            "the image file system cannot be flushed; a power cut soon may damage the image that was just pulled"
        );
        Ok(())
    }

    fn has_unflushed(&self) -> bool {
        self.unflushed.has_any()
    }

    async fn give_up(&self, reference: &str) {
        self.leases.give_up(reference).await;
    }

    async fn release_unwanted(
        &self,
        wanted: impl Fn() -> Vec<String> + Send + Sync,
        least_age: Duration,
    ) -> bool {
        self.leases.release_unwanted(wanted, least_age).await
    }

    async fn pin(&self, reference: &str, id: Option<&str>, job: &JobUid) -> Result<bool, PullError> {
        // The record of the id first, because it's the one that keeps its labels.
        let names: Vec<&str> = id.into_iter().chain([reference]).collect();
        self.pins
            .pin(&names, job)
            .await
            .map_err(|status| to_pull_error(&status, reference, &self.endpoint))?;
        let (looks, interval) = PIN_LOOKS;
        for _ in 0..looks {
            if self.read_image_status(reference).await?.is_some_and(|image| image.pinned) {
                return Ok(true);
            }
            tokio::time::sleep(interval).await;
        }
        Ok(false)
    }

    async fn unpin(&self, jobs: JobsToUnpin<'_>) -> Result<(), PullError> {
        let is_over = |job: &JobUid| match jobs {
            JobsToUnpin::Jobs(over) => over.contains(job),
            JobsToUnpin::All => true,
        };
        let unpinned = self.pins.unpin(is_over).await;
        unpinned.map_err(|status| to_pull_error(&status, "", &self.endpoint))
    }

    async fn pinning_jobs(&self) -> Option<Vec<JobUid>> {
        self.pins.pinning_jobs().await
    }

    async fn read_version(&self) -> Result<String, PullError> {
        let request = VersionRequest { version: "v1".to_owned() };
        let answer = self.ask("", self.runtime.clone().version(request)).await?;
        Ok(format!("{} {}", answer.runtime_name, answer.runtime_version))
    }
}

/// The answer of the runtime at an endpoint to a request about an image, or about no image in particular.
pub(in crate::images) async fn ask<T>(
    endpoint: &RuntimeEndpoint,
    reference: &str,
    question: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, PullError> {
    match timeout(ANSWER_TIMEOUT, question).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(to_pull_error(&status, reference, endpoint)),
        Err(_) => {
            let message =
                format!("the container runtime at {endpoint} did not answer within {ANSWER_TIMEOUT:?}");
            Err(PullError::new(ErrorClass::RuntimeDown, message))
        }
    }
}

/// The runtime doesn't check signatures, so it must not download an image that needs one. The agent verified content
/// that it fetched.
fn refuse_unverified(verification: Option<&Verification>) -> Result<Option<String>, PullError> {
    match verification.map(|verification| verification.mode) {
        None => Ok(None),
        Some(VerificationMode::Warn) => {
            Ok(Some("not verified: the container runtime pulled it, which looks at no signature".to_owned()))
        }
        Some(VerificationMode::Enforce) => {
            let message = "the image needs a signature, and the container runtime would pull it without verifying one: have the agent of this node download (--fetch=auto, over containerd)";
            Err(PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::SignatureInvalid))
        }
    }
}

fn image_spec(reference: &str) -> ImageSpec {
    ImageSpec { image: reference.to_owned(), ..ImageSpec::default() }
}

/// Converts the pod sandbox for CRI, as the kubelet sends it for a pod; the task has only labels and annotations.
fn to_sandbox_config(sandbox: &SandboxMetadata) -> PodSandboxConfig {
    let SandboxMetadata { labels, annotations } = sandbox;
    let map = |entries: &BTreeMap<String, String>| entries.clone().into_iter().collect();
    PodSandboxConfig { labels: map(labels), annotations: map(annotations), ..PodSandboxConfig::default() }
}

/// Normalises an image id to `sha256:…`; CRI-O omits the algorithm. `None` if the text isn't an id.
fn parse_image_id(text: &str) -> Option<String> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text);
    let is_id = digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_id.then(|| format!("sha256:{digits}"))
}

/// Picks the digest that's listed for the repository of a tag, if there's exactly one. Docker lists repositories in
/// their short form, `nginx` for `docker.io/library/nginx`.
fn pick_digest(name: &str, repo_digests: &[String]) -> Option<String> {
    let repository = |text: &str| Some(Reference::parse(text).ok()?.normalized().name());
    let own = repository(name)?;
    let of_own = |entry: &String| {
        let (listed, digest) = entry.split_once('@')?;
        (repository(listed)? == own).then(|| digest.to_owned())
    };
    let digests: BTreeSet<String> = repo_digests.iter().filter_map(of_own).collect();
    let mut digests = digests.into_iter();
    digests.next().filter(|_| digests.next().is_none())
}

fn read_image_filesystem(mountpoint: &str) -> Result<Filesystem, PullError> {
    read_filesystem(Path::new(mountpoint)).map_err(|error| {
        PullError::new(
            ErrorClass::Transient,
            format!(
                "cannot read the free space on {mountpoint}, where the container runtime keeps images: {error} (if the agent runs in a container, mount it there at the same path)"
            ),
        )
    })
}

#[cfg(test)]
mod tests;
