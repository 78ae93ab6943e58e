//! The faults of `restarts` and `fleet` with Kruise's API: either side is killed, a NodeImage is deleted, a policy refuses
//! writes, the API server fails. The job must complete, and no complete layer may be pulled twice.

use std::time::Duration;

use kube::api::{Api, PostParams};
use prepull_api::crd::kruise::NodeImage;
use prepull_e2e::cleanup::eventually;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

type MidPull = crate::mid_pull::MidPull<KruisePullJob>;

async fn mid_pull() -> Result<MidPull> {
    let site = Site::with_kruise(&["--heartbeat", "1s"]).await?;
    MidPull::start(site, "kruise-mid-pull", async |site, reference| {
        // Waits between attempts are random: enough attempts for a link that's away for some seconds.
        site.pull_job("mid-pull", reference).on_nodes(["edge-1"]).limits(600, 8).apply().await
    })
    .await
}

impl MidPull {
    /// Waits until the job completes, and checks that every result is acknowledged.
    async fn ends_right(&self) -> Result<()> {
        let status = self.job.completes().await?;
        assert_eq!((status.desired, status.succeeded, status.failed), (1, 1, 0), "{status:?}");
        assert_eq!(status.message, "job has completed");
        let tag = self.site.cluster.node_image("edge-1").referenced_tag(&self.reference).succeeds().await?;
        assert_eq!((tag.progress, tag.version), (100, 0), "{tag:?}");
        ensure!(self.node.has_image(&self.reference).await?);
        self.node.forgets_all_tasks().await
    }
}

#[tokio::test]
async fn a_killed_cloud_continues_a_pull() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.site.cloud.restart().await?;
    mid.ends_right().await?;
    mid.nothing_was_pulled_twice()
}

#[tokio::test]
async fn a_result_outlives_a_kill_of_both_sides() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.site.cloud.kill9()?;
    mid.node.ends_a_task().await?;
    mid.node.kill9_agent()?;
    let asked = mid.site.link.records().len();
    mid.site.cloud.restart().await?;
    mid.node.restart_agent()?;
    mid.ends_right().await?;
    assert_eq!(mid.site.link.records().len(), asked, "this needs no registry");
    Ok(())
}

#[tokio::test]
async fn a_node_image_deleted_by_hand_ends_no_job() -> Result<()> {
    let mid = mid_pull().await?;
    mid.site.cluster.node_image("edge-1").delete().await?;
    mid.ends_right().await
}

/// A policy about the NodeImages that are written, with its binding. `does`: the rest of its spec.
async fn add_policy(cluster: &Cluster, kind: &str, version: &str, does: Value) -> Result<()> {
    let api_version = format!("admissionregistration.k8s.io/{version}");
    let rule = json!({
        "apiGroups": ["apps.kruise.io"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"],
        "resources": ["nodeimages"],
    });
    let mut spec = json!({"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}});
    for (name, value) in does.as_object().context("no fields")? {
        spec[name] = value.clone();
    }
    let mut binding = json!({"policyName": "of-the-test"});
    if kind.starts_with("Validating") {
        binding["validationActions"] = json!(["Deny"]);
    }
    for (kind, spec) in [(kind.to_owned(), spec), (format!("{kind}Binding"), binding)] {
        let metadata = json!({"name": "of-the-test"});
        let object = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec});
        cluster.apply(&object.to_string()).await?;
    }
    Ok(())
}

/// A NodeImage with an image, as the API server would store it.
async fn dry_run(cluster: &Cluster, image: &str) -> Result<NodeImage> {
    let tags = json!({image: {"tags": [{"tag": "v1", "pullPolicy": {"ttlSecondsAfterFinished": 300}}]}});
    let spec = serde_json::from_value(json!({"images": tags}))?;
    let params = PostParams { dry_run: true, ..PostParams::default() };
    Ok(Api::all(cluster.client()).create(&params, &NodeImage::new("dry-run", spec)).await?)
}

#[tokio::test]
async fn a_policy_against_one_image_holds_up_no_other() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.install_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 3).await?;
    let expression = "!object.spec.?images.orValue({}).exists(name, name.endsWith('/forbidden'))";
    let does = json!({"validations": [{"expression": expression, "message": "not here"}]});
    add_policy(&cluster, "ValidatingAdmissionPolicy", "v1", does).await?;
    let image = "registry.example/forbidden";
    eventually("the policy is in force", SOON, async || {
        refusal(dry_run(&cluster, image).await, "not here").map(drop)
    })
    .await?;

    let refused = cluster.pull_job("refused", &format!("{image}:v1")).parallelism(3).apply().await?;
    eventually("its NodeImages are refused", SOON, async || {
        let refusals = cloud.log().matches("the API server refused the NodeImage").count();
        ensure!(refusals >= 3, "{refusals} refusals");
        Ok(())
    })
    .await?;
    let other = cluster.pull_job("other", "registry.example/allowed:v1").completes().await?;
    assert_eq!((other.desired, other.succeeded), (3, 3), "{other:?}");
    assert_eq!(refused.status().await?.completion_time, None);

    cluster.kubectl(&["delete", "validatingadmissionpolicy", "of-the-test"]).await?;
    let status = refused.completes().await?;
    assert_eq!((status.desired, status.succeeded), (3, 3), "{status:?}");
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn a_policy_that_sets_labels_holds_up_no_result() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.install_kruise().await?;
    // Another label with each write.
    let expression = "Object{metadata: Object.metadata{labels: {\"before\": \
                      object.metadata.?resourceVersion.orValue(\"none\")}}}";
    let applied =
        json!({"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}});
    let does = json!({"reinvocationPolicy": "Never", "mutations": [applied]});
    add_policy(&cluster, "MutatingAdmissionPolicy", "v1", does).await?;
    eventually("the policy is in force", SOON, async || {
        let labels = dry_run(&cluster, "registry.example/app").await?.metadata.labels.unwrap_or_default();
        ensure!(labels.contains_key("before"), "{labels:?}");
        Ok(())
    })
    .await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 1).await?;
    let status = cluster.pull_job("labelled", "registry.example/app:v1").completes().await?;
    assert_eq!((status.desired, status.succeeded), (1, 1), "{status:?}");
    let writes = cloud.metrics().await?.sum("cloudcore_prepull_kruise_writes_total", &[]);
    ensure!(writes < 60.0, "{writes} writes");
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn a_faulty_api_server_repeats_nothing() -> Result<()> {
    const EDGES: usize = 30;
    let cluster = Cluster::with_kruise().await?;
    let api = ApiProxy::start(&cluster, 4)?;
    let cloud = Cloud::with_kruise(&cluster).through(&api).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).pulls_take(Duration::from_millis(50)).await?;
    api.inject(Requests::WRITES, 0.1, Fault::Status(500));
    api.inject(Requests::WRITES, 0.1, Fault::Status(409));
    api.inject(Requests::WRITES, 0.1, Fault::LostAnswer);
    let job = cluster.pull_job("bad-day", "registry.example/bad-day:v1").parallelism(5).apply().await?;
    job.until_met("is half of the way", |job| job.status.as_ref().is_some_and(|s| s.succeeded > 10)).await?;
    api.expire_watches();
    let status = job.completes().await?;
    assert_eq!((status.desired, status.succeeded, status.failed), (30, 30, 0), "{status:?}");
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (30, 0));
    fleet.all_acknowledged().await?;
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn breaking_links_and_killed_clouds_lose_nothing() -> Result<()> {
    const EDGES: usize = 60;
    let cluster = Cluster::with_kruise().await?;
    let mut cloud = Cloud::with_kruise(&cluster).await?;
    let behaviour = Behaviour {
        pull: PullDurations::Between(Duration::from_millis(200), Duration::from_secs(2)),
        disconnect_every: Some(Duration::from_secs(2)),
        most_faults: Some(5),
        seed: 4,
        ..Behaviour::default()
    };
    let fleet = Fleet::start(&cluster, &cloud, EDGES).behaves(behaviour).await?;
    let images = ["registry.example/a:v1", "registry.example/b:v1"];
    let list = cluster.list_job("faults", images).parallelism(EDGES.try_into()?).apply().await?;
    fleet.until_met("half of the images are there", SOON, |tally| tally.whole >= 60).await?;
    cloud.restart().await?;
    let status = list.completes().await?;
    assert_eq!((status.desired, status.succeeded), (2, 2), "{status:?}");
    fleet.all_acknowledged().await?;
    let tally = fleet.tally();
    assert_eq!((tally.pulls, tally.pulled_twice, tally.whole), (120, 0, 120), "{tally:?}");
    ensure!(tally.cuts > 20, "too little happened: {tally:?}");
    fleet.stop().await;
    Ok(())
}
