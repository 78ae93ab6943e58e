//! The choice among several addresses of the cloud, and the waits between them.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cloudcore_prepull::edges::tokens::Scope;
use cloudcore_prepull::edges::tunnel;
use edgecore_prepull::cloud::endpoint::RequestError;
use edgecore_prepull::cloud::identity::{Connection, Identity};
use edgecore_prepull::cloud::join::{self, JoinError};
use edgecore_prepull::cloud::tunnel::dial::TunnelSettings;
use prepull_api::wire::{CloudMessage, Hello};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::agent::{Agent, join, join_args};
use crate::cloud::{Cloud, HOUR, SOON, fast};

/// Settings with a backoff beyond any test, so that only the first round connects.
fn no_second_round() -> TunnelSettings {
    TunnelSettings { first_backoff: HOUR, ..TunnelSettings::default() }
}

/// Settings with a short backoff.
fn quick() -> TunnelSettings {
    TunnelSettings { first_backoff: Duration::from_millis(100), ..TunnelSettings::default() }
}

fn url(address: SocketAddr) -> String {
    format!("wss://{address}/v1/edge")
}

/// An address without a listener.
async fn unused_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// An address where a SYN gets no answer, because the listen queue is full and never emptied.
struct Blackblackhole {
    address: SocketAddr,
    _listener: TcpListener,
    _queued: Vec<TcpStream>,
}

impl Blackblackhole {
    async fn open() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut queued = Vec::new();
        while let Ok(stream) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
            queued.push(stream.unwrap());
        }
        Self { address, _listener: listener, _queued: queued }
    }
}

/// A TCP proxy to a cloud that can cut its connections, or freeze them, like a NAT that has dropped them.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    cut: Arc<Notify>,
    pub(crate) frozen: Arc<Notify>,
    serving: JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn to(cloud: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, frozen) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (cuts, freezes) = (Arc::clone(&cut), Arc::clone(&frozen));
        let serving = tokio::spawn(async move {
            let mut held = Vec::new();
            loop {
                let (mut edge, _) = listener.accept().await.unwrap();
                let mut cloud = TcpStream::connect(cloud).await.unwrap();
                tokio::select! {
                    _ = copy_bidirectional(&mut edge, &mut cloud) => {}
                    () = cuts.notified() => {}
                    () = freezes.notified() => held.push((edge, cloud)),
                }
            }
        });
        Self { address, cut, frozen, serving }
    }
}

#[tokio::test]
async fn a_refusing_address_costs_no_wait() {
    let mut cloud = Cloud::start();
    let urls = vec![url(unused_address().await), url(unused_address().await), cloud.tunnel_url()];
    let mut agent = Agent::dialling(&cloud, "edge-1", urls, no_second_round()).await;
    agent.connected(Hello::default()).await;
    cloud.up().await;
}

#[tokio::test]
async fn a_silent_address_costs_the_connect_deadline() {
    assert_eq!(TunnelSettings::default().connect_deadline, Duration::from_secs(5));
    let (mut cloud, blackhole) = (Cloud::start(), Blackblackhole::open().await);
    let settings = TunnelSettings { connect_deadline: Duration::from_millis(300), ..no_second_round() };
    let urls = vec![url(blackhole.address), cloud.tunnel_url()];
    let mut agent = Agent::dialling(&cloud, "edge-1", urls, settings).await;
    let start = Instant::now();
    agent.connected(Hello::default()).await;
    cloud.up().await;
    // A margin, because the agent started before `start` was taken.
    assert!(start.elapsed() > Duration::from_millis(200), "{:?}: was it dialled?", start.elapsed());
}

#[tokio::test]
async fn a_lost_server_means_the_next_address() {
    let mut a = Cloud::start();
    let mut b = a.beside(tunnel::ListenerSettings::default());
    let proxy = Proxy::to(a.tunnel).await;
    let urls = vec![url(proxy.address), b.tunnel_url()];
    let mut agent = Agent::dialling(&a, "edge-1", urls, TunnelSettings::default()).await;
    agent.connected(Hello::default()).await;
    a.up().await;
    proxy.serving.abort();
    agent.disconnected().await;
    let start = Instant::now();
    agent.connected(Hello::default()).await;
    b.up().await;
    // One backoff of at most a second, and some time to connect on a busy machine.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_broken_session_retries_its_address_first() {
    let mut a = Cloud::start();
    let mut b = a.beside(tunnel::ListenerSettings::default());
    let proxy = Proxy::to(a.tunnel).await;
    let urls = vec![url(unused_address().await), url(proxy.address), b.tunnel_url()];
    let mut agent = Agent::dialling(&a, "edge-1", urls, quick()).await;
    for _ in 0..3 {
        agent.connected(Hello::default()).await;
        a.up().await;
        proxy.cut.notify_one();
        agent.disconnected().await;
        a.down().await;
    }
    b.no_event(Duration::ZERO).await;
}

#[tokio::test]
async fn a_hanging_server_is_not_retried_first() {
    let mut a = Cloud::start_with(fast());
    let mut b = a.beside(fast());
    let proxy = Proxy::to(a.tunnel).await;
    let urls = vec![url(proxy.address), b.tunnel_url()];
    let mut agent = Agent::dialling(&a, "edge-1", urls, quick()).await;
    agent.connected(Hello::default()).await;
    a.up().await;
    proxy.frozen.notify_one();
    agent.disconnected().await;
    agent.connected(Hello::default()).await;
    b.up().await;
}

#[tokio::test]
async fn a_goaway_leads_to_the_next_address() {
    const AFTER: Duration = Duration::from_millis(700);
    let mut a = Cloud::start();
    let mut b = a.beside(tunnel::ListenerSettings::default());
    let urls = vec![a.tunnel_url(), b.tunnel_url()];
    let mut agent = Agent::dialling(&a, "edge-1", urls, no_second_round()).await;
    agent.connected(Hello::default()).await;
    a.up().await;
    let goaway = || CloudMessage::Goaway { after: AFTER, reason: "not the leader any more".to_owned() };
    for (from, to) in [(0, 1), (1, 0)] {
        let clouds = [&mut a, &mut b];
        let start = Instant::now();
        clouds[from].sessions.send(&"edge-1".into(), goaway()).unwrap();
        agent.disconnected().await;
        clouds[from].down().await;
        agent.connected(Hello::default()).await;
        clouds[to].up().await;
        assert!(start.elapsed() >= AFTER, "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn joining_tries_and_stores_every_address() {
    let cloud = Cloud::start();
    let stranger = Cloud::start();
    let token = cloud.token(Scope::Node("edge-1".into())).await;
    let dir = tempfile::tempdir().unwrap();
    let mut args = join_args(&cloud, &token, "edge-1", dir.path());
    let free = format!("https://{}", unused_address().await);
    args.enroll_url = vec![free.clone(), stranger.enroll_url(), cloud.enroll_url()];
    args.tunnel_url = vec![url(unused_address().await), cloud.tunnel_url()];
    let (enroll_urls, tunnel_urls) = (args.enroll_url.clone(), args.tunnel_url.clone());
    join::run(args).await.unwrap();
    let connection = Connection::load(dir.path()).unwrap();
    assert_eq!((connection.enroll_urls, connection.tunnel_urls), (enroll_urls.into(), tunnel_urls.into()));

    // Renewing tries each address too.
    let identity = Identity::load(dir.path()).unwrap();
    let certificate = || std::fs::read(dir.path().join("pki/client.crt")).unwrap();
    let before = certificate();
    identity.renew(vec![free.clone(), cloud.enroll_url()]).await.unwrap();
    assert_ne!(certificate(), before);
    let error = identity.renew(vec![free.clone(), stranger.enroll_url()]).await.unwrap_err().to_string();
    let free = free.trim_start_matches("https://");
    assert!(error.contains(free) && error.contains(&stranger.enroll.to_string()), "{error}");
}

#[tokio::test]
async fn a_refusal_is_final_at_every_address() {
    let a = Cloud::start();
    let b = a.beside(tunnel::ListenerSettings::default());
    // Of the same CA, but only the second server knows it: the first server's answer is final.
    let token = b.token(Scope::Fleet).await;
    let join_at = async |urls: Vec<String>, dir: &Path| {
        let mut args = join_args(&a, &token, "edge-1", dir);
        args.enroll_url = urls;
        timeout(SOON, join::run(args)).await.unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let refused = join_at(vec![a.enroll_url(), b.enroll_url()], dir.path()).await;
    assert!(matches!(refused, Err(JoinError::Request(RequestError::Refused { .. }))), "{refused:?}");
    assert!(join(&a, &token, "edge-1", dir.path()).await.is_err());
    join_at(vec![b.enroll_url(), a.enroll_url()], dir.path()).await.unwrap();
}
