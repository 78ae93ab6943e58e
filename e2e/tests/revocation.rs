//! Machines that were stolen, copied, deleted, or away for months: which ones are kept out, which ones come back by
//! themselves, and the messages for people. cloudcore-prepull/tests/tunnel and `edges/roster` have the tests that need
//! no API server.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use edgecore_prepull::cloud::identity::Identity;
use edgecore_prepull::cloud::tunnel::{TunnelEvent, TunnelSender, dial};
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{Api, ListParams, Patch, PatchParams};
use prepull_api::wire::{EdgeMessage, Hello, TUNNEL_PATH};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use prepull_e2e::prelude::*;
use prepull_e2e::sim::certificates;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Limit for the end of a session after `node revoke`, on a busy machine.
const WITHIN_SECONDS: Duration = Duration::from_secs(5);

/// A machine with a state directory: its identity and its tunnel.
pub(crate) struct Machine {
    pub(crate) state: PathBuf,
    pub(crate) identity: Identity,
}

impl Machine {
    pub(crate) async fn joins(cloud: &Cloud, place: &Place, node: &str) -> Result<Self> {
        let state = place.new_dir(node)?;
        cloud.join(&cloud.token(node).await?, node, &state).await?;
        Self::of(state)
    }

    fn of(state: PathBuf) -> Result<Self> {
        Ok(Self { identity: Identity::load(&state)?, state })
    }

    async fn renews(&self, cloud: &Cloud) -> Result<()> {
        Ok(self.identity.renew(format!("https://{}", cloud.enroll_addr())).await?)
    }

    /// Keeps a session up, or tries to, until the session is dropped.
    pub(crate) fn dials(&self, cloud: &Cloud) -> Session {
        let (link, outgoing) = TunnelSender::new(1);
        let (sender, mut events) = tokio::sync::mpsc::channel(16);
        let stop = CancellationToken::new();
        let url = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
        tokio::spawn(dial::run(self.identity.clone(), url, sender, outgoing, stop.clone()));
        let (state, connected) = watch::channel(false);
        tokio::spawn(async move {
            while let Some(event) = events.recv().await {
                match event {
                    TunnelEvent::Connecting(hello) => _ = hello.send(Hello::default()),
                    TunnelEvent::Connected(_) => _ = state.send(true),
                    TunnelEvent::Message(_) => {}
                    TunnelEvent::Disconnected => _ = state.send(false),
                }
            }
        });
        Session { connected, _link: link, _stop: stop.drop_guard() }
    }
}

pub(crate) struct Session {
    connected: watch::Receiver<bool>,
    /// Without a program that can send, the machine doesn't dial.
    _link: TunnelSender,
    _stop: DropGuard,
}

impl Session {
    pub(crate) async fn is(&mut self, connected: bool) -> Result<()> {
        self.is_within(SOON, connected).await
    }

    async fn is_within(&mut self, limit: Duration, connected: bool) -> Result<()> {
        let wait = self.connected.wait_for(|now| *now == connected);
        tokio::time::timeout(limit, wait)
            .await
            .with_context(|| format!("connected is not {connected}"))??;
        Ok(())
    }
}

async fn refusals(cloud: &Cloud, reason: &str) -> Result<f64> {
    Ok(cloud.metrics().await?.sum("cloudcore_prepull_refused_edges_total", &[("reason", reason)]))
}

/// Lets the machine dial, and waits until the cloud has refused it for this reason.
async fn is_refused(cloud: &Cloud, machine: &Machine, reason: &str) -> Result<()> {
    let before = refusals(cloud, reason).await?;
    let _session = machine.dials(cloud);
    eventually(&format!("refused: {reason}"), SOON, async || {
        let now = refusals(cloud, reason).await?;
        ensure!(now > before, "{now} refusals");
        Ok(())
    })
    .await
}

/// The messages of the events about a Node with this reason.
async fn events(cluster: &Cluster, node: &str, reason: &str) -> Result<Vec<String>> {
    let fields = format!("involvedObject.kind=Node,involvedObject.name={node},reason={reason}");
    let events: Api<Event> = Api::namespaced(cluster.client(), "default");
    let events = events.list(&ListParams::default().fields(&fields)).await?;
    Ok(events.items.into_iter().filter_map(|event| event.message).collect())
}

async fn event_message(cluster: &Cluster, node: &str, reason: &str) -> Result<String> {
    eventually(&format!("the event {reason}"), SOON, async || {
        events(cluster, node, reason).await?.pop().context("there is none")
    })
    .await
}

#[tokio::test]
async fn a_stolen_box_stays_out() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["edge-1", "edge-2"]).await?;
    let mut cloud = Cloud::start(&cluster).replica().await?;
    let successor = Cloud::start(&cluster).standby().named("successor").await?;
    let place = Place::here()?;
    let stolen = Machine::joins(&cloud, &place, "edge-1").await?;
    let honest = Machine::joins(&cloud, &place, "edge-2").await?;
    // The token on the stolen box as well.
    let (old_token, fleet_token) = (cloud.token("edge-1").await?, cloud.command(&["token", "create"]).await?);
    let (mut session, mut others) = (stolen.dials(&cloud), honest.dials(&cloud));
    session.is(true).await?;
    others.is(true).await?;
    // Renewed a moment before.
    stolen.renews(&cloud).await?;
    session.is(false).await?;
    session.is(true).await?;

    // It has a certificate and no session yet, so there's no session to end.
    let mut slow = Intruder::of(&cluster, &cloud, "edge-1").await?.open_websocket().await?;
    let asked = Instant::now();
    let said = cloud.command(&["node", "revoke", "edge-1"]).await?;
    let done = Instant::now();
    session.is(false).await?;
    eprintln!(
        "`node revoke` took {:?}; the session ended {:?} after it began, {:?} after it ended",
        done - asked,
        asked.elapsed(),
        done.elapsed()
    );
    ensure!(asked.elapsed() < WITHIN_SECONDS, "{:?}", asked.elapsed());
    ensure!(said.contains("edge-1 revoked"), "{said}");
    slow.send_message(&EdgeMessage::Hello(Box::default())).await?;
    let reason = slow.read_to_close().await?;
    ensure!(reason.contains("node edge-1 is revoked"), "a slow Hello: {reason:?}");
    is_refused(&cloud, &stolen, "revoked").await?;
    refusal(stolen.renews(&cloud).await, "node edge-1 is revoked")?;
    let elsewhere = place.new_dir("elsewhere")?;
    refusal(cloud.join(&old_token, "edge-1", &elsewhere).await, "after this token was made")?;
    refusal(cloud.join(&fleet_token, "edge-1", &elsewhere).await, "node edge-1 is revoked")?;
    ensure!(*others.connected.borrow(), "another node was disconnected");
    let listed = cloud.command(&["node", "list"]).await?;
    ensure!(listed.lines().any(|line| line.starts_with("edge-1 ") && !line.ends_with('-')), "{listed}");
    refusal(cloud.command(&["node", "revoke", "edge-11"]).await, "no Node of this name")?;

    // Manual changes to the record's ConfigMaps don't help either, except for their content.
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "prepull-system");
    for map in maps.list(&ListParams::default()).await?.items {
        let name = map.metadata.name.unwrap_or_default();
        if name.starts_with("prepull-nodes-") {
            let unlabelled = Patch::Merge(json!({ "metadata": { "labels": null } }));
            maps.patch(&name, &PatchParams::default(), &unlabelled).await?;
        }
    }
    cloud.kill9()?;
    successor.leads(SOON).await?;
    drop((session, others));
    let (session, mut others) = (stolen.dials(&successor), honest.dials(&successor));
    is_refused(&successor, &stolen, "revoked").await?;
    refusal(stolen.renews(&successor).await, "node edge-1 is revoked")?;
    others.is(true).await?;
    ensure!(!*session.connected.borrow(), "the stolen box is in again");

    // A new machine under the same name; the old keys stay out.
    let fresh = Machine::joins(&successor, &place, "edge-1").await?;
    let mut new_session = fresh.dials(&successor);
    new_session.is(true).await?;
    is_refused(&successor, &stolen, "revoked").await?;
    refusal(stolen.renews(&successor).await, "node edge-1 is revoked")?;
    let taken_back = successor.command(&["node", "allow", "edge-1"]).await;
    refusal(taken_back, "its keys of before would be let in as well")?;
    fresh.renews(&successor).await?;
    new_session.is(false).await?;
    new_session.is(true).await?;
    ensure!(!*session.connected.borrow(), "the stolen box is in again");
    Ok(())
}

#[tokio::test]
async fn a_revocation_passes_silent_connections() -> Result<()> {
    /// Like client-go's HTTP/2 pings.
    const NOTICED: Duration = Duration::from_secs(45);
    const IN_FORCE: Duration = Duration::from_secs(60);
    const WATCHED: [&str; 5] = ["nodes", "imageprepulljobs", "imageprepullreports", "configmaps", "secrets"];
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let api = ApiProxy::start(&cluster, 1)?;
    let cloud = Cloud::start(&cluster).through(&api).await?;
    let place = Place::here()?;
    let machine = Machine::joins(&cloud, &place, "edge-1").await?;
    let mut session = machine.dials(&cloud);
    session.is(true).await?;

    let watches = || WATCHED.map(|kind| api.count(Requests::WATCHES.on(kind)));
    api.silence_connections();
    let (silent, before) = (Instant::now(), watches());
    cloud.command(&["node", "revoke", "edge-1"]).await?;
    eventually("every watch is begun again", NOTICED, async || {
        let now = watches();
        ensure!(
            now.iter().zip(&before).all(|(now, before)| now > before),
            "{WATCHED:?}: {before:?}, {now:?}"
        );
        Ok(())
    })
    .await?;
    eprintln!("noticed after {:?}", silent.elapsed());
    session.is_within(IN_FORCE.saturating_sub(silent.elapsed()), false).await?;
    eprintln!("in force after {:?}", silent.elapsed());
    is_refused(&cloud, &machine, "revoked").await
}

#[tokio::test]
async fn a_false_alarm_is_taken_back() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let cloud = Cloud::start(&cluster).await?;
    let place = Place::here()?;
    let machine = Machine::joins(&cloud, &place, "edge-1").await?;
    let mut session = machine.dials(&cloud);
    session.is(true).await?;
    cloud.command(&["node", "revoke", "edge-1"]).await?;
    session.is(false).await?;
    cloud.command(&["node", "allow", "edge-1"]).await?;
    session.is(true).await?;
    machine.renews(&cloud).await?;
    session.is(false).await?;
    session.is(true).await?;

    cluster.delete_node("edge-1").await?;
    session.is(false).await?;
    is_refused(&cloud, &machine, "no_node").await?;
    refusal(machine.renews(&cloud).await, "the cluster has no Node edge-1")?;
    cluster.edge_nodes(&["edge-1"]).await?;
    session.is(true).await?;
    machine.renews(&cloud).await
}

#[tokio::test]
async fn a_copied_state_directory_is_detected() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let place = Place::here()?;
    let own = Machine::joins(&cloud, &place, "edge-1").await?;
    let copied = place.new_dir("copy")?;
    std::fs::create_dir_all(copied.join("pki"))?;
    for file in ["ca.crt", "client.crt", "client.key"] {
        std::fs::copy(own.state.join("pki").join(file), copied.join("pki").join(file))?;
    }
    let copy = Machine::of(copied)?;

    own.renews(&cloud).await?;
    let mut session = own.dials(&cloud);
    session.is(true).await?;
    ensure!(events(&cluster, "edge-1", "SupersededKey").await?.is_empty(), "no event yet");
    // From now on they take turns: each session replaces the other one's.
    let other_session = copy.dials(&cloud);
    let message = event_message(&cluster, "edge-1", "SupersededKey").await?;
    ensure!(
        message.contains("Two machines act as this node") && message.contains("node revoke edge-1"),
        "{message}"
    );
    refusal(copy.renews(&cloud).await, "a newer key of node edge-1 has superseded this one")?;
    // One event covers all of it.
    for (at, times) in [("renewal", 1.0), ("tunnel", 3.0)] {
        eventually(&format!("it is counted at the {at}"), SOON, async || {
            let count = cloud.metrics().await?.sum("cloudcore_prepull_superseded_keys_total", &[("at", at)]);
            ensure!(count >= times, "{count}");
            Ok(())
        })
        .await?;
    }
    drop((session, other_session));
    assert_eq!(events(&cluster, "edge-1", "SupersededKey").await?.len(), 1);
    // The newest key is still known after a restart.
    cloud.kill9()?;
    cloud.restart().await?;
    refusal(copy.renews(&cloud).await, "has superseded this one")?;
    own.renews(&cloud).await
}

#[tokio::test]
async fn a_box_returns_after_months() -> Result<()> {
    let cluster = Cluster::start().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let cloud = Cloud::start(&cluster).await?;
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").without_agent().await?;
    let authority = certificates::CloudAuthority::from_cluster(&cluster).await?;
    authority.expire(node.state_dir(), "edge-1", 89 * DAY)?;
    node.restart_agent()?;
    node.is_connected().await?;
    let message = event_message(&cluster, "edge-1", "RenewedAfterExpiry").await?;
    ensure!(message.contains("had expired at") && message.contains("node revoke edge-1"), "{message}");
    ensure!(cloud.log().contains("RenewedAfterExpiry"), "it is in the log as well");

    let logs_reason = async |node: &EdgeNode, why: &str| {
        eventually(why, SOON, async || {
            ensure!(node.agent_log().contains(why), "not yet");
            Ok(())
        })
        .await
    };
    // A board without a battery is still before the end by its own clock.
    node.kill9_agent()?;
    authority.expire(node.state_dir(), "edge-1", 89 * DAY)?;
    node.set_clock_off_by(-100 * 24 * 3600)?;
    node.restart_agent()?;
    node.is_connected().await?;
    node.set_clock_off_by(0)?;
    // A replica whose clock was ahead has issued one.
    node.kill9_agent()?;
    authority.postdate(node.state_dir(), "edge-1", 45 * DAY)?;
    node.restart_agent()?;
    node.is_connected().await?;

    node.kill9_agent()?;
    authority.expire(node.state_dir(), "edge-1", 91 * DAY)?;
    node.restart_agent()?;
    logs_reason(&node, "join again with a new token (HTTP 403)").await?;
    ensure!(!node.has_agent_ended(), "it waits for a join");

    node.kill9_agent()?;
    cloud.command(&["node", "revoke", "edge-1"]).await?;
    authority.expire(node.state_dir(), "edge-1", DAY)?;
    node.restart_agent()?;
    logs_reason(&node, "node edge-1 is revoked").await?;
    ensure!(node.metrics().await?.sum("edgecore_prepull_connected", &[]) < 0.5, "it is in");
    assert_eq!(events(&cluster, "edge-1", "RenewedAfterExpiry").await?.len(), 1);
    Ok(())
}
