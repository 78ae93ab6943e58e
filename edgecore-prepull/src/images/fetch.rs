//! The [`Puller`] that downloads by itself, and has the container runtime unpack.
//!
//! ```text
//!  resolve ─▶ signed? ─▶ manifests ─▶ room? ─▶ blobs ─▶ labels ─▶ the records of the image
//!                                                │ unpacked as they arrive, the lowest first
//!                                                │ from where an earlier pull left them
//!                                                │ one at a time per digest over the node
//!                                                │ each byte from the buckets of the node and of the task
//! ```
//!
//! The lease of the image keeps all of it, so nothing is fetched twice after an interruption. Images that the agent
//! can't fetch are left to the runtime: see [`FetchMode`].

mod admission;
mod ahead;
mod beginnings;
mod blob;
mod blobs;
mod buckets;
mod clearing;
mod delta;
mod deltas;
mod download;
mod downloads;
mod fetcher;
mod finish;
mod flights;
mod image;
mod ingest;
mod make_room;
mod mode;
mod neighbours;
mod old_files;
mod pour;
mod rebuild;
mod removal;
mod room;
mod runtime;
mod shared;
mod step_back;
mod stop;
mod unpacked;
mod unreachable;
mod unused;
mod whole;
mod yielding;

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use prepull_api::download::Deltas;
use prepull_api::image::Reference;
use prepull_api::task::{ImageFacts, JobUid, PulledBy};
use prepull_api::wire::{Filesystem, truncate_note, truncate_reason};
use prepull_registry::Proxies;
use tokio::sync::{Semaphore, watch};

use self::admission::Admitted;
use self::buckets::PullBuckets;
use self::deltas::Goal;
use self::download::{Download, Unpacking};
use self::downloads::Layer;
pub use self::downloads::{ImageDownload, LayerDownload};
use self::fetcher::{Fetcher, received_ahead, streams_of_image};
use self::finish::needs_runtime;
use self::image::ImageParts;
use self::shared::ImageSharing;
pub(crate) use self::shared::Neighbourhood;
use self::stop::FetchStop;
use super::containerd::{Containerd, ContentStore, SourceRepository};
use super::puller::cri::{CriPuller, is_registry_token_alone, unusable};
use super::puller::{
    DiskWatch, ErrorClass, HeldImage, JobsToUnpin, Present, ProgressSink, PullError, PullRequest, Pulled,
    Puller, Removed,
};
use super::rate::Bucket;
use super::verify::{SignatureVerdict, verify};
use crate::clock::CloudClock;
use crate::metrics::AgentMetrics;
use crate::units::{Amount, Percent};
pub use mode::{BadFetchMode, FetchMode};
pub use room::RoomRules;

/// A pull must not take a node below 10 % free disk, the kubelet's threshold for evicting pods (nodefs.available). By
/// default the kubelet's garbage collection leaves 15 % free.
pub(crate) const DEFAULT_DISK_MIN_FREE: Amount = Amount::Percent(10);
/// The kubelet's own default.
pub(crate) const DEFAULT_GC_HIGH_THRESHOLD: Percent = Percent(85);

/// Settings for downloads of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchSettings {
    /// The program that downloads.
    pub mode: FetchMode,
    /// Limit in bytes a second, over all pulls of the node.
    pub max_rate: Option<NonZeroU64>,
    /// Directory with a directory for each registry; `None` for that of the runtime.
    pub hosts_dir: Option<PathBuf>,
    /// Space that must stay free.
    pub room: RoomRules,
    /// Whether images may be rebuilt from earlier ones and deltas.
    pub deltas: bool,
    /// Whether an image also needs the blobs of layers that are unpacked, as for `ctr image export`.
    pub whole: bool,
}

impl FetchSettings {
    /// Settings under which every image fits, even on a full disk.
    pub fn without_room_check() -> Self {
        let room =
            RoomRules { gc_high_threshold: Percent(100), disk_min_free: Amount::Bytes(0), make_room: false };
        Self { room, ..Self::default() }
    }
}

impl Default for FetchSettings {
    fn default() -> Self {
        let room = RoomRules {
            gc_high_threshold: DEFAULT_GC_HIGH_THRESHOLD,
            disk_min_free: DEFAULT_DISK_MIN_FREE,
            make_room: false,
        };
        Self { mode: FetchMode::default(), max_rate: None, hosts_dir: None, room, deltas: true, whole: false }
    }
}

/// Downloads by itself, and has `P` unpack.
#[derive(Debug)]
pub struct Fetching<P> {
    inner: P,
    fetcher: Fetcher,
}

impl Fetching<CriPuller> {
    /// Downloads in front of a puller over CRI, into the containerd at the same endpoint.
    pub fn over_cri(puller: CriPuller, settings: FetchSettings) -> Self {
        let containerd = puller.containerd();
        Self::new(puller, containerd, settings)
    }
}

impl<P: Puller> Fetching<P> {
    pub(crate) fn new(inner: P, containerd: Containerd, settings: FetchSettings) -> Self {
        Self { inner, fetcher: Fetcher::new(containerd, settings) }
    }

    /// Counts in these metrics.
    #[must_use]
    pub(crate) fn counted_in(mut self, metrics: Arc<AgentMetrics>) -> Self {
        self.fetcher.metrics = Some(metrics);
        self
    }

    /// Downloads through these proxies, instead of those of the environment.
    #[must_use]
    pub(crate) fn through(mut self, proxies: Proxies) -> Self {
        self.fetcher.proxies = proxies;
        self
    }

    /// Shares layers with the neighbours of the site, for tasks that request it.
    #[must_use]
    pub(crate) fn shared_with(mut self, neighbourhood: Neighbourhood) -> Self {
        self.fetcher.neighbourhood = Some(neighbourhood);
        self
    }

    /// Checks the certificates of registries at the time of this clock, and has leases outlive the moment at which the machine's
    /// own clock is set to it.
    #[must_use]
    pub(crate) fn with_clock(mut self, clock: Arc<CloudClock>) -> Self {
        self.fetcher.leases.follow_clock(clock.clone());
        self.fetcher.clock = clock;
        self
    }

    /// The content store for the downloads.
    pub(crate) fn store(&self) -> Arc<ContentStore> {
        Arc::clone(&self.fetcher.store)
    }

    /// The node's own limit. It may change at any time.
    pub fn bucket(&self) -> &Bucket {
        &self.fetcher.bucket
    }

    /// Records which images are in use, in an endless loop, if images may be removed to make room.
    pub(crate) async fn watch_uses(&self) -> Infallible {
        let mut rules = self.fetcher.room.subscribe();
        // The sender is part of the fetcher, so these waits can't fail.
        loop {
            let _ = rules.wait_for(|rules| rules.make_room).await;
            tokio::select! {
                never = self.fetcher.watch_uses() => return never,
                _ = rules.wait_for(|rules| !rules.make_room) => {}
            }
        }
    }

    /// Changes the limits for the free space, for the pulls that begin from now on.
    pub(crate) fn set_room(&self, rules: RoomRules) {
        self.fetcher.room.send_if_modified(|room| std::mem::replace(room, rules) != rules);
    }

    /// The downloads in progress.
    pub fn downloads(&self) -> Vec<ImageDownload> {
        self.fetcher.downloads.current_downloads()
    }

    async fn fetch_image(
        &self,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<Pulled, FetchStop> {
        let reference = Reference::parse(request.reference)
            .map_err(|error| PullError::new(ErrorClass::Permanent, error.to_string()))?
            .normalized();
        let fetcher = &self.fetcher;
        let facts = fetcher.runtime.read_facts(fetcher.settings.hosts_dir.as_deref()).await?;
        if needs_runtime(&request, &facts)
            && let Some(credential) =
                request.credential.filter(|credential| is_registry_token_alone(credential))
        {
            // It would work for the download, but containerd couldn't present it for unpacking.
            return Err(unusable(credential, "containerd").into());
        }
        let buckets = PullBuckets::new(&fetcher.bucket, &request.terms);
        let repository = fetcher.client(&facts).repository(&reference, request.credential)?;
        let repository = repository.receiving_ahead(buckets.uplink_limit().map(received_ahead));
        let registry = reference.registry();
        let resolved = repository.resolve().await.map_err(|error| FetchStop::of_resolve(error, registry))?;
        fetcher.unreachable.forget(registry);
        // From here on, we fetch and unpack only this digest.
        let verdict = match request.terms.verification {
            Some(verification) => Some(verify(&repository, &resolved.descriptor, verification).await?),
            None => None,
        };
        let image = ImageParts::read(&fetcher.store, &repository, resolved).await?;
        let Some(lease) = fetcher.leases.acquire(request.reference).await else {
            let message = format!("containerd gives no lease for the image ({})", fetcher.endpoint);
            return Err(PullError::new(ErrorClass::RuntimeDown, message).into());
        };
        for (snapshotter, key) in fetcher.leases.half_unpacked(&lease).await {
            // It takes room, and a process that's killed repeatedly would fill the disk. If removing fails, it goes
            // with the lease.
            let _ = fetcher.unpacker.remove_snapshot(&snapshotter, &key, &lease).await;
        }
        let shared = fetcher
            .neighbourhood
            .as_ref()
            .filter(|_| !repository.has_machine_credential())
            .and_then(|neighbourhood| ImageSharing::new(neighbourhood, &request.terms));
        let goal = Goal {
            reference: &reference,
            repository: &repository,
            image: &image,
            facts: &facts,
            lease: &lease,
            is_shared: shared.is_some(),
        };
        // The runtime has given a lease, so it was there.
        let admitted = fetcher.admit(&request, &goal).await;
        let Admitted { layers, watched, mut deltas, no_delta } =
            admitted.map_err(|stop| stop.after_answer(request.reference, None))?;
        let old_files = deltas.as_mut().and_then(|deltas| deltas.old.view.take());
        let download = Download {
            fetcher,
            repository: &repository,
            facts: &facts,
            reference: request.reference,
            image: &image,
            layers: &layers,
            source: SourceRepository::of_reference(request.reference),
            lease: &lease,
            buckets,
            streams: Semaphore::new(streams_of_image(buckets.limit())),
            letting_go: watch::Sender::new(false),
            unpacking: Unpacking::default(),
            asked_last: Mutex::default(),
            shared,
            deltas,
            needs_deltas: request.terms.deltas == Deltas::Require,
            no_delta: no_delta.map_or_else(OnceLock::new, OnceLock::from),
            since: request.terms.since,
            is_refused: AtomicBool::new(false),
        };
        let brought = async {
            let unpacked = download.fetch_blobs(progress).await?;
            drop(watched);
            if let Some(old_files) = old_files {
                old_files.close().await;
            }
            self.finish(request, &reference, &download, unpacked).await
        };
        let brought = brought.await;
        if download.is_refused.load(Ordering::Relaxed) {
            fetcher.leases.give_up(request.reference).await;
        }
        let pulled = brought
            .map_err(|stop| stop.after_answer(request.reference, download.unpacking.layer().as_deref()))?;
        download.keep_deltas().await;
        fetcher.leases.release(request.reference).await;
        fetcher.refused.forget(image.manifest_digest());
        let (signed_by, warning) = verdict.map_or((None, None), signer_or_warning);
        let shared = download.shared.as_ref();
        let no_delta = download.no_delta.get();
        let facts = ImageFacts {
            pulled_by: Some(PulledBy::Agent),
            signed_by,
            unshared_reason: shared.map(ImageSharing::why_not).unwrap_or_default(),
            delta_saved_bytes: download.deltas.is_some().then(|| layers.iter().map(Layer::spared).sum()),
            no_delta: no_delta.map(|unused| unused.code),
            no_delta_reason: no_delta.map(|unused| truncate_note(&unused.why)).unwrap_or_default(),
            ..pulled.facts
        };
        Ok(Pulled { warning, facts, from_peers: shared.and_then(ImageSharing::delivered), ..pulled })
    }
}

fn signer_or_warning(verdict: SignatureVerdict) -> (Option<String>, Option<String>) {
    match verdict {
        SignatureVerdict::Signed { by } => (Some(by), None),
        SignatureVerdict::Unsigned { reason } => {
            let warning = format!("pulled without a valid signature: {reason}");
            (None, Some(truncate_reason(&warning)))
        }
    }
}

impl<P: Puller> Puller for Fetching<P> {
    async fn pull(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, PullError> {
        loop {
            let fetched = if self.fetcher.settings.mode == FetchMode::Runtime {
                Err(FetchStop::StepBack("--fetch=runtime".to_owned()))
            } else {
                self.fetch_image(request, progress).await
            };
            let by_runtime = match fetched {
                Ok(pulled) => return Ok(pulled),
                Err(FetchStop::Failed(error)) => return Err(error),
                Err(FetchStop::StepBack(why)) => self.step_back(&why, request, progress).await?,
                Err(FetchStop::NoConnection { registry, error }) => {
                    self.step_back_unreachable(&registry, error, request, progress).await?
                }
            };
            if let Some(pulled) = by_runtime {
                return Ok(pulled);
            }
            tracing::info!(
                image = request.reference,
                "has a limit now, which the container runtime would not keep"
            );
        }
    }

    async fn look_up(&self, reference: &str) -> Result<Option<Present>, PullError> {
        self.inner.look_up(reference).await
    }

    async fn read_file(&self, id: &str, path: &str, most: u64) -> Result<Vec<u8>, String> {
        let fetcher = &self.fetcher;
        let facts = fetcher.runtime.read_facts(fetcher.settings.hosts_dir.as_deref()).await;
        let facts = facts.map_err(FetchStop::into_message)?;
        let chain = fetcher.store.snapshot_of(id, &facts.snapshotter).await;
        let chain = chain.map_err(|status| status.message().to_owned())?;
        let chain = chain.ok_or("containerd has no unpacked image of this id")?;
        // By the id, since a pull of the reference has a lease of its own.
        let lease = fetcher.leases.acquire(id).await.ok_or("containerd gives no lease")?;
        let viewed = fetcher.unpacker.open_view(&facts.snapshotter, &chain, &lease).await;
        let content = match viewed {
            Ok((view, directories)) => {
                let path = path.to_owned();
                let read =
                    tokio::task::spawn_blocking(move || old_files::read_file(&directories, &path, most));
                let content = read.await.map_err(|error| error.to_string());
                view.close().await;
                content.and_then(|content| content.map_err(|error| error.to_string()))
            }
            Err(status) => Err(status.message().to_owned()),
        };
        fetcher.leases.release(id).await;
        content
    }

    async fn read_filesystem(&self) -> Result<Filesystem, PullError> {
        self.inner.read_filesystem().await
    }

    async fn removable_bytes(&self, wanted: &[String]) -> u64 {
        let fetcher = &self.fetcher;
        if !fetcher.room.borrow().make_room || fetcher.settings.mode == FetchMode::Runtime {
            return 0;
        }
        self.fetcher.removable_bytes(wanted).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot find out which images the node needs, so none counts as free");
            0
        })
    }

    async fn held_images(&self) -> Result<Vec<HeldImage>, PullError> {
        self.fetcher.held_images().await
    }

    async fn weigh(&self, ids: &[String]) -> Result<Vec<u64>, PullError> {
        self.fetcher.weigh(ids).await
    }

    async fn remove(
        &self,
        id: &str,
        agrees: impl FnOnce(&[HeldImage]) -> bool + Send,
    ) -> Result<Removed, PullError> {
        self.fetcher.remove_if_agreed(id, agrees).await
    }

    fn set_progress_wanted(&self, wanted: bool) {
        self.inner.set_progress_wanted(wanted);
    }

    async fn watch_disk(&self) -> DiskWatch {
        self.fetcher.find_directories().await;
        self.inner.watch_disk().await
    }

    async fn flush(&self) -> Result<(), PullError> {
        self.fetcher.find_directories().await;
        self.inner.flush().await
    }

    fn has_unflushed(&self) -> bool {
        self.inner.has_unflushed()
    }

    async fn give_up(&self, reference: &str) {
        self.inner.give_up(reference).await;
    }

    async fn release_unwanted(
        &self,
        wanted: impl Fn() -> Vec<String> + Send + Sync,
        least_age: Duration,
    ) -> bool {
        self.inner.release_unwanted(wanted, least_age).await
    }

    async fn pin(&self, reference: &str, id: Option<&str>, job: &JobUid) -> Result<bool, PullError> {
        self.inner.pin(reference, id, job).await
    }

    async fn unpin(&self, jobs: JobsToUnpin<'_>) -> Result<(), PullError> {
        self.inner.unpin(jobs).await
    }

    async fn pinning_jobs(&self) -> Option<Vec<JobUid>> {
        self.inner.pinning_jobs().await
    }

    async fn can_stream_layers(&self) -> bool {
        let Self { fetcher: Fetcher { runtime, settings, .. }, .. } = self;
        settings.mode != FetchMode::Runtime && runtime.shows_ingests(settings.hosts_dir.as_deref()).await
    }

    async fn read_version(&self) -> Result<String, PullError> {
        self.inner.read_version().await
    }
}

#[cfg(test)]
mod tests;
