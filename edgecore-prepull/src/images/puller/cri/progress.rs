//! Progress in bytes of a pull by the runtime, and detection of a stalled download, from containerd's content store.
//!
//! CRI reports nothing during a pull. containerd's own API lists every blob that's being written, but not the image
//! that a blob belongs to. Our lease of the pull connects them: it holds everything that the pull has fetched or found.
//!
//! ```text
//! lease ─▶ manifest among its blobs ─▶ layers
//!   done  = layers in the store + bytes of those being written
//!   total = the sizes in the manifest
//! ```
//!
//! A runtime without this API (CRI-O) pulls just as well, and reports no bytes. Downloads by the agent aren't watched
//! here.

mod stall;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use prepull_api::task::ByteProgress;
use prepull_registry::manifest::Descriptor;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, timeout};
use tonic::metadata::{Ascii, MetadataValue};

use self::stall::{LIMIT, PullStage, StallDetector};
use crate::images::containerd::{ContentStore, Ingest, Leases};
use crate::images::puller::ProgressSink;

/// Interval between two looks at the content store: progress goes to the cloud at most once a second.
const POLL: Duration = Duration::from_secs(1);
/// Further wait while progress isn't wanted: then we only need to notice a stall, which takes minutes.
const UNWATCHED_WAIT: Duration = Duration::from_secs(14);
/// Every look up to this one is thorough, and later every tenth one. Most looks use only the list of blobs that are
/// being written, because the rest takes a request each.
const THOROUGH: u32 = 10;

/// The download received no byte for this long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) Duration);

/// Watches pulls by the runtime.
#[derive(Debug)]
pub(super) struct PullWatcher {
    store: Arc<ContentStore>,
    leases: Arc<Leases>,
    /// Whether progress is wanted at the moment.
    wanted: watch::Sender<bool>,
    /// The last list of blobs, which all pulls share.
    last: Mutex<Option<(Instant, Ingests)>>,
    stall_limit: Duration,
    /// Number of layers that are being written, over all watched pulls.
    open: AtomicUsize,
}

/// The blobs that are being written, by digest.
type Ingests = Arc<HashMap<String, Ingest>>;

impl PullWatcher {
    pub(super) fn new(store: Arc<ContentStore>, leases: Arc<Leases>) -> Self {
        Self {
            store,
            leases,
            wanted: watch::Sender::new(true),
            last: Mutex::default(),
            stall_limit: LIMIT,
            open: AtomicUsize::new(0),
        }
    }

    /// With another limit, for a test that can't wait so long.
    pub(super) fn with_stall_limit(self, stall_limit: Duration) -> Self {
        Self { stall_limit, ..self }
    }

    /// Starts watching the pull with this lease.
    pub(super) fn watch(&self, lease: MetadataValue<Ascii>) -> PullWatch<'_> {
        PullWatch { watcher: self, lease, begun: SystemTime::now() }
    }

    /// Sets whether progress is wanted at the moment.
    pub(super) fn set_progress_wanted(&self, wanted: bool) {
        self.wanted.send_replace(wanted);
    }

    async fn wait_for_next_look(&self) {
        let mut wanted = self.wanted.subscribe();
        sleep(POLL).await;
        // This can't fail: the sender is a field of `self`.
        let _ = timeout(UNWATCHED_WAIT, wanted.wait_for(|wanted| *wanted)).await;
    }

    /// Lists the blobs that are being written, once for all pulls that look at about the same time.
    async fn ingests(&self) -> Option<Ingests> {
        let mut last = self.last.lock().await;
        if let Some((at, ingests)) = &*last
            && at.elapsed() < POLL * 9 / 10
        {
            return Some(Arc::clone(ingests));
        }
        let ingests = Arc::new(self.store.ingests().await?);
        *last = Some((Instant::now(), Arc::clone(&ingests)));
        Some(ingests)
    }
}

/// The layers of one pull that are being written. Their number is included in the total until this is dropped.
struct OpenLayers<'a> {
    all: &'a AtomicUsize,
    own: usize,
}

impl OpenLayers<'_> {
    /// Sets their number. Returns that of the other pulls.
    fn set_own(&mut self, own: usize) -> usize {
        // Relaxed, because this number guards no other data.
        self.all.fetch_add(own, Ordering::Relaxed);
        let all = self.all.fetch_sub(self.own, Ordering::Relaxed) - self.own;
        self.own = own;
        all - own
    }
}

impl Drop for OpenLayers<'_> {
    fn drop(&mut self) {
        self.all.fetch_sub(self.own, Ordering::Relaxed);
    }
}

/// One pull that is being watched, until it is dropped.
#[derive(Debug)]
pub(super) struct PullWatch<'a> {
    watcher: &'a PullWatcher,
    lease: MetadataValue<Ascii>,
    begun: SystemTime,
}

impl PullWatch<'_> {
    /// Reports bytes for as long as it is polled. Returns only if the download has stalled.
    pub(super) async fn report_until_stalled(&self, progress: ProgressSink<'_>) -> Stalled {
        let store = &self.watcher.store;
        let mut layers: Option<Vec<LayerProgress>> = None;
        let mut stall = StallDetector::new(self.begun, self.watcher.stall_limit, Instant::now());
        let mut open = OpenLayers { all: &self.watcher.open, own: 0 };
        // Without an answer the runtime may be unpacking.
        let mut is_resolving = false;
        for look in 0_u32.. {
            self.watcher.wait_for_next_look().await;
            if store.is_unsupported() {
                break;
            }
            let Some(ingests) = self.watcher.ingests().await else { continue };
            let thorough = look < THOROUGH || look.is_multiple_of(THOROUGH);
            if layers.is_none() && thorough {
                match self.find_manifest().await {
                    Some(None) => is_resolving = true,
                    Some(Some(manifest)) => {
                        is_resolving = false;
                        let found = store.layers(&manifest).await;
                        layers = found.map(|found| found.into_iter().map(LayerProgress::new).collect());
                    }
                    None => {}
                }
            }
            let stage = match &mut layers {
                None => PullStage::Resolving { may_unpack: !is_resolving },
                Some(layers) => {
                    for layer in layers.iter_mut() {
                        let ingest = ingests.get(&layer.layer.digest);
                        if layer.observe(ingest, self.begun) || (thorough && layer.is_unknown()) {
                            layer.whole = store.has_blob(&layer.layer.digest).await;
                        }
                    }
                    progress(add_up(layers));
                    let written = layers.iter().filter(|layer| layer.is_written).count();
                    PullStage::Fetching { written, begun: add_up_begun(layers) }
                }
            };
            let others = open.set_own(match stage {
                PullStage::Resolving { .. } => 0,
                PullStage::Fetching { written, .. } => written,
            });
            if let Some(limit) = stall.observe(&ingests, stage, others, Instant::now()) {
                return Stalled(limit);
            }
        }
        std::future::pending().await
    }

    /// The manifest that the pull has resolved. `Some(None)` before that, and `None` without an answer.
    async fn find_manifest(&self) -> Option<Option<String>> {
        let blobs = self.watcher.leases.kept_blobs(&self.lease).await?;
        self.watcher.store.find_manifest(&blobs).await
    }
}

#[derive(Debug)]
struct LayerProgress {
    layer: Descriptor,
    /// Whether the complete layer is in the store.
    whole: bool,
    /// Bytes of the layer that have been written; only meaningful while it's incomplete.
    written: u64,
    /// Whether it is being written.
    is_written: bool,
    /// Whether this pull has received bytes for it since it's being written.
    has_begun: bool,
}

impl LayerProgress {
    fn new(layer: Descriptor) -> Self {
        Self { layer, whole: false, written: 0, is_written: false, has_begun: false }
    }

    /// Updates the layer from its ingest, for a pull that began at `since`. Returns whether the ingest has just ended,
    /// so that the layer may be complete.
    fn observe(&mut self, ingest: Option<&Ingest>, since: SystemTime) -> bool {
        let was_written = std::mem::replace(&mut self.is_written, ingest.is_some());
        self.has_begun &= self.is_written;
        if let Some(ingest) = ingest {
            self.whole = false;
            let before = std::mem::replace(&mut self.written, ingest.offset.min(self.layer.size));
            // Bytes at the first look may be of an earlier pull, which this one waits for and then resumes.
            self.has_begun |= if was_written {
                self.written != before
            } else {
                self.written > 0 && ingest.last_write.is_some_and(|last| last >= since)
            };
        }
        was_written && !self.is_written
    }

    /// Whether the layer hasn't begun, or was there before.
    fn is_unknown(&self) -> bool {
        !self.whole && !self.is_written
    }
}

fn add_up(layers: &[LayerProgress]) -> ByteProgress {
    let done = |state: &LayerProgress| if state.whole { state.layer.size } else { state.written };
    ByteProgress {
        done: layers.iter().map(done).sum(),
        total: layers.iter().map(|state| state.layer.size).sum(),
    }
}

/// Bytes of the layers in progress. `None` if there are none.
fn add_up_begun(layers: &[LayerProgress]) -> Option<u64> {
    layers
        .iter()
        .filter(|layer| layer.has_begun)
        .map(|layer| layer.written)
        .reduce(|sum, written| sum + written)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::images::containerd::Owner;

    #[test]
    fn done_includes_partial_layers() {
        let layer = |size| {
            LayerProgress::new(Descriptor { digest: format!("sha256:{size}"), size, ..Descriptor::default() })
        };
        let mut layers = [layer(100), layer(50), layer(7)];
        assert_eq!(add_up(&layers), ByteProgress { done: 0, total: 157 });
        layers[0].whole = true;
        let look = |layer: &mut LayerProgress, offset: Option<u64>| {
            let ingest = offset.map(|offset| Ingest { offset, last_write: None });
            layer.observe(ingest.as_ref(), SystemTime::UNIX_EPOCH)
        };
        assert!(!look(&mut layers[1], Some(20)));
        assert_eq!(add_up(&layers), ByteProgress { done: 120, total: 157 });
        assert!(!look(&mut layers[1], Some(60)));
        assert_eq!(add_up(&layers), ByteProgress { done: 150, total: 157 }, "never more than the layer has");
        assert!(look(&mut layers[1], None), "it may be whole");
        assert!(!look(&mut layers[1], None) && layers[1].is_unknown(), "asked once, and then now and then");
    }

    #[test]
    fn a_layer_begins_with_its_first_write() {
        let since = SystemTime::UNIX_EPOCH + POLL;
        let looks = |looks: &[Option<(u64, SystemTime)>]| {
            let mut layers = [LayerProgress::new(Descriptor { size: 100, ..Descriptor::default() })];
            for look in looks {
                let ingest = look.map(|(offset, at)| Ingest { offset, last_write: Some(at) });
                layers[0].observe(ingest.as_ref(), since);
            }
            add_up_begun(&layers)
        };
        let (earlier, now) = (SystemTime::UNIX_EPOCH, since);
        assert_eq!(looks(&[]), None);
        assert_eq!(looks(&[Some((0, now))]), None, "it was opened");
        assert_eq!(looks(&[Some((0, now)), Some((7, now))]), Some(7));
        assert_eq!(looks(&[Some((7, now))]), Some(7), "between two looks");
        assert_eq!(looks(&[Some((7, earlier)), Some((7, earlier))]), None, "an earlier pull got so far");
        assert_eq!(looks(&[Some((7, earlier)), Some((8, now))]), Some(8));
        assert_eq!(looks(&[Some((7, now)), None]), None, "it is whole");
        assert_eq!(looks(&[Some((7, now)), None, Some((0, now))]), None, "it was begun again");
    }

    #[tokio::test(start_paused = true)]
    async fn looks_are_rare_without_listeners() {
        let channel = tonic::transport::Endpoint::from_static("http://nobody.invalid").connect_lazy();
        let leases = Arc::new(Leases::new(channel.clone(), Owner::Agent));
        let watcher = Arc::new(PullWatcher::new(Arc::new(ContentStore::new(channel)), leases));
        let took = async || {
            let begun = Instant::now();
            watcher.wait_for_next_look().await;
            begun.elapsed()
        };
        assert_eq!(took().await, POLL);
        watcher.set_progress_wanted(false);
        assert_eq!(took().await, POLL + UNWATCHED_WAIT);
        let waiting = tokio::spawn({
            let watcher = Arc::clone(&watcher);
            async move { watcher.wait_for_next_look().await }
        });
        sleep(POLL * 3).await;
        watcher.set_progress_wanted(true);
        timeout(POLL, waiting).await.unwrap().unwrap();
    }
}
