//! An edge that means ill: a good certificate, and no manners.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, SUBPROTOCOL, TUNNEL_PATH, decode, encode};
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

use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::sim::certificates::Authority;

/// For a step of the handshake, while the cloud is under attack.
const SOON: Duration = Duration::from_secs(20);

/// A node's certificate, and where the cloud is.
#[derive(Clone)]
pub struct Intruder {
    tls: Arc<ClientConfig>,
    addr: SocketAddr,
}

/// One session of an intruder, raw.
pub struct Wire(WebSocketStream<TlsStream<TcpStream>>);

impl Intruder {
    /// With the certificate of this node, signed with the cloud's own CA.
    pub async fn of(cluster: &Cluster, cloud: &Cloud, node: &str) -> Result<Self> {
        let (authority, key) = (Authority::of(cluster).await?, KeyPair::generate()?);
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes())?)?;
        let chain = vec![CertificateDer::from_pem_slice(authority.certificate(node, &key)?.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
        let config =
            ClientConfig::builder().with_root_certificates(roots).with_client_auth_cert(chain, key)?;
        Ok(Self { tls: Arc::new(config), addr: cloud.tunnel_addr() })
    }

    /// TCP, and not a byte.
    pub async fn knock(&self) -> Result<TcpStream> {
        Ok(timeout(SOON, TcpStream::connect(self.addr)).await??)
    }

    /// TLS, and not a byte within.
    pub async fn shake(&self) -> Result<TlsStream<TcpStream>> {
        let stream = self.knock().await?;
        let name = ServerName::try_from("localhost")?;
        Ok(timeout(SOON, TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream)).await??)
    }

    /// The websocket, and not a word.
    pub async fn dial(&self) -> Result<Wire> {
        let stream = self.shake().await?;
        let mut request = format!("wss://{}{TUNNEL_PATH}", self.addr).into_client_request()?;
        request.headers_mut().insert("Sec-WebSocket-Protocol", SUBPROTOCOL.parse()?);
        Ok(Wire(timeout(SOON, client_async(request, stream)).await??.0))
    }

    /// A session: it has said `Hello`, and was welcomed.
    pub async fn enter(&self) -> Result<Wire> {
        let mut wire = self.dial().await?;
        wire.say(&EdgeMessage::Hello(Hello::default())).await?;
        match wire.hear().await? {
            CloudMessage::Welcome(_) => Ok(wire),
            other => bail!("it was not welcomed: {other:?}"),
        }
    }
}

impl Wire {
    /// A message, or the like.
    pub async fn say(&mut self, message: &EdgeMessage) -> Result<()> {
        self.send(Message::text(encode(message)?)).await
    }

    /// The same again and again, as fast as it goes, for so long or until the cloud hangs up. Nothing is read.
    pub async fn repeat(&mut self, message: &EdgeMessage, time: Duration) {
        let _ = timeout(time, async { while self.say(message).await.is_ok() {} }).await;
    }

    /// A frame.
    pub async fn send(&mut self, frame: Message) -> Result<()> {
        Ok(timeout(SOON, self.0.send(frame)).await??)
    }

    /// The next message.
    pub async fn hear(&mut self) -> Result<CloudMessage> {
        loop {
            match timeout(SOON, self.0.next()).await?.context("the connection ended")?? {
                Message::Text(text) => return Ok(decode(&text)?),
                Message::Ping(_) | Message::Pong(_) => {}
                other => bail!("no message: {other:?}"),
            }
        }
    }

    /// Reads on until the cloud hangs up: the reason that it gave, if it did. Pings are no sign that it will.
    pub async fn end(&mut self) -> Result<String> {
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
        timeout(SOON, end).await.context("the cloud does not hang up")
    }
}
