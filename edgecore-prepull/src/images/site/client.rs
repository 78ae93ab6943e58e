//! Reading a blob from a neighbour.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, HOST, RANGE};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use prepull_api::sites::{BLOBS_PATH, MAX_ADDRESSES, Peer, PeerFault, is_address};
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
    /// Ends it when dropped.
    pub(crate) connection: AbortOnDropHandle<()>,
}

/// Asks a neighbour for a blob of this size, from an offset on.
pub(crate) async fn open(
    tls: &Arc<ClientConfig>,
    peer: &Peer,
    digest: &str,
    (offset, size): (u64, u64),
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
        let asking = ask(tls, peer, stream, digest, (offset, size));
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
    peer: &Peer,
    stream: TcpStream,
    digest: &str,
    (offset, size): (u64, u64),
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
    let request = Request::get(format!("{BLOBS_PATH}{digest}"))
        .header(HOST, "neighbour")
        .header(AUTHORIZATION, format!("Ticket {}", peer.ticket))
        .header(RANGE, format!("bytes={offset}-"))
        .body(Empty::<Bytes>::new())
        .map_err(|error| unreachable(&error))?;
    let response = sender.send_request(request).await.map_err(|error| unreachable(&error))?;
    let fault = match response.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
            let stream = BlobStream::of_answer(response, &format!("neighbour {}", peer.node), (offset, size))
                .map_err(|error| unreachable(&error))?;
            return Ok(PeerBlob { stream, connection });
        }
        StatusCode::SERVICE_UNAVAILABLE => PeerFault::Busy,
        StatusCode::NOT_FOUND => PeerFault::Gone,
        _ => PeerFault::Refused,
    };
    Err((fault, format!("it answers {}", response.status())))
}
