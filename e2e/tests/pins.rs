//! Pins: images that the kubelet's garbage collection leaves alone for as long as their job exists.

use prepull_e2e::prelude::*;
use serde_json::json;

const PINNED: &str = "io.cri-containerd.pinned";
const PINNED_BY: &str = "operations.kubeedge.io/pinned-by";

/// Checks that exactly the jobs with these UIDs want the image pinned, and that it's pinned if there are any.
async fn is_pinned_for(node: &EdgeNode, names: &[&str], uids: &[&str]) -> Result<()> {
    for name in names {
        let labels = node.containerd().labels_of(name).await?;
        let jobs: Vec<_> = labels
            .keys()
            .filter_map(|label| label.strip_prefix("operations.kubeedge.io/pinned-for."))
            .collect();
        let mut expected = uids.to_vec();
        expected.sort_unstable();
        ensure!(jobs == expected, "{name} is pinned for {jobs:?}, not {expected:?}");
        let is_pinned = labels.get(PINNED).is_some_and(|value| value == "pinned");
        let is_ours = labels.contains_key(PINNED_BY);
        ensure!((is_pinned, is_ours) == (!uids.is_empty(), !uids.is_empty()), "{name}: {labels:?}");
    }
    // Versions before 1.6.25 report no pins.
    let reports = !node.containerd().version().await?.starts_with("1.6.2");
    ensure!(node.containerd().is_pinned(names[0]).await? == (reports && !uids.is_empty()), "CRI");
    Ok(())
}

#[tokio::test]
async fn a_pinned_image_stays_until_its_last_job() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let reference = registry.seed(&Image::small("pinned")?, "team/pinned:v1")?;
    let job = |name: &str| {
        stage
            .cluster
            .job(name)
            .on(["edge-1"])
            .images([&reference])
            .policy("Always")
            .spec(|spec| spec.pin = true)
    };

    let first = job("first").apply().await?;
    let status = first.completes().await?;
    let image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!(image.pinned, Some(node.containerd().is_pinned(&reference).await?), "as the runtime reports");
    let id = node.containerd().image_id(&reference).await?;
    let first_uid = first.uid().await?;
    is_pinned_for(node, &[&reference, &id], &[&first_uid]).await?;

    // Another pull: the record of the name loses its labels.
    node.containerd().pull(&reference, None).await?;
    is_pinned_for(node, &[&id], &[&first_uid]).await?;

    let second = job("second").apply().await?;
    second.completes().await?;
    let second_uid = second.uid().await?;
    is_pinned_for(node, &[&id], &[&first_uid, &second_uid]).await?;
    first.delete().await?;
    eventually("the first job wants it no more", SOON, async || {
        is_pinned_for(node, &[&reference, &id], &[&second_uid]).await
    })
    .await?;
    // A job that ends the pin keeps the image.
    second.patch_spec(json!({"pin": false})).await?;
    eventually("no job wants it pinned", SOON, async || is_pinned_for(node, &[&reference, &id], &[]).await)
        .await?;
    ensure!(node.has_image(&reference).await?, "it is gone");
    Ok(())
}

#[tokio::test]
async fn a_returning_agent_unpins_a_deleted_job() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").await?;
    let [going, staying] = ["going", "staying"].map(|name| {
        let reference = registry.seed(&Image::small(name)?, &format!("team/{name}:v1"))?;
        anyhow::Ok((
            cluster.job(name).on(["edge-1"]).images([&reference]).spec(|spec| spec.pin = true),
            reference,
        ))
    });
    let ((going, gone), (staying, kept)) = (going?, staying?);
    let (going, staying) = (going.apply().await?, staying.apply().await?);
    going.completes().await?;
    staying.completes().await?;
    // A foreign pin: only its owner may remove it.
    let of_others = registry.seed(&Image::small("sandbox")?, "team/sandbox:v1")?;
    node.containerd().pull(&of_others, None).await?;
    node.containerd().set_label(&of_others, PINNED, "pinned").await?;

    node.kill9_agent()?;
    cloud.kill9()?;
    going.delete().await?;
    cloud.restart().await?;
    is_pinned_for(&node, &[&gone], &[&node_uid(&node, &gone).await?]).await?;
    node.restart_agent()?;
    eventually("the image of the deleted job is unpinned", SOON, async || {
        is_pinned_for(&node, &[&gone], &[]).await
    })
    .await?;
    is_pinned_for(&node, &[&kept], &[&staying.uid().await?]).await?;
    let labels = node.containerd().labels_of(&of_others).await?;
    assert_eq!(labels.get(PINNED).map(String::as_str), Some("pinned"), "a foreign pin");
    Ok(())
}

/// The UID of the only job that pins the image.
async fn node_uid(node: &EdgeNode, reference: &str) -> Result<String> {
    let labels = node.containerd().labels_of(reference).await?;
    let uid = labels.keys().find_map(|label| label.strip_prefix("operations.kubeedge.io/pinned-for."));
    Ok(uid.context("it is not pinned")?.to_owned())
}
