//! `kubectl prepull cancel`: its effects, and their limits.

use prepull_api::crd::status::{ImagePrePullJobStatus, NodeStatus};
use prepull_e2e::prelude::*;
use serde_json::json;

const NAMES: [&str; 3] = ["edge-1", "edge-2", "edge-3"];

async fn fleet() -> Result<(Site, Vec<EdgeNode>)> {
    let site = Site::start().await?;
    let mut nodes = Vec::new();
    for name in NAMES {
        nodes.push(site.add_node(name).await?.await?);
    }
    Ok((site, nodes))
}

/// The reasons of the events about a job.
async fn reasons(job: &Job) -> Result<Vec<String>> {
    Ok(job.events().await?.into_iter().map(|(_, reason, _)| reason).collect())
}

fn has_failed_as(status: &ImagePrePullJobStatus, reason: &str) -> bool {
    status.conditions.iter().any(|c| c.type_ == "Failed" && c.status == "True" && c.reason == reason)
}

#[tokio::test]
async fn a_suspended_job_pulls_no_byte() -> Result<()> {
    let (mut site, nodes) = fleet().await?;
    let (large, image) = site.seed_image("large", &[8 * MIB])?;
    let job = site.job("held").images([&image]).on(NAMES).concurrency(3);
    let job = job.spec(|spec| spec.suspend = true).apply().await?;
    job.until("is suspended", |status| {
        status.conditions.iter().any(|c| c.type_ == "Suspended" && c.status == "True")
    })
    .await?;
    let carried = site.link.bytes();
    let me = Person::new(site.cluster.kubeconfig());
    me.runs("cancel held").await?.is(0, &["held cancelled"])?;
    let status = job.fails().await?;
    ensure!(has_failed_as(&status, "Cancelled"), "{status:?}");
    // The next leader doesn't start anything either, even on request.
    site.cloud.restart().await?;
    for node in &nodes {
        eventually("the node is back", SOON, async || node.is_connected().await).await?;
    }
    job.patch_spec(json!({"suspend": false, "retry": 1})).await?;
    let status = job.until("refuses the retry", |status| status.reason.contains("edit refused")).await?;
    ensure!(has_failed_as(&status, "Cancelled") && status.summary.pending == 3, "{status:?}");
    assert!(status.node_status.iter().all(|node| node.reason == "not started: the job was cancelled"));
    assert_eq!((site.link.bytes() - carried, site.fetches(&large)), (0, 0));
    let said = reasons(&job).await?;
    assert_eq!(said.iter().filter(|reason| *reason == "Cancelled").count(), 1, "{said:?}");
    assert!(!said.iter().any(|reason| ["Resumed", "NodeUnknown"].contains(&reason.as_str())), "{said:?}");
    Ok(())
}

#[tokio::test]
async fn a_running_job_makes_way() -> Result<()> {
    let (site, nodes) = fleet().await?;
    site.link.throttle(Some(MIB / 2));
    let (_, large) = site.seed_image("large", &[64 * MIB])?;
    let (_, small) = site.seed_image("small", &[MIB / 4])?;
    let long = site.job("long").images([&large]).on(NAMES).concurrency(2).apply().await?;
    long.until("pulls", |status| {
        let bytes = |node: &NodeStatus| node.image_status.iter().any(|image| image.bytes.is_some());
        status.node_status.iter().filter(|node| bytes(node)).count() == 2
    })
    .await?;
    // It waits: each of these nodes works on one job at a time.
    let next = site.job("next").images([&small]).on(NAMES).concurrency(3).apply().await?;
    let me = Person::new(site.cluster.kubeconfig());
    me.runs("cancel long").await?.is(0, &["long cancelled"])?;
    let status = long.fails().await?;
    ensure!(has_failed_as(&status, "Cancelled"), "{status:?}");
    assert_eq!((status.summary.unknown, status.summary.pending), (2, 1));
    assert_eq!(status.reason, "cancelled; 2 nodes did not end, 1 not started (Cancelled 2)");
    site.link.throttle(None);
    next.completes().await?;
    for node in &nodes {
        eventually("no task is left on the node", SOON, async || {
            ensure!(node.open_tasks() == 0, "{} has {}", node.name(), node.open_tasks());
            Ok(())
        })
        .await?;
        ensure!(!node.has_image(&large).await?, "{} has pulled all of it", node.name());
    }
    let said = reasons(&long).await?;
    assert!(!said.iter().any(|reason| reason == "NodeUnknown"), "{said:?}");
    Ok(())
}

#[tokio::test]
async fn an_older_cloud_is_named() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let job = cluster.job("night").images(["nginx:1.25"]).on(["edge-1"]);
    let job = job.spec(|spec| spec.suspend = true).apply().await?;
    // The definition of a version before these fields.
    let spec = "/schema/openAPIV3Schema/properties/spec";
    let removed = [0, 1].map(|version| format!("/spec/versions/{version}{spec}"));
    let removed = removed.iter().flat_map(|spec| {
        ["properties/cancel", "properties/rollout", "x-kubernetes-validations"]
            .map(|field| format!("{spec}/{field}"))
    });
    let crd = "imageprepulljobs.operations.kubeedge.io";
    let known = cluster.kubectl(&["get", "crd", crd, "-o", "yaml"]).await?;
    // Servers before 1.25 have no rules.
    let removed = removed.filter(|path| !path.ends_with("validations") || known.contains("oldSelf.cancel"));
    let removed: Vec<_> = removed.map(|path| json!({"op": "remove", "path": path})).collect();
    cluster.kubectl(&["patch", "crd", crd, "--type=json", "-p", &json!(removed).to_string()]).await?;
    eventually("the field is unknown", SOON, async || {
        let cancel = r#"{"spec":{"cancel":true}}"#;
        let tried =
            ["patch", "ippj", "night", "--type=merge", "--dry-run=server", "-o", "yaml", "-p", cancel];
        let stored = cluster.kubectl(&tried).await?;
        ensure!(!stored.contains("cancel: true"), "it is known");
        Ok(())
    })
    .await?;
    let before = job.get().await?;
    let me = Person::new(cluster.kubeconfig());
    // What the API server would drop is refused: it would be another job.
    for (line, field) in [
        ("cancel night", "spec.cancel"),
        ("set night wave=1,100%", "spec.rollout"),
        ("run nginx:1.25 --name waves --node edge-1 --wave 1,100% --wait=0", "spec.rollout"),
        ("remove nginx:1.25 --name away --node edge-1 --wait=0", "spec.rollout"),
    ] {
        let older = "the definitions of the cluster are of an older version";
        me.runs(line).await?.is(1, &[older, field, "kubectl apply -f manifests/crds"])?;
    }
    assert_eq!(
        cluster.kubectl(&["get", "ippj", "-o", "name"]).await?.lines().count(),
        1,
        "only night is there"
    );
    let after = job.get().await?;
    assert_eq!((after.spec, after.metadata.generation), (before.spec, before.metadata.generation));
    Ok(())
}
