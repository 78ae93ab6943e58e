//! A Kubernetes API server on a bad day: a proxy between cloudcore-prepull and kube-apiserver. TLS ends here, bearer
//! tokens and watches go through, and on command a share of the requests meets a [`Fault`].
//!
//! Only cloudcore goes this way: a test that creates nodes and reads status asks the API server itself.

mod rules;
mod serve;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::Kubeconfig;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use rules::{About, Requests, Verb};
use rules::{Dice, Rule};
use serve::Upstream;

use crate::background;
use crate::certs::Authority;
use crate::cluster::Cluster;
use crate::ports::Port;

/// What befalls a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answered with this status; the server is not asked. A 429 says to come back after a second.
    Status(u16),
    /// Answered this much later, at least and at most.
    Late(Duration, Duration),
    /// The connection is closed; the server is not asked.
    Cut,
    /// The server is asked and does what it is told; then the connection is closed without a word of it.
    LostAnswer,
}

/// One request that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What it was about.
    pub about: About,
    /// What befell it.
    pub fault: Option<Fault>,
    /// The status of the server's own answer, once there is one.
    pub status: Option<u16>,
}

/// The proxy. Ends when dropped.
pub struct ApiProxy {
    port: Port,
    kubeconfig: PathBuf,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

/// What the proxy's tasks share.
struct Shared {
    upstream: Upstream,
    rules: Mutex<Vec<Rule>>,
    dice: Mutex<Dice>,
    seen: Mutex<Vec<Seen>>,
    /// Counts up when the watches that are open now are to expire.
    expired: watch::Sender<u64>,
}

impl ApiProxy {
    /// In front of the cluster's API server. `seed` decides which requests meet a fault: the n-th that fits a rule
    /// does or does not, in every run.
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
            dice: Mutex::new(Dice::new(seed)),
            seen: Mutex::default(),
            expired: watch::Sender::default(),
        });
        let stop = CancellationToken::new();
        let tls = serve::tls(&authority.server(&dir, &[])?)?;
        let runtime = background::runtime()?;
        let listener = std::net::TcpListener::bind(port.addr())?;
        listener.set_nonblocking(true)?;
        runtime.spawn(serve::serve(listener, tls, Arc::clone(&shared), stop.clone()));
        Ok(Self { port, kubeconfig: file, shared, _stop: stop.drop_guard() })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The kubeconfig of cloudcore, by way of the proxy.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// From now on this share (0 to 1) of these requests meets this fault. Of several rules the first that strikes
    /// counts, and each draws anew.
    pub fn inject(&self, requests: Requests, share: f64, fault: Fault) {
        lock(&self.shared.rules).push(Rule { requests, share, fault, left: None });
    }

    /// The next so many of these requests meet this fault.
    pub fn inject_next(&self, times: u32, requests: Requests, fault: Fault) {
        lock(&self.shared.rules).push(Rule { requests, share: 1.0, fault, left: Some(times) });
    }

    /// From now on nothing is wrong any more.
    pub fn heal(&self) {
        lock(&self.shared.rules).clear();
    }

    /// Ends every watch that is open now as the API server does where it has forgotten the resource version: with an
    /// `ERROR` event that holds a Status of 410.
    pub fn expire_watches(&self) {
        self.shared.expired.send_modify(|count| *count += 1);
    }

    /// Every request so far, in the order of arrival.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// How many of these requests have met this fault so far.
    pub fn injected(&self, requests: Requests, fault: Fault) -> usize {
        let met = |seen: &&Seen| seen.fault == Some(fault) && requests.fit(&seen.about);
        lock(&self.shared.seen).iter().filter(met).count()
    }

    /// How many of these requests there were so far.
    pub fn count(&self, requests: Requests) -> usize {
        lock(&self.shared.seen).iter().filter(|seen| requests.fit(&seen.about)).count()
    }
}

impl Shared {
    /// Takes down a request, and draws what befalls it.
    fn met(&self, about: About) -> (usize, Option<Fault>) {
        let fault = {
            let mut dice = lock(&self.dice);
            lock(&self.rules).iter_mut().find_map(|rule| rule.strikes(&about, &mut dice))
        };
        let mut seen = lock(&self.seen);
        seen.push(Seen { about, fault, status: None });
        (seen.len() - 1, fault)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
