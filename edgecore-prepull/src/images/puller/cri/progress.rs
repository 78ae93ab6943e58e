//! Progress in bytes of a pull by the runtime, and detection of a stalled download, from containerd's content store.
//!
//! CRI reports nothing while it pulls. containerd's own API lists every blob that is being written, but not the image
//! that a blob belongs to. The layers of the image are found in this order:
//!
//! ```text
//! reference ─▶ manifest of its repository that is new, or whose layers are being fetched, since the pull began
//!           ─▶ (of an index: the manifest of this platform) ─▶ layers
//!   done  = layers in the store + bytes of those being written
//!   total = the sizes in the manifest
//! ```
//!
//! While two pulls of one repository cannot be told apart, neither reports bytes: no number is better than that of
//! another image. A runtime without this API (CRI-O) pulls just as well, and reports no bytes.

mod claims;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prepull_api::task::Bytes;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use self::claims::{Claim, Claims};
use crate::images::containerd::{ContentStore, Ingest, Layer};
use crate::images::puller::ProgressSink;

/// Interval between two looks at the content store: progress goes to the cloud once a second at most.
const POLL: Duration = Duration::from_secs(1);
/// A download that receives no byte for this long is abandoned; the next attempt resumes it. Without this limit, a
/// connection that a router on the way has forgotten hangs until the kernel's keepalive ends it, or for ever:
/// containerd 1.6 has no timeout of its own. containerd writes in steps of 1 MiB, so any download above 6 KiB/s
/// survives.
const STALL: Duration = Duration::from_secs(180);

/// The download received no byte for this long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) Duration);

/// Watches pulls, and knows which manifest belongs to which of them.
#[derive(Debug)]
pub(super) struct PullWatcher {
    store: Arc<ContentStore>,
    claims: Claims,
}

impl PullWatcher {
    pub(super) fn new(store: Arc<ContentStore>) -> Self {
        Self { store, claims: Claims::default() }
    }

    /// Begins to watch a pull. Call it before the pull begins: manifests that are older count as another image's.
    pub(super) fn watch(&self, reference: &str) -> PullWatch<'_> {
        let name = LabelName::of_reference(reference);
        let claim = self.claims.enter(&name.repository(), name.digest.as_deref());
        PullWatch { store: &self.store, name, claim, begun: SystemTime::now() }
    }
}

/// One pull that is being watched, until it is dropped.
#[derive(Debug)]
pub(super) struct PullWatch<'a> {
    store: &'a ContentStore,
    name: LabelName,
    claim: Claim<'a>,
    begun: SystemTime,
}

impl PullWatch<'_> {
    /// Reports bytes for as long as it is polled. Returns only if the download has stalled.
    pub(super) async fn report_until_stalled(&self, progress: ProgressSink<'_>) -> Stalled {
        let begun = Instant::now();
        let mut ticks = interval_at(begun + POLL, POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut layers: Option<Vec<LayerProgress>> = None;
        let mut stall = StallDetector::new(begun);
        loop {
            ticks.tick().await;
            if self.store.is_unsupported() {
                std::future::pending::<()>().await;
            }
            let Some(ingests) = self.store.ingests().await else { continue };
            if layers.is_none() {
                layers = self
                    .find_layers(&ingests)
                    .await
                    .map(|layers| layers.into_iter().map(LayerProgress::new).collect());
            }
            let Some(layers) = &mut layers else { continue };
            for layer in layers.iter_mut() {
                match ingests.get(&layer.layer.digest) {
                    Some(ingest) => layer.set_written(ingest.offset),
                    None if !layer.whole => layer.whole = self.store.has_blob(&layer.layer.digest).await,
                    None => {}
                }
            }
            let bytes = add_up(layers);
            progress(bytes);
            if stall.observe(bytes, Instant::now()) {
                return Stalled(STALL);
            }
        }
    }

    async fn find_layers(&self, ingests: &HashMap<String, Ingest>) -> Option<Vec<Layer>> {
        if self.claim.digest().is_none() {
            let LabelName { host, path, digest: _ } = &self.name;
            let found = self.store.candidates(host, path, self.begun, ingests).await?;
            self.claim.resolve(&found);
        }
        self.store.layers(&self.claim.digest()?).await
    }

    /// Records the manifest that the pull got, so that no other pull takes it for its own.
    pub(super) fn set_digest(&self, digest: &str) {
        self.claim.set_digest(digest);
    }
}

/// A normalised reference, split as containerd's labels name repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LabelName {
    host: String,
    path: String,
    digest: Option<String>,
}

impl LabelName {
    fn of_reference(reference: &str) -> Self {
        let (name, digest) = match reference.split_once('@') {
            Some((name, digest)) => (name, Some(digest.to_owned())),
            None => (reference, None),
        };
        let (host, path) = name.split_once('/').unwrap_or(("", name));
        let path = path.split_once(':').map_or(path, |(path, _tag)| path);
        // containerd cuts the host at the first colon, so its labels lack the port.
        let host = host.split_once(':').map_or(host, |(host, _port)| host);
        Self { host: host.to_owned(), path: path.to_owned(), digest }
    }

    fn repository(&self) -> String {
        format!("{}/{}", self.host, self.path)
    }
}

#[derive(Debug)]
struct LayerProgress {
    layer: Layer,
    /// Whether the layer is in the store as a whole.
    whole: bool,
    /// Bytes of the layer that have been written; counts only while it is not whole.
    written: u64,
}

impl LayerProgress {
    fn new(layer: Layer) -> Self {
        Self { layer, whole: false, written: 0 }
    }

    fn set_written(&mut self, offset: u64) {
        self.whole = false;
        self.written = offset.min(self.layer.size);
    }
}

fn add_up(layers: &[LayerProgress]) -> Bytes {
    let done = |state: &LayerProgress| if state.whole { state.layer.size } else { state.written };
    Bytes { done: layers.iter().map(done).sum(), total: layers.iter().map(|state| state.layer.size).sum() }
}

/// Detects a download that receives nothing. Unpacking may take longer than that and does not count: all bytes are
/// there by then.
#[derive(Debug)]
struct StallDetector {
    last: Bytes,
    since: Instant,
}

impl StallDetector {
    fn new(now: Instant) -> Self {
        Self { last: Bytes::default(), since: now }
    }

    fn observe(&mut self, bytes: Bytes, now: Instant) -> bool {
        if bytes != self.last || bytes.done >= bytes.total {
            *self = Self { last: bytes, since: now };
        }
        now.duration_since(self.since) >= STALL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_split_as_containerd_labels_repositories() {
        for (reference, host, path, digest) in [
            ("docker.io/library/nginx:1.25", "docker.io", "library/nginx", None),
            ("127.0.0.1:5000/a/b", "127.0.0.1", "a/b", None),
            ("r.io:5000/a:1@sha256:00", "r.io", "a", Some("sha256:00")),
        ] {
            let expected =
                LabelName { host: host.to_owned(), path: path.to_owned(), digest: digest.map(str::to_owned) };
            assert_eq!(LabelName::of_reference(reference), expected);
        }
    }

    #[test]
    fn done_counts_whole_layers_and_the_written_part_of_others() {
        let layer = |size| LayerProgress::new(Layer { digest: format!("sha256:{size}"), size });
        let mut layers = [layer(100), layer(50), layer(7)];
        assert_eq!(add_up(&layers), Bytes { done: 0, total: 157 });
        layers[0].whole = true;
        layers[1].set_written(20);
        assert_eq!(add_up(&layers), Bytes { done: 120, total: 157 });
        layers[1].set_written(60);
        assert_eq!(add_up(&layers), Bytes { done: 150, total: 157 }, "never more than the layer has");
    }

    #[test]
    fn a_download_without_a_byte_stalls_and_unpacking_does_not() {
        let begun = Instant::now();
        let bytes = |done| Bytes { done, total: 10 };
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut stall = StallDetector::new(begun);
        assert!(!stall.observe(bytes(1), at(100)));
        assert!(!stall.observe(bytes(1), at(279)));
        assert!(stall.observe(bytes(1), at(280)));
        assert!(!stall.observe(bytes(2), at(281)));
        assert!(!stall.observe(bytes(10), at(300)));
        assert!(!stall.observe(bytes(10), at(3000)));
    }
}
