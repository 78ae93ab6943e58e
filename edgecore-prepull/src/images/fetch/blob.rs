//! One blob, from the registry into containerd's content store, from where an earlier pull left it.

use std::time::Duration;

use prepull_api::sites::PeerFault;
use prepull_registry::manifest::Descriptor;
use prepull_registry::{ErrorKind, HostId, RegistryError};
use tokio::time::sleep;

use super::download::Download;
use super::flights::Flight;
use super::image::ImageDocument;
use super::ingest::{Blame, Filling};
use super::neighbours::wait_for_origin;
use super::pour::{Broken, Filled, PROGRESS};
use super::stop::FetchStop;
use crate::images::containerd::{BlobToWrite, BlobWriteError, Labels};
use crate::images::site::{BlobOrigin, Seeker};

/// Requests in a row that may end without progress before the attempt has failed.
const STRIKES: u32 = 3;
/// Wait before a request is made again.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait that a registry may ask for while the attempt goes on, and keeps others from its place on the node; with a
/// longer one the attempt has failed, and the next one begins after the wait.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Neighbours that may send a wrong blob before a pull takes it from the registry. Each has sent all of it.
const LIES: u32 = 2;
/// Why a pull takes a blob from the registry then.
const DAMAGED: &str = "what neighbours sent had another digest";

impl Download<'_> {
    /// Brings a blob into the store.
    pub(super) async fn fetch_blob(
        &self,
        blob: &BlobToWrite,
        descriptor: &Descriptor,
        flight: &Flight,
    ) -> Result<(), FetchStop> {
        let _turn = flight.take_turn(!self.buckets.has_own()).await;
        // Before anything is waited for that others could use.
        let mut seeker = self.seek(blob, flight).await;
        let mut avoid: Vec<HostId> = Vec::new();
        let mut open = None;
        let (mut lies, mut is_second_try) = (0, false);
        loop {
            let way = match &mut seeker {
                Some(seeker) => wait_for_origin(seeker, &mut open).await,
                None => BlobOrigin::Registry(None),
            };
            // An error would mean that the semaphore is closed; these never are.
            let _of_image = tokio::select! {
                permit = self.streams.acquire() => permit.ok(),
                // Another pull waits for it, which shares nothing of our cap: it doesn't wait for the layers before this one.
                () = flight.becomes_hurried(), if self.buckets.has_own() => None,
            };
            let _of_node = self.fetcher.streams.acquire().await;
            // An error would mean that the sender is gone, which is a field of this.
            let _ = self.letting_go.subscribe().wait_for(|letting_go| !letting_go).await;
            let (of_peer, limited) = (matches!(way, BlobOrigin::Peer(_)), seeker.as_ref());
            let fits = |open: &Filling<'_>| open.is_private() || !of_peer;
            let mut filling = if let Some(open) = open.take().filter(fits) {
                open
            } else {
                let opened = self.open_for(blob, flight, limited, of_peer).await?;
                let Some(opened) = opened else { break };
                opened
            };
            let from = match &way {
                BlobOrigin::Peer(peer) => peer.node.as_str(),
                BlobOrigin::Registry(_) => "the registry",
            };
            let offset = filling.part.offset();
            tracing::debug!(image = self.reference, blob = blob.digest, offset, from, "filling");
            let filled = match (way, &mut seeker) {
                (BlobOrigin::Peer(peer), Some(seeker)) => {
                    self.fill_from_peer(&mut filling, blob, &peer, seeker).await?
                }
                (way, seeker) => {
                    if let BlobOrigin::Registry(Some(why)) = way {
                        self.note_unshared(&why);
                    }
                    filling.senders.note_registry();
                    self.fill_from_registry(&mut filling, descriptor, seeker.as_ref(), &avoid).await?
                }
            };
            let host = match filled {
                Filled::Whole(host) => host,
                Filled::Spoiled => {
                    self.discard(filling).await?;
                    continue;
                }
                Filled::LetGo => {
                    // A pull by the runtime may wait for a shared ingest, so none stays open while we wait for our turn.
                    open = Some(filling).filter(Filling::is_private);
                    continue;
                }
            };
            let Err((blame, error)) = self.commit_blob(filling).await? else { break };
            match (blame, &mut seeker) {
                (Blame::Neighbour(peer), Some(seeker)) => {
                    tracing::warn!(image = self.reference, blob = blob.digest, %peer, "a neighbour has sent bytes with another digest");
                    seeker.note_fault(&peer, PeerFault::Damaged);
                    lies += 1;
                    if lies == LIES {
                        seeker.go_alone(DAMAGED);
                    }
                }
                (Blame::Several, Some(seeker)) => seeker.go_alone(DAMAGED),
                _ => {
                    let Some(host) = host else {
                        // What an earlier pull has left was wrong, and it's gone now.
                        if std::mem::replace(&mut is_second_try, true) {
                            return Err(self.write_failed(error));
                        }
                        tracing::warn!(image = self.reference, blob = blob.digest, %error, "what an earlier pull has left of a blob is damaged; it is fetched once more");
                        continue;
                    };
                    if !avoid.is_empty() {
                        return Err(self.write_failed(error));
                    }
                    tracing::warn!(image = self.reference, blob = blob.digest, %host, %error, "a blob arrived damaged; it is fetched once more, from another host if there is one");
                    avoid.push(host);
                }
            }
        }
        // Another pull may have brought it, from elsewhere.
        if let Some(seeker) = seeker {
            let stored = self.fetcher.store.look_up_blob(&blob.digest).await;
            if stored.is_some_and(|stored| self.is_of_repository(&stored)) {
                seeker.note_arrived();
            }
        }
        Ok(())
    }

    /// Writes a manifest or an index into the store, unless it is there.
    pub(super) async fn write_document(
        &self,
        ImageDocument { blob, content, labels }: &ImageDocument,
    ) -> Result<(), FetchStop> {
        // Where layers are discarded, nothing may hold them.
        let labels = if self.facts.discards_layers { &Labels::new() } else { labels };
        let flight = self.fetcher.flights.shared_value(&blob.digest);
        let _turn = flight.take_turn(false).await;
        let Some(mut part) = self.open_ingest(blob, &flight).await? else { return Ok(()) };
        let from = usize::try_from(part.offset()).unwrap_or(usize::MAX);
        let written = async {
            if let Some(rest) = content.get(from..).filter(|rest| !rest.is_empty()) {
                part.write(rest.to_vec()).await?;
            }
            part.commit(&self.source, labels).await
        };
        let written = written.await;
        if matches!(written, Err(BlobWriteError::Mismatch { .. })) {
            // The partial content belongs to another blob: the next attempt restarts from byte 0.
            self.fetcher.writer.abort(blob).await.map_err(|error| self.write_failed(error))?;
        }
        written.map_err(|error| self.write_failed(error))
    }

    /// Appends what is missing. A connection that breaks is replaced by another one, as long as there is progress.
    async fn fill_from_registry(
        &self,
        filling: &mut Filling<'_>,
        descriptor: &Descriptor,
        seeker: Option<&Seeker>,
        avoid: &[HostId],
    ) -> Result<Filled, FetchStop> {
        let mut host = None;
        let mut strikes = 0;
        while filling.part.offset() < descriptor.size {
            let from = filling.part.offset();
            let avoid = [avoid, &self.asked_last()].concat();
            let broken = match self.repository.fetch_blob(descriptor, from, &avoid).await {
                Ok(mut stream) => {
                    host = Some(stream.host().clone());
                    match self.pour(&mut stream, filling, seeker, false).await {
                        Ok(()) => break,
                        Err(broken) => broken,
                    }
                }
                Err(error) => Broken::Registry(error),
            };
            let error = match broken {
                Broken::Registry(error) => error,
                Broken::Store(error) => return Err(self.write_failed(error)),
                Broken::LetGo => return Ok(Filled::LetGo),
            };
            strikes = if filling.part.offset() - from >= PROGRESS { 0 } else { strikes + 1 };
            // The last strike is for another endpoint, if there is one: this one may be silent for ever.
            let is_slow = error.kind == ErrorKind::TooSlow;
            if let Some(host) = host.take_if(|_| is_slow || strikes == STRIKES - 1) {
                tracing::info!(image = self.reference, blob = descriptor.digest, %host, %error, "other endpoints are asked first for the rest of the image");
                self.ask_last(host);
            }
            if is_slow {
                // It goes on, with this one too if no other answers. Deadlines bound it.
                strikes = 0;
                continue;
            }
            let pause = pause_before_asking_again(&error).filter(|_| strikes < STRIKES);
            let Some(pause) = pause else { return Err(error.into()) };
            tracing::debug!(image = self.reference, blob = descriptor.digest, offset = filling.part.offset(), %error, "asking for the rest");
            sleep(pause).await;
        }
        Ok(Filled::Whole(host))
    }
}

/// How long to wait before the rest of a blob is asked for again. `None` if that would not help.
fn pause_before_asking_again(error: &RegistryError) -> Option<Duration> {
    match error.kind {
        // A token that has expired is replaced, and so is the URL that a registry has redirected to.
        ErrorKind::Unauthorized
        | ErrorKind::NoConnection
        | ErrorKind::Unreachable
        | ErrorKind::TooSlow
        | ErrorKind::Protocol => Some(PAUSE),
        ErrorKind::RateLimited { retry_after } | ErrorKind::Server { retry_after } => {
            let pause = retry_after.unwrap_or(PAUSE).max(PAUSE);
            (pause <= LONGEST_PAUSE).then_some(pause)
        }
        ErrorKind::NotFound => error.undecided.then_some(PAUSE),
        ErrorKind::PlatformMismatch | ErrorKind::DigestMismatch | ErrorKind::Unsupported => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirrors_not_found_is_asked_again() {
        for (undecided, expected) in [(false, None), (true, Some(PAUSE))] {
            let error = RegistryError { kind: ErrorKind::NotFound, message: String::new(), undecided };
            assert_eq!(pause_before_asking_again(&error), expected);
        }
    }
}
