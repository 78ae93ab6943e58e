//! Cluster, cloud and fleet of a run, with measurements of connecting and of idle sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prepull_e2e::cloud::Cloud;
use prepull_e2e::cluster::Cluster;
use prepull_e2e::network::Network;
use prepull_e2e::services;
use prepull_e2e::sim::{Fleet, FleetStartStep};
use prepull_e2e::teller::Teller;
use prepull_e2e::usage::Usage;

use super::FleetOptions;
use super::figures::{Connect, Idle};
use super::listing::EdgeListing;

/// Everything that runs. Fields are dropped in order, so that each part comes before those that it uses.
pub(crate) struct FleetScene {
    pub(super) fleet: Fleet,
    pub(super) cloud: Cloud,
    pub(super) cluster: Cluster,
    /// Connects the API server to the list of the edges, for people.
    _network: Option<Network>,
}

impl FleetScene {
    /// Starts cluster, cloud and fleet.
    pub(crate) async fn start(options: &FleetOptions, teller: &Teller) -> Result<(Self, Connect)> {
        let nodes = options.nodes;
        teller.step("etcd, kube-apiserver and cloudcore-prepull");
        let cluster = Cluster::own().await?;
        if options.kruise {
            cluster.install_kruise().await?;
        }
        let arguments: Vec<_> = options.cloud_arg.iter().map(String::as_str).collect();
        let cloud = if options.kruise { Cloud::with_kruise(&cluster) } else { Cloud::start(&cluster) };
        let cloud = cloud.args(&arguments);
        let (cloud, network) = if options.people {
            let (cloud, network) = services::with_edges_listed(&cluster, cloud).await?;
            (cloud, Some(network))
        } else {
            (cloud.await?, None)
        };

        let steps = Arc::new(teller.counter(nodes));
        let watcher = {
            let steps = Arc::clone(&steps);
            move |step, done| {
                let name = match step {
                    FleetStartStep::Nodes => "Node objects",
                    FleetStartStep::Certificates => "certificates",
                    FleetStartStep::Sessions => "sessions",
                };
                steps.show(name, done);
            }
        };
        let fleet = Fleet::start(&cluster, &cloud, nodes).behaves(options.behaviour()).watched_by(watcher);
        let prepared = fleet.prepare().await?;
        // cloudcore must have processed all Node objects before the measurement begins.
        wait_until_quiet(&cloud).await?;
        let (before, begun) = (usage(&cloud)?, Instant::now());
        let fleet = prepared.connect().await?;
        let seconds = begun.elapsed().as_secs_f64();
        steps.show("sessions", fleet.connected());
        drop(steps);
        let after = usage(&cloud)?;
        let connect = Connect {
            nodes,
            seconds,
            cpu_seconds: after.cpu.saturating_sub(before.cpu).as_secs_f64(),
            rss_before: before.rss,
            rss_after: after.rss,
            per_session: after.rss.saturating_sub(before.rss) / (nodes as u64).max(1),
        };
        teller.step(&format!("{nodes} sessions are up after {seconds:.1} s"));
        Ok((Self { fleet, cloud, cluster, _network: network }, connect))
    }

    /// Cluster of the run.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Measures the cost of the sessions while they only exchange heartbeats.
    pub(crate) async fn measure_idle(&self, time: Duration, teller: &Teller) -> Result<Idle> {
        teller.step(&format!("idle for {time:?}"));
        let (before, begun, sessions) = (usage(&self.cloud)?, Instant::now(), self.fleet.tally().sessions);
        tokio::time::sleep(time).await;
        let sessions_begun = self.fleet.tally().sessions - sessions;
        let (after, seconds) = (usage(&self.cloud)?, begun.elapsed().as_secs_f64());
        let cpu_seconds = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        // Far below 2^32 sessions.
        let thousands = f64::from(u32::try_from(self.fleet.connected()).unwrap_or(u32::MAX)) / 1000.0;
        let cpu_millis_per_thousand = cpu_seconds * 1000.0 / seconds / thousands;
        let listing = EdgeListing::measure(&self.cloud).await?;
        Ok(Idle { seconds, cpu_seconds, cpu_millis_per_thousand, rss: after.rss, sessions_begun, listing })
    }
}

/// Reads the usage of cloudcore.
pub(super) fn usage(cloud: &Cloud) -> Result<Usage> {
    Usage::of_process(cloud.process()?.pid())
}

/// Waits until cloudcore is idle.
async fn wait_until_quiet(cloud: &Cloud) -> Result<()> {
    /// Time in which an idle cloudcore uses not one tick of CPU time.
    const QUIET: Duration = Duration::from_millis(300);
    /// Limit, longer than it takes to process 20,000 nodes.
    const LIMIT: Duration = Duration::from_secs(30);
    let quiet = async {
        let mut last = usage(cloud)?.cpu;
        loop {
            tokio::time::sleep(QUIET).await;
            let now = usage(cloud)?.cpu;
            if now == last {
                return anyhow::Ok(());
            }
            last = now;
        }
    };
    tokio::time::timeout(LIMIT, quiet).await.context("cloudcore is busy although nothing happens")?
}
