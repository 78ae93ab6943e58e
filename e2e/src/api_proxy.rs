//! A faulty Kubernetes API server: a proxy between cloudcore-prepull and kube-apiserver. It terminates TLS, forwards
//! bearer tokens and watches, and injects a [`Fault`] into a share of the requests.
//!
//! Only cloudcore uses the proxy: a test that creates nodes or reads a status asks the API server itself.

mod rules;
mod serve;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::Kubeconfig;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use rules::Rule;
pub use rules::{About, Requests, Verb};
use serve::Upstream;

use crate::background;
use crate::certs::Authority;
use crate::chance::Chance;
use crate::cluster::Cluster;
use crate::ports::Port;

/// A fault that a request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The proxy answers with this status, without asking the server. A 429 has a Retry-After of one second.
    Status(u16),
    /// The response is delayed, by at least and at most these times.
    Late(Duration, Duration),
    /// The connection is closed, without asking the server.
    Cut,
    /// The server executes the request, but the connection is closed instead of passing on the response.
    LostAnswer,
}

/// A request that came through the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The target of the request.
    pub about: About,
    /// Fault that the request met.
    pub fault: Option<Fault>,
    /// Status of the server's own response, once there is one.
    pub status: Option<u16>,
}

/// A proxy in front of the API server. Ends when dropped.
pub struct ApiProxy {
    _port: Port,
    kubeconfig: PathBuf,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

/// The state that the proxy's tasks share.
struct Shared {
    upstream: Upstream,
    rules: Mutex<Vec<Rule>>,
    chance: Mutex<Chance>,
    seen: Mutex<Vec<Seen>>,
    /// Incremented to expire the open watches.
    expired: watch::Sender<u64>,
    /// Incremented to silence the open connections.
    silenced: watch::Sender<u64>,
}

impl ApiProxy {
    /// Starts a proxy in front of the cluster's API server. `seed` selects the requests that meet a fault, so that the
    /// n-th matching request has the same fate in every run.
    pub fn start(cluster: &Cluster, seed: u64) -> Result<Self> {
        let authority = Authority::new("api-proxy")?;
        let place = authority.place();
        let dir = place.new_dir("api-proxy")?;
        let mut kubeconfig = Kubeconfig::read_from(cluster.cloudcore_kubeconfig())?;
        let entry = kubeconfig.clusters.first_mut().and_then(|named| named.cluster.as_mut());
        let entry = entry.context("the kubeconfig of cloudcore names no cluster")?;
        let upstream = Upstream::of(entry)?;
        let port = Port::reserve()?;
        entry.server = Some(format!("https://{}", port.addr()));
        entry.certificate_authority = Some(authority.file().display().to_string());
        entry.certificate_authority_data = None;
        let file = dir.join("kubeconfig");
        std::fs::write(&file, serde_saphyr::to_string(&kubeconfig)?)?;

        let shared = Arc::new(Shared {
            upstream,
            rules: Mutex::default(),
            chance: Mutex::new(Chance::new(seed, 0)),
            seen: Mutex::default(),
            expired: watch::Sender::default(),
            silenced: watch::Sender::default(),
        });
        let stop = CancellationToken::new();
        let tls = serve::tls(&authority.server(&dir, &[])?)?;
        let runtime = background::runtime()?;
        let listener = std::net::TcpListener::bind(port.addr())?;
        listener.set_nonblocking(true)?;
        runtime.spawn(serve::serve(listener, tls, Arc::clone(&shared), stop.clone()));
        Ok(Self { _port: port, kubeconfig: file, shared, _stop: stop.drop_guard() })
    }

    /// Kubeconfig for cloudcore that leads to the proxy.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Injects a fault into a share (0 to 1) of these requests from now on. If several rules match, the first that
    /// strikes counts; each draws its own random numbers.
    pub fn inject(&self, requests: Requests, share: f64, fault: Fault) {
        lock(&self.shared.rules).push(Rule { requests, share, fault, left: None });
    }

    /// Injects a fault into the next `times` of these requests.
    pub fn inject_next(&self, times: u32, requests: Requests, fault: Fault) {
        lock(&self.shared.rules).push(Rule { requests, share: 1.0, fault, left: Some(times) });
    }

    /// Stops injecting faults.
    pub fn heal(&self) {
        lock(&self.shared.rules).clear();
    }

    /// Ends all open watches as the API server does if the resource version is too old: with an `ERROR` event that has
    /// a Status of 410.
    pub fn expire_watches(&self) {
        self.shared.expired.send_modify(|count| *count += 1);
    }

    /// Lets nothing more through on the connections that are open now, and doesn't close them either. This simulates a
    /// load balancer in front of several API servers when one of them has lost its power. New connections lead to
    /// another one.
    pub fn silence_connections(&self) {
        self.shared.silenced.send_modify(|count| *count += 1);
    }

    /// All requests so far, in the order of arrival.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// Number of these requests that have met this fault so far.
    pub fn injected(&self, requests: Requests, fault: Fault) -> usize {
        let met = |seen: &&Seen| seen.fault == Some(fault) && requests.fit(&seen.about);
        lock(&self.shared.seen).iter().filter(met).count()
    }

    /// Number of these requests so far.
    pub fn count(&self, requests: Requests) -> usize {
        lock(&self.shared.seen).iter().filter(|seen| requests.fit(&seen.about)).count()
    }
}

impl Shared {
    /// Records a request, and draws its fault. Returns its index and the fault.
    fn record(&self, about: About) -> (usize, Option<Fault>) {
        let fault = {
            let mut chance = lock(&self.chance);
            lock(&self.rules).iter_mut().find_map(|rule| rule.strikes(&about, &mut chance))
        };
        let mut seen = lock(&self.seen);
        seen.push(Seen { about, fault, status: None });
        (seen.len() - 1, fault)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
