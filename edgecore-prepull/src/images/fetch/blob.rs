//! One blob, from the registry into containerd's content store, from where an earlier pull left it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use prepull_registry::manifest::Descriptor;
use prepull_registry::{BlobStream, HostId, Kind, RegistryError, Repository};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};
use tonic::metadata::{Ascii, MetadataValue};

use super::ahead::Unpacking;
use super::flights::Flight;
use super::image::Document;
use super::neighbours::{Senders, Shared};
use super::runtime::Facts;
use super::stop::{Stop, of_write};
use super::{Buckets, Fetcher};
use crate::images::containerd::{Blob, Labels, PartialBlob, Source, WriteError};
use crate::images::puller::{ErrorClass, PullError};
use crate::images::site::{Seeker, Way};

/// Most bytes that are handed to containerd at once. What has arrived is handed on without waiting for more.
const CHUNK: usize = 128 * 1024;
/// The same under a limit, which holds only from the second chunk on.
const SMALL_CHUNK: usize = 16 * 1024;
/// Requests in a row that may end without progress before the attempt has failed.
const STRIKES: u32 = 3;
/// Least number of bytes that count as progress: with fewer, a registry that sends single bytes would be asked for ever.
const PROGRESS: u64 = 64 * 1024;
/// Wait before a request is made again.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait that a registry may ask for while the attempt goes on, and keeps others from its place on the node; with a
/// longer one the attempt has failed, and the next one begins after the wait.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Interval of looking whether somebody else has finished a blob. Each look keeps containerd's database busy for up to a
/// second, since it tries for the lock that long.
const LOOK: Duration = Duration::from_secs(2);
/// Longest time for which somebody else may keep a blob without any progress.
const STUCK: Duration = Duration::from_secs(300);

/// What the blobs of one image share.
pub(super) struct Download<'a> {
    pub(super) fetcher: &'a Fetcher,
    pub(super) repository: &'a Repository,
    pub(super) facts: &'a Facts,
    /// The image that is pulled, as the lease knows it.
    pub(super) reference: &'a str,
    /// Where it is from.
    pub(super) source: Source,
    pub(super) lease: &'a MetadataValue<Ascii>,
    pub(super) buckets: Buckets<'a>,
    /// One permit per blob of the image that may arrive at the same time.
    pub(super) streams: Semaphore,
    /// Set while somebody else wants the image now, who would wait for our limit.
    pub(super) letting_go: watch::Sender<bool>,
    pub(super) unpacking: Unpacking,
    /// Endpoints that trickled or fell silent. For the rest of the image, they're asked if no other one answers.
    pub(super) asked_last: Mutex<Vec<HostId>>,
    /// The site, where the task shares layers with it.
    pub(super) shared: Option<Shared<'a>>,
}

/// How far a blob has come.
enum Filled {
    /// All bytes are there, the last ones from this host.
    Whole(Option<HostId>),
    /// Somebody else is to have it.
    LetGo,
}

/// Why bytes stopped arriving.
pub(super) enum Broken {
    LetGo,
    Registry(RegistryError),
    Store(WriteError),
}

impl Download<'_> {
    /// Brings a blob into the store.
    pub(super) async fn blob(
        &self,
        blob: &Blob,
        descriptor: &Descriptor,
        flight: &Flight,
    ) -> Result<(), Stop> {
        let _turn = flight.take_turn(!self.buckets.has_own()).await;
        // Before anything is waited for that others could use.
        let mut seeker = self.seek(blob, flight).await;
        let mut avoid: Vec<HostId> = Vec::new();
        let mut senders = Senders::default();
        loop {
            let way = match &mut seeker {
                Some(seeker) => seeker.way().await,
                None => Way::Registry(None),
            };
            // An error would mean that the semaphore is closed; these never are.
            let _of_image = self.streams.acquire().await;
            let _of_node = self.fetcher.streams.acquire().await;
            // An error would mean that the sender is gone, which is a field of this.
            let _ = self.letting_go.subscribe().wait_for(|letting_go| !letting_go).await;
            let is_there = match (way, &mut seeker) {
                (Way::Peer(peer), Some(seeker)) => {
                    self.fetch_from_peer(blob, flight, &peer, seeker, &mut senders).await?
                }
                (way, _) => {
                    if let Way::Registry(Some(why)) = way {
                        self.note_unshared(&why);
                    }
                    self.fetch_from_registry(blob, descriptor, flight, seeker.as_ref(), &mut avoid).await?
                }
            };
            if is_there {
                if let Some(seeker) = seeker {
                    seeker.finish();
                }
                return Ok(());
            }
        }
    }

    /// Fetches a blob from the registry. `false` if somebody else is to have it, or if it is to come from elsewhere.
    async fn fetch_from_registry(
        &self,
        blob: &Blob,
        descriptor: &Descriptor,
        flight: &Flight,
        seeker: Option<&Seeker>,
        avoid: &mut Vec<HostId>,
    ) -> Result<bool, Stop> {
        let Some(mut part) = self.open(blob, flight).await? else {
            flight.set_written(blob.size);
            return Ok(true);
        };
        let host = match self.fill(&mut part, descriptor, flight, seeker, avoid).await? {
            Filled::Whole(host) => host,
            Filled::LetGo => return Ok(false),
        };
        match part.commit(&self.source, &Labels::new()).await {
            Ok(()) => Ok(true),
            Err(error @ WriteError::Mismatch { .. }) => {
                self.fetcher.writer.abort(blob).await.map_err(|error| self.refused(error))?;
                flight.set_written(0);
                // What an earlier pull has left may have been wrong, so that nobody is to blame.
                let Some(host) = host.filter(|_| avoid.is_empty()) else {
                    return Err(self.refused(error));
                };
                tracing::warn!(image = self.reference, blob = blob.digest, %host, %error, "a blob arrived damaged; it is fetched once more, from another host if there is one");
                avoid.push(host);
                Ok(false)
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    /// Writes a manifest or an index into the store, unless it is there.
    pub(super) async fn document(&self, Document { blob, content, labels }: &Document) -> Result<(), Stop> {
        // Where layers are discarded, nothing may hold them.
        let labels = if self.facts.discards_layers { &Labels::new() } else { labels };
        let flight = self.fetcher.flights.of(&blob.digest);
        let _turn = flight.take_turn(false).await;
        let Some(mut part) = self.open(blob, &flight).await? else { return Ok(()) };
        let from = usize::try_from(part.offset()).unwrap_or(usize::MAX);
        let written = async {
            if let Some(rest) = content.get(from..).filter(|rest| !rest.is_empty()) {
                part.write(rest.to_vec()).await?;
            }
            part.commit(&self.source, labels).await
        };
        let written = written.await;
        if matches!(written, Err(WriteError::Mismatch { .. })) {
            // Its beginning is not ours; the next attempt begins anew.
            self.fetcher.writer.abort(blob).await.map_err(|error| self.refused(error))?;
        }
        written.map_err(|error| self.refused(error))
    }

    /// Opens a blob, or waits for somebody else to finish it. `None` if it is there.
    async fn open(&self, blob: &Blob, flight: &Flight) -> Result<Option<PartialBlob>, Stop> {
        let mut progress = Instant::now();
        loop {
            match self.fetcher.writer.open(blob, self.lease).await {
                Ok(None) => return Ok(None),
                Ok(Some(part)) => {
                    flight.set_written(part.offset());
                    return Ok(Some(part));
                }
                Err(error @ WriteError::Locked(_)) if progress.elapsed() > STUCK => {
                    return Err(self.refused(error));
                }
                Err(WriteError::Locked(_)) => {}
                Err(error) => return Err(self.refused(error)),
            }
            sleep(LOOK).await;
            let ingests = self.fetcher.store.ingests().await.unwrap_or_default();
            if let Some(theirs) = ingests.get(&blob.digest)
                && theirs.offset != flight.written()
            {
                flight.set_written(theirs.offset);
                progress = Instant::now();
            }
        }
    }

    /// Appends what is missing. A connection that breaks is replaced by another one, as long as there is progress.
    async fn fill(
        &self,
        part: &mut PartialBlob,
        descriptor: &Descriptor,
        flight: &Flight,
        seeker: Option<&Seeker>,
        avoid: &[HostId],
    ) -> Result<Filled, Stop> {
        let mut host = None;
        let mut strikes = 0;
        while part.offset() < descriptor.size {
            let from = part.offset();
            let avoid = [avoid, &self.asked_last()].concat();
            let broken = match self.repository.blob(descriptor, from, &avoid).await {
                Ok(stream) => {
                    host = Some(stream.host().clone());
                    match self.pour(stream, part, flight, seeker, false).await {
                        Ok(()) => break,
                        Err(broken) => broken,
                    }
                }
                Err(error) => Broken::Registry(error),
            };
            let error = match broken {
                Broken::Registry(error) => error,
                Broken::Store(error) => return Err(self.refused(error)),
                Broken::LetGo => return Ok(Filled::LetGo),
            };
            strikes = if part.offset() - from >= PROGRESS { 0 } else { strikes + 1 };
            // The last strike is for another endpoint, if there is one: this one may be silent for ever.
            let is_slow = error.kind == Kind::TooSlow;
            if let Some(host) = host.take_if(|_| is_slow || strikes == STRIKES - 1) {
                tracing::info!(image = self.reference, blob = descriptor.digest, %host, %error, "other endpoints are asked first for the rest of the image");
                self.ask_last(host);
            }
            if is_slow {
                // It goes on, with this one too if no other answers. Deadlines bound it.
                strikes = 0;
                continue;
            }
            let pause = pause_before_asking_again(error.kind).filter(|_| strikes < STRIKES);
            let Some(pause) = pause else { return Err(error.into()) };
            tracing::debug!(image = self.reference, blob = descriptor.digest, offset = part.offset(), %error, "asking for the rest");
            sleep(pause).await;
        }
        Ok(Filled::Whole(host))
    }

    fn asked_last(&self) -> MutexGuard<'_, Vec<HostId>> {
        self.asked_last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_last(&self, host: HostId) {
        let mut asked_last = self.asked_last();
        if !asked_last.contains(&host) {
            asked_last.push(host);
        }
    }

    /// Writes what arrives. A registry without ranges begins at the beginning: what is there already is read past, which
    /// takes as much from the link as fetching it anew would, and nothing of the disk.
    pub(super) async fn pour(
        &self,
        mut stream: BlobStream,
        part: &mut PartialBlob,
        flight: &Flight,
        seeker: Option<&Seeker>,
        is_of_peer: bool,
    ) -> Result<(), Broken> {
        let mut skip = part.offset().saturating_sub(stream.offset());
        let most = if self.buckets.limit().is_some() { SMALL_CHUNK } else { CHUNK };
        let mut end = Ok(false);
        while let Ok(false) = end {
            if *self.letting_go.borrow() || seeker.is_some_and(Seeker::is_redirected) {
                return Err(Broken::LetGo);
            }
            let mut chunk = Vec::new();
            let mut arrived = 0;
            let mut next = stream.next().await;
            loop {
                match next {
                    Some(Ok(bytes)) => {
                        arrived += bytes.len();
                        let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
                        skip -= skipped as u64;
                        chunk.extend_from_slice(&bytes[skipped..]);
                    }
                    Some(Err(error)) => end = Err(error),
                    None => end = Ok(true),
                }
                if !matches!(end, Ok(false)) || arrived >= most {
                    break;
                }
                match stream.next().now_or_never() {
                    Some(more) => next = more,
                    None => break,
                }
            }
            // Written first and paid for then: what has crossed the link is not lost while it waits.
            if !chunk.is_empty() {
                part.write(chunk).await.map_err(Broken::Store)?;
                flight.set_written(part.offset());
                if let Some(seeker) = seeker {
                    seeker.set_done(part.offset());
                }
            }
            self.count(arrived, is_of_peer);
            self.buckets.take(arrived, flight.is_hurried()).await;
            if let Some(seeker) = seeker.filter(|_| !is_of_peer) {
                seeker.take(arrived).await;
            }
        }
        end.map(drop).map_err(Broken::Registry)
    }

    pub(super) fn refused(&self, error: WriteError) -> Stop {
        let error = of_write(error, self.reference, &self.fetcher.endpoint);
        if error.class == ErrorClass::NotFound {
            // containerd knows no "not found" of a registry here: the lease is gone, or the ref.
            return PullError { class: ErrorClass::Transient, ..error }.into();
        }
        error.into()
    }
}

/// How long to wait before the rest of a blob is asked for again. `None` if that would not help.
fn pause_before_asking_again(kind: Kind) -> Option<Duration> {
    match kind {
        // A token that has expired is replaced, and so is the URL that a registry has redirected to.
        Kind::Unauthorized | Kind::NoConnection | Kind::Unreachable | Kind::TooSlow | Kind::Protocol => {
            Some(PAUSE)
        }
        Kind::RateLimited { retry_after } | Kind::Server { retry_after } => {
            let pause = retry_after.unwrap_or(PAUSE).max(PAUSE);
            (pause <= LONGEST_PAUSE).then_some(pause)
        }
        Kind::NotFound | Kind::PlatformMismatch | Kind::DigestMismatch | Kind::Unsupported => None,
    }
}
