//! A tunnel client that sends any message, valid or not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::{SinkExt, Stream, StreamExt};
use prepull_api::enroll::SubjectForm;
use prepull_api::wire::{CloudMessage, EdgeMessage, SUBPROTOCOL, encode_frame};
use rcgen::{CertificateParams, KeyPair};
use rustls::ClientConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::cloud::{Cloud, HOUR, SOON};

pub(crate) type Socket = WebSocketStream<TlsStream<TcpStream>>;

/// A key and its certificate, PEM.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) key: String,
    pub(crate) certificate: String,
}

impl Credentials {
    pub(crate) fn of(cloud: &Cloud, node: &str) -> Self {
        Self::until(cloud, node, HOUR, SystemTime::now())
    }

    /// As release 0.1 would have issued them.
    pub(crate) fn with_old_subject(cloud: &Cloud, node: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let csr = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        let (form, now) = (SubjectForm::Kubelet, SystemTime::now());
        Self {
            certificate: cloud.certificate_of_form(form, &csr, node, now..now + HOUR),
            key: key.serialize_pem(),
        }
    }

    pub(crate) fn until(cloud: &Cloud, node: &str, ttl: Duration, now: SystemTime) -> Self {
        let key = KeyPair::generate().unwrap();
        let csr = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        Self { certificate: cloud.certificate(&csr, node, ttl, now), key: key.serialize_pem() }
    }
}

/// The TLS configuration of a client that trusts the cloud, with or without a certificate.
pub(crate) fn tls(cloud: &Cloud, credentials: Option<&Credentials>) -> Arc<ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cloud.cas().signer().certificate().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    Arc::new(match credentials {
        None => builder.with_no_client_auth(),
        Some(Credentials { key, certificate }) => {
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
            builder
                .with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap())
                .unwrap()
        }
    })
}

/// A whole ClientHello, as an edge begins with.
pub(crate) fn client_hello(cloud: &Cloud) -> Vec<u8> {
    let name = ServerName::try_from("localhost").unwrap();
    let mut client = rustls::ClientConnection::new(tls(cloud, None), name).unwrap();
    let mut hello = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut hello).unwrap();
    }
    hello
}

pub(crate) async fn dial(address: SocketAddr, tls: Arc<ClientConfig>) -> Result<Socket, Error> {
    dial_path(address, tls, "/v1/edge", Some(SUBPROTOCOL)).await
}

pub(crate) async fn dial_path(
    address: SocketAddr,
    tls: Arc<ClientConfig>,
    path: &str,
    subprotocol: Option<&str>,
) -> Result<Socket, Error> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(tls).connect(name, stream).await?;
    let mut request = format!("wss://{address}{path}").into_client_request()?;
    if let Some(subprotocol) = subprotocol {
        request.headers_mut().insert("Sec-WebSocket-Protocol", subprotocol.parse().unwrap());
    }
    Ok(timeout(SOON, client_async(request, stream)).await.unwrap()?.0)
}

/// Dials, sends `Hello` and is welcomed.
pub(crate) async fn session(cloud: &mut Cloud, node: &str) -> Socket {
    let credentials = Credentials::of(cloud, node);
    let mut socket = dial(cloud.tunnel, tls(cloud, Some(&credentials))).await.unwrap();
    say(&mut socket, &EdgeMessage::Hello(Box::default())).await;
    assert!(matches!(heard(&mut socket).await, CloudMessage::Welcome(_)));
    assert_eq!(cloud.up().await.0, node.into());
    socket
}

pub(crate) async fn say(socket: &mut Socket, message: &EdgeMessage) {
    socket.send(Message::text(encode_frame(message).unwrap())).await.unwrap();
}

/// Receives the next message.
pub(crate) async fn heard(socket: &mut Socket) -> CloudMessage {
    loop {
        match timeout(SOON, socket.next()).await.expect("nothing came").unwrap().unwrap() {
            Message::Text(text) => return prepull_api::wire::decode_frame(&text).unwrap(),
            Message::Ping(_) | Message::Pong(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Reads until the server closes, and returns the code and the reason.
pub(crate) async fn closed(
    socket: &mut (impl Stream<Item = Result<Message, Error>> + Unpin),
) -> (u16, String) {
    loop {
        match timeout(SOON, socket.next()).await.expect("it was not closed") {
            Some(Ok(Message::Close(Some(frame)))) => {
                return (frame.code.into(), frame.reason.as_str().to_owned());
            }
            Some(Ok(_)) => {}
            other => panic!("closed without a reason: {other:?}"),
        }
    }
}
