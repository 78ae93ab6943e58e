//! Tests of the harness: each part of an edge node can be stopped, cut off and restarted on its own.

use prepull_e2e::prelude::*;

#[tokio::test]
async fn every_part_of_a_node_restarts() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).args(&["--heartbeat", "1s"]).await?;
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let image = Image::small("app")?;
    let reference = registry.seed(&image, "team/app:v1")?;
    cluster.registry_secret("default", "alice", &[registry.login("alice")?]).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let tunnel = Proxy::for_tcp(cloud.tunnel_addr())?;
    let mut edge = EdgeNode::start(&cluster, &cloud, "edge-1").tunnel_through(&tunnel).await?;
    edge.is_connected().await?;
    ensure!(tunnel.connections() > 0, "the tunnel does not go through the proxy");

    let job = |name: &str| cluster.job(name).images([&reference]).on(["edge-1"]).secret("default/alice");
    let status = job("first").completes().await?;
    let pulled = status.image("edge-1", &reference).context("no status of the image")?;
    assert_eq!(pulled.digest.as_deref(), Some(image.digest()));
    assert_eq!(edge.images().await?.get(&reference).map(String::as_str), Some(image.digest()));

    // The cloud notices a cut, and the agent reconnects by itself.
    tunnel.refuse();
    cloud.has_sessions(0).await?;
    tunnel.accept_again()?;
    cloud.has_sessions(1).await?;

    // A job waits for an agent that is frozen, killed and restarted.
    edge.stop_agent()?;
    let waiting = job("second").apply().await?;
    edge.cont_agent()?;
    waiting.completes().await?;
    edge.kill9_agent()?;
    edge.remove_image(&reference).await?;
    let waiting = job("third").apply().await?;
    waiting.until("edge-1 is offline", |status| status.summary.pending == 1).await?;
    edge.restart_containerd().await?;
    edge.restart_agent()?;
    waiting.completes().await?;
    ensure!(edge.has_image(&reference).await?, "Completed, and it is not there");
    ensure!(edge.open_tasks() <= 1, "tasks that ended stay in the ledger");
    edge.terminate_agent().await
}

#[tokio::test]
async fn one_node_can_have_a_proxy() -> Result<()> {
    let registry = Registry::start().await?;
    let proxy = Proxy::for_http(registry.addr())?;
    let (near, far) = tokio::try_join!(Containerd::start("near"), Containerd::start("far"))?;
    registry.route_node_through(&far, &proxy)?;
    let reference = registry.seed(&Image::small("app")?, "team/app:v1")?;
    near.pull(&reference, None).await?;
    assert_eq!(proxy.records(), []);
    far.pull(&reference, None).await?;
    ensure!(proxy.records().iter().any(|record| record.path.contains("/blobs/") && record.status == 200));
    Ok(())
}
