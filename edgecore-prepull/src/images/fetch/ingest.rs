//! The ingest that a blob of a site is filled into, from one source after the other.
//!
//! Bytes of neighbours only get into one that no other client knows, [`BlobKind::OfPeer`]: no pull by the runtime goes on with
//! bytes that may be wrong. Bytes of the registry get into the one that has most, so that no bytes cross the uplink twice.

use std::collections::HashSet;
use std::time::Duration;

use hyper::header::HeaderValue;
use prepull_api::task::NodeName;
use tokio::time::{Instant, sleep};

use super::download::Download;
use super::flights::Flight;
use super::stop::FetchStop;
use crate::images::containerd::{BlobKind, BlobToWrite, BlobWriteError, Labels, PartialBlob};
use crate::images::site::{Arriving, Seeker};

/// Interval of looking whether another client has finished a blob. Each look keeps containerd's database busy for up to a
/// second, since it tries for the lock that long.
const LOOK: Duration = Duration::from_secs(2);
/// Longest time for which another client may keep a blob without any progress.
const STUCK: Duration = Duration::from_secs(300);

/// An ingest that is being filled. No other client writes to it.
#[derive(Debug)]
pub(super) struct Filling<'f> {
    /// The blob, as its ingest is named.
    of: BlobToWrite,
    flight: &'f Flight,
    pub(super) part: PartialBlob,
    pub(super) senders: Senders,
    /// Whether all bytes are of the image's repository.
    is_own: bool,
    /// Lets neighbours read what has arrived.
    arriving: Option<Arriving>,
}

/// The neighbours that have sent what there is of a blob.
#[derive(Debug, Default)]
pub(super) struct Senders {
    known: HashSet<NodeName>,
    /// Whether some of it is from the registry, or left by an earlier pull.
    has_other: bool,
    /// The version of the bytes, by the last neighbour that was still receiving them.
    pub(super) version: Option<(NodeName, HeaderValue)>,
}

/// The source of bytes with a wrong digest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// This neighbour has sent all of them.
    Neighbour(NodeName),
    /// Neighbours have sent some of them.
    Several,
    /// No neighbour has sent any.
    Registry,
}

impl Senders {
    /// Notes a neighbour that sends bytes from an offset on.
    pub(super) fn note_neighbour(&mut self, peer: &NodeName, offset: u64) {
        if offset == 0 {
            *self = Self::default();
        }
        self.has_other |= offset > 0 && self.known.is_empty();
        self.known.insert(peer.clone());
    }

    /// Notes that the rest comes from the registry.
    pub(super) fn note_registry(&mut self) {
        self.has_other = true;
    }

    pub(super) fn blame(&self) -> Blame {
        match self.known.iter().next() {
            None => Blame::Registry,
            Some(only) if self.known.len() == 1 && !self.has_other => Blame::Neighbour(only.clone()),
            Some(_) => Blame::Several,
        }
    }

    /// The version of the bytes, for a neighbour that has sent all of them.
    pub(super) fn version_of(&self, peer: &NodeName) -> Option<&HeaderValue> {
        let (of, version) = self.version.as_ref()?;
        (of == peer && self.blame() == Blame::Neighbour(peer.clone())).then_some(version)
    }
}

impl Filling<'_> {
    /// Whether no pull by the runtime waits for this ingest.
    pub(super) fn is_private(&self) -> bool {
        self.of.kind == BlobKind::OfPeer
    }

    /// Whether a pull without a cap of its own waits for the blob.
    pub(super) fn is_hurried(&self) -> bool {
        self.flight.is_hurried()
    }

    /// Appends bytes.
    pub(super) async fn write(&mut self, data: Vec<u8>) -> Result<(), BlobWriteError> {
        self.part.write(data).await?;
        self.flight.set_written(self.part.offset());
        self.advance();
        Ok(())
    }

    fn advance(&self) {
        if let Some(arriving) = &self.arriving {
            arriving.advance(self.part.acknowledged());
        }
    }
}

impl Download<'_> {
    /// Opens the ingest for bytes of a source. `None` if the whole blob is there.
    pub(super) async fn open_for<'f>(
        &self,
        blob: &BlobToWrite,
        flight: &'f Flight,
        seeker: Option<&Seeker>,
        of_peer: bool,
    ) -> Result<Option<Filling<'f>>, FetchStop> {
        let private = blob.of_peer();
        let writer = &self.fetcher.writer;
        let is_private = match seeker {
            None => false,
            Some(_) => of_peer || writer.written_bytes(&private).await > writer.written_bytes(blob).await,
        };
        let of = if is_private { private } else { blob.clone() };
        let Some(part) = self.open_ingest(&of, flight).await? else {
            flight.set_written(blob.size);
            return Ok(None);
        };
        if let Some(seeker) = seeker {
            seeker.set_done(part.offset());
        }
        let (beginnings, offset) = (&self.fetcher.beginnings, part.offset());
        let is_own = beginnings.go_on(of.ingest_name(), &self.source.name, (offset, blob.size));
        let mut arriving = None;
        if let Some(shared) = self.shared.as_ref().filter(|_| is_own && seeker.is_some())
            && let Some(file) = writer.read_ingest(&of, self.facts.directories.root.clone()).await
        {
            let arrivals = &shared.neighbourhood.hub.arrivals;
            arriving = Some(arrivals.offer_blob(&blob.digest, blob.size, part.acknowledged(), file));
        }
        let senders = Senders { has_other: part.offset() > 0 && !is_private, ..Senders::default() };
        Ok(Some(Filling { of, flight, part, senders, is_own, arriving }))
    }

    /// Opens a blob, or waits for another client to finish it. `None` if it is there.
    pub(super) async fn open_ingest(
        &self,
        blob: &BlobToWrite,
        flight: &Flight,
    ) -> Result<Option<PartialBlob>, FetchStop> {
        let mut progress = Instant::now();
        loop {
            match self.fetcher.writer.open(blob, self.lease).await {
                Ok(None) => return Ok(None),
                Ok(Some(part)) => {
                    flight.set_written(part.offset());
                    return Ok(Some(part));
                }
                Err(error @ BlobWriteError::Locked(_)) if progress.elapsed() > STUCK => {
                    return Err(self.write_failed(error));
                }
                Err(BlobWriteError::Locked(_)) => {}
                Err(error) => return Err(self.write_failed(error)),
            }
            sleep(LOOK).await;
            let theirs = self.fetcher.writer.written_bytes(blob).await;
            if theirs != flight.written_bytes() {
                flight.set_written(theirs);
                progress = Instant::now();
            }
        }
    }

    /// Makes the blob of an ingest that has all bytes. The source of the bytes, if they have another digest: then they're gone.
    pub(super) async fn commit_blob(
        &self,
        filling: Filling<'_>,
    ) -> Result<Result<(), (Blame, BlobWriteError)>, FetchStop> {
        let Filling { of, flight, mut part, senders, is_own, arriving } = filling;
        part.await_acknowledgements().await.map_err(|error| self.write_failed(error))?;
        if let Some(arriving) = &arriving {
            // Before the flush to the disk, which takes its time.
            arriving.advance(part.acknowledged());
        }
        let labels = if is_own { self.source.fetched_label() } else { Labels::new() };
        match part.commit(&self.source, &labels).await {
            Ok(()) => {
                self.fetcher.beginnings.forget(&of.ingest_name());
                Ok(Ok(()))
            }
            Err(error @ BlobWriteError::Mismatch { .. }) => {
                self.throw_away(&of, flight).await?;
                let blame = match senders.blame() {
                    // An earlier pull has left bytes of neighbours.
                    Blame::Registry if of.kind == BlobKind::OfPeer => Blame::Several,
                    blame => blame,
                };
                Ok(Err((blame, error)))
            }
            Err(error) => Err(self.write_failed(error)),
        }
    }

    /// Throws away the bytes of an ingest, also those that neighbours have read from it.
    async fn throw_away(&self, of: &BlobToWrite, flight: &Flight) -> Result<(), FetchStop> {
        if let Some(shared) = &self.shared {
            shared.neighbourhood.hub.arrivals.note_spoiled(&of.digest);
        }
        self.fetcher.writer.abort(of).await.map_err(|error| self.write_failed(error))?;
        flight.set_written(0);
        Ok(())
    }

    /// Throws away the bytes of an open ingest.
    pub(super) async fn discard(&self, filling: Filling<'_>) -> Result<(), FetchStop> {
        let Filling { of, flight, part, .. } = filling;
        drop(part);
        self.throw_away(&of, flight).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sender_of_all_bytes_is_blamed() {
        let (a, b) = (NodeName::from("a"), NodeName::from("b"));
        let mut senders = Senders::default();
        assert_eq!(senders.blame(), Blame::Registry);
        senders.note_neighbour(&a, 0);
        assert_eq!(senders.blame(), Blame::Neighbour(a.clone()));
        senders.note_neighbour(&a, 5);
        assert_eq!(senders.blame(), Blame::Neighbour(a.clone()), "the same one went on");
        senders.note_neighbour(&b, 7);
        assert_eq!(senders.blame(), Blame::Several);
        senders.note_neighbour(&b, 0);
        assert_eq!(senders.blame(), Blame::Neighbour(b), "begun again");
        senders.note_registry();
        assert_eq!(senders.blame(), Blame::Several);
        let mut senders = Senders::default();
        senders.note_neighbour(&a, 5);
        senders.note_neighbour(&a, 6);
        assert_eq!(senders.blame(), Blame::Several, "an earlier pull has left some");
    }

    #[test]
    fn a_version_is_for_the_sender_of_all_bytes() {
        let (a, b) = (NodeName::from("a"), NodeName::from("b"));
        let mut senders = Senders::default();
        senders.note_neighbour(&a, 0);
        let version = HeaderValue::from_static("\"0\"");
        senders.version = Some((a.clone(), version.clone()));
        assert_eq!(senders.version_of(&a), Some(&version));
        assert_eq!(senders.version_of(&b), None);
        senders.note_neighbour(&b, 9);
        assert_eq!(senders.version_of(&a), None);
    }
}
