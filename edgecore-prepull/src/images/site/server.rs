//! Serving blobs to neighbours: those that the cloud has given a ticket for, straight from containerd's content store.

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_RANGE, HeaderMap, RANGE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prepull_api::sites::{BLOBS_PATH, is_digest};
use prepull_api::task::NodeName;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::hub::Hub;
use crate::cloud::identity::{Identity, node_of};
use crate::images::containerd::ContentStore;
use crate::images::rate::Bucket;
use crate::metrics::Metrics;
use crate::tasks::checks::read_load;

/// Blobs that are served at a time, to as many neighbours as the cloud sends here, and some that it has sent before. Each
/// takes up to a MiB.
const SERVED: usize = 6;
/// The same on a machine whose processors have more to do than they can: its own work comes first.
const SERVED_WHEN_BUSY: usize = 2;
/// Connections at a time, those included that wait for their turn or are in their handshake.
const CONNECTIONS: usize = 32;
/// Limit for a handshake and a request.
const REQUEST: Duration = Duration::from_secs(5);
/// Longest wait for a turn. The neighbour waits longer for an answer, and asks somebody else then.
const TURN: Duration = Duration::from_secs(8);
/// Longest time in which a neighbour takes no bytes at all.
const STUCK: Duration = Duration::from_secs(300);
/// Bytes that are read from the store at a time.
const PIECE: u64 = 256 * 1024;
/// Wait after a connection could not be accepted: most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The permission to be served, until it is dropped.
type Turn = Vec<OwnedSemaphorePermit>;
type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Serves neighbours.
pub(crate) struct Server {
    hub: Arc<Hub>,
    identity: Identity,
    store: Arc<ContentStore>,
    /// What may be uploaded.
    bucket: Bucket,
    metrics: Arc<Metrics>,
    turns: Arc<Semaphore>,
    /// Those who are served while the machine is busy need one of these as well.
    turns_when_busy: Arc<Semaphore>,
}

impl Server {
    pub(crate) fn new(
        hub: Arc<Hub>,
        identity: Identity,
        store: Arc<ContentStore>,
        max_rate: Option<NonZeroU64>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let [turns, turns_when_busy] =
            [SERVED, SERVED_WHEN_BUSY].map(|turns| Arc::new(Semaphore::new(turns)));
        let bucket = Bucket::new(max_rate);
        Arc::new(Self { hub, identity, store, bucket, metrics, turns, turns_when_busy })
    }

    /// Serves until `shutdown`.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener, shutdown: CancellationToken) {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    // Whoever comes beyond is disconnected, and asks somebody else.
                    let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
                    let (server, shutdown) = (Arc::clone(&self), shutdown.clone());
                    tokio::spawn(async move {
                        let _place = place;
                        shutdown.run_until_cancelled(server.connection(stream)).await;
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "a neighbour's connection was not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let tls = self.identity.watch().borrow().peers.server.clone();
        let Ok(Ok(stream)) = timeout(REQUEST, TlsAcceptor::from(tls).accept(stream)).await else { return };
        let reader = stream.get_ref().1.peer_certificates().and_then(|chain| node_of(chain.first()?));
        let Some(reader) = reader else { return };
        let progress = Arc::new(AtomicU64::new(0));
        let service = hyper::service::service_fn(|request| {
            let (server, reader, progress) = (Arc::clone(&self), reader.clone(), Arc::clone(&progress));
            async move { Ok::<_, Infallible>(server.answer(&reader, &request, progress).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            ended = connection => if let Err(error) = ended {
                tracing::debug!(%reader, %error, "a neighbour's connection ended");
            },
            () = wait_until_stuck(&progress) => tracing::debug!(%reader, "a neighbour takes no bytes any more"),
        }
    }

    async fn answer(
        self: Arc<Self>,
        reader: &NodeName,
        request: &Request<Incoming>,
        progress: Arc<AtomicU64>,
    ) -> Response<Body> {
        let Some(digest) = request.uri().path().strip_prefix(BLOBS_PATH).filter(|digest| is_digest(digest))
        else {
            return refuse(StatusCode::BAD_REQUEST);
        };
        if request.method() != Method::GET {
            return refuse(StatusCode::METHOD_NOT_ALLOWED);
        }
        let now = self.hub.clock.now().as_secs();
        let ticket = bearer(request.headers()).unwrap_or_default();
        if !self.hub.keys.allow(ticket, (reader, &self.identity.node()), digest, now) {
            tracing::info!(%reader, digest, "a neighbour without a valid ticket was refused");
            return refuse(StatusCode::FORBIDDEN);
        }
        let Some(size) = self.store.blob_size(digest).await else { return refuse(StatusCode::NOT_FOUND) };
        let Some(offset) = offset(request.headers()).filter(|offset| *offset < size) else {
            return refuse(StatusCode::RANGE_NOT_SATISFIABLE);
        };
        let Some(turn) = self.take_turn().await else { return refuse(StatusCode::SERVICE_UNAVAILABLE) };
        tracing::debug!(%reader, digest, offset, "serving a neighbour");
        let range = format!("bytes {offset}-{}/{size}", size - 1);
        let body = BodyExt::boxed_unsync(StreamBody::new(self.pieces(
            digest.to_owned(),
            (offset, size),
            (turn, progress),
        )));
        let response = Response::builder()
            .status(StatusCode::PARTIAL_CONTENT)
            .header(CONTENT_RANGE, range)
            .header(hyper::header::CONTENT_LENGTH, size - offset)
            .body(body);
        response.unwrap_or_else(|_| refuse(StatusCode::INTERNAL_SERVER_ERROR))
    }

    /// A turn to be served, unless there are too many others.
    async fn take_turn(&self) -> Option<Turn> {
        let turns = if is_busy() {
            [Some(&self.turns), Some(&self.turns_when_busy)]
        } else {
            [Some(&self.turns), None]
        };
        let taking = async {
            let mut taken = Vec::new();
            for turns in turns.into_iter().flatten() {
                taken.push(Arc::clone(turns).acquire_owned().await.ok()?);
            }
            Some(taken)
        };
        timeout(TURN, taking).await.ok()?
    }

    fn pieces(
        self: Arc<Self>,
        digest: String,
        (offset, size): (u64, u64),
        (turn, progress): (Turn, Arc<AtomicU64>),
    ) -> impl Stream<Item = std::io::Result<Frame<Bytes>>> + Send + 'static {
        stream::try_unfold((self, offset, turn), move |(server, offset, turn)| {
            let (digest, progress) = (digest.clone(), Arc::clone(&progress));
            async move {
                if offset >= size {
                    return Ok(None);
                }
                let piece = server.store.read_piece(&digest, offset, PIECE.min(size - offset)).await;
                let gone = || std::io::Error::other("the blob is gone");
                let piece = piece.filter(|piece| !piece.is_empty()).ok_or_else(gone)?;
                server.bucket.take(piece.len()).await;
                let bytes = piece.len() as u64;
                server.metrics.count_served(bytes);
                progress.fetch_add(bytes, Ordering::Relaxed);
                Ok(Some((Frame::data(Bytes::from(piece)), (server, offset + bytes, turn))))
            }
        })
    }
}

/// Waits until nothing was sent for a while.
async fn wait_until_stuck(progress: &AtomicU64) {
    let mut before = None;
    loop {
        let now = progress.load(Ordering::Relaxed);
        if before.replace(now) == Some(now) {
            return;
        }
        sleep(STUCK).await;
    }
}

/// Whether the processors have more to do than they can.
fn is_busy() -> bool {
    // No machine has so many processors that this would be imprecise.
    #[allow(clippy::cast_precision_loss)]
    read_load().is_some_and(|(load, processors)| load > 2.0 * processors as f64)
}

fn refuse(status: StatusCode) -> Response<Body> {
    let body = Full::new(Bytes::new()).map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

/// The ticket of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Ticket ")
}

/// The first byte of `bytes=N-`; 0 where there is no range.
fn offset(headers: &HeaderMap) -> Option<u64> {
    let Some(range) = headers.get(RANGE) else { return Some(0) };
    range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}
