//! Identity of nodes: tokens in Secrets of a real API server, certificates, and attempts to act as another node.
//! cloudcore-prepull/tests/tunnel has the tests that need no API server.

use std::path::Path;
use std::time::Duration;

use edgecore_prepull::cloud::identity::Identity;
use edgecore_prepull::cloud::tunnel::{TunnelEvent, TunnelSender, dial};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ListParams};
use prepull_api::task::{ImageOutcome, ImageResult, JobUid, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, TUNNEL_PATH};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use prepull_e2e::prelude::*;

#[tokio::test]
async fn a_token_enrols_its_node_once() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let place = Place::here()?;
    let token = cloud.token("edge-1").await?;
    refusal(cloud.join(&token, "edge-2", &place.new_dir("of-another")?).await, "is for node edge-1")?;

    let own = place.new_dir("own")?;
    cloud.join(&token, "edge-1", &own).await?;
    // A request with another key comes from another machine.
    refusal(cloud.join(&token, "edge-1", &place.new_dir("again")?).await, "used with another key")?;

    let short = cloud.command(&["token", "create", "--ttl", "1s"]).await?;
    // The expiry of the token isn't reported.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    refusal(cloud.join(&short, "edge-6", &place.new_dir("six")?).await, "expired")?;

    // A token without a node serves each edge node of the cluster, once; a revoked or expired token serves none.
    cluster.edge_nodes(&["edge-7", "edge-8"]).await?;
    cluster.node("cloud-1").ready().create().await?;
    let fleet = cloud.command(&["token", "create"]).await?;
    // New: cloudcore waits for its watch to deliver it.
    cloud.join(&fleet, "edge-8", &place.new_dir("eight")?).await?;
    cloud.join(&fleet, "edge-7", &place.new_dir("seven")?).await?;
    refusal(cloud.join(&fleet, "edge-7", &place.new_dir("copy")?).await, "edge-7 has joined before")?;
    refusal(cloud.join(&fleet, "edge-1", &place.new_dir("one")?).await, "the cluster has no Node edge-1")?;
    refusal(cloud.join(&fleet, "cloud-1", &place.new_dir("c")?).await, "the Node cloud-1 is none")?;
    let id = fleet.split('.').nth(1).context("a token has three parts")?;
    cloud.command(&["token", "revoke", id]).await?;
    refusal(cloud.join(&fleet, "edge-9", &place.new_dir("nine")?).await, "unknown token")?;
    let listed = cloud.command(&["token", "list"]).await?;
    ensure!(listed.contains("edge-1") && !listed.contains(id), "{listed}");
    Ok(())
}

#[tokio::test]
async fn a_token_is_stored_as_a_hash() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let token = cloud.token("edge-1").await?;
    let parts: Vec<&str> = token.split('.').collect();
    let [ca, id, secret] = parts[..] else { bail!("{} parts", parts.len()) };
    ensure!(ca.len() == 64 && !token.contains(char::is_whitespace), "not only a token is printed");

    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "prepull-system");
    let stored = secrets.get(&format!("prepull-token-{id}")).await.context("the token's Secret")?;
    let stored = serde_json::to_string(&stored.data.unwrap_or_default().values().collect::<Vec<_>>())?;
    let all = secrets.list(&ListParams::default()).await?;
    let everything: Vec<u8> =
        all.items.iter().flat_map(|s| s.data.iter().flatten()).flat_map(|(_, v)| v.0.clone()).collect();
    let everything = String::from_utf8_lossy(&everything);
    ensure!(!everything.contains(secret), "the token itself is stored");
    ensure!(stored.len() > 40, "nothing is stored: {stored}");
    ensure!(!cloud.log().contains(secret), "the token is in the log");
    Ok(())
}

#[tokio::test]
async fn a_node_acts_only_for_itself() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    stage.cluster.registry_secret("default", "alice", &[registry.login("alice")?]).await?;
    let link = Proxy::for_http(registry.addr())?;
    registry.route_through(&link)?;
    link.throttle(Some(2 * MIB));
    let image = Image::of_layers("slow", &[8 * MIB])?;
    let reference = registry.seed(&image, "team/slow:v1")?;

    // The intruder has a valid certificate of its own.
    stage.cluster.edge_nodes(&["edge-2"]).await?;
    let place = Place::here()?;
    let dir = place.new_dir("intruder")?;
    let token = stage.cloud.token("edge-2").await?;
    stage.cloud.join(&token, "edge-2", &dir).await?;
    let intruder = Intruder::start(&dir, &stage.cloud)?;

    let job = stage
        .cluster
        .job("of-edge-1")
        .images([&reference])
        .on(["edge-1"])
        .secret("default/alice")
        .apply()
        .await?;
    job.until("edge-1 is pulling", |status| {
        status.node_status.iter().any(|node| node.phase == NodePhase::InProgress)
    })
    .await?;
    let task = TaskId { job: JobUid(job.uid().await?), attempt: 1 };
    let failed =
        ImageResult { reason: "forged".to_owned(), attempts: 1, ..ImageResult::new(ImageOutcome::Failed) };
    let forged = TaskResult {
        reason: "forged".to_owned(),
        images: vec![failed],
        ..TaskResult::new(task, TaskOutcome::Failed)
    };
    let answers = intruder.says(EdgeMessage::Result(forged)).await?;
    // Its result is acknowledged and has no other effect.
    ensure!(answers.iter().all(|answer| matches!(answer, CloudMessage::ResultAck { .. })), "{answers:?}");

    link.throttle(None);
    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 1);
    ensure!(!serde_json::to_string(&status)?.contains("forged"), "{status:?}");
    Ok(())
}

#[tokio::test]
async fn ca_and_nodes_survive_a_restart() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let node = EdgeNode::start(&cluster, &cloud, "edge-1").await?;
    node.is_connected().await?;
    let before = cloud.token("x").await?;
    cloud.kill9()?;
    cloud.restart().await?;
    node.is_connected().await?;
    let after = cloud.token("x").await?;
    assert_eq!(before.split('.').next(), after.split('.').next(), "the CA is another one");
    Ok(())
}

/// A client with a node's certificate that sends any message.
struct Intruder {
    link: TunnelSender,
    events: tokio::sync::Mutex<mpsc::Receiver<TunnelEvent>>,
    _stop: tokio_util::sync::DropGuard,
}

impl Intruder {
    fn start(state_dir: &Path, cloud: &Cloud) -> Result<Self> {
        let identity = Identity::load(state_dir)?;
        let (link, outgoing) = TunnelSender::new(16);
        let (sender, events) = mpsc::channel(16);
        let stop = CancellationToken::new();
        let url = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
        tokio::spawn(dial::run(identity, url, sender, outgoing, stop.clone()));
        Ok(Self { link, events: tokio::sync::Mutex::new(events), _stop: stop.drop_guard() })
    }

    /// Sends a message once connected, and returns what arrives within two seconds.
    async fn says(&self, message: EdgeMessage) -> Result<Vec<CloudMessage>> {
        let mut events = self.events.lock().await;
        let mut answers = Vec::new();
        let listen = async {
            while let Some(event) = events.recv().await {
                match event {
                    TunnelEvent::Connecting(hello) => _ = hello.send(Hello::default()),
                    TunnelEvent::Connected(_) => self.link.send(message.clone()).await,
                    TunnelEvent::Message(answer) => answers.push(answer),
                    TunnelEvent::Disconnected => bail!("the session ended"),
                }
            }
            Ok(())
        };
        // We can't wait for the absence of a message; an answer to its own message comes immediately.
        if let Ok(ended) = tokio::time::timeout(Duration::from_secs(2), listen).await {
            ended?;
        }
        ensure!(!answers.is_empty(), "no answer at all: was it connected?");
        Ok(answers)
    }
}
