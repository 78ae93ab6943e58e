//! How far a pull is, in bytes, from containerd's content store.
//!
//! CRI tells nothing while it pulls. containerd's own API, on the same socket, lists every blob that is being
//! written; what it does not say is which image a blob belongs to. That is found out in this order:
//!
//! ```text
//! reference ─▶ manifest of its repository that is new, or being fetched, since the pull began ─(index: the platform's)─▶ layers
//!   done  = layers in the store + bytes of those being written
//!   total = the manifest's sizes
//! ```
//!
//! Where two pulls of one repository begin at once and cannot be told apart, neither has bytes: none is better
//! than another image's. A runtime without this API (CRI-O) pulls just as well, without bytes.

mod claims;
mod store;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use prepull_api::task::Bytes;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tonic::transport::Channel;

use self::claims::{Claim, Claims};
use self::store::{ContentStore, Document, Layer, Written};
use super::ProgressSink;

/// Progress goes to the cloud once a second at the most, so that asking more often would be for nobody.
const POLL: Duration = Duration::from_secs(1);
/// A download without one byte for this long is given up; the next try resumes it. Without this, a connection
/// that a router on the way has forgotten hangs until the kernel's keepalive gives up, or for ever: containerd
/// 1.6 has no timeout of its own. containerd writes in steps of 1 MiB, so that anything above 6 KiB/s lives.
const STALL: Duration = Duration::from_secs(180);
/// The description of a pulled image is worth a short wait and no longer.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// No byte arrived for this long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) Duration);

/// containerd's content store, and who watches what in it.
#[derive(Debug)]
pub(super) struct Content {
    store: ContentStore,
    claims: Claims,
}

impl Content {
    pub(super) fn new(channel: Channel) -> Self {
        Self { store: ContentStore::new(channel), claims: Claims::default() }
    }

    /// Begins to watch a pull. To be called before the pull begins.
    pub(super) fn watch(&self, reference: &str) -> Watch<'_> {
        let name = Name::of(reference);
        let claim = self.claims.enter(&name.repository(), name.digest.as_deref());
        Watch { content: self, name, claim, begun: SystemTime::now() }
    }

    /// The digest that the reference points to in containerd's image store.
    pub(super) async fn target(&self, reference: &str) -> Option<String> {
        timeout(DESCRIBE_TIMEOUT, self.store.image_target(reference)).await.ok().flatten()
    }

    /// All of a pulled image's layers.
    pub(super) async fn size(&self, digest: &str) -> Option<Bytes> {
        let layers = timeout(DESCRIBE_TIMEOUT, self.layers(digest)).await.ok().flatten()?;
        let total = layers.iter().map(|layer| layer.size).sum();
        Some(Bytes { done: total, total })
    }

    /// The layers below a manifest or an index, each once. None while the manifest is not in the store.
    async fn layers(&self, top: &str) -> Option<Vec<Layer>> {
        let layers = match self.store.document(top).await? {
            Document::Manifest(layers) => layers,
            Document::Index(manifests) => {
                // Of an index, only this platform's manifest is fetched.
                let mut found = None;
                for manifest in manifests {
                    if let Some(Document::Manifest(layers)) = self.store.document(&manifest).await {
                        found = Some(layers);
                        break;
                    }
                }
                found?
            }
        };
        let mut seen = HashSet::new();
        let layers: Vec<_> = layers.into_iter().filter(|layer| seen.insert(layer.digest.clone())).collect();
        (!layers.is_empty()).then_some(layers)
    }
}

/// One pull that is being watched.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    content: &'a Content,
    name: Name,
    claim: Claim<'a>,
    begun: SystemTime,
}

impl Watch<'_> {
    /// Reports bytes for as long as it is polled. Ends only where the pull is stuck.
    pub(super) async fn follow(&self, progress: ProgressSink<'_>) -> Stalled {
        let begun = Instant::now();
        let mut ticks = interval_at(begun + POLL, POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut layers: Option<Vec<LayerState>> = None;
        let mut stall = Stall::new(begun);
        loop {
            ticks.tick().await;
            if self.content.store.is_absent() {
                std::future::pending::<()>().await;
            }
            let Some(written) = self.content.store.being_written().await else { continue };
            if layers.is_none() {
                layers =
                    self.find(&written).await.map(|layers| layers.into_iter().map(LayerState::new).collect());
            }
            let Some(layers) = &mut layers else { continue };
            for layer in layers.iter_mut() {
                match written.get(&layer.layer.digest) {
                    Some(written) => layer.writing(written.offset),
                    None if !layer.whole => layer.whole = self.content.store.has(&layer.layer.digest).await,
                    None => {}
                }
            }
            let bytes = account(layers);
            progress(bytes);
            if stall.observe(bytes, Instant::now()) {
                return Stalled(STALL);
            }
        }
    }

    async fn find(&self, written: &HashMap<String, Written>) -> Option<Vec<Layer>> {
        if self.claim.digest().is_none() {
            let Name { host, path, digest: _ } = &self.name;
            let found = self.content.store.candidates(host, path, self.begun, written).await?;
            self.claim.resolve(&found);
        }
        self.content.layers(&self.claim.digest()?).await
    }

    /// The pull has ended and this is what it got, so that nobody else takes it for theirs.
    pub(super) fn settle(&self, digest: &str) {
        self.claim.set(digest);
    }
}

/// The parts of a normalised reference that containerd's labels are about.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    host: String,
    path: String,
    digest: Option<String>,
}

impl Name {
    fn of(reference: &str) -> Self {
        let (name, digest) = match reference.split_once('@') {
            Some((name, digest)) => (name, Some(digest.to_owned())),
            None => (reference, None),
        };
        let (host, path) = name.split_once('/').unwrap_or(("", name));
        let path = path.split_once(':').map_or(path, |(path, _tag)| path);
        // containerd cuts the host at the first colon, and so leaves out the port.
        let host = host.split_once(':').map_or(host, |(host, _port)| host);
        Self { host: host.to_owned(), path: path.to_owned(), digest }
    }

    fn repository(&self) -> String {
        format!("{}/{}", self.host, self.path)
    }
}

#[derive(Debug)]
struct LayerState {
    layer: Layer,
    whole: bool,
    written: u64,
}

impl LayerState {
    fn new(layer: Layer) -> Self {
        Self { layer, whole: false, written: 0 }
    }

    fn writing(&mut self, offset: u64) {
        self.whole = false;
        self.written = offset.min(self.layer.size);
    }
}

fn account(layers: &[LayerState]) -> Bytes {
    let done = |state: &LayerState| if state.whole { state.layer.size } else { state.written };
    Bytes { done: layers.iter().map(done).sum(), total: layers.iter().map(|state| state.layer.size).sum() }
}

/// Notices a download that has stopped. Unpacking may take long and is none: all bytes are there by then.
#[derive(Debug)]
struct Stall {
    last: Bytes,
    since: Instant,
}

impl Stall {
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
    fn a_name_is_split_as_containerd_labels_it() {
        for (reference, host, path, digest) in [
            ("docker.io/library/nginx:1.25", "docker.io", "library/nginx", None),
            ("127.0.0.1:5000/a/b", "127.0.0.1", "a/b", None),
            ("r.io:5000/a:1@sha256:00", "r.io", "a", Some("sha256:00")),
        ] {
            let expected =
                Name { host: host.to_owned(), path: path.to_owned(), digest: digest.map(str::to_owned) };
            assert_eq!(Name::of(reference), expected);
        }
    }

    #[test]
    fn bytes_are_whole_layers_and_the_written_part_of_others() {
        let layer = |size| LayerState::new(Layer { digest: format!("sha256:{size}"), size });
        let mut layers = [layer(100), layer(50), layer(7)];
        assert_eq!(account(&layers), Bytes { done: 0, total: 157 });
        layers[0].whole = true;
        layers[1].writing(20);
        assert_eq!(account(&layers), Bytes { done: 120, total: 157 });
        layers[1].writing(60);
        assert_eq!(account(&layers), Bytes { done: 150, total: 157 }, "never more than the layer has");
    }

    #[test]
    fn a_download_that_stands_still_is_stuck_and_an_unpacking_one_is_not() {
        let begun = Instant::now();
        let bytes = |done| Bytes { done, total: 10 };
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut stall = Stall::new(begun);
        assert!(!stall.observe(bytes(1), at(100)));
        assert!(!stall.observe(bytes(1), at(279)));
        assert!(stall.observe(bytes(1), at(280)));
        assert!(!stall.observe(bytes(2), at(281)));
        assert!(!stall.observe(bytes(10), at(300)));
        assert!(!stall.observe(bytes(10), at(3000)));
    }
}
