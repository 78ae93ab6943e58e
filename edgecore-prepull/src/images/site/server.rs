//! Serves blobs to neighbours that show a ticket: whole ones straight from containerd's content store, and those that are
//! still arriving from their ingest.

use std::convert::Infallible;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, IF_MATCH, RANGE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prepull_api::sites::{BLOBS_PATH, is_digest};
use prepull_api::task::NodeName;
use prepull_program::places::{ConnectionPlace, ConnectionPlaces, Loses};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::arrivals::Arrival;
use super::hub::Hub;
use super::turns::{Pace, ReaderTurn, TURN, Turns};
use crate::cloud::identity::{Identity, node_of};
use crate::images::containerd::{ContentStore, FoundBlob};
use crate::images::rate::Bucket;
use crate::machine::read_load;
use crate::metrics::AgentMetrics;

/// Connections at a time that haven't shown a ticket yet.
const CONNECTIONS: usize = 32;
/// Limit for a handshake and a request.
const REQUEST: Duration = Duration::from_secs(5);
/// Bytes that are read at a time.
const PIECE: u64 = 128 * 1024;
/// Bytes that HTTP buffers for a reader, besides a piece.
const BUFFERED: usize = 64 * 1024;
/// Interval of looking whether a reader has to go.
const LOOK: Duration = Duration::from_secs(1);
/// Wait after a connection could not be accepted: most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type BlobBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// Serves neighbours.
pub(crate) struct PeerServer {
    hub: Arc<Hub>,
    identity: Identity,
    store: Arc<ContentStore>,
    /// The limit of uploads.
    bucket: Bucket,
    metrics: Arc<AgentMetrics>,
    turns: Arc<Turns>,
}

/// One connection: it asks for one blob.
#[derive(Debug, Default)]
struct ReaderConnection {
    /// Cancelled once it has shown a ticket.
    admitted: CancellationToken,
    /// Cancelled when the reader has come back for the same blob.
    end: CancellationToken,
    pace: Mutex<Pace>,
    /// End of the ticket, in seconds since 1970.
    expires: AtomicU64,
}

impl ReaderConnection {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a blob is read from.
enum ServedBlob {
    /// The content store has all of it.
    Store {
        digest: String,
        size: u64,
    },
    Arrival(Arrival),
}

impl ServedBlob {
    fn size(&self) -> u64 {
        match self {
            Self::Store { size, .. } | Self::Arrival(Arrival { size, .. }) => *size,
        }
    }
}

impl PeerServer {
    pub(crate) fn new(
        hub: Arc<Hub>,
        identity: Identity,
        store: Arc<ContentStore>,
        metrics: Arc<AgentMetrics>,
    ) -> Arc<Self> {
        let bucket = Bucket::new(None);
        Arc::new(Self { hub, identity, store, bucket, metrics, turns: Arc::default() })
    }

    /// The limit of uploads, over all neighbours. It may change at any time.
    pub(crate) fn upload_bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// Serves until `shutdown`.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener, shutdown: CancellationToken) {
        let places = ConnectionPlaces::new(CONNECTIONS, Loses::Oldest);
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let place = places.take(from.ip().into());
                    let (server, shutdown) = (Arc::clone(&self), shutdown.clone());
                    tokio::spawn(shutdown.run_until_cancelled_owned(server.serve_connection(stream, place)));
                }
                Err(error) => {
                    tracing::debug!(%error, "a neighbour's connection was not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn serve_connection(self: Arc<Self>, stream: TcpStream, place: ConnectionPlace) {
        let course = Arc::new(ReaderConnection::default());
        tokio::select! {
            () = Arc::clone(&self).converse(stream, Arc::clone(&course)) => {}
            () = course.end.cancelled() => {}
            () = hold_until_admitted(place, &course) => {}
            () = self.wait_for_turn_end(&course) => {}
        }
    }

    async fn converse(self: Arc<Self>, stream: TcpStream, course: Arc<ReaderConnection>) {
        let _ = stream.set_nodelay(true);
        let tls = self.identity.watch().borrow().peers.server.clone();
        let Ok(Ok(stream)) = timeout(REQUEST, TlsAcceptor::from(tls).accept(stream)).await else { return };
        let certificates = stream.get_ref().1.peer_certificates();
        let Some(reader) = certificates.and_then(|all| node_of(all.first()?)) else { return };
        let service = hyper::service::service_fn(|request| {
            let (server, reader, course) = (Arc::clone(&self), reader.clone(), Arc::clone(&course));
            async move { Ok::<_, Infallible>(server.answer_request(&reader, &request, course).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST)
            .keep_alive(false)
            .max_buf_size(BUFFERED)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = connection.await {
            tracing::debug!(%reader, %error, "a neighbour's connection ended");
        }
    }

    /// Waits until the ticket of a reader has expired, or it has lost its turn.
    async fn wait_for_turn_end(&self, course: &ReaderConnection) {
        course.admitted.cancelled().await;
        loop {
            sleep(LOOK).await;
            let is_expired = self.hub.clock.now().as_secs() >= course.expires.load(Ordering::Relaxed);
            if is_expired || course.pace().is_too_slow(self.turns.are_wanted(), Instant::now()) {
                tracing::debug!(is_expired, "a neighbour's turn is over");
                return;
            }
        }
    }

    async fn answer_request(
        self: Arc<Self>,
        reader: &NodeName,
        request: &Request<Incoming>,
        course: Arc<ReaderConnection>,
    ) -> Response<BlobBody> {
        let headers = request.headers();
        let Some(digest) = request.uri().path().strip_prefix(BLOBS_PATH).filter(|digest| is_digest(digest))
        else {
            return refuse(StatusCode::BAD_REQUEST);
        };
        if request.method() != Method::GET {
            return refuse(StatusCode::METHOD_NOT_ALLOWED);
        }
        let now = self.hub.clock.now().as_secs();
        let ticket = request_ticket(headers).unwrap_or_default();
        let Some(expires) = self.hub.keys.check(ticket, (reader, &self.identity.node()), digest, now) else {
            tracing::info!(%reader, digest, "a neighbour without a valid ticket was refused");
            return refuse(StatusCode::FORBIDDEN);
        };
        course.expires.store(expires, Ordering::Relaxed);
        course.admitted.cancel();
        let version = format!("\"{}\"", self.hub.arrivals.version(digest));
        if headers.get(IF_MATCH).is_some_and(|before| before.as_bytes() != version.as_bytes()) {
            return refuse(StatusCode::PRECONDITION_FAILED);
        }
        let Some(mut turn) = self.turns.enter_queue(reader, digest, &course.end) else {
            return refuse(StatusCode::SERVICE_UNAVAILABLE);
        };
        let source = match timeout(TURN, self.find(digest)).await {
            Ok(Ok(source)) => source,
            Ok(Err(status)) => return refuse(status),
            Err(_) => return refuse(StatusCode::SERVICE_UNAVAILABLE),
        };
        let size = source.size();
        let Some(offset) = range_offset(headers).filter(|offset| *offset < size) else {
            return refuse(StatusCode::RANGE_NOT_SATISFIABLE);
        };
        let is_busy = matches!(source, ServedBlob::Store { .. }) && is_busy();
        if !turn.wait_to_serve(is_busy).await {
            return refuse(StatusCode::SERVICE_UNAVAILABLE);
        }
        tracing::debug!(%reader, digest, offset, "serving a neighbour");
        let mut response = Response::builder()
            .status(StatusCode::PARTIAL_CONTENT)
            .header(CONTENT_RANGE, format!("bytes {offset}-{}/{size}", size - 1))
            .header(CONTENT_LENGTH, size - offset);
        if matches!(source, ServedBlob::Arrival(_)) {
            response = response.header(ETAG, version);
        }
        let body = BodyExt::boxed_unsync(StreamBody::new(self.stream_pieces(source, offset, (course, turn))));
        response.body(body).unwrap_or_else(|_| refuse(StatusCode::INTERNAL_SERVER_ERROR))
    }

    /// Finds a blob that a ticket may open. One that a pull seeks may have no bytes yet: then this waits for them, also where
    /// the store has the blob, since that may be another repository's.
    async fn find(&self, digest: &str) -> Result<ServedBlob, StatusCode> {
        let check = |repository: &str| {
            let may_serve = self.hub.may_serve(digest, repository);
            may_serve.then_some(()).ok_or(StatusCode::SERVICE_UNAVAILABLE)
        };
        while let Some(repository) = self.hub.sought_from(digest) {
            check(&repository)?;
            if let Some(arrival) = self.hub.arrivals.get(digest) {
                return Ok(ServedBlob::Arrival(arrival));
            }
            sleep(LOOK).await;
        }
        let stored = self.store.look_up_blob(digest).await;
        let Some(FoundBlob { size, fetched_from: Some(repository) }) = stored else {
            return Err(StatusCode::NOT_FOUND);
        };
        check(&repository)?;
        Ok(ServedBlob::Store { digest: digest.to_owned(), size })
    }

    fn stream_pieces(
        self: Arc<Self>,
        source: ServedBlob,
        offset: u64,
        (course, turn): (Arc<ReaderConnection>, ReaderTurn),
    ) -> impl Stream<Item = std::io::Result<Frame<Bytes>>> + Send + 'static {
        stream::try_unfold((self, source, offset, turn), move |(server, mut source, offset, turn)| {
            let course = Arc::clone(&course);
            async move {
                if offset >= source.size() {
                    return Ok(None);
                }
                course.pace().note_taken(Instant::now());
                let piece = server.read_piece(&mut source, offset).await;
                let gone = || std::io::Error::other("no more bytes of the blob");
                let piece = piece.filter(|piece| !piece.is_empty()).ok_or_else(gone)?;
                server.bucket.take(piece.len()).await;
                let bytes = piece.len() as u64;
                server.metrics.count_served(bytes);
                course.pace().note_offered(bytes, Instant::now());
                Ok(Some((Frame::data(Bytes::from(piece)), (server, source, offset + bytes, turn))))
            }
        })
    }

    async fn read_piece(&self, source: &mut ServedBlob, offset: u64) -> Option<Vec<u8>> {
        match source {
            ServedBlob::Store { digest, size } => {
                self.store.read_piece(digest, offset, PIECE.min(*size - offset)).await
            }
            ServedBlob::Arrival(arrival) => {
                let bytes = usize::try_from(arrival.bytes_beyond(offset).await?.min(PIECE)).ok()?;
                let file = Arc::clone(&arrival.file);
                let reading = spawn_blocking(move || {
                    let mut piece = vec![0; bytes];
                    file.read_exact_at(&mut piece, offset).map(|()| piece)
                });
                reading.await.ok()?.ok()
            }
        }
    }
}

/// Waits until a connection has lost its place. One with a ticket needs none: turns bound those.
async fn hold_until_admitted(mut place: ConnectionPlace, course: &ReaderConnection) {
    tokio::select! {
        () = place.wait_for_loss() => return,
        () = course.admitted.cancelled() => drop(place),
    }
    std::future::pending::<()>().await;
}

/// Whether the processors have more to do than they can.
fn is_busy() -> bool {
    // No machine has so many processors that this would be imprecise.
    #[allow(clippy::cast_precision_loss)]
    read_load().is_some_and(|(load, processors)| load > 2.0 * processors as f64)
}

fn refuse(status: StatusCode) -> Response<BlobBody> {
    let body = Full::new(Bytes::new()).map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

/// The ticket of a request.
fn request_ticket(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Ticket ")
}

/// The first byte of `bytes=N-`; 0 where there is no range.
fn range_offset(headers: &HeaderMap) -> Option<u64> {
    let Some(range) = headers.get(RANGE) else { return Some(0) };
    range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}
