//! Serving of requests, with one connection to the API server for each, so that a cut affects exactly one request.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::stream;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;

use super::rules::About;
use super::{Fault, Shared, Verb, lock};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, BoxError>;

/// The API server behind the proxy.
pub(super) struct Upstream {
    authority: String,
    host: ServerName<'static>,
    tls: TlsConnector,
}

impl Upstream {
    /// Reads address and CA from the cluster of a kubeconfig.
    pub(super) fn of(cluster: &kube::config::Cluster) -> Result<Self> {
        let server: http::Uri = cluster.server.as_deref().unwrap_or_default().parse()?;
        let host = server.host().context("the kubeconfig's server has no host")?;
        let authority = format!("{host}:{}", server.port_u16().unwrap_or(443));
        let pem = match (&cluster.certificate_authority_data, &cluster.certificate_authority) {
            (Some(data), _) => STANDARD.decode(data)?,
            (None, Some(file)) => std::fs::read(file).with_context(|| file.clone())?,
            (None, None) => anyhow::bail!("the kubeconfig has no certificate authority"),
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            roots.add(certificate?)?;
        }
        let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let host = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
        Ok(Self { authority, host, tls: TlsConnector::from(Arc::new(tls)) })
    }

    async fn ask(&self, request: Request<Incoming>) -> Result<Response<Incoming>> {
        let stream = TcpStream::connect(&self.authority).await?;
        let stream = self.tls.connect(self.host.clone(), stream).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the response, or when its reader is gone.
        tokio::spawn(connection);
        Ok(sender.send_request(request).await?)
    }
}

/// Server side of TLS, from the files of certificate and key.
pub(super) fn tls((certificate, key): &(PathBuf, PathBuf)) -> Result<TlsAcceptor> {
    let read = |file: &Path| std::fs::read(file).with_context(|| file.display().to_string());
    let chain = vec![CertificateDer::from_pem_slice(&read(certificate)?)?];
    let key = PrivateKeyDer::from_pem_slice(&read(key)?)?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

pub(super) async fn serve(
    listener: std::net::TcpListener,
    tls: TlsAcceptor,
    shared: Arc<Shared>,
    stop: CancellationToken,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Some(Ok((stream, _))) = stop.run_until_cancelled(listener.accept()).await {
        let (tls, shared, stop) = (tls.clone(), Arc::clone(&shared), stop.clone());
        let mut silenced = shared.silenced.subscribe();
        tokio::spawn(async move {
            let connection = std::pin::pin!(async {
                let stream = TokioIo::new(tls.accept(stream).await?);
                let service = service_fn(|request| answer(request, &shared));
                // Connections are cut on purpose, or by the client.
                let _ = hyper::server::conn::http1::Builder::new().serve_connection(stream, service).await;
                anyhow::Ok(())
            });
            tokio::select! {
                () = stop.cancelled() => {}
                _ = connection => {}
                // The connection stays open, and we neither read from it nor write to it.
                Ok(()) = silenced.changed() => stop.cancelled().await,
            }
        });
    }
}

/// Answers a request. An error closes the connection without a response.
async fn answer(request: Request<Incoming>, shared: &Shared) -> Result<Response<Body>, BoxError> {
    let about = About::of(request.method(), request.uri());
    let is_watch = about.verb == Verb::Watch;
    let (number, fault) = shared.record(about);
    match fault {
        Some(Fault::Status(status)) => return Ok(refusal(status)?),
        Some(Fault::Cut) => return Err("cut on purpose".into()),
        Some(Fault::Late(..) | Fault::LostAnswer) | None => {}
    }
    let expired = shared.expired.subscribe();
    let response = shared.upstream.ask(request).await?;
    lock(&shared.seen)[number].status = Some(response.status().as_u16());
    match fault {
        Some(Fault::LostAnswer) => {
            response.collect().await?;
            return Err("the response is lost on purpose".into());
        }
        Some(Fault::Late(least, most)) => {
            let delay = lock(&shared.chance).between(least, most);
            tokio::time::sleep(delay).await;
        }
        _ => {}
    }
    Ok(response.map(|body| {
        if is_watch { watched(body, expired) } else { body.map_err(BoxError::from).boxed_unsync() }
    }))
}

/// The body of a watch. It ends when the watch should expire.
fn watched(body: Incoming, expired: watch::Receiver<u64>) -> Body {
    // The third part records whether the last event was complete: a watch never ends in the middle of one.
    let begin = Some((body, expired, true));
    let frames = stream::unfold(begin, async |state| {
        let (mut body, mut expired, whole) = state?;
        tokio::select! {
            biased;
            Ok(()) = expired.changed(), if whole => {
                let event = json!({"type": "ERROR", "object": status_object(410)});
                Some((Ok(Frame::data(Bytes::from(format!("{event}\n")))), None))
            }
            frame = body.frame() => {
                let frame = frame?.map_err(BoxError::from);
                let ends = frame.as_ref().ok().and_then(Frame::data_ref).is_none_or(|data| data.ends_with(b"\n"));
                Some((frame, Some((body, expired, ends))))
            }
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

/// A response that refuses a request, in the form of the API server.
fn refusal(status: u16) -> Result<Response<Body>, http::Error> {
    let mut response =
        Response::builder().status(StatusCode::from_u16(status)?).header("Content-Type", "application/json");
    if status == 429 {
        response = response.header("Retry-After", "1");
    }
    let body = Full::from(status_object(status).to_string());
    response.body(body.map_err(|never| match never {}).boxed_unsync())
}

fn status_object(code: u16) -> serde_json::Value {
    let reason = match code {
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        _ => "Unknown",
    };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "injected by the test", "reason": reason, "code": code,
    })
}
