//! The faults of `restarts`, `links` and `fleet` with Kruise's API: either side is killed, the link is cut, a node is
//! offline. The job must complete, and no complete layer may be pulled twice.

use std::time::Duration;

use kube::api::{Api, PostParams};
use prepull_api::crd::kruise::{ImagePullJob, NodeImage};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

use crate::mid_pull::SMALL;

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
async fn a_killed_agent_resumes_its_pull() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.node.kill9_agent()?;
    // Time for containerd to remove content that is not in use.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(mid.job.status().await?.completion_time, None);
    mid.node.restart_agent()?;
    mid.ends_right().await?;
    mid.nothing_was_pulled_twice()
}

#[tokio::test]
async fn a_cut_link_does_not_stop_a_pull() -> Result<()> {
    let mid = mid_pull().await?;
    mid.tunnel.refuse();
    mid.node.ends_a_task().await?;
    assert_eq!(mid.job.status().await?.completion_time, None);
    let asked = mid.site.link.records().len();
    mid.tunnel.accept_again()?;
    mid.ends_right().await?;
    assert_eq!(mid.site.link.records().len(), asked, "this needs no registry");
    Ok(())
}

#[tokio::test]
async fn a_cut_registry_link_is_retried() -> Result<()> {
    let mid = mid_pull().await?;
    mid.site.link.refuse();
    let tag = mid.site.cluster.node_image("edge-1").referenced_tag(&mid.reference);
    tag.until_met("says what went wrong", |_, status| {
        status.is_some_and(|status| !status.message.is_empty())
    })
    .await?;
    mid.site.link.accept_again()?;
    mid.ends_right().await?;
    assert_eq!(tag.status().await?.map(|status| status.message), Some(String::new()));
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
async fn a_job_deleted_without_its_agent_stops() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.node.kill9_agent()?;
    mid.job.delete().await?;
    mid.site.cluster.node_image("edge-1").referenced_tag(&mid.reference).is_gone().await?;
    mid.node.restart_agent()?;
    mid.node.forgets_all_tasks().await?;
    ensure!(!mid.node.has_image(&mid.reference).await?, "it was pulled to the end");
    Ok(())
}

#[tokio::test]
async fn an_entry_removed_without_cloud_is_stopped() -> Result<()> {
    let mut mid = mid_pull().await?;
    mid.site.cloud.kill9()?;
    mid.job.delete().await?;
    let node_image = mid.site.cluster.node_image("edge-1");
    node_image.patch_spec(serde_json::json!({"images": null})).await?;
    mid.site.cloud.restart().await?;
    node_image.is_empty().await?;
    mid.node.forgets_all_tasks().await?;
    ensure!(!mid.node.has_image(&mid.reference).await?, "it was pulled to the end");
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
async fn an_offline_node_holds_no_slot() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("kruise-offline", &[SMALL])?;
    // The first node by name has a Node object and no agent.
    site.cluster.edge_nodes(&["edge-1"]).await?;
    site.cluster.node_image("edge-1").exists().await?;
    let _second = site.add_node("edge-2").await?.await?;
    let job = site.pull_job("offline", &reference).parallelism(1).apply().await?;
    let through = |succeeded: i32| {
        move |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.succeeded == succeeded)
    };
    let one = job.until_met("is through with the other one", through(1)).await?.status.unwrap_or_default();
    assert_eq!((one.desired, one.active, one.completion_time), (2, 0, None), "{:?}", one.message);
    assert_eq!(one.message, "job is running, progress 50.0%");

    // The agent of the first node connects.
    let _first = EdgeNode::start(&site.cluster, &site.cloud, "edge-1").await?;
    let status = job.completes().await?;
    assert_eq!((status.desired, status.succeeded), (2, 2), "{status:?}");
    Ok(())
}

#[tokio::test]
async fn a_job_waits_for_offline_nodes() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("kruise-never-there", &[SMALL])?;
    site.cluster.edge_nodes(&["edge-1"]).await?;
    let _second = site.add_node("edge-2").await?.await?;
    for node in ["edge-1", "edge-2"] {
        site.cluster.node_image(node).exists().await?;
    }
    // An offline node has a minute to reconnect, and three tries of two seconds each.
    let job = site.pull_job("patient", &reference).limits(2, 2).apply().await?;
    let status = job.clone().with_limit(Duration::from_secs(120)).completes().await?;
    assert_eq!((status.desired, status.succeeded, status.failed), (2, 1, 1), "{status:?}");
    assert_eq!(status.failed_nodes, ["edge-1"]);
    let took =
        status.completion_time.zip(status.start_time).map(|(end, start)| end.0.duration_since(start.0));
    ensure!(took.is_some_and(|took| (60..90).contains(&took.as_secs())), "{took:?}");
    let (kind, note) = job.wait_for_event("Unresponsive").await?;
    ensure!(kind == "Warning" && note.contains("edge-1") && !note.contains("edge-2"), "{kind} {note}");
    Ok(())
}

#[tokio::test]
async fn a_task_on_a_dead_link_is_resent() -> Result<()> {
    let site = Site::with_kruise(&["--heartbeat", "1s"]).await?;
    let tunnel = Proxy::for_tcp(site.cloud.tunnel_addr())?;
    let node = site.add_node("edge-1").await?.tunnel_through(&tunnel).await?;
    node.is_connected().await?;
    let (_, reference) = site.seed_image("kruise-cut", &[SMALL])?;
    // The cloud still considers the node online, but nothing reaches it.
    tunnel.freeze();
    let job = site.pull_job("cut", &reference).on_nodes(["edge-1"]).apply().await?;
    eventually("the task is sent", SOON, async || {
        let sent =
            site.cloud.metrics().await?.sum("cloudcore_prepull_dispatches_total", &[("outcome", "sent")]);
        ensure!(sent > 0.5, "it is not");
        Ok(())
    })
    .await?;
    tunnel.refuse();
    tunnel.thaw();
    tunnel.accept_again()?;
    assert_eq!(job.completes().await?.succeeded, 1);
    node.forgets_all_tasks().await
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
