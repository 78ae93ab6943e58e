//! `make fleet ARGS=--rotate`: a rotation of the CA under a fleet, with a part of it offline.
//!
//! The edges are simulated: they have the real tunnel and the real renewal, each with its own state directory, and no
//! agent.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use edgecore_prepull::cloud::identity::Identity;
use edgecore_prepull::cloud::tunnel::{TunnelEvent, TunnelSender, dial};
use futures::{TryStreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use prepull_api::wire::{Hello, TUNNEL_PATH};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::cloud::Cloud;
use prepull_e2e::cluster::{Cluster, NAMESPACE};
use prepull_e2e::sim::certificates::CloudAuthority;
use prepull_e2e::teller::Teller;
use prepull_e2e::usage::Usage;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::FleetOptions;

/// Limit for one step.
const LIMIT: Duration = Duration::from_secs(900);

/// Requests for Node objects at a time.
const AT_A_TIME: usize = 64;

/// The measured seconds since the previous step.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RotationFigures {
    nodes: usize,
    away: usize,
    /// From `ca rotate` until every connected edge has the new CA on its disk.
    informed: f64,
    /// Until the new CA signs.
    signing: f64,
    /// Until every connected edge has a certificate of the new CA, and a session with it.
    renewed: f64,
    /// From the return of the offline edges until all edges have a certificate of the new CA.
    back: f64,
    /// From `ca retire` until no edge trusts the old CA.
    retired: f64,
    cpu_seconds: f64,
    rss: u64,
    /// Edges that joined again. It should be 0.
    joins: usize,
    connected: usize,
}

/// Edges that run.
struct RenewingEdges {
    connected: Arc<AtomicUsize>,
    shutdown: CancellationToken,
    _stop: DropGuard,
    tunnel: String,
    enroll: String,
}

impl RenewingEdges {
    fn for_cloud(cloud: &Cloud) -> Self {
        let shutdown = CancellationToken::new();
        Self {
            connected: Arc::default(),
            _stop: shutdown.clone().drop_guard(),
            shutdown,
            tunnel: format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr()),
            enroll: format!("https://{}", cloud.enroll_addr()),
        }
    }

    /// Starts an edge from a state directory of `join`.
    fn start_edge(&self, state: &Path) -> Result<()> {
        let identity = Identity::load(state)?;
        tokio::spawn(identity.clone().keep_renewed(self.enroll.clone(), self.shutdown.clone()));
        let (link, outgoing) = TunnelSender::new(1);
        let (events, mut arriving) = mpsc::channel(4);
        tokio::spawn(dial::run(identity, self.tunnel.clone(), events, outgoing, self.shutdown.clone()));
        let connected = Arc::clone(&self.connected);
        tokio::spawn(async move {
            let _link = link;
            let mut is_up = false;
            while let Some(event) = arriving.recv().await {
                match event {
                    TunnelEvent::Connecting(hello) => _ = hello.send(Hello::default()),
                    TunnelEvent::Connected(_) => {
                        is_up = true;
                        connected.fetch_add(1, Ordering::SeqCst);
                    }
                    TunnelEvent::Disconnected => {
                        if std::mem::take(&mut is_up) {
                            connected.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                    TunnelEvent::Message(_) => {}
                }
            }
        });
        Ok(())
    }

    async fn are_connected(&self, count: usize) -> Result<()> {
        eventually(&format!("{count} edges are connected"), LIMIT, async || {
            let connected = self.connected.load(Ordering::SeqCst);
            ensure!(connected == count, "{connected} are");
            Ok(())
        })
        .await
    }
}

impl RotationFigures {
    /// Starts a fleet, rotates the CA under it, and stops it.
    pub(crate) async fn measure(options: &FleetOptions, teller: &Teller) -> Result<Self> {
        let nodes = options.nodes;
        let away = nodes / 10;
        teller.step("etcd, kube-apiserver and cloudcore-prepull");
        let cluster = Cluster::own().await?;
        let cloud = Cloud::start(&cluster).await?;
        let authority = CloudAuthority::from_cluster(&cluster).await?;
        let dir = cluster.place().new_dir("rotated")?;
        let states: Vec<_> = (0..nodes).map(|number| dir.join(format!("sim-{number}"))).collect();
        for (number, state) in states.iter().enumerate() {
            authority.join(state, &format!("sim-{number}"))?;
        }
        // An edge without a Node is rejected.
        let create = (0..nodes).map(|number| {
            let cluster = &cluster;
            Ok(async move { cluster.node(&format!("sim-{number}")).edge().ready().create().await })
        });
        stream::iter(create).try_for_each_concurrent(AT_A_TIME, |node| node).await?;
        let edges = RenewingEdges::for_cloud(&cloud);
        let (asleep, present) = states.split_at(away);
        for state in present {
            edges.start_edge(state)?;
        }
        edges.are_connected(nodes - away).await?;
        teller.step(&format!("{} edges are connected, {away} are away", nodes - away));
        let usage = || Usage::of_process(cloud.process()?.pid());
        let before = usage()?;

        let mut begun = Instant::now();
        let mut lap = |what: &str| {
            let seconds = begun.elapsed().as_secs_f64();
            begun = Instant::now();
            teller.step(&format!("{what}: {seconds:.1} s"));
            seconds
        };
        cloud.command(&["ca", "rotate"]).await?;
        let trusting = |cas: usize, states: &[std::path::PathBuf]| {
            let trusts = |state: &&std::path::PathBuf| {
                let cas_there = std::fs::read_to_string(state.join("pki/ca.crt")).unwrap_or_default();
                cas_there.matches("BEGIN").count() == cas
            };
            states.iter().filter(trusts).count()
        };
        eventually("the edges know the new CA", LIMIT, async || {
            let count = trusting(2, present);
            ensure!(count == present.len(), "{count} of {} do", present.len());
            Ok(())
        })
        .await?;
        let informed = lap("every connected edge knows the new CA");
        wait_for_progress(&cluster, |progress| progress["step"] == "signing").await?;
        let signing = lap("the new CA signs");
        let renewed_are = |count: usize| {
            move |progress: &Value| {
                progress["edges"]["renewed"] == count && progress["edges"]["connected"] == count
            }
        };
        wait_for_progress(&cluster, renewed_are(nodes - away)).await?;
        let renewed = lap("every connected edge has a certificate of the new CA");
        ensure!(trusting(1, asleep) == away, "those that are away cannot have learnt of anything");
        for state in asleep {
            edges.start_edge(state)?;
        }
        wait_for_progress(&cluster, renewed_are(nodes)).await?;
        let back = lap("those that were away are back, with certificates of the new CA");
        cloud.command(&["ca", "retire", "--now"]).await?;
        eventually("no edge trusts the old CA", LIMIT, async || {
            let count = trusting(1, &states);
            ensure!(count == nodes, "{count} of {nodes}");
            Ok(())
        })
        .await?;
        let retired = lap("the old CA is retired");
        edges.are_connected(nodes).await?;
        let after = usage()?;
        let joins = cloud.log().matches("a node has joined").count();
        Ok(Self {
            nodes,
            away,
            informed,
            signing,
            renewed,
            back,
            retired,
            cpu_seconds: after.cpu.saturating_sub(before.cpu).as_secs_f64(),
            rss: after.rss,
            joins,
            connected: edges.connected.load(Ordering::SeqCst),
        })
    }

    /// Whether all edges are back and none joined again.
    pub(crate) fn is_whole(&self) -> bool {
        self.joins == 0 && self.connected == self.nodes
    }
}

/// Waits until cloudcore publishes this progress.
async fn wait_for_progress(cluster: &Cluster, is_met: impl Fn(&Value) -> bool) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), NAMESPACE);
    eventually("the rotation goes on", LIMIT, async || {
        let data = maps.get("prepull-ca").await?.data.unwrap_or_default();
        let text = data.get("rotation.json").context("no progress is published")?;
        ensure!(is_met(&serde_json::from_str(text)?), "{text}");
        Ok(())
    })
    .await
}
