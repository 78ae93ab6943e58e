//! A hostile edge with a valid certificate, which violates the protocol.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use prepull_api::wire::{
    CloudMessage, EdgeMessage, Hello, SUBPROTOCOL, TUNNEL_PATH, decode_frame, encode_frame,
};
use rcgen::KeyPair;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::cleanup::SOON;
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::sim::certificates::CloudAuthority;

/// Checks that an attempt was refused with this text.
pub fn refusal<T>(outcome: Result<T>, expected: &str) -> Result<()> {
    let Err(error) = outcome else { bail!("it was let in, and not refused with {expected:?}") };
    let text = format!("{error:#}");
    ensure!(text.contains(expected), "refused, but not with {expected:?}: {text}");
    Ok(())
}

/// A client with the certificate of a node, which opens connections to any depth of the handshake.
#[derive(Clone)]
pub struct Intruder {
    tls: Arc<ClientConfig>,
    addr: SocketAddr,
}

/// One websocket of an intruder, without the limits of the real edge.
pub struct Wire(WebSocketStream<TlsStream<TcpStream>>);

impl Intruder {
    /// Creates an intruder with a certificate for the node, signed by the cloud's own CA.
    pub async fn of(cluster: &Cluster, cloud: &Cloud, node: &str) -> Result<Self> {
        let (authority, key) = (CloudAuthority::from_cluster(cluster).await?, KeyPair::generate()?);
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes())?)?;
        let chain = vec![CertificateDer::from_pem_slice(authority.node_certificate(node, &key)?.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
        let config =
            ClientConfig::builder().with_root_certificates(roots).with_client_auth_cert(chain, key)?;
        Ok(Self { tls: Arc::new(config), addr: cloud.tunnel_addr() })
    }

    /// Opens a TCP connection and sends nothing.
    pub async fn connect_tcp(&self) -> Result<TcpStream> {
        Ok(timeout(SOON, TcpStream::connect(self.addr)).await??)
    }

    /// Opens a TLS connection and sends nothing through it.
    pub async fn connect_tls(&self) -> Result<TlsStream<TcpStream>> {
        let stream = self.connect_tcp().await?;
        let name = ServerName::try_from("localhost")?;
        Ok(timeout(SOON, TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream)).await??)
    }

    /// Opens a websocket and sends no message.
    pub async fn open_websocket(&self) -> Result<Wire> {
        let stream = self.connect_tls().await?;
        let mut request = format!("wss://{}{TUNNEL_PATH}", self.addr).into_client_request()?;
        request.headers_mut().insert("Sec-WebSocket-Protocol", SUBPROTOCOL.parse()?);
        Ok(Wire(timeout(SOON, client_async(request, stream)).await??.0))
    }

    /// Opens a session: sends `Hello` and waits for `Welcome`.
    pub async fn open_session(&self) -> Result<Wire> {
        self.open_session_with(Hello::default()).await
    }

    /// Opens a session with this `Hello`.
    pub async fn open_session_with(&self, hello: Hello) -> Result<Wire> {
        let mut wire = self.open_websocket().await?;
        wire.send_message(&EdgeMessage::Hello(Box::new(hello))).await?;
        match wire.receive().await? {
            CloudMessage::Welcome(_) => Ok(wire),
            other => bail!("the cloud answered Hello with {other:?} instead of Welcome"),
        }
    }
}

impl Wire {
    /// Sends a message.
    pub async fn send_message(&mut self, message: &EdgeMessage) -> Result<()> {
        self.send_frame(Message::text(encode_frame(message)?)).await
    }

    /// Sends the same message repeatedly, as fast as possible, until the time is up or the cloud closes the connection.
    /// Reads nothing.
    pub async fn send_repeatedly(&mut self, message: &EdgeMessage, time: Duration) {
        let _ = timeout(time, async { while self.send_message(message).await.is_ok() {} }).await;
    }

    /// Sends a frame.
    pub async fn send_frame(&mut self, frame: Message) -> Result<()> {
        Ok(timeout(SOON, self.0.send(frame)).await??)
    }

    /// Receives the next message.
    pub async fn receive(&mut self) -> Result<CloudMessage> {
        loop {
            match timeout(SOON, self.0.next()).await?.context("the connection ended")?? {
                Message::Text(text) => return Ok(decode_frame(&text)?),
                Message::Ping(_) | Message::Pong(_) => {}
                other => bail!("expected a message, received {other:?}"),
            }
        }
    }

    /// Reads until the cloud closes the connection, and returns its reason; empty if it gave none.
    pub async fn read_to_close(&mut self) -> Result<String> {
        let end = async {
            loop {
                match self.0.next().await {
                    Some(Ok(Message::Close(frame))) => {
                        return frame.map(|frame| frame.reason.as_str().to_owned()).unwrap_or_default();
                    }
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return String::new(),
                }
            }
        };
        timeout(SOON, end).await.context("the cloud does not close the connection")
    }
}
