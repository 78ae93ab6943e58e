//! The downloads of the node at the moment, layer by layer, for display.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use prepull_registry::Repository;
use prepull_registry::manifest::Descriptor;

use super::delta::Delta;
use super::flights::Flight;

/// An image with layers that are being downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageDownload {
    /// The normalised reference of the image.
    pub reference: String,
    /// Its layers, the lowest one first.
    pub layers: Vec<LayerDownload>,
}

/// A layer of an image that is being downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerDownload {
    /// `sha256:…`
    pub digest: String,
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes of the whole layer, compressed.
    pub total: u64,
}

/// The downloads of the node that are under way.
#[derive(Default)]
pub(super) struct ActiveDownloads(Mutex<Vec<Arc<RunningDownload>>>);

/// One download.
pub(super) struct RunningDownload {
    reference: String,
    pub(super) layers: Arc<[Layer]>,
    /// The repository of its layers, once it's known.
    pub(super) repository: OnceLock<Repository>,
}

/// A download in progress. Dropping it ends it.
pub(super) struct DownloadGuard<'a> {
    all: &'a ActiveDownloads,
    this: Arc<RunningDownload>,
}

impl ActiveDownloads {
    pub(super) fn register_download(&self, reference: &str, layers: Arc<[Layer]>) -> DownloadGuard<'_> {
        let this = RunningDownload { reference: reference.to_owned(), layers, repository: OnceLock::new() };
        let this = Arc::new(this);
        self.lock().push(Arc::clone(&this));
        DownloadGuard { all: self, this }
    }

    /// Sets the repository of a download, and lists the downloads that began before it.
    pub(super) fn earlier_downloads(
        &self,
        layers: &Arc<[Layer]>,
        repository: &Repository,
    ) -> Vec<Arc<RunningDownload>> {
        let all = self.lock();
        let this = all.iter().position(|running| Arc::ptr_eq(&running.layers, layers));
        let (before, rest) = all.split_at(this.unwrap_or(all.len()));
        if let Some(this) = rest.first() {
            let _ = this.repository.set(repository.clone());
        }
        before.to_vec()
    }

    /// The current state of all downloads, oldest first.
    pub(super) fn current_downloads(&self) -> Vec<ImageDownload> {
        let layer = |layer: &Layer| {
            let (digest, total) = (layer.descriptor.digest.clone(), layer.descriptor.size);
            LayerDownload { digest, done: layer.written_bytes(), total }
        };
        let image = |RunningDownload { reference, layers, .. }: &RunningDownload| {
            let layers = layers.iter().map(layer).collect();
            ImageDownload { reference: reference.clone(), layers }
        };
        self.lock().iter().map(|running| image(running)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<RunningDownload>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DownloadGuard<'_> {
    fn drop(&mut self) {
        self.all.lock().retain(|running| !Arc::ptr_eq(running, &self.this));
    }
}

/// A layer, and the bytes that we have of it.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) descriptor: Descriptor,
    /// What is downloaded in its place.
    pub(super) delta: Option<Delta>,
    /// The download, of the delta or of the layer.
    pub(super) flight: Arc<Flight>,
    /// Bytes of it in the store at the start of the pull.
    pub(super) there: u64,
    /// Whether the runtime doesn't need it, because it has unpacked it before.
    pub(super) is_needless: bool,
    /// The download of the layer, after its delta was of no use.
    pub(super) whole: OnceLock<Arc<Flight>>,
}

impl Layer {
    pub(super) fn new(descriptor: Descriptor, flight: Arc<Flight>, there: u64) -> Self {
        flight.set_written(there);
        Self { descriptor, delta: None, flight, there, is_needless: false, whole: OnceLock::new() }
    }

    /// Has nothing downloaded for it: it's unpacked.
    pub(super) fn leave_out(&mut self) {
        (self.is_needless, self.there) = (true, self.descriptor.size);
        self.flight.set_written(self.there);
    }

    /// Has a delta downloaded in its place. Its publisher may have given it the digest and a wrong size of a blob that another
    /// pull fetches now.
    pub(super) fn come_by(&mut self, delta: Delta, flight: Arc<Flight>, there: u64) {
        flight.raise_written(there);
        (self.delta, self.flight, self.there) = (Some(delta), flight, there);
    }

    /// Whether a part of the download is missing.
    pub(super) fn is_missing(&self) -> bool {
        self.missing_bytes() > 0
    }

    /// Bytes of the download that weren't there at the start of the pull.
    pub(super) fn missing_bytes(&self) -> u64 {
        self.blob_to_fetch().size.saturating_sub(self.there)
    }

    /// The blob to download.
    pub(super) fn blob_to_fetch(&self) -> &Descriptor {
        self.delta.as_ref().map_or(&self.descriptor, |delta| &delta.blob)
    }

    /// Whether it's unpacked, and its blob isn't in the store.
    pub(super) fn lacks_blob(&self) -> bool {
        self.is_needless || (self.delta.is_some() && self.whole.get().is_none())
    }

    /// Bytes that needn't be downloaded, thanks to a delta.
    pub(super) fn spared(&self) -> u64 {
        let is_by_delta = !self.is_needless && self.whole.get().is_none();
        if is_by_delta { self.descriptor.size.saturating_sub(self.blob_to_fetch().size) } else { 0 }
    }

    /// Bytes that have arrived, or needn't.
    pub(super) fn written_bytes(&self) -> u64 {
        let size = self.descriptor.size;
        match self.whole.get() {
            Some(flight) => flight.written_bytes().min(size),
            None if self.is_needless => size,
            None => self.spared().saturating_add(self.flight.written_bytes()).min(size),
        }
    }
}
