//! Thousands of simulated edges: the real tunnel, real certificates and the real agent, but a ledger in memory and
//! simulated pulls.
//!
//! ```text
//!  Fleet ─▶ SimulatedEdge (one task each) ─▶ edgecore_prepull::tasks::agent ─▶ SimulatedMachine (pulls that take time)
//!             └─▶ edgecore_prepull::cloud::tunnel::dial ═══▶ cloudcore
//! ```

mod behaviour;
pub mod certificates;
mod counts;
mod edge;
mod machine;
mod start;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use prepull_api::task::JobUid;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use behaviour::{Behaviour, PullDurations};
pub use counts::FleetTally;
pub use start::{FleetStart, FleetStartStep};

use crate::cleanup::{SOON, eventually};
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use counts::FleetCounters;

/// Limit for all edges to connect. Under overload each of them waits up to a minute between two tries.
const CONNECT_LIMIT: Duration = Duration::from_secs(180);
/// Addition to that for each edge that dials at the start: a handshake of unoptimised edges takes 30 ms on two busy
/// cores.
const CONNECT_LIMIT_OF_ONE: Duration = Duration::from_millis(60);
/// Interval between two looks at a counter: a hundredth of the times that are measured with it.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Simulated edges that run in this process. They end when the fleet is dropped.
pub struct Fleet {
    names: Vec<String>,
    counts: Arc<FleetCounters>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

impl Fleet {
    /// Starts `size` edges, named `sim-0` and so on, each with a Node that's Ready: `Fleet::start(&cluster, &cloud,
    /// 1000).await?`. Returns when each of them has connected once.
    pub fn start<'a>(cluster: &'a Cluster, cloud: &'a Cloud, size: usize) -> FleetStart<'a> {
        FleetStart::new(cluster, cloud, size)
    }

    /// Names of the nodes.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Counts of what the fleet has done so far.
    pub fn tally(&self) -> FleetTally {
        self.counts.tally()
    }

    /// Number of edges that are connected now.
    pub fn connected(&self) -> usize {
        *self.counts.connected.borrow()
    }

    /// Waits until exactly this many edges are connected.
    pub async fn reaches_sessions(&self, connected: usize, limit: Duration) -> Result<()> {
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

    /// Waits until all edges are connected.
    pub async fn all_connected(&self) -> Result<()> {
        self.reaches_sessions(self.names.len(), CONNECT_LIMIT).await
    }

    /// Begins to count the edges that connect from now on: see [`Self::all_have_connected`].
    pub fn start_roll_call(&self) {
        self.counts.present.send_modify(|(call, count)| (*call, *count) = (*call + 1, 0));
    }

    /// Waits until this many edges have connected since [`Self::start_roll_call`], even if they have lost the
    /// connection again: in a fleet with constant losses, all of them may never be up at the same moment.
    pub async fn have_connected(&self, edges: usize, limit: Duration) -> Result<()> {
        let mut present = self.counts.present.subscribe();
        let came = tokio::time::timeout(limit, present.wait_for(|(_, count)| *count >= edges)).await;
        let count = || self.counts.present.borrow().1;
        came.with_context(|| format!("{} edges have connected within {limit:?}, not {edges}", count()))??;
        Ok(())
    }

    /// Waits until every edge has connected since [`Self::start_roll_call`].
    pub async fn all_have_connected(&self, limit: Duration) -> Result<()> {
        self.have_connected(self.names.len(), limit).await
    }

    /// Waits until the counts satisfy a condition; `what` names it in errors.
    pub async fn until_met(
        &self,
        what: &str,
        limit: Duration,
        is_met: impl Fn(&FleetTally) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !is_met(&self.tally()) {
            if Instant::now() > deadline {
                bail!("{what}: not within {limit:?}; {:?}", self.tally());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Number of pulls begun so far.
    pub fn pulls(&self) -> u64 {
        self.tally().pulls
    }

    /// Number of complete images that their task pulled again. Must be 0.
    pub fn pulled_twice(&self) -> u64 {
        self.tally().pulled_twice
    }

    /// [`Self::pulled_twice`] for these jobs only.
    pub fn pulled_twice_for(&self, counts: impl Fn(&JobUid) -> bool) -> u64 {
        self.counts.pulled_twice(counts)
    }

    /// Largest number of edges that were pulling at the same time.
    pub fn most_at_once(&self) -> usize {
        self.tally().most_at_once
    }

    /// Number of tasks in the ledgers, which are not acknowledged yet.
    pub fn open_tasks(&self) -> usize {
        self.tally().open
    }

    /// Arrival of the first and the last task since [`Self::reset_task_times`]. `None` if there was none.
    pub fn task_times(&self) -> Option<(Instant, Instant)> {
        self.counts.times()
    }

    /// Resets [`Self::task_times`], before a job to measure.
    pub fn reset_task_times(&self) {
        self.counts.reset_task_times();
    }

    /// Waits until the cloud has acknowledged every result, which it does when the API server has it.
    pub async fn all_acknowledged(&self) -> Result<()> {
        eventually("every result is acknowledged", SOON, async || match self.open_tasks() {
            0 => Ok(()),
            open => bail!("{open} tasks are open"),
        })
        .await
    }

    /// Ends all edges, and waits until they have ended.
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
