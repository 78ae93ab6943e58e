//! A lying peer: it has a node's certificate and answers with garbage, or with nothing.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::background;
use crate::images::Image;
use crate::network::Outlet;

/// Port of the liar in its box.
const PORT: u16 = 10_007;

/// How a liar answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// With zeros of the right length.
    Garbage,
    /// That it has no such blob.
    NotFound,
    /// With nothing.
    Silence,
}

/// A server of garbage in a box. It ends when dropped.
pub struct Liar {
    lies: Arc<AtomicU64>,
    #[expect(dead_code, reason = "held for its drop")]
    stop: DropGuard,
}

impl Liar {
    /// Starts lying about an image, with the certificate in this state directory.
    pub fn start(outlet: &Outlet, state: &Path, image: &Image) -> Result<Self> {
        Self::answering(outlet, state, image, Answer::Garbage)
    }

    /// Does the same with an answer of the caller's choice.
    pub(super) fn answering(outlet: &Outlet, state: &Path, image: &Image, answer: Answer) -> Result<Self> {
        let pem = |name: &str| state.join("pki").join(name);
        let chain = CertificateDer::pem_file_iter(pem("client.crt"))?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(pem("client.key")).context("the node's key")?;
        let tls = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
        let tls = TlsAcceptor::from(Arc::new(tls));
        let listener = outlet.listen(PORT)?;
        listener.set_nonblocking(true)?;
        let (stop, lies) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
        let (stopped, counted, image) = (stop.clone(), Arc::clone(&lies), Arc::new(image.clone()));
        background::runtime()?.spawn(async move {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            while let Some(Ok((stream, _))) = stopped.run_until_cancelled(listener.accept()).await {
                let (tls, counted, image) = (tls.clone(), Arc::clone(&counted), Arc::clone(&image));
                let stopped = stopped.clone();
                tokio::spawn(stopped.run_until_cancelled_owned(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let answer = service_fn(async |request| {
                        counted.fetch_add(1, Ordering::SeqCst);
                        Ok::<_, Infallible>(match answer {
                            Answer::Garbage => lie(&image, &request),
                            Answer::NotFound => respond(StatusCode::NOT_FOUND, 0),
                            Answer::Silence => std::future::pending().await,
                        })
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    // A client that has seen enough breaks off.
                    let _ = http.serve_connection(TokioIo::new(stream), answer).await;
                }));
            }
        });
        Ok(Self { lies, stop: stop.drop_guard() })
    }

    /// Address for the box to announce to the others.
    pub fn address(outlet: &Outlet) -> SocketAddr {
        (outlet.address(), PORT).into()
    }

    /// Number of requests that it has answered.
    pub fn lies(&self) -> u64 {
        self.lies.load(Ordering::SeqCst)
    }
}

/// Zeros of the right length, with correct headers.
fn lie(image: &Image, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let asked = request.uri().path();
    let blob = image.blobs().iter().find(|blob| asked.contains(blob.as_str()));
    let size = blob.and_then(|blob| std::fs::metadata(image.blob_file(blob)).ok()).map(|found| found.len());
    let Some(size) = size else {
        return respond(StatusCode::NOT_FOUND, 0);
    };
    match range(request.headers(), size) {
        Some((first, last)) => {
            let mut response = respond(StatusCode::PARTIAL_CONTENT, last + 1 - first);
            if let Ok(value) = format!("bytes {first}-{last}/{size}").parse() {
                response.headers_mut().insert(CONTENT_RANGE, value);
            }
            response
        }
        None => respond(StatusCode::OK, size),
    }
}

fn respond(status: StatusCode, length: u64) -> Response<Full<Bytes>> {
    let zeros = vec![0; usize::try_from(length).unwrap_or(0)];
    let mut response = Response::new(Full::new(Bytes::from(zeros)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

/// First and last byte of the range that is asked for.
fn range(headers: &HeaderMap, size: u64) -> Option<(u64, u64)> {
    let (first, last) = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    let first = first.parse().ok().filter(|first| *first < size)?;
    Some((first, last.parse().unwrap_or(size - 1).min(size - 1)))
}
