//! The download of one image, as its blobs share it.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use prepull_registry::{HostId, Repository};
use tokio::sync::{Semaphore, watch};
use tonic::metadata::{Ascii, MetadataValue};

use super::buckets::PullBuckets;
use super::delta::{LayerDeltas, UnusedDelta};
use super::downloads::Layer;
use super::fetcher::Fetcher;
use super::image::ImageParts;
use super::runtime::RuntimeFacts;
use super::shared::ImageSharing;
use super::stop::{FetchStop, of_write};
use crate::images::containerd::{BlobWriteError, SourceRepository};
use crate::images::puller::{ErrorClass, FlushMark, PullError};

/// What the blobs of one image share.
pub(super) struct Download<'a> {
    pub(super) fetcher: &'a Fetcher,
    pub(super) repository: &'a Repository,
    pub(super) facts: &'a RuntimeFacts,
    /// The image that is pulled, as the lease knows it.
    pub(super) reference: &'a str,
    pub(super) image: &'a ImageParts,
    pub(super) layers: &'a [Layer],
    /// Where it is from.
    pub(super) source: SourceRepository,
    pub(super) lease: &'a MetadataValue<Ascii>,
    pub(super) buckets: PullBuckets<'a>,
    /// One permit per blob of the image that may arrive at the same time.
    pub(super) streams: Semaphore,
    /// Set while the container runtime pulls the image as well, and would wait for our limit.
    pub(super) letting_go: watch::Sender<bool>,
    pub(super) unpacking: Unpacking,
    /// Endpoints that trickled or fell silent. For the rest of the image, they're asked if no other one answers.
    pub(super) asked_last: Mutex<Vec<HostId>>,
    /// The site, where the task shares layers with it.
    pub(super) shared: Option<ImageSharing<'a>>,
    /// What the registry offers in place of layers.
    pub(super) deltas: Option<LayerDeltas>,
    /// Whether the image may also come without them.
    pub(super) needs_deltas: bool,
    /// Why a layer was downloaded whole nevertheless.
    pub(super) no_delta: OnceLock<UnusedDelta>,
    /// Taken before this attempt wrote anything.
    pub(super) since: Option<&'a FlushMark>,
    /// Whether the disk has refused a flush, and may have lost what has arrived.
    pub(super) is_refused: AtomicBool,
}

/// The digest of the layer that the runtime is unpacking for us.
#[derive(Debug, Default)]
pub(super) struct Unpacking(Mutex<Option<String>>);

impl Unpacking {
    pub(super) fn layer(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, layer: Option<&str>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = layer.map(str::to_owned);
    }
}

impl Download<'_> {
    pub(super) fn asked_last(&self) -> MutexGuard<'_, Vec<HostId>> {
        self.asked_last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ask_last(&self, host: HostId) {
        let mut asked_last = self.asked_last();
        if !asked_last.contains(&host) {
            asked_last.push(host);
        }
    }

    /// Notes why a blob comes from no neighbour, for the status.
    pub(super) fn note_unshared(&self, why: &str) {
        if let Some(shared) = &self.shared {
            let _ = shared.why_not.set(why.to_owned());
        }
    }

    /// Counts bytes that have arrived.
    pub(super) fn count_arrived(&self, bytes: usize, is_of_peer: bool) {
        self.fetcher.count_arrived(bytes, is_of_peer);
        if let Some(shared) = self.shared.as_ref().filter(|_| is_of_peer) {
            shared.from_peers.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Ends the attempt, whose writes the disk has refused. What has arrived is given up: the next attempt would find it, and
    /// its flush may succeed.
    pub(super) fn stop_refused(&self, path: &Path, error: &io::Error) -> FetchStop {
        self.is_refused.store(true, Ordering::Relaxed);
        PullError::of_flush(path, error).into()
    }

    pub(super) fn write_failed(&self, error: BlobWriteError) -> FetchStop {
        let error = of_write(error, self.reference, &self.fetcher.endpoint);
        if error.class == ErrorClass::NotFound {
            // containerd knows no "not found" of a registry here: the lease is gone, or the ref.
            return PullError { class: ErrorClass::Transient, ..error }.into();
        }
        error.into()
    }
}
