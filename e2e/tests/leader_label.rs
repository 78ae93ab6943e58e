//! All replicas of cloudcore-prepull are available, and the Service selects the pod of the one that leads. Without a kubelet
//! the pods are objects, and the processes that act for them are told their names.

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Limit for a standby to lead if it has to wait for the Lease to expire.
const FAILOVER: Duration = Duration::from_secs(10);
/// Between two looks of a measurement.
const POLL: Duration = Duration::from_millis(5);
/// Longer than the leader takes to look for the label again.
const LOOKED_AGAIN: Duration = Duration::from_secs(15);
const RIGHTS: &str = "manifests/cloudcore-prepull/rbac.yaml";

/// The first object of a manifest of cloudcore-prepull.
fn manifest<K: serde::de::DeserializeOwned>(file: &str) -> Result<K> {
    let yaml = std::fs::read_to_string(workspace().join("manifests/cloudcore-prepull").join(file))?;
    let first = yaml.split("\n---\n").next().unwrap_or_default();
    Ok(serde_saphyr::from_str(first)?)
}

/// Two replicas, each in a pod as the Deployment would make it.
struct Pods {
    a: Cloud,
    b: Cloud,
    cluster: Cluster,
    /// The selector of the Service.
    selector: String,
}

impl Pods {
    async fn start(cluster: Cluster) -> Result<Self> {
        let selector = manifest::<Service>("service.yaml")?.spec.and_then(|spec| spec.selector);
        let selector: Vec<_> =
            selector.context("no selector")?.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let deployment: Deployment = manifest("deployment.yaml")?;
        let labels = deployment.spec.template.metadata.and_then(|pod| pod.labels).context("no labels")?;
        let labels: Vec<_> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        for pod in ["a", "b"] {
            cluster.pod(NAMESPACE, pod, "a-machine", &labels).await?;
        }
        let a = Cloud::start(&cluster).standby().in_pod("a").await?;
        a.leads(SOON).await?;
        let b = Cloud::start(&cluster).named("cloudcore-prepull-2").standby().in_pod("b").await?;
        Ok(Self { a, b, cluster, selector: selector.join(",") })
    }

    /// The pods to which the Service would send an edge, were they ready.
    async fn selected(&self) -> Result<Vec<String>> {
        let pods = self.api().list(&ListParams::default().labels(&self.selector)).await?;
        Ok(pods.iter().map(ResourceExt::name_any).collect())
    }

    /// Waits until the Service selects this pod alone, and returns when.
    async fn selects(&self, pod: &str, limit: Duration) -> Result<Instant> {
        let began = Instant::now();
        loop {
            let selected = self.selected().await?;
            if selected == [pod] {
                return Ok(Instant::now());
            }
            ensure!(began.elapsed() < limit, "the Service selects {selected:?}, not {pod}");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until this replica leads and is selected alone; returns how long each took since then.
    async fn passes_to(&self, pod: &str, began: Instant) -> Result<(Duration, Duration)> {
        let cloud = if pod == "a" { &self.a } else { &self.b };
        let leads = async {
            while !matches!(cloud.readiness().await, Ok((200, _))) {
                ensure!(began.elapsed() < FAILOVER, "{pod} does not lead");
                tokio::time::sleep(POLL).await;
            }
            Ok(began.elapsed())
        };
        let (ready, selected) = tokio::try_join!(leads, self.selects(pod, FAILOVER))?;
        Ok((ready, selected.duration_since(began)))
    }

    /// Puts the label of the leader on a pod, as somebody by hand, or as a leader that is gone.
    async fn mark(&self, pod: &str) -> Result<()> {
        let marked = json!({"metadata": {"labels": {"prepull.kubeedge.io/leader": "true"}}});
        self.api().patch(pod, &PatchParams::default(), &Patch::Merge(marked)).await?;
        Ok(())
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), NAMESPACE)
    }
}

async fn is_available(cloud: &Cloud) -> Result<()> {
    eventually("it is available", SOON, async || {
        let (status, body) = cloud.availability().await?;
        ensure!(status == 200, "{status} {body}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn every_replica_is_available_and_the_service_selects_the_leader_alone() -> Result<()> {
    let mut pods = Pods::start(Cluster::start().await?).await?;
    pods.selects("a", SOON).await?;
    for cloud in [&pods.a, &pods.b] {
        is_available(cloud).await?;
    }
    let (status, body) = pods.b.availability().await?;
    ensure!(status == 200 && body.starts_with("standing by: a_"), "{status} {body}");
    assert_eq!(pods.b.readiness().await?.0, 503, "it leads");

    let began = Instant::now();
    pods.a.process()?.terminate()?;
    let (ready, selected) = pods.passes_to("b", began).await?;
    eprintln!("after SIGTERM: ready after {ready:?}, selected alone after {selected:?}");
    pods.a.restart().await?;
    is_available(&pods.a).await?;
    assert_eq!(pods.selected().await?, ["b"]);

    // What somebody does by hand is undone.
    pods.mark("a").await?;
    pods.selects("b", LOOKED_AGAIN).await?;
    Ok(())
}

#[tokio::test]
async fn a_leader_that_is_killed_or_frozen_loses_its_label_to_the_next_one() -> Result<()> {
    let mut pods = Pods::start(Cluster::start().await?).await?;
    pods.selects("a", SOON).await?;
    is_available(&pods.b).await?;

    // The container is gone and its pod stays, with the label.
    let began = Instant::now();
    pods.a.kill9()?;
    assert_eq!(pods.selected().await?, ["a"]);
    let (ready, selected) = pods.passes_to("b", began).await?;
    eprintln!("after SIGKILL: ready after {ready:?}, selected alone after {selected:?}");
    pods.a.restart().await?;
    is_available(&pods.a).await?;

    // As on a machine that is cut off: it says nothing, and its pod is still there.
    let began = Instant::now();
    pods.b.pause()?;
    let (ready, selected) = pods.passes_to("a", began).await?;
    eprintln!("after SIGSTOP: ready after {ready:?}, selected alone after {selected:?}");
    pods.b.resume()?;
    pods.b.ends(SOON).await?;
    assert_eq!(pods.selected().await?, ["a"], "it has marked itself again");
    Ok(())
}

#[tokio::test]
async fn a_restarted_container_takes_the_label_from_its_pod_before_it_stands_by() -> Result<()> {
    let mut pods = Pods::start(Cluster::start().await?).await?;
    pods.selects("a", SOON).await?;
    // Nobody else can lead or take the label away.
    pods.b.terminate().await?;
    pods.a.kill9()?;
    assert_eq!(pods.selected().await?, ["a"]);
    pods.a.restart().await?;
    // It has to wait for the Lease of its predecessor.
    let standing_by = eventually("it stands by", SOON, async || {
        let (status, body) = pods.a.availability().await?;
        ensure!(status == 200, "{status} {body}");
        Ok(body)
    })
    .await?;
    ensure!(standing_by.starts_with("standing by: a_"), "{standing_by}");
    assert_eq!(pods.selected().await?, [""; 0], "the Service sends edges to a standby");
    pods.a.leads(FAILOVER).await?;
    pods.selects("a", SOON).await?;
    Ok(())
}

#[tokio::test]
async fn without_the_right_to_mark_pods_the_remedy_is_named_and_manifests_of_before_go_on() -> Result<()> {
    let cluster = Cluster::own().await?;
    cluster.kubectl(&["-n", NAMESPACE, "delete", "role", "cloudcore-prepull-leader-label"]).await?;
    let pods = Pods::start(cluster).await?;
    // What manifests of before probe: /readyz of the leader does not depend on it.
    pods.a.leads(SOON).await?;
    for cloud in [&pods.a, &pods.b] {
        eventually("the remedy is named", SOON, async || {
            let (status, body) = cloud.availability().await?;
            let remedy = body.contains("a right is missing: User ") && body.contains(RIGHTS);
            ensure!(status == 503 && remedy, "{status} {body}");
            Ok(())
        })
        .await?;
    }
    assert_eq!(pods.selected().await?, [""; 0]);
    pods.cluster.apply_file(&workspace().join(RIGHTS)).await?;
    pods.selects("a", LOOKED_AGAIN).await?;
    for cloud in [&pods.a, &pods.b] {
        is_available(cloud).await?;
    }
    Ok(())
}
