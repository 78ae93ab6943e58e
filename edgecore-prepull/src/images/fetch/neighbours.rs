//! Blobs from the neighbours of the site.

use futures::FutureExt;
use prepull_api::sites::{BlobPeer, PeerFault};

use super::download::Download;
use super::flights::Flight;
use super::ingest::Filling;
use super::pour::{Broken, Filled, PROGRESS};
use super::shared::ImageSharing;
use super::stop::FetchStop;
use crate::images::containerd::{BlobKind, BlobToWrite, FoundBlob};
use crate::images::site::client::{self, PeerBlob, WantedPart};
use crate::images::site::{BlobOrigin, Seeker, Sought};

/// Waits until the cloud says where a blob is to be had. While it waits, a pull by the runtime can have its ingest.
pub(super) async fn wait_for_origin(seeker: &mut Seeker, open: &mut Option<Filling<'_>>) -> BlobOrigin {
    if let Some(way) = seeker.wait_for_origin().now_or_never() {
        return way;
    }
    open.take_if(|open| !open.is_private());
    seeker.wait_for_origin().await
}

/// Why a pull doesn't share a blob that another image's pull has begun.
const FOREIGN: &str = "a part of it was left by the pull of an image from another repository";

impl Download<'_> {
    /// Asks the cloud where to get a blob, if the site shares it and the store lacks it. A stored blob is announced instead, if
    /// it came from the image's repository.
    pub(super) async fn seek(&self, blob: &BlobToWrite, flight: &Flight) -> Option<Seeker> {
        let ImageSharing { neighbourhood, task, site_limited, deadline, .. } =
            self.shared.as_ref().filter(|_| blob.kind == BlobKind::Layer)?;
        let hub = &neighbourhood.hub;
        if let Some(stored) = self.fetcher.store.look_up_blob(&blob.digest).await {
            if self.is_of_repository(&stored) {
                hub.announce(task, &blob.digest, blob.size);
            }
            return None;
        }
        let (mut done, mut is_own) = (0, true);
        for part in [blob, &blob.of_peer()] {
            let written = self.fetcher.writer.written_bytes(part).await;
            let beginnings = &self.fetcher.beginnings;
            is_own &= written == 0 || beginnings.is_own(&part.ingest_name(), &self.source.name);
            done = done.max(written);
        }
        flight.set_written(done);
        let (digest, size, site_limited, deadline) = (&blob.digest, blob.size, *site_limited, *deadline);
        let repository = &self.source.name;
        let mut seeker =
            hub.seek(&Sought { task, repository, digest, size, done, site_limited, deadline })?;
        if !is_own {
            seeker.go_alone(FOREIGN);
        }
        Some(seeker)
    }

    /// Whether a blob came from the image's repository. Another one may be a private layer that the image's manifest only
    /// lists, to get at it through a neighbour.
    pub(super) fn is_of_repository(&self, stored: &FoundBlob) -> bool {
        stored.fetched_from.as_deref() == Some(self.source.name.as_str())
    }

    /// Appends what a neighbour sends.
    pub(super) async fn fill_from_peer(
        &self,
        filling: &mut Filling<'_>,
        blob: &BlobToWrite,
        peer: &BlobPeer,
        seeker: &mut Seeker,
    ) -> Result<Filled, FetchStop> {
        let Some(ImageSharing { neighbourhood, .. }) = &self.shared else { return Ok(Filled::LetGo) };
        let (digest, size, offset) = (&blob.digest, blob.size, filling.part.offset());
        if offset >= size {
            return Ok(Filled::Whole(None));
        }
        let tls = neighbourhood.identity.watch().borrow().peers.client.clone();
        let wanted = WantedPart { digest, offset, size, version: filling.senders.version_of(&peer.node) };
        let opened = client::request_blob(&tls, peer, &wanted).await;
        let PeerBlob { mut stream, version, connection: _connection } = match opened {
            Ok(blob) => blob,
            Err((PeerFault::Damaged, _)) => {
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, "a neighbour has thrown away what it sent");
                // It isn't to blame: it had these bytes from another one, and is still receiving.
                seeker.note_fault(&peer.node, PeerFault::Stalled);
                return Ok(Filled::Spoiled);
            }
            Err((fault, why)) => {
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, ?fault, why, "a neighbour does not deliver");
                seeker.note_fault(&peer.node, fault);
                return Ok(Filled::LetGo);
            }
        };
        filling.senders.note_neighbour(&peer.node, offset);
        filling.senders.version = version.map(|version| (peer.node.clone(), version));
        match self.pour(&mut stream, filling, Some(seeker), true).await {
            Ok(()) => Ok(Filled::Whole(None)),
            Err(Broken::LetGo) => Ok(Filled::LetGo),
            Err(Broken::Store(error)) => Err(self.write_failed(error)),
            Err(Broken::Registry(error)) => {
                let (came, has_stalled) = (filling.part.offset() - offset, stream.has_stalled());
                tracing::info!(image = self.reference, blob = digest, peer = %peer.node, %error, came, "a neighbour has stopped");
                if has_stalled {
                    seeker.note_fault(&peer.node, PeerFault::Stalled);
                } else if came < PROGRESS {
                    seeker.note_fault(&peer.node, PeerFault::Unreachable);
                }
                // Otherwise it's asked for the rest: its ticket or our turn may be over, or it has begun again.
                Ok(Filled::LetGo)
            }
        }
    }
}
