//! Simulated edges, by the thousand: the real tunnel, real certificates and the real agent, but a ledger in memory
//! and pulls that only take time.

pub(crate) mod certificates;
mod edge;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use edgecore_prepull::identity::Identity;
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt, stream};
use prepull_api::wire::TUNNEL_PATH;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::background;
use crate::cleanup::eventually;
use crate::cloud::Cloud;
use crate::cluster::Cluster;

/// Requests to the API server at a time, while the nodes are made.
const AT_A_TIME: usize = 64;
/// For all to connect: each waits up to a minute between two tries when the cloud is overloaded.
const CONNECT_LIMIT: Duration = Duration::from_secs(120);

/// For the acknowledgements of results that the API server has.
const ACK_LIMIT: Duration = Duration::from_secs(20);

/// Edges that run in this process. They end when this is dropped.
pub struct Fleet {
    names: Vec<String>,
    counts: Arc<Counts>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

/// What the edges of a fleet count together.
#[derive(Default)]
struct Counts {
    connected: watch::Sender<usize>,
    pulls: AtomicU64,
    twice: AtomicU64,
    tasks: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
}

/// A fleet to be; `.await` starts it.
pub struct Start<'a> {
    cluster: &'a Cluster,
    cloud: &'a Cloud,
    size: usize,
    pull: Duration,
    failing: usize,
}

impl Fleet {
    /// So many edges, `sim-0` and on, each with a Node that is Ready: `Fleet::start(&cluster, &cloud, 1000).await?`.
    /// Returns when all are connected.
    pub fn start<'a>(cluster: &'a Cluster, cloud: &'a Cloud, size: usize) -> Start<'a> {
        Start { cluster, cloud, size, pull: Duration::ZERO, failing: 0 }
    }

    /// The names of the nodes.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// How many are connected now.
    pub fn connected(&self) -> usize {
        *self.counts.connected.borrow()
    }

    /// Waits until that many are connected.
    pub async fn reaches(&self, connected: usize, limit: Duration) -> Result<()> {
        let mut count = self.counts.connected.subscribe();
        let there = tokio::time::timeout(limit, count.wait_for(|count| *count == connected)).await;
        there.with_context(|| {
            format!(
                "{} of {} are connected after {limit:?}, not {connected}",
                self.connected(),
                self.names.len()
            )
        })??;
        Ok(())
    }

    /// Waits until all are connected.
    pub async fn all_connected(&self) -> Result<()> {
        self.reaches(self.names.len(), CONNECT_LIMIT).await
    }

    /// Images pulled so far.
    pub fn pulls(&self) -> u64 {
        self.counts.pulls.load(Ordering::SeqCst)
    }

    /// Images that were pulled again for the same task of the same node. 0, or something is wrong.
    pub fn pulled_twice(&self) -> u64 {
        self.counts.twice.load(Ordering::SeqCst)
    }

    /// How many edges have been pulling at the same time, at most.
    pub fn most_at_once(&self) -> usize {
        self.counts.most_running.load(Ordering::SeqCst)
    }

    /// Tasks that the edges hold: not acknowledged yet.
    pub fn open_tasks(&self) -> usize {
        self.counts.tasks.load(Ordering::SeqCst)
    }

    /// Waits until the cloud has acknowledged every result. It does so when the API server has it.
    pub async fn all_acknowledged(&self) -> Result<()> {
        eventually("every result is acknowledged", ACK_LIMIT, async || match self.open_tasks() {
            0 => Ok(()),
            open => bail!("{open} tasks are open"),
        })
        .await
    }

    /// Ends the sessions and waits for it.
    pub async fn stop(&self) {
        self.shutdown.cancel();
        self.tasks.wait().await;
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Start<'_> {
    /// Each image takes this long. At once, unless told otherwise.
    #[must_use]
    pub fn pulls_take(mut self, pull: Duration) -> Self {
        self.pull = pull;
        self
    }

    /// On the first so many edges every image fails.
    #[must_use]
    pub fn the_first_fail(mut self, edges: usize) -> Self {
        self.failing = edges;
        self
    }

    async fn start(self) -> Result<Fleet> {
        let Self { cluster, cloud, size, pull, failing } = self;
        let names: Vec<_> = (0..size).map(|number| format!("sim-{number}")).collect();
        let nodes = stream::iter(names.iter().map(|name| Ok(cluster.node(name).edge().ready().create())));
        nodes.try_for_each_concurrent(AT_A_TIME, |created| created).await?;

        let authority = certificates::Authority::of(cluster).await?;
        let dir = cluster.place().new_dir("fleet")?;
        let identities = {
            let names = names.clone();
            // Files and signatures, thousands of them.
            tokio::task::spawn_blocking(move || authority.identities(&dir, &names)).await??
        };
        let fleet = Fleet {
            names,
            counts: Arc::default(),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        fleet.dial(identities, &format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr()), pull, failing)?;
        fleet.all_connected().await?;
        Ok(fleet)
    }
}

impl Fleet {
    fn dial(&self, identities: Vec<Identity>, url: &str, pull: Duration, failing: usize) -> Result<()> {
        let runtime = background::runtime()?;
        for (number, identity) in identities.into_iter().enumerate() {
            let edge = edge::Edge::new(pull, number < failing, Arc::clone(&self.counts));
            let run = edge.run(identity, url.to_owned(), self.shutdown.clone(), self.tasks.clone());
            self.tasks.spawn_on(run, runtime);
        }
        self.tasks.close();
        Ok(())
    }
}

impl<'a> IntoFuture for Start<'a> {
    type Output = Result<Fleet>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}
