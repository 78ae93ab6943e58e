//! The state of all fetches of the node, and finding out which layers are there.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use futures::stream::{self, StreamExt};
use prepull_registry::manifest::Descriptor;
use prepull_registry::{ClientSettings, HostsFiles, Proxies, RegistryClient, Repository};
use tokio::sync::{Mutex as AsyncMutex, Semaphore, watch};

use super::FetchSettings;
use super::beginnings::Beginnings;
use super::delta::{LayerDeltas, RefusedDeltas};
use super::downloads::{ActiveDownloads, Layer};
use super::flights::Flights;
use super::image::ImageParts;
use super::room::RoomRules;
use super::runtime::{Runtime, RuntimeFacts};
use super::shared::Neighbourhood;
use super::unpacked::parse_diffs;
use super::unreachable::Unreachable;
use super::unused::LastUses;
use crate::by_key::ByKey;
use crate::clock::CloudClock;
use crate::images::containerd::{
    Containerd, ContentLabels, ContentStore, ContentWriter, HoldingsReader, ImageRecords, Leases, Unpacker,
};
use crate::images::filesystem::FlushError;
use crate::images::flushes::{FlushMark, Flushes};
use crate::images::rate::Bucket;
use crate::images::runtime::RuntimeEndpoint;
use crate::metrics::AgentMetrics;
use crate::one_question::OneQuestion;

/// Blobs of an image that arrive at the same time, as many as containerd fetches by default.
const STREAMS_OF_IMAGE: usize = 3;
/// The same under a cap. A further connection would only bring the bytes in its buffers, which cross the link before
/// the cap allows them.
const STREAMS_UNDER_CAP: usize = 1;
/// Blobs that arrive at the same time over all images of the node. Each takes some hundred KiB of memory.
const STREAMS_OF_NODE: usize = 9;
/// Blobs of an image that we look at ahead. Those that another pull fetches wait without a stream.
pub(super) const AHEAD: usize = 32;
/// The state of all fetches, except the puller that unpacks.
pub(super) struct Fetcher {
    pub(super) settings: FetchSettings,
    pub(super) endpoint: RuntimeEndpoint,
    pub(super) runtime: Runtime,
    pub(super) store: Arc<ContentStore>,
    pub(super) writer: ContentWriter,
    pub(super) records: ImageRecords,
    pub(super) labels: ContentLabels,
    pub(super) unpacker: Unpacker,
    pub(super) leases: Arc<Leases>,
    pub(super) holdings: HoldingsReader,
    pub(super) uses: LastUses,
    /// Held while images are removed to make room.
    pub(super) removing: AsyncMutex<()>,
    pub(super) bucket: Bucket,
    /// The limits for the free space. They may change at any time.
    pub(super) room: watch::Sender<RoomRules>,
    pub(super) flights: Flights,
    pub(super) beginnings: Beginnings,
    /// Snapshots that are being unpacked, by name.
    pub(super) chains: ByKey<AsyncMutex<()>>,
    flushes: Arc<Flushes>,
    pub(super) filesystem: OneQuestion,
    pub(super) unreachable: Unreachable,
    pub(super) downloads: ActiveDownloads,
    pub(super) refused: RefusedDeltas,
    /// For the layer that is being rebuilt: each takes up to 16 MiB.
    pub(super) rebuilding: Arc<Semaphore>,
    pub(super) streams: Semaphore,
    /// The last client that was needed, and the registry host files that it was built from.
    client: Mutex<Option<(HostsFiles, RegistryClient)>>,
    pub(super) proxies: Proxies,
    pub(super) clock: Arc<CloudClock>,
    pub(super) metrics: Option<Arc<AgentMetrics>>,
    pub(super) neighbourhood: Option<Neighbourhood>,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Fetcher {
    pub(super) fn new(containerd: Containerd, settings: FetchSettings) -> Self {
        let Containerd { channel, endpoint, store, leases, flushes } = containerd;
        Self {
            runtime: Runtime::new(&channel, endpoint.clone()),
            endpoint,
            store,
            writer: ContentWriter::new(channel.clone()),
            records: ImageRecords::new(channel.clone()),
            labels: ContentLabels::new(channel.clone()),
            holdings: HoldingsReader::new(channel.clone()),
            uses: LastUses::default(),
            removing: AsyncMutex::default(),
            unpacker: Unpacker::new(channel),
            leases,
            bucket: Bucket::new(settings.max_rate),
            room: watch::Sender::new(settings.room),
            flights: Flights::default(),
            beginnings: Beginnings::default(),
            chains: ByKey::default(),
            flushes,
            filesystem: OneQuestion::default(),
            unreachable: Unreachable::default(),
            downloads: ActiveDownloads::default(),
            refused: RefusedDeltas::default(),
            rebuilding: Arc::new(Semaphore::new(1)),
            streams: Semaphore::new(STREAMS_OF_NODE),
            client: Mutex::default(),
            proxies: Proxies::from_env(),
            clock: Arc::default(),
            metrics: None,
            neighbourhood: None,
            settings,
        }
    }

    /// The registry client for the runtime's current configuration.
    pub(super) fn client(&self, facts: &RuntimeFacts) -> RegistryClient {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, client)) = &*client
            && *of == facts.hosts
        {
            return client.clone();
        }
        let new = RegistryClient::new(ClientSettings {
            hosts: facts.hosts.clone(),
            user_agent: concat!("edgecore-prepull/", env!("CARGO_PKG_VERSION")).to_owned(),
            proxies: self.proxies.clone(),
            time: Some(self.clock.clone()),
        });
        *client = Some((facts.hosts.clone(), new.clone()));
        new
    }

    /// The layers of an image, with the bytes that we have of each.
    pub(super) async fn layers(
        &self,
        repository: &Repository,
        image: &ImageParts,
        facts: &RuntimeFacts,
        is_shared: bool,
    ) -> Vec<Layer> {
        let begun = self.store.begun_bytes(is_shared).await;
        let layer = |index: usize| {
            let descriptor = image.layers[index].clone();
            let flight = self.flights.shared_value(&descriptor.digest);
            let begun = begun.get(&descriptor.digest).map_or(0, |begun| descriptor.size.min(*begun));
            async move {
                let has_blob = self.store.has_blob(&descriptor.digest).await;
                let there = if has_blob { descriptor.size } else { begun };
                Layer::new(descriptor, flight, there)
            }
        };
        let layers = stream::iter((0..image.layers.len()).map(layer)).buffered(AHEAD);
        let mut layers: Vec<Layer> = layers.collect().await;
        let has_gap = layers.iter().any(Layer::is_missing);
        let may_lack_blobs =
            facts.discards_layers || (has_gap && !self.settings.whole && self.store.has_rebuilt().await);
        if may_lack_blobs {
            let needed = image.digests_above(self.count_unpacked(repository, image, facts).await);
            // The runtime requests none that is unpacked.
            let needless = |layer: &&mut Layer| !needed.contains(layer.descriptor.digest.as_str());
            layers.iter_mut().filter(needless).for_each(Layer::leave_out);
        }
        layers
    }

    /// Has deltas downloaded in place of layers.
    pub(super) async fn put_deltas(&self, layers: &mut [Layer], deltas: &LayerDeltas, is_shared: bool) {
        let begun = self.store.begun_bytes(is_shared).await;
        for layer in layers {
            let Some(delta) = deltas.delta_of(&layer.descriptor.digest).cloned() else { continue };
            let Descriptor { digest, size, .. } = &delta.blob;
            let flight = self.flights.shared_value(digest);
            let begun = begun.get(digest).map_or(0, |begun| *size.min(begun));
            let there = if self.store.has_blob(digest).await { *size } else { begun };
            layer.come_by(delta, flight, there);
        }
    }

    /// Number of layers, counted from the lowest one, that the snapshotter has unpacked.
    async fn count_unpacked(
        &self,
        repository: &Repository,
        image: &ImageParts,
        facts: &RuntimeFacts,
    ) -> usize {
        let config = self.read_config(repository, image).await.unwrap_or_default();
        let mut unpacked = 0;
        for diff in parse_diffs(&config) {
            if !self.store.is_unpacked(&facts.snapshotter, &diff.chain_id).await {
                break;
            }
            unpacked += 1;
        }
        unpacked
    }

    /// Brings to disk all that was unpacked since the mark.
    ///
    /// # Errors
    /// The disk refuses this flush, or has refused another one since.
    pub(super) async fn flush_unpacked(
        &self,
        facts: &RuntimeFacts,
        since: Option<&FlushMark>,
    ) -> Result<(), FlushError> {
        let flushed = self.flushes.flush(&facts.directories.unpacked).await;
        flushed.and_then(|()| since.map_or(Ok(()), FlushMark::check)).inspect_err(warn_of_unflushed)
    }

    /// Brings to disk all that was unpacked, or written to the content store, since the mark. containerd doesn't flush the
    /// directory of a new blob.
    ///
    /// # Errors
    /// The disk refuses this flush, or has refused another one since.
    pub(super) async fn flush(
        &self,
        facts: &RuntimeFacts,
        since: Option<&FlushMark>,
    ) -> Result<(), FlushError> {
        let flushed = self.flushes.flush_both(&facts.directories).await;
        flushed.and_then(|()| since.map_or(Ok(()), FlushMark::check)).inspect_err(warn_of_unflushed)
    }

    /// Has [`Puller::flush`](crate::images::puller::Puller::flush) find containerd's directories.
    pub(super) async fn find_directories(&self) {
        if let Some(directories) = self.runtime.directories().await {
            self.flushes.set_directories(directories);
        }
    }

    /// Counts bytes that have arrived.
    pub(super) fn count_arrived(&self, bytes: usize, is_of_peer: bool) {
        if let Some(metrics) = &self.metrics {
            metrics.count_downloaded(bytes as u64, is_of_peer);
        }
    }
}

fn warn_of_unflushed(error: &FlushError) {
    tracing::warn!(%error, "the runtime's disk isn't flushed; a power cut may damage what is being pulled");
}

/// Blobs of an image that may arrive at the same time under this limit of bytes a second.
pub(super) fn streams_of_image(limit: Option<NonZeroU64>) -> usize {
    if limit.is_some() { STREAMS_UNDER_CAP } else { STREAMS_OF_IMAGE }
}

/// Bytes that each connection may receive ahead of a limit. They cross the link before the limit allows them, once for
/// each connection: with three connections, that's three percent of ten seconds at any rate. With fewer bytes, a single
/// connection over a link with a long round trip would stay below the limit: this many cover a round trip of 60 ms.
///
/// It's a power of two, so that tasks with different limits can share connections.
pub(super) fn received_ahead(limit: NonZeroU64) -> usize {
    const LEAST: u64 = 16 * 1024;
    const MOST: u64 = 1 << 20;
    let ahead = (limit.get() / 10).clamp(LEAST, MOST);
    usize::try_from(1_u64 << ahead.ilog2()).unwrap_or(1 << 20)
}
