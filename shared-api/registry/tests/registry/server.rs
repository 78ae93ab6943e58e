//! A server that answers with raw bytes, and the client that asks it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prepull_api::credentials::RegistryCredential;
use prepull_api::image::Reference;
use prepull_registry::{
    BlobStream, ClientSettings, HostsFiles, Proxies, RegistryClient, RegistryError, Repository,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// A request as the server saw it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// What the server does with a connection.
pub(crate) enum Reply {
    /// Sends these bytes and closes.
    Raw(Vec<u8>),
    /// Sends these bytes, and then others without an end.
    Endless(Vec<u8>),
    /// Sends these bytes, and then a single one each 29 seconds.
    Trickle(Vec<u8>),
}

/// A response with a body and its correct length.
pub(crate) fn reply(status: u16, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Reply {
    let body = body.as_ref();
    let mut lines = vec![format!("HTTP/1.1 {status} Status"), "Connection: close".to_owned()];
    let own_length = headers.iter().any(|(name, _)| matches!(*name, "Content-Length" | "Transfer-Encoding"));
    if !own_length {
        lines.push(format!("Content-Length: {}", body.len()));
    }
    lines.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
    let mut bytes = (lines.join("\r\n") + "\r\n\r\n").into_bytes();
    bytes.extend_from_slice(body);
    Reply::Raw(bytes)
}

/// A server; ends when dropped.
pub(crate) struct Server {
    pub(crate) at: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    serving: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Server {
    pub(crate) async fn start(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with(None, answer).await
    }

    pub(crate) async fn start_with(
        tls: Option<TlsAcceptor>,
        answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let answer = Arc::new(answer);
        let serving = tokio::spawn({
            let seen = Arc::clone(&seen);
            async move {
                loop {
                    let (tcp, _) = listener.accept().await.unwrap();
                    let (seen, answer, tls) = (Arc::clone(&seen), Arc::clone(&answer), tls.clone());
                    tokio::spawn(async move {
                        match tls {
                            None => serve(tcp, &seen, &*answer).await,
                            Some(tls) => {
                                if let Ok(io) = tls.accept(tcp).await {
                                    serve(io, &seen, &*answer).await;
                                }
                            }
                        }
                    });
                }
            }
        });
        Self { at, seen, serving }
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

async fn serve(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    seen: &Mutex<Vec<Seen>>,
    answer: &(dyn Fn(&Seen) -> Reply + Send + Sync),
) {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
        if io.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
        if !bytes[0].is_ascii_uppercase() {
            // The beginning of TLS: so answer those who do not expect it.
            let _ = io.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
            return;
        }
    };
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let mut lines = text.lines();
    let mut first = lines.next().unwrap().split(' ').map(str::to_owned);
    let pairs = lines.filter_map(|line| line.split_once(": "));
    let headers: BTreeMap<String, String> =
        pairs.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while bytes.len() < head + length {
        if io.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let body = String::from_utf8_lossy(&bytes[head..]).into_owned();
    let one = Seen { method: first.next().unwrap(), target: first.next().unwrap(), headers, body };
    seen.lock().unwrap().push(one.clone());
    let answer = answer(&one);
    let (Reply::Raw(start) | Reply::Endless(start) | Reply::Trickle(start)) = &answer;
    let (endless, trickles) = (matches!(answer, Reply::Endless(_)), matches!(answer, Reply::Trickle(_)));
    // The client may hang up at any time.
    let mut fine = io.write_all(start).await.is_ok();
    let more = vec![b'x'; 64 << 10];
    while endless && fine {
        fine = io.write_all(&more).await.is_ok();
    }
    while trickles && fine {
        tokio::time::sleep(Duration::from_secs(29)).await;
        fine = io.write_all(b"x").await.is_ok();
    }
    let _ = io.shutdown().await;
    // Closing with unread data resets the connection, and the client might lose the response.
    let _ = io.read_to_end(&mut Vec::new()).await;
}

/// A client with its hosts.toml files in this directory.
pub(crate) fn client(hosts: &Path) -> RegistryClient {
    client_with(hosts, Proxies::default())
}

pub(crate) fn client_with(hosts: &Path, proxies: Proxies) -> RegistryClient {
    RegistryClient::new(ClientSettings {
        hosts: HostsFiles { dirs: vec![hosts.to_owned()], ..HostsFiles::default() },
        user_agent: "test/1".to_owned(),
        proxies,
        time: None,
    })
}

pub(crate) fn repository(
    client: &RegistryClient,
    image: &str,
    credential: Option<&RegistryCredential>,
) -> Repository {
    client.repository(&Reference::parse(image).unwrap().normalized(), credential).unwrap()
}

/// Writes the hosts.toml of a registry.
pub(crate) fn write_hosts(root: &Path, registry: &str, text: &str) {
    let dir = root.join(registry);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("hosts.toml"), text).unwrap();
}

/// The repository `team/app` of a registry that is at this server.
pub(crate) fn at(server: &Server) -> Repository {
    at_with(server, None)
}

pub(crate) fn at_with(server: &Server, credential: Option<&RegistryCredential>) -> Repository {
    let hosts = tempfile::tempdir().unwrap();
    write_hosts(hosts.path(), "r.example", &format!("server = \"http://{}\"\n", server.at));
    repository(&client(hosts.path()), "r.example/team/app:v1", credential)
}

/// All of a blob, or the error in the middle of it, with what has arrived before.
pub(crate) async fn drain(mut stream: BlobStream) -> (Vec<u8>, Option<RegistryError>) {
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        match chunk {
            Ok(chunk) => bytes.extend_from_slice(&chunk),
            Err(error) => return (bytes, Some(error)),
        }
    }
    (bytes, None)
}

/// Proves that what the edge awaits in its tasks may move between threads.
pub(crate) fn is_send<T: Send>(value: T) -> T {
    value
}
