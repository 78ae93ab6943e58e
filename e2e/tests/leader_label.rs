//! All replicas of cloudcore-prepull are available, and the Service selects the leader's pod. Without a kubelet the
//! pods are only objects, and the processes for them get their names.

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Limit for a standby to lead after waiting for the Lease to expire.
const FAILOVER: Duration = Duration::from_secs(10);
/// Interval of a measurement.
const POLL: Duration = Duration::from_millis(5);
/// Longer than the leader's interval of checking the label.
const LOOKED_AGAIN: Duration = Duration::from_secs(15);
const RIGHTS: &str = "manifests/cloudcore-prepull/rbac.yaml";

/// The first object of a manifest of cloudcore-prepull.
fn manifest<K: serde::de::DeserializeOwned>(file: &str) -> Result<K> {
    let yaml = std::fs::read_to_string(workspace().join("manifests/cloudcore-prepull").join(file))?;
    let first = yaml.split("\n---\n").next().unwrap_or_default();
    Ok(serde_saphyr::from_str(first)?)
}

/// Two replicas, each in a pod like those of the Deployment.
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
            cluster.create_pod(NAMESPACE, pod, "a-machine", &labels).await?;
        }
        let a = Cloud::start(&cluster).standby().in_pod("a").await?;
        a.leads(SOON).await?;
        let b = Cloud::start(&cluster).named("cloudcore-prepull-2").standby().in_pod("b").await?;
        Ok(Self { a, b, cluster, selector: selector.join(",") })
    }

    /// The pods to which the Service would send an edge, if they were ready.
    async fn selected(&self) -> Result<Vec<String>> {
        let pods = self.api().list(&ListParams::default().labels(&self.selector)).await?;
        Ok(pods.iter().map(ResourceExt::name_any).collect())
    }

    /// Waits until the Service selects only this pod, and returns the time.
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

    /// Waits until this replica leads and is the only one selected; returns both durations since then.
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

    /// Puts the leader's label on a pod, like a person or a former leader.
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
async fn the_service_selects_only_the_leader() -> Result<()> {
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

    // Manual changes are undone.
    pods.mark("a").await?;
    pods.selects("b", LOOKED_AGAIN).await?;
    Ok(())
}

#[tokio::test]
async fn a_lost_leader_loses_its_label() -> Result<()> {
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

    // Like a machine that's cut off: it's silent, and its pod still exists.
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
async fn a_restarted_container_loses_the_label() -> Result<()> {
    let mut pods = Pods::start(Cluster::start().await?).await?;
    pods.selects("a", SOON).await?;
    // No other replica can lead or remove the label.
    pods.b.terminate().await?;
    pods.a.kill9()?;
    assert_eq!(pods.selected().await?, ["a"]);
    pods.a.restart().await?;
    // It must wait for the Lease of its predecessor.
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
async fn a_missing_right_to_label_is_named() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.kubectl(&["-n", NAMESPACE, "delete", "role", "cloudcore-prepull-leader-label"]).await?;
    let pods = Pods::start(cluster).await?;
    // The probes of earlier manifests: /readyz of the leader doesn't depend on it.
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
