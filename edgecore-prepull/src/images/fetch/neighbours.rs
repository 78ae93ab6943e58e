//! Blobs from the neighbours of the site.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use prepull_api::sites::{Peer, PeerFault};
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::truncate_note;

use super::blob::{Broken, Download};
use super::flights::Flight;
use super::stop::Stop;
use crate::cloud::identity::Identity;
use crate::images::containerd::{Blob, BlobKind, Labels, WriteError};
use crate::images::site::client::{self, PeerBlob};
use crate::images::site::{Hub, Seeker};

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
    from_peers: AtomicU64,
    why_not: OnceLock<String>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(neighbourhood: &'a Neighbourhood, task: &'a TaskId, site_limited: bool) -> Self {
        Self { neighbourhood, task, site_limited, from_peers: AtomicU64::new(0), why_not: OnceLock::new() }
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

/// The neighbours that have sent what there is of a blob.
#[derive(Debug, Default)]
pub(super) struct Senders {
    known: HashSet<NodeName>,
    /// Whether an earlier pull has left some of it.
    has_unknown: bool,
}

impl Senders {
    fn note(&mut self, peer: &NodeName, offset: u64) {
        if offset == 0 {
            *self = Self::default();
        }
        self.has_unknown |= offset > 0 && self.known.is_empty();
        self.known.insert(peer.clone());
    }

    /// Whether only one has sent all of it: then it is the one that is to blame.
    fn is_one(&self) -> bool {
        self.known.len() == 1 && !self.has_unknown
    }
}

impl Download<'_> {
    /// Has the cloud asked where a blob is to be had, if the site shares it and it is not here. What is here is announced.
    pub(super) async fn seek(&self, blob: &Blob, flight: &Flight) -> Option<Seeker> {
        let Shared { neighbourhood, task, site_limited, .. } =
            self.shared.as_ref().filter(|_| blob.kind == BlobKind::Layer)?;
        let hub = &neighbourhood.hub;
        if self.fetcher.store.has_blob(&blob.digest).await {
            hub.announce(task, &blob.digest, blob.size);
            return None;
        }
        hub.seek(task, &blob.digest, blob.size, flight.written(), *site_limited)
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

    /// Fetches a blob from a neighbour, under a name of our own until its digest is right. `false` if it did not deliver.
    pub(super) async fn fetch_from_peer(
        &self,
        blob: &Blob,
        flight: &Flight,
        peer: &Peer,
        seeker: &mut Seeker,
        senders: &mut Senders,
    ) -> Result<bool, Stop> {
        let Some(Shared { neighbourhood, .. }) = &self.shared else { return Ok(false) };
        let private = Blob { kind: BlobKind::OfPeer, ..blob.clone() };
        let opened = self.fetcher.writer.open(&private, self.lease).await;
        let Some(mut part) = opened.map_err(|error| self.refused(error))? else {
            flight.set_written(blob.size);
            return Ok(true);
        };
        let offset = part.offset();
        flight.set_written(offset);
        if offset < blob.size {
            senders.note(&peer.node, offset);
            let tls = neighbourhood.identity.watch().borrow().peers.client.clone();
            let opened = client::open(&tls, peer, &blob.digest, (offset, blob.size)).await;
            let PeerBlob { stream, connection: _connection } = match opened {
                Ok(blob) => blob,
                Err((fault, why)) => {
                    tracing::info!(image = self.reference, blob = blob.digest, peer = %peer.node, ?fault, why, "a neighbour does not deliver");
                    seeker.fail(peer, fault);
                    return Ok(false);
                }
            };
            match self.pour(stream, &mut part, flight, Some(seeker), true).await {
                Ok(()) => {}
                Err(Broken::LetGo) => return Ok(false),
                Err(Broken::Store(error)) => return Err(self.refused(error)),
                Err(Broken::Registry(error)) => {
                    tracing::info!(image = self.reference, blob = blob.digest, peer = %peer.node, %error, "a neighbour has stopped");
                    seeker.fail(peer, PeerFault::Unreachable);
                    return Ok(false);
                }
            }
        }
        match part.commit(&self.source, &Labels::new()).await {
            Ok(()) => Ok(true),
            Err(WriteError::Mismatch { .. }) => {
                self.fetcher.writer.abort(&private).await.map_err(|error| self.refused(error))?;
                flight.set_written(0);
                if senders.is_one() {
                    tracing::warn!(image = self.reference, blob = blob.digest, peer = %peer.node, "a neighbour has sent bytes with another digest");
                    seeker.fail(peer, PeerFault::Damaged);
                }
                Ok(false)
            }
            Err(error) => Err(self.refused(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_sent_all_of_a_wrong_blob_is_to_blame_and_nobody_else() {
        let mut senders = Senders::default();
        senders.note(&"a".into(), 0);
        assert!(senders.is_one());
        senders.note(&"a".into(), 5);
        assert!(senders.is_one(), "the same one went on");
        senders.note(&"b".into(), 7);
        assert!(!senders.is_one(), "one of two");
        senders.note(&"b".into(), 0);
        assert!(senders.is_one(), "begun anew");
        let mut senders = Senders::default();
        senders.note(&"a".into(), 5);
        senders.note(&"a".into(), 6);
        assert!(!senders.is_one(), "an earlier pull has left some");
    }
}
