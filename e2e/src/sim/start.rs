//! Start of a fleet: nodes, certificates, sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use edgecore_prepull::cloud::identity::Identity;
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt, stream};
use prepull_api::wire::TUNNEL_PATH;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::behaviour::{Behaviour, PullDurations};
use super::counts::FleetCounters;
use super::edge::{FleetContext, SimulatedEdge};
use super::{CONNECT_LIMIT, CONNECT_LIMIT_OF_ONE, Fleet, certificates};
use crate::background;
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use crate::place::file_limit;

/// Concurrent requests to the API server while Node objects are created.
const AT_A_TIME: usize = 64;
/// Files that this process has open in addition to the sockets of its edges, or a cloudcore to those of its sessions.
const OTHER_FILES: usize = 200;
/// Interval between two reports of how many sessions are up.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A step of the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetStartStep {
    /// Node objects are created.
    Nodes,
    /// Certificates are signed.
    Certificates,
    /// Edges connect.
    Sessions,
}

/// A function that's called with each step and the number of completed edges.
type Watcher = Arc<dyn Fn(FleetStartStep, usize) + Send + Sync>;

/// A fleet that has not been started; `.await` starts it.
pub struct FleetStart<'a> {
    cluster: &'a Cluster,
    cloud: &'a Cloud,
    size: usize,
    behaviour: Behaviour,
    failing: usize,
    watcher: Watcher,
}

impl<'a> FleetStart<'a> {
    pub(super) fn new(cluster: &'a Cluster, cloud: &'a Cloud, size: usize) -> Self {
        let (behaviour, watcher) = (Behaviour::default(), Arc::new(|_, _| {}));
        Self { cluster, cloud, size, behaviour, failing: 0, watcher }
    }

    /// Sets the duration of each pull, which is 0 by default.
    #[must_use]
    pub fn pulls_take(mut self, pull: Duration) -> Self {
        self.behaviour.pull = PullDurations::Fixed(pull);
        self
    }

    /// Makes every image fail on the first `edges` edges.
    #[must_use]
    pub fn the_first_fail(mut self, edges: usize) -> Self {
        self.failing = edges;
        self
    }

    /// Sets the behaviour of the edges.
    #[must_use]
    pub fn behaves(mut self, behaviour: Behaviour) -> Self {
        self.behaviour = behaviour;
        self
    }

    /// Sets a function that's called with each step and the number of completed edges.
    #[must_use]
    pub fn watched_by(mut self, watcher: impl Fn(FleetStartStep, usize) + Send + Sync + 'static) -> Self {
        self.watcher = Arc::new(watcher);
        self
    }

    /// Creates Node objects and certificates, without connecting.
    pub async fn prepare(self) -> Result<PreparedFleet> {
        let Self { cluster, cloud, size, behaviour, failing, watcher } = self;
        let files = file_limit();
        ensure!(
            files >= size + OTHER_FILES,
            "{size} edges take a socket each, here and in cloudcore, and a process may have {files} open files: \
             raise the limit (ulimit -Hn), or take fewer"
        );
        let names: Vec<_> = (0..size).map(|number| format!("sim-{number}")).collect();
        let made = AtomicUsize::new(0);
        let nodes = names.iter().map(|name| {
            Ok(async {
                cluster.node(name).edge().ready().create().await?;
                watcher(FleetStartStep::Nodes, made.fetch_add(1, Ordering::Relaxed) + 1);
                anyhow::Ok(())
            })
        });
        stream::iter(nodes).try_for_each_concurrent(AT_A_TIME, |node| node).await?;

        let authority = certificates::CloudAuthority::from_cluster(cluster).await?;
        let dir = cluster.place().new_dir("fleet")?;
        let identities = {
            let (names, watcher) = (names.clone(), Arc::clone(&watcher));
            // Thousands of signatures would block the runtime.
            let sign = move || {
                authority.create_identities(&dir, &names, &|done| watcher(FleetStartStep::Certificates, done))
            };
            tokio::task::spawn_blocking(sign).await??
        };
        let url = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
        Ok(PreparedFleet { names, identities, url, behaviour: Arc::new(behaviour), failing, watcher })
    }
}

/// A fleet with nodes and certificates that has not connected.
pub struct PreparedFleet {
    names: Vec<String>,
    identities: Vec<Identity>,
    url: String,
    behaviour: Arc<Behaviour>,
    failing: usize,
    watcher: Watcher,
}

impl PreparedFleet {
    /// Lets all edges dial at the same time. Returns when each of them has connected once.
    pub async fn connect(self) -> Result<Fleet> {
        let Self { names, identities, url, behaviour, failing, watcher } = self;
        let fleet = Fleet {
            names,
            counts: Arc::new(FleetCounters::new()),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        let shared = Arc::new(FleetContext {
            url,
            behaviour,
            counts: Arc::clone(&fleet.counts),
            shutdown: fleet.shutdown.clone(),
            tasks: fleet.tasks.clone(),
        });
        fleet.start_roll_call();
        let runtime = background::runtime()?;
        for (number, identity) in identities.into_iter().enumerate() {
            let edge = SimulatedEdge::new(Arc::clone(&shared), identity, number as u64, number < failing);
            fleet.tasks.spawn_on(edge.run(), runtime);
        }
        fleet.tasks.close();
        let watch = async {
            loop {
                watcher(FleetStartStep::Sessions, fleet.connected());
                tokio::time::sleep(REPORT_INTERVAL).await;
            }
        };
        let edges = u32::try_from(fleet.names.len()).unwrap_or(u32::MAX);
        let limit = CONNECT_LIMIT.saturating_add(CONNECT_LIMIT_OF_ONE.saturating_mul(edges));
        tokio::select! {
            connected = fleet.all_have_connected(limit) => connected?,
            never = watch => never,
        }
        Ok(fleet)
    }
}

impl<'a> IntoFuture for FleetStart<'a> {
    type Output = Result<Fleet>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        async { self.prepare().await?.connect().await }.boxed()
    }
}
