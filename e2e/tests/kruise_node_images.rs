//! NodeImages: each is created and deleted with its Node, and manually added tags are pulled, reported, and removed
//! again.

use std::collections::BTreeMap;

use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::kruise::NodeImage;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const LARGE: u64 = 24 * MIB;

fn labels(object: &NodeImage) -> BTreeMap<String, String> {
    object.metadata.labels.clone().unwrap_or_default()
}

#[tokio::test]
async fn a_node_image_follows_its_node() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    let _cloud = Cloud::with_kruise(&cluster).await?;
    cluster.node("late").edge().label("site", "factory").create().await?;
    cluster.node("virtual").edge().ready().label("type", "virtual-kubelet").create().await?;
    cluster.node("other").ready().create().await?;
    // Nodes are processed in order: when this one has its NodeImage, the others have been processed.
    cluster.node("witness").edge().ready().create().await?;
    cluster.node_image("witness").exists().await?;
    for node in ["late", "virtual", "other"] {
        ensure!(!cluster.node_image(node).exists_now().await?, "{node} has one");
    }

    cluster.mark_ready("late", true).await?;
    let late = cluster.node_image("late");
    let expected = BTreeMap::from([(EDGE_LABEL.into(), String::new()), ("site".into(), "factory".into())]);
    let made = late.until_met("has the labels of its Node", |object| labels(object) == expected).await?;
    assert_eq!(made.spec.images.len(), 0);

    // The NodeImage is kept while the Node is NotReady.
    cluster.mark_ready("late", false).await?;
    cluster.label_node("late", "site", Some("shop")).await?;
    late.until_met("follows", |object| labels(object).get("site").is_some_and(|site| site == "shop")).await?;
    cluster.label_node("late", "site", None).await?;
    late.until_met("loses it", |object| !labels(object).contains_key("site")).await?;
    late.patch(json!({"metadata": {"labels": {"mine": "too"}}})).await?;
    late.until_met("has the labels of its Node", |object| !labels(object).contains_key("mine")).await?;

    cluster.delete_node("late").await?;
    late.is_gone().await?;
    // A deleted NodeImage is created again, and one without a Node is removed.
    let before = cluster.node_image("witness").uid().await?;
    cluster.node_image("witness").delete().await?;
    cluster
        .node_image("witness")
        .until_met("is made again", |object| object.metadata.uid.as_ref() != Some(&before))
        .await?;
    cluster.create_node_image("nobody").await?.is_gone().await?;
    let table = cluster.kubectl(&["get", "nodeimages"]).await?;
    let header: Vec<_> = table.lines().next().unwrap_or_default().split_whitespace().collect();
    assert_eq!(header, ["NAME", "DESIRED", "PULLING", "SUCCEED", "FAILED", "AGE"]);
    let selected = cluster.kubectl(&["get", "nodeimage", "-l", EDGE_LABEL, "-o", "name"]).await?;
    assert_eq!(selected.trim(), "nodeimage.apps.kruise.io/witness");
    Ok(())
}

#[tokio::test]
async fn an_empty_selector_selects_every_node() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    cluster.node("plain").ready().create().await?;
    cluster.node("edge").edge().ready().create().await?;
    let _cloud = Cloud::with_kruise(&cluster).arg("--kruise-node-selector=").await?;
    for node in ["plain", "edge"] {
        cluster.node_image(node).exists().await?;
    }
    Ok(())
}

/// Entry for an image of the site's registry, with these tags and the secret.
fn images(name: &str, tags: &[Value]) -> Value {
    json!({"images": {name: {
        "pullSecrets": [{"namespace": "default", "name": "registry"}],
        "tags": tags,
    }}})
}

fn tag(tag: &str, ttl: i32, version: i64, policy: &str) -> Value {
    let limits = json!({"ttlSecondsAfterFinished": ttl, "backoffLimit": 0});
    json!({"tag": tag, "pullPolicy": limits, "version": version, "imagePullPolicy": policy})
}

#[tokio::test]
async fn a_manual_tag_lasts_for_its_ttl() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (first, reference) = site.seed_image("by-hand", &[MIB])?;
    let (name, _) = name_and_tag(&reference);
    let node = site.add_node("edge-1").await?.await?;
    let node_image = site.cluster.node_image("edge-1");
    node_image.exists().await?;
    let (v1, v2) = (node_image.tag(name, "v1"), node_image.tag(name, "v2"));

    // Two tags are added, and one of them exists.
    let (one, two) = (tag("v1", 300, 0, "IfNotPresent"), tag("v2", 300, 0, "IfNotPresent"));
    node_image.patch_spec(images(name, &[one.clone(), two.clone()])).await?;
    let there = v1.succeeds().await?;
    assert_eq!((there.progress, there.version, there.message.as_str()), (100, 0, ""), "{there:?}");
    ensure!(there.start_time.is_some() && there.start_time <= there.completion_time, "{there:?}");
    let id = there.image_id.context("no imageID")?;
    ensure!(id.starts_with(name) && id.contains("sha256:"), "{id}");
    let failed = v2.fails().await?;
    ensure!(failed.message.contains("not found") && failed.image_id.is_none(), "{failed:?}");
    let counted = node_image
        .until_met("is counted", |object| {
            object.status.as_ref().is_some_and(|s| (s.desired, s.succeeded, s.failed) == (2, 1, 1))
        })
        .await?;
    assert_eq!(counted.status.map(|status| (status.pulling, status.waiting)), Some((0, 0)));
    assert_eq!(node.images().await?.get(&reference).map(String::as_str), Some(first.digest()));

    // A raised version pulls the tag again.
    let second = Image::of_layers("by-hand, rebuilt", &[MIB])?;
    site.registry.seed(&second, "team/by-hand:v1")?;
    let again = tag("v1", 300, 1, "Always");
    node_image.patch_spec(images(name, &[again.clone(), two.clone()])).await?;
    let (_, status) = v1
        .until_met("is through again", |_, status| status.is_some_and(|status| status.has_ended(1)))
        .await?;
    assert_eq!(status.map(|status| status.phase), Some(PullPhase::Succeeded));
    assert_eq!(node.images().await?.get(&reference).map(String::as_str), Some(second.digest()));
    assert_eq!(v2.status().await?.map(|status| status.completion_time), Some(failed.completion_time));

    // Removing the entry does not remove the image.
    node_image.patch_spec(images(name, &[again])).await?;
    v2.is_gone().await?;
    assert_eq!(v1.status().await?.map(|status| status.phase), Some(PullPhase::Succeeded));

    // The entry is removed after its time to live.
    node_image.patch_spec(images(name, &[tag("v1", 1, 1, "Always")])).await?;
    v1.is_gone().await?;
    let empty = node_image.is_empty().await?.status.unwrap_or_default();
    assert_eq!((empty.desired, empty.succeeded, empty.failed, empty.pulling), (0, 0, 0, 0), "{empty:?}");
    ensure!(node.has_image(&reference).await?);
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn removing_an_entry_stops_its_pull() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("progress", &[LARGE])?;
    let (name, _) = name_and_tag(&reference);
    let node = site.add_node("edge-1").await?.await?;
    site.link.throttle(Some(2 * MIB));
    let node_image = site.cluster.node_image("edge-1");
    node_image.exists().await?;
    node_image.patch_spec(images(name, &[tag("v1", 300, 0, "IfNotPresent")])).await?;
    let mut seen = Vec::new();
    node_image
        .tag(name, "v1")
        .until_met("is beyond the half", |_, status| {
            let progress = status.map_or(0, |status| status.progress);
            if seen.last() != Some(&progress) {
                seen.push(progress);
            }
            progress > 50
        })
        .await?;
    ensure!(seen.is_sorted() && seen.iter().all(|progress| (0..100).contains(progress)), "{seen:?}");
    ensure!(seen.iter().filter(|progress| **progress > 0).count() > 1, "only once: {seen:?}");
    let pulling = node_image.get().await?.status.unwrap_or_default();
    assert_eq!((pulling.desired, pulling.pulling, pulling.succeeded), (1, 1, 0), "{pulling:?}");

    node_image.patch_spec(json!({"images": null})).await?;
    node_image.tag(name, "v1").is_gone().await?;
    node.forgets_all_tasks().await?;
    ensure!(!node.has_image(&reference).await?, "it is there");
    ensure!(site.link.bytes() < LARGE, "it was pulled to the end");
    Ok(())
}

#[tokio::test]
async fn an_invalid_entry_spares_the_others() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("right", &[MIB])?;
    let (name, _) = name_and_tag(&reference);
    let _node = site.add_node("edge-1").await?.await?;
    let node_image = site.cluster.node_image("edge-1");
    node_image.exists().await?;
    let mut spec = images(name, &[tag("v1", 300, 0, "IfNotPresent")]);
    spec["images"]["No Image"] = json!({"tags": [tag("v1", 300, 0, "IfNotPresent")]});
    node_image.patch_spec(spec).await?;
    node_image.tag(name, "v1").succeeds().await?;
    let wrong = node_image.tag("No Image", "v1").fails().await?;
    ensure!(wrong.message.contains("No Image"), "{wrong:?}");

    // Newer API servers refuse these entries themselves.
    for (field, words, tags) in [
        ("ttl", "pullPolicy.ttlSecondsAfterFinished", json!([{"tag": "v1", "pullPolicy": {}}])),
        ("version", "can not be less than 0", json!([tag("v1", 9, -1, "Always")])),
    ] {
        let image = format!("registry.example/{field}");
        match node_image.patch_spec(json!({"images": {&image: {"tags": tags}}})).await {
            Ok(_) => {
                let failed = node_image.tag(&image, "v1").fails().await?;
                ensure!(failed.message.contains(words), "{failed:?}");
            }
            Err(error) => ensure!(format!("{error:#}").contains(words), "{error:#}"),
        }
    }
    assert_eq!(
        node_image.tag(name, "v1").status().await?.map(|status| status.phase),
        Some(PullPhase::Succeeded)
    );
    Ok(())
}

#[tokio::test]
async fn two_jobs_share_an_entry() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (image, reference) = site.seed_image("shared", &[12 * MIB])?;
    let node = site.add_node("edge-1").await?.await?;
    site.link.throttle(Some(3 * MIB));
    let first = site.pull_job("first", &reference).on_nodes(["edge-1"]).apply().await?;
    let tag = site.cluster.node_image("edge-1").referenced_tag(&reference);
    let before = tag.is_requested().await?;
    assert_eq!(before.owner_references.len(), 1);
    let owner = &before.owner_references[0];
    assert_eq!((owner.kind.as_deref(), owner.name.as_deref()), (Some("ImagePullJob"), Some("first")));
    assert_eq!((owner.namespace.as_deref(), owner.uid.clone()), (Some("default"), Some(first.uid().await?)));
    ensure!(before.created_at.is_some(), "{before:?}");
    node.accepts_a_task().await?;

    // A second job joins while the tag is being pulled.
    let second = site.pull_job("second", &reference).on_nodes(["edge-1"]).apply().await?;
    let (spec, _) = tag
        .until_met("has two owners", |spec, _| spec.is_some_and(|spec| spec.owner_references.len() == 2))
        .await?;
    ensure!(spec.is_some_and(|spec| spec.version > before.version), "the version rises");
    for job in [&first, &second] {
        let status = job.completes().await?;
        assert_eq!((status.desired, status.succeeded), (1, 1), "{}: {status:?}", job.name());
    }
    let done = tag.succeeds().await?;
    ensure!(done.version > before.version, "{done:?}");

    // A third job joins when the image is on the node.
    site.link.throttle(None);
    let third = site.pull_job("third", &reference).on_nodes(["edge-1"]).apply().await?;
    assert_eq!(third.completes().await?.succeeded, 1);
    ensure!(tag.succeeds().await?.version > done.version);
    for blob in image.blobs() {
        let size = std::fs::metadata(image.blob_file(blob))?.len();
        ensure!(site.link.bytes_of(blob) <= size + 2 * MIB, "{blob} was fetched again");
    }
    node.forgets_all_tasks().await?;

    // The entry is removed with the last of its owners.
    for job in [&first, &second, &third] {
        ensure!(tag.spec().await?.is_some(), "{} is still an owner", job.name());
        job.delete().await?;
    }
    tag.is_gone().await
}
