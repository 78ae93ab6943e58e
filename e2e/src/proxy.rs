//! A bad link, or a bad server: a proxy of our own on loopback, in front of a registry or of the tunnel.
//!
//! It runs on threads of the harness, so that a test which blocks does not block it.

mod http;
mod relay;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::background;
use crate::ports::Port;

/// What it forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// Bytes.
    Tcp,
    /// Plain HTTP/1.1, one request a connection, so that requests can be told apart.
    Http,
}

/// One request that came through an HTTP proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// `GET`, `HEAD`, …
    pub method: String,
    /// Without the query.
    pub path: String,
    /// The request's Range header.
    pub range: Option<String>,
    /// Whether the request had an Authorization header.
    pub authorized: bool,
    /// Of the answer; 0 while there is none.
    pub status: u16,
    /// Of the answer's body, so far.
    pub bytes: u64,
    /// Whether the proxy itself answered: see [`Proxy::fail_next`].
    pub injected: bool,
}

/// How the link is.
#[derive(Clone, Debug, Default)]
struct Link {
    /// Before each piece that goes through.
    delay: Duration,
    /// Bytes a second, of all connections together, towards the client.
    rate: Option<u64>,
    /// Nothing goes through.
    frozen: bool,
}

/// What the proxy answers instead of the server.
struct Fault {
    status: u16,
    times: u32,
    /// Only paths that contain this.
    on: String,
}

/// What the tasks of a proxy share.
struct Shared {
    target: SocketAddr,
    protocol: Protocol,
    link: watch::Sender<Link>,
    /// Of the connections that are open now; replaced when they are cut.
    connections: Mutex<CancellationToken>,
    /// When the link has room again.
    free_at: Mutex<tokio::time::Instant>,
    /// The connection that would carry more bytes than these is cut, once.
    cut_after: Mutex<Option<usize>>,
    faults: Mutex<Vec<Fault>>,
    records: Mutex<Vec<Record>>,
    accepted: AtomicU64,
    bytes: AtomicU64,
}

/// A proxy. Ends when dropped.
pub struct Proxy {
    port: Port,
    shared: Arc<Shared>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl Proxy {
    /// Forwards bytes. For TLS, so for the tunnel.
    pub fn tcp(target: SocketAddr) -> Result<Self> {
        Self::start(target, Protocol::Tcp)
    }

    /// Forwards plain HTTP, records the requests, and can answer them itself.
    pub fn http(target: SocketAddr) -> Result<Self> {
        Self::start(target, Protocol::Http)
    }

    fn start(target: SocketAddr, protocol: Protocol) -> Result<Self> {
        let shared = Shared {
            target,
            protocol,
            link: watch::Sender::new(Link::default()),
            connections: Mutex::default(),
            free_at: Mutex::new(tokio::time::Instant::now()),
            cut_after: Mutex::default(),
            faults: Mutex::default(),
            records: Mutex::default(),
            accepted: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        let proxy = Self { port: Port::reserve()?, shared: Arc::new(shared), listening: Mutex::default() };
        proxy.accept()?;
        Ok(proxy)
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Cuts every connection that is open now. New ones are welcome.
    pub fn cut(&self) {
        std::mem::take(&mut *lock(&self.shared.connections)).cancel();
    }

    /// From now on connections are refused, and those that are open are cut.
    pub fn refuse(&self) {
        if let Some(listening) = lock(&self.listening).take() {
            listening.abort();
            // The port is closed only when the task is gone.
            while !listening.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.cut();
    }

    /// From now on connections are accepted again.
    pub fn accept(&self) -> Result<()> {
        let mut listening = lock(&self.listening);
        if listening.is_none() {
            let runtime = background::runtime()?;
            let _context = runtime.enter();
            let listener = listen(self.addr())?;
            *listening = Some(runtime.spawn(serve(listener, Arc::clone(&self.shared))));
        }
        Ok(())
    }

    /// Nothing goes through, and nobody is told: connections stay open. As a cable that was pulled.
    pub fn freeze(&self) {
        self.shared.link.send_modify(|link| link.frozen = true);
    }

    /// It flows again.
    pub fn thaw(&self) {
        self.shared.link.send_modify(|link| link.frozen = false);
    }

    /// Every piece takes this much longer.
    pub fn delay(&self, delay: Duration) {
        self.shared.link.send_modify(|link| link.delay = delay);
    }

    /// At most so many bytes a second towards the client, all connections together. None: no limit.
    pub fn throttle(&self, bytes_per_second: Option<u64>) {
        self.shared.link.send_modify(|link| link.rate = bytes_per_second.map(|rate| rate.max(1)));
    }

    /// Once: after so many more bytes towards the client, the connection that carries the next one is cut.
    pub fn cut_after(&self, bytes: usize) {
        *lock(&self.shared.cut_after) = Some(bytes);
    }

    /// Answers the next so many requests with this status, without asking the server. HTTP only.
    pub fn fail_next(&self, times: u32, status: u16) {
        self.fail_next_on("", times, status);
    }

    /// As [`Self::fail_next`], for paths that contain `on`: `/manifests/`, `/blobs/`.
    pub fn fail_next_on(&self, on: &str, times: u32, status: u16) {
        lock(&self.shared.faults).push(Fault { status, times, on: on.to_owned() });
    }

    /// Every request so far, in the order of arrival. HTTP only.
    pub fn records(&self) -> Vec<Record> {
        lock(&self.shared.records).clone()
    }

    /// Bytes of the answers' bodies so far, over all requests for a blob. HTTP only.
    pub fn bytes_of(&self, blob: &str) -> u64 {
        lock(&self.shared.records).iter().filter(|r| r.path.ends_with(blob)).map(|r| r.bytes).sum()
    }

    /// Connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Bytes towards the client so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(listening) = lock(&self.listening).take() {
            listening.abort();
        }
        self.cut();
    }
}

/// As after a restart of the proxy: closed connections of before do not keep the port.
fn listen(addr: SocketAddr) -> Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    // More than any test has clients.
    Ok(socket.listen(4096)?)
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(&shared);
        let cut = lock(&shared.connections).clone();
        tokio::spawn(async move {
            // A broken connection is the point of the exercise.
            let _ = cut.run_until_cancelled(forward(client, &shared)).await;
        });
    }
}

async fn forward(client: TcpStream, shared: &Shared) -> Result<()> {
    match shared.protocol {
        Protocol::Tcp => {
            let server = TcpStream::connect(shared.target).await?;
            relay::both_ways(client, server, shared).await
        }
        Protocol::Http => http::forward(client, shared).await,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
