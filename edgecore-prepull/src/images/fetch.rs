//! The [`Puller`] that downloads by itself, and has the container runtime unpack.
//!
//! ```text
//!  resolve ─▶ signed? ─▶ manifests ─▶ room? ─▶ blobs ─▶ PullImage by digest, which unpacks ─▶ the tag's record
//!                                                │ from where an earlier pull left them
//!                                                │ one at a time per digest over the node
//!                                                │ each byte from the buckets of the node and of the task
//! ```
//!
//! All of it is kept by the lease of the image, so that nothing of it is fetched twice, whatever breaks in between. What
//! the agent cannot fetch, the runtime pulls as it would without the agent: see [`FetchMode`].

mod blob;
mod buckets;
mod flights;
mod image;
mod mode;
mod room;
mod runtime;
mod stop;
mod unpacked;
mod yielding;

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_api::task::{Bytes, JobUid};
use prepull_api::wire::Filesystem;
use prepull_registry::manifest::{Descriptor, MAX_MANIFEST};
use prepull_registry::{Proxies, RegistryClient, Repository, Settings as ClientSettings};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use self::blob::Download;
use self::buckets::Buckets;
use self::flights::{Flight, Flights};
use self::image::{ImageParts, blob};
use self::room::{Disk, Guess, Need, guess, is_gzip, judge, size_by_trailer};
use self::runtime::{Facts, Runtime};
use self::stop::Stop;
use self::unpacked::chain_ids;
use self::yielding::yield_to_others;
use super::containerd::{BlobKind, Containerd, ContentStore, ContentWriter, ImageRecords, Leases};
use super::puller::cri::CriPuller;
use super::puller::{
    ErrorClass, Present, ProgressSink, PullError, PullRequest, PullTerms, Pulled, Puller, Unpinned,
};
use super::rate::Bucket;
use super::runtime::RuntimeEndpoint;
use super::verify::{Verdict, verify};
use crate::config::{Amount, DEFAULT_DISK_MIN_FREE, DEFAULT_GC_HIGH_THRESHOLD, Percent};
use crate::metrics::{Metrics, PulledBy};
pub use mode::{BadFetchMode, FetchMode};
pub use room::RoomRules;

/// Blobs of an image that arrive at the same time, as many as containerd fetches by default.
const STREAMS_OF_IMAGE: usize = 3;
/// The same under a cap: another connection would bring nothing but what waits in its buffers, which has crossed the link
/// before the cap has let it.
const STREAMS_UNDER_CAP: usize = 1;
/// Blobs that arrive at the same time over all images of the node. Each takes some hundred KiB of memory.
const STREAMS_OF_NODE: usize = 9;
/// Blobs of an image that are looked at ahead: those that another pull fetches wait without a stream.
const AHEAD: usize = 32;
/// Interval of progress, which goes to the cloud once a second at most.
const PROGRESS: Duration = Duration::from_secs(1);
/// Longest wait for the CRI to learn of a record that was written. It takes milliseconds.
const SEEN: Duration = Duration::from_secs(5);
/// Interval of asking whether it has.
const LOOK: Duration = Duration::from_millis(20);

/// How the node downloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchSettings {
    /// Who downloads.
    pub mode: FetchMode,
    /// Bytes a second over all pulls of the node.
    pub max_rate: Option<NonZeroU64>,
    /// Directory with a directory for each registry; `None` for that of the runtime.
    pub hosts_dir: Option<PathBuf>,
    /// What must stay free.
    pub room: RoomRules,
}

impl FetchSettings {
    /// Settings under which every image fits, however full the disk is.
    pub fn whatever_the_disk() -> Self {
        let room = RoomRules { gc_high_threshold: Percent(100), disk_min_free: Amount::Bytes(0) };
        Self { room, ..Self::default() }
    }
}

impl Default for FetchSettings {
    fn default() -> Self {
        let room =
            RoomRules { gc_high_threshold: DEFAULT_GC_HIGH_THRESHOLD, disk_min_free: DEFAULT_DISK_MIN_FREE };
        Self { mode: FetchMode::default(), max_rate: None, hosts_dir: None, room }
    }
}

/// Downloads images by itself, and has `P` unpack them.
#[derive(Debug)]
pub struct Fetching<P> {
    inner: P,
    fetcher: Fetcher,
}

/// What a client of registries is made for: the directories that the runtime is set up with, and the bytes that may be
/// received ahead of a limit.
type ClientKey = (Vec<PathBuf>, Option<usize>);

/// Everything of a fetch but the puller that unpacks.
struct Fetcher {
    settings: FetchSettings,
    endpoint: RuntimeEndpoint,
    runtime: Runtime,
    store: Arc<ContentStore>,
    writer: ContentWriter,
    records: ImageRecords,
    leases: Arc<Leases>,
    bucket: Bucket,
    flights: Flights,
    streams: Semaphore,
    /// The client that was needed last.
    client: Mutex<Option<(ClientKey, RegistryClient)>>,
    metrics: Option<Arc<Metrics>>,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher").field("settings", &self.settings).finish_non_exhaustive()
    }
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
        let Containerd { channel, endpoint, store, leases } = containerd;
        let fetcher = Fetcher {
            runtime: Runtime::new(&channel, endpoint.clone()),
            endpoint,
            store,
            writer: ContentWriter::new(channel.clone()),
            records: ImageRecords::new(channel),
            leases,
            bucket: Bucket::new(settings.max_rate),
            flights: Flights::default(),
            streams: Semaphore::new(STREAMS_OF_NODE),
            client: Mutex::default(),
            metrics: None,
            settings,
        };
        Self { inner, fetcher }
    }

    /// Counts in these metrics.
    #[must_use]
    pub(crate) fn counted_in(mut self, metrics: Arc<Metrics>) -> Self {
        self.fetcher.metrics = Some(metrics);
        self
    }

    /// The node's own limit, which may be changed at any time.
    pub fn bucket(&self) -> &Bucket {
        &self.fetcher.bucket
    }

    async fn fetch(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, Stop> {
        let reference = Reference::parse(request.reference)
            .map_err(|error| PullError::new(ErrorClass::Permanent, error.to_string()))?
            .normalized();
        let fetcher = &self.fetcher;
        let facts = fetcher.runtime.read(fetcher.settings.hosts_dir.as_deref()).await?;
        let buckets = Buckets { node: &fetcher.bucket, own: request.terms.bucket };
        let client = fetcher.client(&facts, buckets.limit());
        let repository = client.repository(&reference, request.credential)?;
        let resolved = repository.resolve().await?;
        if let Some(verification) = request.terms.verification {
            // From here on, only what has this digest is fetched and unpacked.
            let verdict = verify(&repository, &resolved.descriptor, verification).await?;
            if let Verdict::Unsigned { reason } = verdict {
                tracing::warn!(image = request.reference, reason, "pulled without a valid signature");
            }
        }
        let image = ImageParts::read(&fetcher.store, &repository, resolved).await?;
        let Some(lease) = fetcher.leases.acquire(request.reference).await else {
            let message = format!("containerd gives no lease for the image ({})", fetcher.endpoint);
            return Err(PullError::new(ErrorClass::RuntimeDown, message).into());
        };
        let layers = fetcher.layers(&repository, &image, &facts).await;
        fetcher.check_room(&repository, &layers, &facts).await?;
        let download = Download {
            fetcher,
            repository: &repository,
            reference: request.reference,
            lease: &lease,
            buckets,
            streams: Semaphore::new(match buckets.limit() {
                None => STREAMS_OF_IMAGE,
                Some(_) => STREAMS_UNDER_CAP,
            }),
            letting_go: watch::Sender::new(false),
        };
        fetcher.download(download, &image, &layers, progress).await?;
        let pulled = self.finish(request, &reference.name(), reference.digest().is_some(), &image).await?;
        fetcher.leases.release(request.reference).await;
        Ok(pulled)
    }

    /// Has the runtime unpack what is there. It asks the registry once more what the reference points to: a tag may have
    /// moved, and the runtime would then download the other image by itself. So it is asked for the digest, and the tag's
    /// record is written here.
    async fn finish(
        &self,
        request: PullRequest<'_>,
        name: &str,
        has_digest: bool,
        image: &ImageParts,
    ) -> Result<Pulled, Stop> {
        let by_digest = format!("{name}@{}", image.target.digest);
        let reference = if has_digest { request.reference } else { &by_digest };
        let fetched_for = Some(request.reference);
        // Nothing is downloaded any more, so that no terms apply.
        let unpack = PullRequest { reference, fetched_for, terms: PullTerms::default(), ..request };
        let mut pulled = self.inner.pull(unpack, &|_| {}).await?;
        let size = image.size();
        pulled.bytes = pulled.bytes.or(Some(Bytes { done: size, total: size }));
        if has_digest {
            return Ok(pulled);
        }
        let Descriptor { media_type, digest, size, .. } = &image.target;
        let fetcher = &self.fetcher;
        let written = fetcher.records.point(request.reference, media_type, digest, *size).await;
        written.map_err(|status| {
            super::puller::cri::to_pull_error(&status, request.reference, &fetcher.endpoint)
        })?;
        let begun = Instant::now();
        while begun.elapsed() < SEEN {
            let seen = self.inner.look_up(request.reference).await?;
            if seen.is_some_and(|present| present.id == pulled.id) {
                return Ok(pulled);
            }
            sleep(LOOK).await;
        }
        let message =
            format!("the runtime does not know {} yet, although its record is written", request.reference);
        Err(PullError::new(ErrorClass::Transient, message).into())
    }

    /// Leaves a pull to the runtime, unless somebody has asked for what only the agent does.
    async fn step_back(
        &self,
        why: &str,
        request: PullRequest<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<Pulled, PullError> {
        let refuse = |because: &str| {
            let message = format!("the agent cannot fetch the image ({why}), and {because}");
            Err(PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::Other))
        };
        if self.fetcher.settings.mode == FetchMode::Agent {
            return refuse("--fetch=agent keeps the container runtime from pulling it");
        }
        let buckets = Buckets { node: &self.fetcher.bucket, own: request.terms.bucket };
        if buckets.limit().is_some() {
            return refuse("a pull by the container runtime keeps no limit of bytes a second");
        }
        tracing::debug!(image = request.reference, why, "left to the container runtime");
        self.fetcher.count_pull(PulledBy::Runtime);
        self.inner.pull(request, progress).await
    }
}

impl Fetcher {
    /// The client of registries for what the runtime is set up with now, and for a limit of bytes a second.
    fn client(&self, facts: &Facts, limit: Option<NonZeroU64>) -> RegistryClient {
        let key = (facts.hosts_dirs.clone(), limit.map(received_ahead));
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, client)) = &*client
            && *of == key
        {
            return client.clone();
        }
        let new = RegistryClient::new(ClientSettings {
            hosts_dirs: facts.hosts_dirs.clone(),
            user_agent: concat!("edgecore-prepull/", env!("CARGO_PKG_VERSION")).to_owned(),
            proxies: Proxies::from_env(),
            receive_buffer: key.1,
        });
        *client = Some((key, new.clone()));
        new
    }

    /// The layers of an image, with how much is there of each.
    async fn layers(&self, repository: &Repository, image: &ImageParts, facts: &Facts) -> Vec<Layer> {
        let ingests = self.store.ingests().await.unwrap_or_default();
        let unpacked = if facts.discards_layers { self.unpacked(repository, image, facts).await } else { 0 };
        let needed = image.above(unpacked);
        let layer = |index: usize| {
            let descriptor = image.layers[index].clone();
            let flight = self.flights.of(&descriptor.digest);
            let ingest = ingests.get(&descriptor.digest).map_or(0, |ingest| ingest.offset);
            // Where layers are discarded, the runtime asks for none that is unpacked.
            let is_needless = !needed.contains(descriptor.digest.as_str());
            async move {
                let whole = is_needless || self.store.has_blob(&descriptor.digest).await;
                let there = if whole { descriptor.size } else { ingest.min(descriptor.size) };
                flight.set_written(there);
                Layer { descriptor, flight, there, is_needless }
            }
        };
        stream::iter((0..image.layers.len()).map(layer)).buffered(AHEAD).collect().await
    }

    /// Number of layers, from the lowest one on, that the snapshotter has unpacked.
    async fn unpacked(&self, repository: &Repository, image: &ImageParts, facts: &Facts) -> usize {
        let config = match self.store.read(&image.config.digest).await {
            Some(config) => Ok(config),
            None => repository.small_blob(&image.config, MAX_MANIFEST).await,
        };
        let mut unpacked = 0;
        for chain in config.map(|config| chain_ids(&config)).unwrap_or_default() {
            if !self.store.is_unpacked(&facts.snapshotter, &chain).await {
                break;
            }
            unpacked += 1;
        }
        unpacked
    }

    /// Refuses an image that does not fit, before a byte of it is fetched.
    async fn check_room(
        &self,
        repository: &Repository,
        layers: &[Layer],
        facts: &Facts,
    ) -> Result<(), PullError> {
        let (content, images) = (facts.root.clone(), facts.image_root.clone());
        // statvfs may block for long if the file system's server is dead.
        let read = tokio::task::spawn_blocking(move || {
            Ok::<_, std::io::Error>((Disk::read(&content)?, Disk::read(&images)?))
        });
        let Ok(Ok((content, images))) = read.await else {
            tracing::warn!(root = %facts.root.display(), "the runtime's disk cannot be read, so that nobody knows whether the image fits (if the agent runs in a container, mount it there at the same path)");
            return Ok(());
        };
        let missing: Vec<&Layer> =
            layers.iter().filter(|layer| layer.there < layer.descriptor.size).collect();
        let judge = |unpacked: &dyn Fn(usize, &Descriptor) -> u64| {
            let mut need = Need::default();
            for (index, Layer { descriptor, there, .. }) in missing.iter().enumerate() {
                need.add(descriptor, descriptor.size - there, unpacked(index, descriptor));
            }
            judge(need, &content, &images, &self.settings.room)
        };
        let refuse = |message: String| PullError::new(ErrorClass::NoSpace, message);
        judge(&|_, layer| guess(layer, Guess::Least)).map_err(refuse)?;
        if judge(&|_, layer| guess(layer, Guess::Usual)).is_ok() {
            return Ok(());
        }
        // It is close: what the registry tells of the layers decides.
        let size_of = |index: usize| unpacked_size(repository, &missing[index].descriptor);
        let sizes = stream::iter((0..missing.len()).map(size_of)).buffered(STREAMS_OF_IMAGE);
        let sizes: Vec<u64> = sizes.collect().await;
        judge(&|index, _| sizes[index]).map_err(refuse)
    }

    async fn download(
        &self,
        download: Download<'_>,
        image: &ImageParts,
        layers: &[Layer],
        progress: ProgressSink<'_>,
    ) -> Result<(), Stop> {
        for (document, content) in &image.documents {
            download.document(document, content).await?;
        }
        let report = || {
            let done = layers.iter().map(Layer::written).fold(0, u64::saturating_add);
            progress(Bytes { done, total: image.size() });
        };
        let wanted = layers.iter().filter(|layer| !layer.is_needless);
        let mut blobs: Vec<_> = wanted
            .map(|layer| (blob(BlobKind::Layer, &layer.descriptor), &layer.descriptor, layer.flight.clone()))
            .collect();
        // The largest first: what is left at the end is small, so that all streams end at about the same time.
        blobs.sort_by_key(|(layer, ..)| std::cmp::Reverse(layer.size));
        let config = &image.config;
        blobs.insert(0, (blob(BlobKind::Config, config), config, self.flights.of(&config.digest)));
        let fetch = |index: usize| {
            let (download, (blob, descriptor, flight)) = (&download, &blobs[index]);
            download.blob(blob, descriptor, flight)
        };
        let all = stream::iter((0..blobs.len()).map(fetch))
            .buffer_unordered(AHEAD)
            .try_for_each(|()| std::future::ready(Ok(())));
        let keep_reporting = async {
            loop {
                report();
                sleep(PROGRESS).await;
            }
        };
        let manifest = &image.documents.last().map_or(&image.target.digest, |(blob, _)| &blob.digest);
        let others = async {
            match download.buckets.limit() {
                // Whoever waits for us waits no longer than if it downloaded by itself.
                None => std::future::pending().await,
                Some(_) => yield_to_others(self, manifest, &blobs, &download.letting_go).await,
            }
        };
        let ended = tokio::select! {
            ended = all => ended,
            never = others => { let never: Infallible = never; match never {} }
            never = keep_reporting => { let never: Infallible = never; match never {} }
        };
        report();
        ended
    }

    /// Counts bytes that have arrived.
    fn count(&self, bytes: usize) {
        if let Some(metrics) = &self.metrics {
            metrics.count_downloaded(bytes as u64);
        }
    }

    fn count_pull(&self, by: PulledBy) {
        if let Some(metrics) = &self.metrics {
            metrics.count_pull(by);
        }
    }
}

/// Bytes that each connection may receive ahead of a limit. They cross the link before the limit has let them, once for
/// each connection: at any rate and with three connections, three percent of ten seconds. With less, a single connection
/// over a link with a long round trip would stay below the limit: this much takes a round trip of 60 ms.
fn received_ahead(limit: NonZeroU64) -> usize {
    const STEP: u64 = 16 * 1024;
    let ahead = limit.get() / 10 / STEP * STEP;
    usize::try_from(ahead.clamp(STEP, 64 * STEP)).unwrap_or(1 << 20)
}

/// A layer, and what there is of it.
struct Layer {
    descriptor: Descriptor,
    flight: Arc<Flight>,
    /// Bytes that were in the store when the pull began.
    there: u64,
    /// Whether the runtime does not need it, because it has unpacked it before.
    is_needless: bool,
}

impl Layer {
    fn written(&self) -> u64 {
        if self.is_needless { self.descriptor.size } else { self.flight.written().min(self.descriptor.size) }
    }
}

/// The size of an unpacked layer, by its last four bytes where they tell it.
async fn unpacked_size(repository: &Repository, layer: &Descriptor) -> u64 {
    let usual = guess(layer, Guess::Usual);
    let Some(from) = layer.size.checked_sub(4).filter(|_| is_gzip(layer)) else { return usual };
    let Ok(mut stream) = repository.blob(layer, from, &[]).await else { return usual };
    if stream.offset() != from {
        return usual;
    }
    let mut trailer = Vec::new();
    while let Some(Ok(bytes)) = stream.next().await {
        trailer.extend_from_slice(&bytes);
    }
    trailer.try_into().map_or(usual, |trailer| size_by_trailer(layer, trailer))
}

impl<P: Puller> Puller for Fetching<P> {
    async fn pull(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, PullError> {
        if self.fetcher.settings.mode == FetchMode::Runtime {
            return self.step_back("--fetch=runtime", request, progress).await;
        }
        match self.fetch(request, progress).await {
            Ok(pulled) => {
                self.fetcher.count_pull(PulledBy::Agent);
                Ok(pulled)
            }
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::StepBack(why)) => self.step_back(&why, request, progress).await,
        }
    }

    async fn look_up(&self, reference: &str) -> Result<Option<Present>, PullError> {
        self.inner.look_up(reference).await
    }

    async fn read_filesystem(&self) -> Result<Filesystem, PullError> {
        self.inner.read_filesystem().await
    }

    fn set_heard(&self, heard: bool) {
        self.inner.set_heard(heard);
    }

    async fn flush(&self) {
        self.inner.flush().await;
    }

    async fn give_up(&self, reference: &str) {
        self.inner.give_up(reference).await;
    }

    async fn release_unwanted(&self, wanted: &[String], all: bool) -> bool {
        self.inner.release_unwanted(wanted, all).await
    }

    async fn pin(&self, reference: &str, id: Option<&str>, job: &JobUid) -> Result<bool, PullError> {
        self.inner.pin(reference, id, job).await
    }

    async fn unpin(&self, jobs: Unpinned<'_>) -> Result<(), PullError> {
        self.inner.unpin(jobs).await
    }

    async fn pinning_jobs(&self) -> Option<Vec<JobUid>> {
        self.inner.pinning_jobs().await
    }

    async fn read_version(&self) -> Result<String, PullError> {
        self.inner.read_version().await
    }
}
