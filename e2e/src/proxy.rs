//! A faulty link or server: a proxy on loopback, in front of a registry or of the tunnel.
//!
//! It runs on threads of the harness, so a blocking test doesn't block it.

mod http;
mod relay;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::background;
use crate::ports::Port;

/// Bytes that a proxy sends ahead of its client. By default it would be some MiB on loopback.
const SEND_BUFFER: u32 = 16 * 1024;

/// The protocol that a proxy forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// Any bytes.
    Tcp,
    /// Plain HTTP/1.1 with one request per connection, so that requests are separate.
    Http,
    /// Any bytes, once the client has asked for a connection with `CONNECT`.
    Connect,
}

/// A request that came through an HTTP proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxiedRequest {
    /// Method, such as `GET`.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Range header of the request.
    pub range: Option<String>,
    /// Whether the request had an Authorization header.
    pub authorized: bool,
    /// Status of the response; 0 while there is none.
    pub status: u16,
    /// Bytes of the response's body so far.
    pub bytes: u64,
    /// Whether the proxy answered instead of the server: see [`Proxy::fail_next`].
    pub injected: bool,
}

/// The state of the link.
#[derive(Clone, Debug, Default)]
struct LinkState {
    /// Delay of each piece.
    delay: Duration,
    /// Limit in bytes a second towards the client, of all connections together.
    rate: Option<u64>,
    /// Whether nothing goes through.
    frozen: bool,
}

/// A response of the proxy instead of the server.
struct InjectedFault {
    status: u16,
    times: u32,
    /// Text that the path must contain.
    on: String,
}

/// The signatures of URLs that lead to a storage: they are numbered.
#[derive(Default)]
struct Signatures {
    issued: AtomicU64,
    /// The last one that's no longer accepted.
    expired: AtomicU64,
}

/// Values of Authorization headers.
#[derive(Default)]
struct Authorizations {
    seen: HashSet<String>,
    /// The expired ones.
    expired: HashSet<String>,
}

/// The state that the tasks of a proxy share.
struct ProxyContext {
    target: SocketAddr,
    protocol: Protocol,
    link: watch::Sender<LinkState>,
    /// Token of the connections that are open now; replaced when they are cut.
    connections: Mutex<CancellationToken>,
    /// Time at which the throttled link can carry the next piece.
    free_at: Mutex<tokio::time::Instant>,
    /// Number of bytes before the next cut. The cut affects the connection that carries the byte after them, once.
    cut_after: Mutex<Option<usize>>,
    faults: Mutex<Vec<InjectedFault>>,
    /// Whether it ignores ranges.
    ignores_ranges: AtomicBool,
    /// Whether it answers with the page of a captive portal.
    is_portal: AtomicBool,
    /// Whether it has the referrers API of OCI 1.1, which the server behind it lacks.
    lists_referrers: AtomicBool,
    /// Path fragments of responses that arrive damaged.
    damaged: Mutex<Vec<String>>,
    /// The storage to which requests for blobs are redirected.
    storage: Mutex<Option<(SocketAddr, Arc<Signatures>)>>,
    /// The signatures issued for this proxy.
    signatures: Arc<Signatures>,
    authorizations: Mutex<Authorizations>,
    records: Mutex<Vec<ProxiedRequest>>,
    accepted: AtomicU64,
    bytes: AtomicU64,
}

/// A proxy in front of one server. Ends when dropped.
pub struct Proxy {
    port: Port,
    shared: Arc<ProxyContext>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl Proxy {
    /// Starts a proxy that forwards any bytes, such as the TLS of the tunnel.
    pub fn for_tcp(target: SocketAddr) -> Result<Self> {
        Self::start(target, Protocol::Tcp)
    }

    /// Starts a proxy that forwards plain HTTP, records requests, and can answer them itself.
    pub fn for_http(target: SocketAddr) -> Result<Self> {
        Self::start(target, Protocol::Http)
    }

    /// Starts a proxy for HTTPS_PROXY, which records the targets of its clients, and connects them all to the target.
    /// It answers other requests with 405.
    pub fn for_connect(target: SocketAddr) -> Result<Self> {
        Self::start(target, Protocol::Connect)
    }

    fn start(target: SocketAddr, protocol: Protocol) -> Result<Self> {
        let shared = ProxyContext {
            target,
            protocol,
            link: watch::Sender::new(LinkState::default()),
            connections: Mutex::default(),
            free_at: Mutex::new(tokio::time::Instant::now()),
            cut_after: Mutex::default(),
            faults: Mutex::default(),
            ignores_ranges: AtomicBool::new(false),
            is_portal: AtomicBool::new(false),
            lists_referrers: AtomicBool::new(false),
            damaged: Mutex::default(),
            storage: Mutex::default(),
            signatures: Arc::default(),
            authorizations: Mutex::default(),
            records: Mutex::default(),
            accepted: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        let proxy = Self { port: Port::reserve()?, shared: Arc::new(shared), listening: Mutex::default() };
        proxy.accept_again()?;
        Ok(proxy)
    }

    /// Address on which the proxy listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Cuts all open connections. New ones are accepted.
    pub fn cut(&self) {
        std::mem::take(&mut *lock(&self.shared.connections)).cancel();
    }

    /// Refuses connections from now on, and cuts those that are open.
    pub fn refuse(&self) {
        self.refuse_more();
        self.cut();
    }

    /// Refuses connections from now on, and keeps those that are open.
    pub fn refuse_more(&self) {
        if let Some(listening) = lock(&self.listening).take() {
            listening.abort();
            // The port is closed only when the task has ended.
            while !listening.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Accepts connections again.
    pub fn accept_again(&self) -> Result<()> {
        let mut listening = lock(&self.listening);
        if listening.is_none() {
            let runtime = background::runtime()?;
            let _context = runtime.enter();
            let listener = listen(self.addr())?;
            *listening = Some(runtime.spawn(accept_clients(listener, Arc::clone(&self.shared))));
        }
        Ok(())
    }

    /// Holds up all bytes while connections stay open, as if a cable had been pulled.
    pub fn freeze(&self) {
        self.shared.link.send_modify(|link| link.frozen = true);
    }

    /// Lets bytes through again after [`Self::freeze`].
    pub fn thaw(&self) {
        self.shared.link.send_modify(|link| link.frozen = false);
    }

    /// Delays every piece by this time.
    pub fn delay(&self, delay: Duration) {
        self.shared.link.send_modify(|link| link.delay = delay);
    }

    /// Limits the bytes a second towards the client, of all connections together. None removes the limit.
    pub fn throttle(&self, bytes_per_second: Option<u64>) {
        self.shared.link.send_modify(|link| link.rate = bytes_per_second.map(|rate| rate.max(1)));
    }

    /// Cuts one connection, once: that which carries the next byte after this many more towards the client.
    pub fn cut_after(&self, bytes: usize) {
        *lock(&self.shared.cut_after) = Some(bytes);
    }

    /// Answers the next `times` requests with this status, without forwarding them. HTTP only.
    pub fn fail_next(&self, times: u32, status: u16) {
        self.fail_next_on("", times, status);
    }

    /// Like [`Self::fail_next`], for paths that contain `on`, such as `/manifests/`.
    pub fn fail_next_on(&self, on: &str, times: u32, status: u16) {
        lock(&self.shared.faults).push(InjectedFault { status, times, on: on.to_owned() });
    }

    /// Always sends whole blobs from now on, even if a range is requested. HTTP only.
    pub fn ignore_ranges(&self) {
        self.shared.ignores_ranges.store(true, Ordering::SeqCst);
    }

    /// Answers each request with a page for people, like a network with a login page. HTTP only.
    pub fn be_portal(&self, is_portal: bool) {
        self.shared.is_portal.store(is_portal, Ordering::SeqCst);
    }

    /// Serves the referrers API of OCI 1.1 from now on, derived from the fallback tags in the registry behind it, and
    /// hides these tags. HTTP only.
    pub fn list_referrers(&self) {
        self.shared.lists_referrers.store(true, Ordering::SeqCst);
    }

    /// Changes the first byte of each response to a path that contains this, from now on. HTTP only.
    pub fn damage(&self, on: &str) {
        lock(&self.shared.damaged).push(on.to_owned());
    }

    /// Redirects requests for blobs from now on, like registries with blobs in a cloud storage: to this proxy, which
    /// then requires a signature that was issued here. HTTP only.
    pub fn redirect_blobs_to(&self, storage: &Self) {
        *lock(&self.shared.storage) = Some((storage.addr(), Arc::clone(&storage.shared.signatures)));
    }

    /// Expires all URLs by which blobs were redirected to this proxy so far: it answers them with 403.
    pub fn expire_urls(&self) {
        let Signatures { issued, expired } = &*self.shared.signatures;
        expired.store(issued.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Expires all tokens and passwords seen so far: they no longer reach the server, so that it answers with its own
    /// challenge. HTTP only.
    pub fn expire_authorizations(&self) {
        let Authorizations { seen, expired } = &mut *lock(&self.shared.authorizations);
        expired.extend(seen.drain());
    }

    /// Forwards all requests again.
    pub fn stop_failing(&self) {
        lock(&self.shared.faults).clear();
    }

    /// All requests so far, in the order of arrival. HTTP and CONNECT only.
    pub fn records(&self) -> Vec<ProxiedRequest> {
        lock(&self.shared.records).clone()
    }

    /// Bytes of all responses to requests for a blob so far. HTTP only.
    pub fn bytes_of(&self, blob: &str) -> u64 {
        lock(&self.shared.records).iter().filter(|r| r.path.ends_with(blob)).map(|r| r.bytes).sum()
    }

    /// Number of connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Number of bytes towards the client so far.
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

/// Listens with SO_REUSEADDR, so that earlier connections don't occupy the port.
fn listen(addr: SocketAddr) -> Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit it: nearly all sent bytes have been read by the other end.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(addr)?;
    // More than any test has clients.
    Ok(socket.listen(4096)?)
}

async fn accept_clients(listener: TcpListener, shared: Arc<ProxyContext>) {
    while let Ok((client, _)) = listener.accept().await {
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(&shared);
        let cut = lock(&shared.connections).clone();
        tokio::spawn(async move {
            // Connections are broken on purpose.
            let _ = cut.run_until_cancelled(forward_connection(client, &shared)).await;
        });
    }
}

async fn forward_connection(client: TcpStream, shared: &ProxyContext) -> Result<()> {
    match shared.protocol {
        Protocol::Tcp => {
            let server = TcpStream::connect(shared.target).await?;
            relay::both_ways(client, server, shared).await
        }
        Protocol::Http => http::forward_request(client, shared).await,
        Protocol::Connect => http::connect_client(client, shared).await,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
