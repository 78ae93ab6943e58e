//! Reading a blob from a neighbour.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, ETAG, HOST, HeaderValue, IF_MATCH, RANGE};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use prepull_api::sites::{BLOBS_PATH, BlobPeer, MAX_ADDRESSES, PeerFault, is_address};
use prepull_registry::BlobStream;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

/// Limit for a connection in the LAN. Where clients are isolated from each other, nothing answers at all.
const CONNECT: Duration = Duration::from_secs(3);
/// Limit for the handshake and the beginning of the answer: the neighbour may be busy, and says so within less.
const ANSWER: Duration = Duration::from_secs(20);

/// A blob that arrives from a neighbour. The connection ends with it.
#[derive(Debug)]
pub(crate) struct PeerBlob {
    pub(crate) stream: BlobStream,
    /// The version of its bytes, where the neighbour is still receiving them.
    pub(crate) version: Option<HeaderValue>,
    /// Ends it when dropped.
    pub(crate) connection: AbortOnDropHandle<()>,
}

/// A part of a blob that a neighbour is asked for.
#[derive(Debug)]
pub(crate) struct WantedPart<'a> {
    pub(crate) digest: &'a str,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    /// The version of the bytes before the offset, if the neighbour has sent them.
    pub(crate) version: Option<&'a HeaderValue>,
}

/// Asks a neighbour for the rest of a blob. [`PeerFault::Damaged`]: it has found out that the bytes before are wrong.
pub(crate) async fn request_blob(
    tls: &Arc<ClientConfig>,
    peer: &BlobPeer,
    wanted: &WantedPart<'_>,
) -> Result<PeerBlob, (PeerFault, String)> {
    let mut last = (PeerFault::Unreachable, "it has no address".to_owned());
    for address in peer.addresses.iter().take(MAX_ADDRESSES).filter(|address| is_address(address)) {
        let stream = match timeout(CONNECT, TcpStream::connect(address.as_str())).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                last.1 = format!("{address}: {error}");
                continue;
            }
            Err(_) => {
                last.1 = format!("{address}: no connection within {} s", CONNECT.as_secs());
                continue;
            }
        };
        let asking = ask(tls, peer, stream, wanted);
        match timeout(ANSWER, asking).await {
            Ok(Ok(blob)) => return Ok(blob),
            Ok(Err((fault, why))) => last = (fault, format!("{address}: {why}")),
            Err(_) => last.1 = format!("{address}: no answer within {} s", ANSWER.as_secs()),
        }
    }
    Err(last)
}

async fn ask(
    tls: &Arc<ClientConfig>,
    peer: &BlobPeer,
    stream: TcpStream,
    &WantedPart { digest, offset, size, version }: &WantedPart<'_>,
) -> Result<PeerBlob, (PeerFault, String)> {
    let unreachable = |error: &dyn std::fmt::Display| (PeerFault::Unreachable, error.to_string());
    let name = ServerName::try_from(peer.node.0.clone()).map_err(|error| unreachable(&error))?;
    let stream = TlsConnector::from(Arc::clone(tls))
        .connect(name, stream)
        .await
        .map_err(|error| unreachable(&error))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| unreachable(&error))?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // Its error is that of the body.
        let _ = connection.await;
    }));
    let mut request = Request::get(format!("{BLOBS_PATH}{digest}"))
        .header(HOST, "neighbour")
        .header(AUTHORIZATION, format!("Ticket {}", peer.ticket))
        .header(RANGE, format!("bytes={offset}-"));
    if let Some(version) = version {
        request = request.header(IF_MATCH, version);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|error| unreachable(&error))?;
    let response = sender.send_request(request).await.map_err(|error| unreachable(&error))?;
    let fault = match response.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
            let version = response.headers().get(ETAG).cloned();
            let stream = BlobStream::of_answer(response, &format!("neighbour {}", peer.node), (offset, size))
                .map_err(|error| unreachable(&error))?;
            return Ok(PeerBlob { stream, version, connection });
        }
        StatusCode::SERVICE_UNAVAILABLE => PeerFault::Busy,
        StatusCode::NOT_FOUND => PeerFault::Gone,
        StatusCode::PRECONDITION_FAILED if version.is_some() => PeerFault::Damaged,
        _ => PeerFault::Refused,
    };
    Err((fault, format!("it answers {}", response.status())))
}
