//! Rotation of the CA, with edges that are away, clouds that are killed, and jobs that go on. The steps themselves are
//! tested in cloudcore-prepull/tests/tunnel.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, DeleteParams, ListParams};

use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;

/// Limit for a step that waits ten seconds on purpose.
const STEP: Duration = Duration::from_secs(45);
const NAMESPACE: &str = "prepull-system";

fn pki(node: &EdgeNode, file: &str) -> Result<String> {
    Ok(std::fs::read_to_string(node.state_dir().join("pki").join(file))?)
}

/// The keys in the CA's Secret.
async fn parts(cluster: &Cluster) -> Result<Vec<String>> {
    let secret = Api::<Secret>::namespaced(cluster.client(), NAMESPACE).get("prepull-ca").await?;
    Ok(secret.data.unwrap_or_default().into_keys().collect())
}

async fn secret_gets(cluster: &Cluster, part: &str) -> Result<()> {
    eventually(&format!("the Secret gets {part}"), STEP, async || {
        let parts = parts(cluster).await?;
        ensure!(parts.iter().any(|name| name == part), "it has {parts:?}");
        Ok(())
    })
    .await
}

/// Waits until the edge trusts what is published, and has another certificate than before.
async fn renews(node: &EdgeNode, cluster: &Cluster, before: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), NAMESPACE);
    eventually(&format!("{} has a certificate of the new CA", node.name()), STEP, async || {
        let published = maps.get("prepull-ca").await?.data.unwrap_or_default().remove("ca.crt");
        ensure!(pki(node, "client.crt")? != before, "it has the certificate of before");
        ensure!(Some(pki(node, "ca.crt")?) == published, "it does not trust what is published");
        Ok(())
    })
    .await
    .with_context(|| prepull_e2e::place::tail(&node.agent_log(), 20))
}

#[tokio::test]
async fn a_rotation_in_the_middle_of_jobs_makes_nobody_join_again() -> Result<()> {
    let mut site = Site::start().await?;
    let node = site.node("edge-1").await?.await?;
    let mut away = site.node("edge-2").await?.await?;
    for node in [&node, &away] {
        node.is_connected().await?;
    }
    let (image, reference) = site.image("rotated", &[MIB, 72 * MIB])?;
    let (_, other) = site.image("afterwards", &[MIB])?;
    let (first, of_away) = (pki(&node, "client.crt")?, pki(&away, "client.crt")?);
    away.kill9_agent()?;
    // Slow enough to last until the new CA signs.
    site.link.throttle(Some(MIB));
    let job = site.job("through").images([&reference]).on(["edge-1"]).timeout_seconds(300).apply().await?;
    node.accepts_a_task().await?;

    site.cloud.command(&["ca", "rotate"]).await?;
    let again = format!("{:#}", site.cloud.command(&["ca", "rotate"]).await.err().context("twice")?);
    ensure!(again.contains("a rotation is under way already"), "{again}");
    // Before the leader can have made the next step.
    site.cloud.restart().await?;
    secret_gets(&site.cluster, "previous.crt").await?;
    ensure!(!parts(&site.cluster).await?.contains(&"next.key".to_owned()), "a key was left");
    // In the moment of the renewal: it fails, and the edge soon tries again.
    eventually("the edge is told of the CA that signs", STEP, async || {
        let told = node.agent_log().matches("the CAs that the cloud named are trusted").count();
        ensure!(told >= 2, "it was told {told} times");
        Ok(())
    })
    .await?;
    site.cloud.kill9()?;
    eventually("the edge has tried to renew", STEP, async || {
        let has_failed = node.agent_log().contains("the certificate was not renewed");
        ensure!(has_failed || pki(&node, "client.crt")? != first, "not yet");
        Ok(())
    })
    .await?;
    site.cloud.restart().await?;
    renews(&node, &site.cluster, &first).await?;
    assert_eq!(job.node_status("edge-1").await?.phase, NodePhase::InProgress, "the pull was over too soon");

    site.cloud.restart().await?;
    // It knows the old CA alone.
    assert_eq!(pki(&away, "client.crt")?, of_away);
    away.restart_agent()?;
    renews(&away, &site.cluster, &of_away).await?;
    site.link.throttle(None);
    let status = job.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
    assert_eq!(site.fetches(&image), image.blobs().len(), "each blob was fetched once");

    let early = format!("{:#}", site.cloud.command(&["ca", "retire"]).await.err().context("too early")?);
    ensure!(early.contains("--now"), "{early}");
    eventually("all have renewed", STEP, async || {
        let shown = site.cloud.command(&["ca", "show"]).await?;
        ensure!(shown.contains("Of 2 connected edges 2 trust both, 2 have a certificate"), "{shown}");
        Ok(())
    })
    .await?;
    site.cloud.command(&["ca", "retire", "--now"]).await?;
    eventually("one CA is left", SOON, async || {
        let cas = [pki(&node, "ca.crt")?, pki(&away, "ca.crt")?];
        ensure!(cas.iter().all(|cas| cas.matches("BEGIN").count() == 1), "{cas:?}");
        Ok(())
    })
    .await?;
    assert_eq!(parts(&site.cluster).await?, ["since", "tls.crt", "tls.key"]);
    site.cloud.restart().await?;
    let status = site.job("after").images([&other]).on(["edge-1", "edge-2"]).completes().await?;
    assert_eq!(status.summary.successful, 2);
    Ok(())
}

#[tokio::test]
async fn whoever_makes_tokens_needs_no_right_to_the_key_of_the_ca() -> Result<()> {
    let cluster = Cluster::own().await?;
    let cloud = Cloud::start(&cluster).await?;
    let manifest = workspace().join("manifests/cloudcore-prepull/optional/token-admin.yaml");
    cluster.apply_file(&manifest).await?;
    let kubeconfig = cluster.kubeconfig_as("system:serviceaccount:prepull-system:prepull-token-admin")?;
    let token = cloud.command_as(&kubeconfig, &["token", "create", "--node", "edge-1"]).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    EdgeNode::start(&cluster, &cloud, "edge-1").with_token(&token).await?.is_connected().await?;
    let other = cloud.token("edge-1").await?;
    assert_eq!(token.split('.').next(), other.split('.').next(), "it names another CA");

    // Neither by name nor in a list, and it cannot delete it either.
    let client = Cluster::client_of(&kubeconfig).await?;
    let secrets: Api<Secret> = Api::namespaced(client, NAMESPACE);
    let refused = |error: kube::Error| matches!(error, kube::Error::Api(status) if status.code == 403);
    ensure!(secrets.get("prepull-ca").await.err().is_some_and(refused), "it reads the key");
    ensure!(secrets.list(&ListParams::default()).await.err().is_some_and(refused), "it lists the key");
    let deleted = secrets.delete("prepull-ca", &DeleteParams::default()).await;
    ensure!(deleted.err().is_some_and(refused), "it deletes the CA");
    Ok(())
}
