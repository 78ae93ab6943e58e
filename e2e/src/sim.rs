//! Simulated edges, by the thousand: the real tunnel, real certificates and the real agent, but a ledger in memory
//! and pulls that only take time.
//!
//! ```text
//!  Fleet ─▶ Edge (one task each) ─▶ edgecore_prepull::tasks::agent ─▶ Machine (pulls that take time)
//!             └─▶ edgecore_prepull::cloud::tunnel::dial ═══▶ cloudcore
//! ```

mod behaviour;
pub(crate) mod certificates;
mod chance;
mod counts;
mod edge;
mod machine;
mod start;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use behaviour::{Behaviour, PullTime};
pub use counts::Tally;
pub use start::{Start, Step};

use crate::cleanup::eventually;
use crate::cloud::Cloud;
use crate::cluster::Cluster;
use counts::Counts;

/// For all to connect: each waits up to a minute between two tries when the cloud is overloaded.
const CONNECT_LIMIT: Duration = Duration::from_secs(180);
/// For the acknowledgements of results that the API server has.
const ACK_LIMIT: Duration = Duration::from_secs(20);
/// Between two looks at a counter that is waited for: a hundredth of what is measured with it.
const LOOK: Duration = Duration::from_millis(2);

/// Edges that run in this process. They end when this is dropped.
pub struct Fleet {
    names: Vec<String>,
    counts: Arc<Counts>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

impl Fleet {
    /// So many edges, `sim-0` and on, each with a Node that is Ready: `Fleet::start(&cluster, &cloud, 1000).await?`.
    /// Returns when each of them has been connected.
    pub fn start<'a>(cluster: &'a Cluster, cloud: &'a Cloud, size: usize) -> Start<'a> {
        Start::new(cluster, cloud, size)
    }

    /// The names of the nodes.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// All that was counted so far.
    pub fn tally(&self) -> Tally {
        self.counts.tally()
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

    /// From here on, each edge that connects has come back: see [`Self::all_came`].
    pub fn call_the_roll(&self) {
        self.counts.present.send_modify(|(call, count)| (*call, *count) = (*call + 1, 0));
    }

    /// Waits until so many edges have connected since the roll was called, whether they still are or not: in a
    /// fleet that loses connections all the time there may be no moment with all of them up.
    pub async fn came(&self, edges: usize, limit: Duration) -> Result<()> {
        let mut present = self.counts.present.subscribe();
        let came = tokio::time::timeout(limit, present.wait_for(|(_, count)| *count >= edges)).await;
        let count = || self.counts.present.borrow().1;
        came.with_context(|| format!("{} edges came within {limit:?}, not {edges}", count()))??;
        Ok(())
    }

    /// Waits until each edge has.
    pub async fn all_came(&self, limit: Duration) -> Result<()> {
        self.came(self.names.len(), limit).await
    }

    /// Waits until the tally is so.
    pub async fn until(&self, what: &str, limit: Duration, so: impl Fn(&Tally) -> bool) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !so(&self.tally()) {
            if Instant::now() > deadline {
                bail!("{what}: not within {limit:?}; {:?}", self.tally());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Images pulled so far.
    pub fn pulls(&self) -> u64 {
        self.tally().pulls
    }

    /// Images that were whole and that a task set out to pull again. 0, or something is wrong.
    pub fn pulled_twice(&self) -> u64 {
        self.tally().pulled_twice
    }

    /// How many edges have been pulling at the same time, at most.
    pub fn most_at_once(&self) -> usize {
        self.tally().most_at_once
    }

    /// Tasks that the edges hold: not acknowledged yet.
    pub fn open_tasks(&self) -> usize {
        self.tally().open
    }

    /// When the first and the last task came in, since [`Self::forget_times`]. None where there was none.
    pub fn task_times(&self) -> Option<(Instant, Instant)> {
        self.counts.times()
    }

    /// Before a job whose [`Self::task_times`] are asked for.
    pub fn forget_times(&self) {
        self.counts.forget_times();
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
