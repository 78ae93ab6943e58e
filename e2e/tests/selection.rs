//! Selection of nodes: the nodes of a job, and the reasons for skipping others.

use std::collections::BTreeMap;

use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;

fn skipped(status: &ImagePrePullJobStatus) -> BTreeMap<&str, &str> {
    status.skipped_nodes.iter().map(|node| (node.node_name.as_str(), node.reason.as_str())).collect()
}

fn nodes(status: &ImagePrePullJobStatus) -> Vec<&str> {
    status.node_status.iter().map(|node| node.node_name.as_str()).collect()
}

#[tokio::test]
async fn skipped_nodes_have_their_reason() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    stage.cluster.node("cloud-1").ready().create().await?;
    stage.cluster.node("edge-2").edge().create().await?;
    let reference = registry.seed(&Image::small("selection")?, "team/app:v1")?;

    let names = ["ghost", "edge-1", "cloud-1", "edge-1", "edge-2", "ghost"];
    let job = stage.cluster.job("names").images([&reference]).on(names).tolerate("0.5").apply().await?;
    let status = job.completes().await?;
    assert_eq!(nodes(&status), ["edge-1", "ghost"], "each once");
    let reasons = [("cloud-1", "not an edge node"), ("edge-2", "NotReady")];
    assert_eq!(skipped(&status), BTreeMap::from(reasons));
    let summary = &status.summary;
    assert_eq!((summary.desired, summary.successful, summary.failure, summary.skipped), (2, 1, 1, 2));
    assert_eq!(status.node("ghost").and_then(|node| node.code), Some(FailureCode::NodeNotFound));
    assert_eq!(job.event("Started").await?.1, "1 image on 1 node, 2 skipped, 1 not found");
    let (kind, note) = job.event("NodesSkipped").await?;
    assert_eq!((kind.as_str(), note.contains("edge-2 (NotReady)")), ("Warning", true), "{note}");
    let (kind, note) = job.event("NodesMissing").await?;
    assert_eq!((kind.as_str(), note.contains("ghost")), ("Warning", true), "{note}");
    Ok(())
}

#[tokio::test]
async fn a_selector_needs_all_requirements() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1", "edge-2"]).await?;
    for (name, site) in [("edge-3", "factory"), ("edge-4", "farm"), ("edge-5", "factory")] {
        stage.cluster.node(name).edge().label("site", site).create().await?;
    }
    stage.cluster.label_node("edge-5", "canary", Some("")).await?;
    stage.cluster.label_node("edge-5", "hardware", Some("nuc")).await?;
    stage.cluster.node("cloud-1").ready().label("site", "factory").create().await?;
    for node in ["edge-1", "edge-2"] {
        stage.cluster.label_node(node, "site", Some("factory")).await?;
    }
    stage.cluster.label_node("edge-2", "hardware", Some("nuc")).await?;
    let reference = registry.seed(&Image::small("selection")?, "team/app:v1")?;

    let status = stage.cluster.job("by-label").images([&reference]).on_label("site", "factory");
    let status = status.concurrency(5).completes().await?;
    assert_eq!(nodes(&status), ["edge-1", "edge-2"]);
    let reasons = [("cloud-1", "not an edge node"), ("edge-3", "NotReady"), ("edge-5", "NotReady")];
    assert_eq!(skipped(&status), BTreeMap::from(reasons));

    let yaml = format!(
        "apiVersion: operations.kubeedge.io/v1alpha2
kind: ImagePrePullJob
metadata: {{name: by-expression}}
spec:
  imagePrePullTemplate:
    images: [{reference}]
    labelSelector:
      matchLabels: {{site: factory}}
      matchExpressions:
      - {{key: hardware, operator: In, values: [jetson, nuc]}}
      - {{key: canary, operator: DoesNotExist}}
"
    );
    let status = stage.cluster.apply_job(&yaml).await?.completes().await?;
    assert_eq!((nodes(&status), skipped(&status).len()), (vec!["edge-2"], 0));
    Ok(())
}

#[tokio::test]
async fn a_job_without_eligible_nodes_fails() -> Result<()> {
    let cluster = Cluster::start().await?;
    let _cloud = Cloud::start(&cluster).await?;
    cluster.node("edge-1").edge().create().await?;
    cluster.node("cloud-1").ready().create().await?;
    cluster.edge_nodes(&["edge-2"]).await?;
    let template = "spec.imagePrePullTemplate";

    let none_fits = cluster.job("none-fits").images(["nginx:1.25"]).on(["ghost", "cloud-1"]);
    let none_matches = cluster.job("none-matches").images(["nginx:1.25"]).on_label("site", "moon");
    let both = cluster.job("both").images(["nginx:1.25"]).on(["edge-2"]).on_label("site", "moon");
    let neither = cluster.job("neither").images(["nginx:1.25"]);
    for (job, event, reason) in [
        (
            none_fits,
            "NoEligibleNodes",
            format!(
                "{template}.nodeNames: no node is eligible: ghost is not found, cloud-1 is not an edge node"
            ),
        ),
        (none_matches, "NoEligibleNodes", format!("{template}.labelSelector: no node matches")),
        (both, "InvalidSpec", format!("{template}: nodeNames and labelSelector are both set")),
        (neither, "InvalidSpec", format!("{template}: neither nodeNames nor labelSelector is set")),
    ] {
        let job = match job.apply().await {
            Ok(job) => job,
            // Since 1.25, an API server knows CEL rules, and reports it immediately.
            Err(error) if event == "InvalidSpec" => {
                let refusal = refused(&error).with_context(|| format!("{error:#}"))?;
                ensure!(refusal.contains("set exactly one of nodeNames and labelSelector"), "{refusal}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let status = job.fails().await?;
        ensure!(status.reason.starts_with(&reason), "{}: {}", job.name(), status.reason);
        let (kind, message) = job.event(event).await?;
        ensure!(kind == "Warning" && message.starts_with(&reason), "{kind} {message}");
        assert_eq!(status.summary.desired, 0);
    }
    let status = cluster.existing_job("none-fits").status().await?;
    assert_eq!(status.summary.skipped, 2);
    assert_eq!(status.skipped("cloud-1"), Some("not an edge node"));
    Ok(())
}

#[tokio::test]
async fn a_job_begins_once_its_node_is_ready() -> Result<()> {
    let registry = Registry::start().await?;
    let mut stage = Stage::with_edges(&["edge-1"]).await?;
    stage.cluster.mark_ready("edge-1", false).await?;
    let reference = registry.seed(&Image::small("selection")?, "team/app:v1")?;
    let job = stage.cluster.job("patient").images([&reference]).on(["edge-1"]).apply().await?;
    let status = job.until("waits", |status| !status.reason.is_empty()).await?;
    assert_eq!((status.phase, status.skipped("edge-1")), (JobPhase::Init, Some("NotReady")));
    ensure!(status.reason.starts_with("waits for a Ready node"), "{}", status.reason);
    // It does so under the next leader as well.
    stage.cloud.restart().await?;
    let me = Person::new(stage.cluster.kubeconfig());
    me.runs("retry patient").await?.is(1, &["job patient has not ended"])?;
    stage.cluster.mark_ready("edge-1", true).await?;
    assert_eq!(job.completes().await?.summary.successful, 1);
    Ok(())
}
