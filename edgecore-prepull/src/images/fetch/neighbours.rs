//! Blobs from the neighbours of the site.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use futures::FutureExt;
use prepull_api::sites::{Peer, PeerFault};
use prepull_api::task::TaskId;
use prepull_api::wire::truncate_note;
use tokio::time::Instant;

use super::blob::{Broken, Download, Filled, PROGRESS};
use super::flights::Flight;
use super::ingest::Filling;
use super::stop::Stop;
use crate::cloud::identity::Identity;
use crate::images::containerd::{Blob, BlobKind};
use crate::images::puller::PullTerms;
use crate::images::rate::Bucket;
use crate::images::site::client::{self, PeerBlob, Wanted};
use crate::images::site::{Hub, Seeker, Sought, Way};

/// How this node gets blobs from its neighbours.
#[derive(Clone, Debug)]
pub(crate) struct Neighbourhood {
    pub(crate) hub: Arc<Hub>,
    /// The certificate that neighbours are shown.
    pub(crate) identity: Identity,
}

/// What the blobs of one image share of it.
pub(super) struct Shared<'a> {
    pub(super) neighbourhood: &'a Neighbourhood,
    /// The task that names the image.
    pub(super) task: &'a TaskId,
    site_limited: bool,
    /// The site's limit as a whole, for what is fetched without a word from the cloud.
    pub(super) site: Option<&'a Bucket>,
    deadline: Option<Instant>,
    from_peers: AtomicU64,
    why_not: OnceLock<String>,
}

impl<'a> Shared<'a> {
    /// `None` where the task doesn't share.
    pub(super) fn new(neighbourhood: &'a Neighbourhood, terms: &PullTerms<'a>) -> Option<Self> {
        let PullTerms { shared_for, site_limited, site, deadline, .. } = *terms;
        let (task, from_peers, why_not) = (shared_for?, AtomicU64::new(0), OnceLock::new());
        Some(Self { neighbourhood, task, site_limited, site, deadline, from_peers, why_not })
    }

    /// Bytes that neighbours have delivered.
    pub(super) fn delivered(&self) -> Option<u64> {
        Some(self.from_peers.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// The first reason for a blob that could come from no neighbour; empty if there is none.
    pub(super) fn why_not(&self) -> String {
        self.why_not.get().map(|why| truncate_note(why)).unwrap_or_default()
    }
}

/// Waits until the cloud says where a blob is to be had. While it waits, a pull by the runtime can have its ingest.
pub(super) async fn way(seeker: &mut Seeker, open: &mut Option<Filling>) -> Way {
    if let Some(way) = seeker.way().now_or_never() {
        return way;
    }
    open.take_if(|open| !open.is_private());
    seeker.way().await
}

impl Download<'_> {
    /// Has the cloud asked where a blob is to be had, if the site shares it and it is not here. What is here is announced.
    pub(super) async fn seek(&self, blob: &Blob, flight: &Flight) -> Option<Seeker> {
        let Shared { neighbourhood, task, site_limited, deadline, .. } =
            self.shared.as_ref().filter(|_| blob.kind == BlobKind::Layer)?;
        let hub = &neighbourhood.hub;
        if self.fetcher.store.has_blob(&blob.digest).await {
            hub.announce(task, &blob.digest, blob.size);
            return None;
        }
        let writer = &self.fetcher.writer;
        let done = writer.written(blob).await.max(writer.written(&blob.of_peer()).await);
        flight.set_written(done);
        let (digest, size, site_limited, deadline) = (&blob.digest, blob.size, *site_limited, *deadline);
        hub.seek(&Sought { task, digest, size, done, site_limited, deadline })
    }

    /// Notes why a blob comes from no neighbour, for the status.
    pub(super) fn note_unshared(&self, why: &str) {
        if let Some(shared) = &self.shared {
            let _ = shared.why_not.set(why.to_owned());
        }
    }

    /// Counts bytes that have arrived.
    pub(super) fn count(&self, bytes: usize, is_of_peer: bool) {
        self.fetcher.count(bytes, is_of_peer);
        if let Some(shared) = self.shared.as_ref().filter(|_| is_of_peer) {
            shared.from_peers.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Appends what a neighbour sends.
    pub(super) async fn fill_from_peer(
        &self,
        filling: &mut Filling,
        blob: &Blob,
        flight: &Flight,
        peer: &Peer,
        seeker: &mut Seeker,
    ) -> Result<Filled, Stop> {
        let Some(Shared { neighbourhood, .. }) = &self.shared else { return Ok(Filled::LetGo) };
        let (digest, size, offset) = (&blob.digest, blob.size, filling.part.offset());
        if offset >= size {
            return Ok(Filled::Whole(None));
        }
        let tls = neighbourhood.identity.watch().borrow().peers.client.clone();
        let wanted = Wanted { digest, offset, size, version: filling.senders.version_of(&peer.node) };
        let opened = client::open(&tls, peer, &wanted).await;
        let PeerBlob { mut stream, version, connection: _connection } = match opened {
            Ok(blob) => blob,
            Err((PeerFault::Damaged, _)) => {
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, "a neighbour has thrown away what it sent");
                // It isn't to blame: it had these bytes from another one, and is still receiving.
                seeker.fail(&peer.node, PeerFault::Stalled);
                return Ok(Filled::Spoiled);
            }
            Err((fault, why)) => {
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, ?fault, why, "a neighbour does not deliver");
                seeker.fail(&peer.node, fault);
                return Ok(Filled::LetGo);
            }
        };
        filling.senders.note(&peer.node, offset);
        filling.senders.version = version.map(|version| (peer.node.clone(), version));
        match self.pour(&mut stream, filling, flight, Some(seeker), true).await {
            Ok(()) => Ok(Filled::Whole(None)),
            Err(Broken::LetGo) => Ok(Filled::LetGo),
            Err(Broken::Store(error)) => Err(self.refused(error)),
            Err(Broken::Registry(error)) => {
                let (came, has_stalled) = (filling.part.offset() - offset, stream.has_stalled());
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, %error, came, "a neighbour has stopped");
                if has_stalled {
                    seeker.fail(&peer.node, PeerFault::Stalled);
                } else if came < PROGRESS {
                    seeker.fail(&peer.node, PeerFault::Unreachable);
                }
                // Otherwise it's asked for the rest: its ticket or our turn may be over, or it has begun again.
                Ok(Filled::LetGo)
            }
        }
    }
}
