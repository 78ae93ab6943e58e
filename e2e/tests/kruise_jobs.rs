//! ImagePullJobs: selection of nodes, secrets, deadlines and status.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ListParams};
use prepull_api::crd::kruise::ImagePullJob;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Size of a layer that takes some seconds at [`SLOW`].
const LARGE: u64 = 12 * MIB;
const SLOW: Option<u64> = Some(3 * MIB);

#[tokio::test]
async fn a_job_goes_after_deadline_and_ttl() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("late", &[LARGE])?;
    let node = site.add_node("edge-1").await?.await?;
    site.link.throttle(Some(MIB));
    let job = site.pull_job("late", &reference).on_nodes(["edge-1"]).limits(2, 3).deadline(3).apply().await?;
    let tag = site.cluster.node_image("edge-1").referenced_tag(&reference);
    node.accepts_a_task().await?;
    let status = job.completes().await?;
    assert_eq!(status.message, "job exceeds activeDeadlineSeconds");
    assert_eq!((status.desired, status.active, status.succeeded, status.failed), (1, 0, 0, 1), "{status:?}");
    assert_eq!(status.failed_nodes, ["edge-1"]);
    let took =
        status.completion_time.zip(status.start_time).map(|(end, start)| end.0.duration_since(start.0));
    ensure!(took.is_some_and(|took| (2..=6).contains(&took.as_secs())), "{took:?}");
    node.forgets_all_tasks().await?;

    job.patch_spec(json!({"completionPolicy": {"ttlSecondsAfterFinished": 1}})).await?;
    job.is_gone().await?;
    tag.is_gone().await
}

#[tokio::test]
async fn nodes_join_and_leave_a_running_job() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("moving", &[LARGE])?;
    let first = site.add_node("edge-1").await?.await?;
    let second = site.add_node("edge-2").await?.await?;
    let never = site.add_node("edge-3").await?.await?;
    for node in ["edge-1", "edge-2", "edge-3"] {
        site.cluster.node_image(node).exists().await?;
    }
    site.link.throttle(SLOW);
    let job = site.pull_job("moving", &reference).apply().await?;
    let desired =
        |nodes: i32| move |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.desired == nodes);
    // Nodes start by name, one at a time.
    job.until_met("has all of them", desired(3)).await?;
    first.accepts_a_task().await?;
    job.until_met("has one at work", |job| job.status.as_ref().is_some_and(|s| s.active == 1)).await?;

    // A node that waits is deleted.
    site.cluster.delete_node("edge-3").await?;
    job.until_met("has two", desired(2)).await?;
    // The node at work is deleted, which frees its slot.
    site.cluster.delete_node("edge-1").await?;
    job.until_met("has one", desired(1)).await?;
    second.accepts_a_task().await?;
    // A new node joins.
    let fourth = site.add_node("edge-4").await?.await?;
    job.until_met("has two again", desired(2)).await?;

    let status = job.completes().await?;
    assert_eq!((status.desired, status.succeeded, status.failed), (2, 2, 0), "{status:?}");
    for node in [&second, &fourth] {
        ensure!(node.has_image(&reference).await?, "{}", node.name());
    }
    ensure!(!never.has_image(&reference).await?, "it had no Node any more");
    first.forgets_all_tasks().await?;
    ensure!(!first.has_image(&reference).await?, "its pull was stopped");
    Ok(())
}

#[tokio::test]
async fn a_pod_selector_follows_its_pods() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("pods", &[LARGE])?;
    let mut nodes = Vec::new();
    for name in ["edge-1", "edge-2", "edge-3"] {
        nodes.push(site.add_node(name).await?.await?);
        site.cluster.node_image(name).exists().await?;
    }
    site.link.throttle(SLOW);
    let app = [("app", "web")];
    site.cluster.create_pod("default", "web-1", "edge-1", &app).await?;
    site.cluster.create_pod("default", "web-done", "edge-3", &app).await?;
    site.cluster.set_pod_phase("default", "web-done", "Succeeded").await?;
    site.cluster.create_pod("elsewhere", "web-1", "edge-3", &app).await?;
    site.cluster.create_pod("default", "db-1", "edge-3", &[("app", "db")]).await?;
    let job = site.pull_job("pods", &reference).where_pods_are("app", "web").never_ends().apply().await?;
    let desired = |nodes: i32, succeeded: i32| {
        move |job: &ImagePullJob| {
            job.status.as_ref().is_some_and(|s| (s.desired, s.succeeded) == (nodes, succeeded))
        }
    };
    job.until_met("has the node of the pod", desired(1, 0)).await?;
    nodes[0].accepts_a_task().await?;

    // The pod is replaced by one on another node.
    site.cluster.delete_pod("default", "web-1").await?;
    job.until_met("has no node", desired(0, 0)).await?;
    site.cluster.create_pod("default", "web-2", "edge-2", &app).await?;
    job.until_met("is through with the other node", desired(1, 1)).await?;
    ensure!(nodes[1].has_image(&reference).await?);
    ensure!(!nodes[2].has_image(&reference).await?, "no such pod is active there");
    // A second pod on the node changes nothing; when the last one ends, the node is no longer part of the job.
    site.cluster.create_pod("default", "web-3", "edge-2", &app).await?;
    site.cluster.delete_pod("default", "web-2").await?;
    assert_eq!(job.status().await?.desired, 1);
    site.cluster.set_pod_phase("default", "web-3", "Failed").await?;
    job.until_met("has no node", desired(0, 0)).await?;
    assert_eq!(job.status().await?.message, "job is running, no progress");
    Ok(())
}

#[tokio::test]
async fn a_jobs_secrets_share_its_namespace() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = Stage::with_kruise(&["edge-1"]).await?;
    let cluster = &stage.cluster;
    cluster.registry_secret("team", "registry", &[registry.login("alice")?]).await?;
    cluster.registry_secret("team", "wrong", &[(registry.host(), "alice", &password("mallory"))]).await?;
    let secrets = async || {
        let list = Api::<Secret>::all(cluster.client()).list(&ListParams::default()).await?.items;
        let names =
            list.into_iter().map(|s| (s.metadata.namespace, s.metadata.name, s.metadata.resource_version));
        anyhow::Ok(names.collect::<BTreeSet<_>>())
    };
    let before = secrets().await?;
    let image = |name: &str| registry.seed(&Image::small(name)?, &format!("team/{name}:v1"));
    let (good, elsewhere, locked) = (image("good")?, image("elsewhere")?, image("locked")?);
    let job = |name, image: &str| cluster.pull_job(name, image).on_nodes(["edge-1"]).limits(60, 3);

    // The secret is looked up in the namespace of the job; that of the other job has no such secret.
    let there = job("private", &good).in_namespace("team").secrets(&["registry"]).apply().await?;
    assert_eq!(there.completes().await?.succeeded, 1);
    ensure!(stage.edge("edge-1")?.has_image(&good).await?);
    let node_image = cluster.node_image("edge-1");
    let (name, _) = name_and_tag(&good);
    let entry = node_image.get().await?.spec.images[name].clone();
    let named: Vec<_> = entry.pull_secrets.iter().map(|s| (s.namespace.as_str(), s.name.as_str())).collect();
    assert_eq!(named, [("team", "registry")]);
    let missing = job("private", &elsewhere).in_namespace("other").secrets(&["registry"]).apply().await?;
    assert_eq!(missing.completes().await?.failed_nodes, ["edge-1"]);
    let failed = node_image.referenced_tag(&elsewhere).fails().await?;
    ensure!(failed.message.contains("other/registry"), "{failed:?}");

    // A wrong password is not retried.
    let wrong = job("locked", &locked).in_namespace("team").secrets(&["wrong"]).apply().await?;
    assert_eq!(wrong.completes().await?.failed, 1);
    let failed = node_image.referenced_tag(&locked).fails().await?;
    ensure!(failed.message.contains("401") && !failed.message.contains(CANARY), "{failed:?}");
    let asked =
        registry.requests().for_repository("team/locked").filter(|request| request.status == 401).len();
    ensure!(asked <= 6, "{asked} requests");
    // An anonymous pull is refused by this registry.
    assert_eq!(registry.requests().for_repository("team/good").users(), BTreeSet::from(["alice"]));
    assert_eq!(secrets().await?, before, "secrets were copied, or changed");
    Ok(())
}

#[tokio::test]
async fn an_unknown_image_is_not_retried() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_kruise(&["edge-1"]).await?;
    let good = registry.seed(&Image::small("good")?, "team/good:v1")?;
    let bad = registry.image("team/good:v2");
    let good_job = stage.cluster.pull_job("good", &good).on_nodes(["edge-1"]).apply().await?;
    assert_eq!(good_job.completes().await?.succeeded, 1);
    let bad_job = stage.cluster.pull_job("bad", &bad).on_nodes(["edge-1"]).limits(60, 3).apply().await?;
    let status = bad_job.completes().await?;
    assert_eq!((status.failed, status.failed_nodes.as_slice()), (1, &["edge-1".to_owned()][..]));
    let asked = registry.requests().filter(|request| request.path.ends_with("/manifests/v2")).len();
    // containerd itself retries a few times before it gives up; four attempts would be four times as many requests.
    ensure!(asked <= 3, "{asked} requests for {bad}");

    let node_image = stage.cluster.node_image("edge-1");
    let (kind, note) = node_image.wait_for_event("PullImageSucceed").await?;
    ensure!(kind == "Normal" && note.contains(&good), "{kind} {note}");
    let (kind, note) = node_image.wait_for_event("PullImageFailed").await?;
    ensure!(kind == "Warning" && note.contains(&bad) && note.contains("not found"), "{kind} {note}");
    let (kind, note) = bad_job.wait_for_event("PullImageFailed").await?;
    ensure!(kind == "Warning" && note.contains(&bad) && note.contains("edge-1"), "{kind} {note}");
    let described = stage.cluster.kubectl(&["describe", "imagepulljob", "bad"]).await?;
    ensure!(described.contains("PullImageFailed"), "{described}");
    Ok(())
}

#[tokio::test]
async fn digests_and_moved_tags_follow_the_policy() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_kruise(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let (first, second) = (Image::small("first")?, Image::multi_arch("second")?);
    let tagged = registry.seed(&first, "team/app:v1")?;
    let name = tagged.trim_end_matches(":v1");
    let job = |job: &str, image: &str| stage.cluster.pull_job(job, image).on_nodes(["edge-1"]);

    let digest = format!("{name}@{}", first.digest());
    assert_eq!(job("digest", &digest).completes().await?.succeeded, 1);
    ensure!(node.containerd().names_of(first.digest()).await?.contains(&digest));
    stage.cluster.node_image("edge-1").tag(name, first.digest()).succeeds().await?;
    let both = format!("{name}:v1@{}", first.digest());
    assert_eq!(job("tag-and-digest", &both).completes().await?.succeeded, 1);
    let other = format!("{name}@{}", second.digest());
    assert_eq!(job("no-such-digest", &other).completes().await?.failed, 1);

    assert_eq!(job("tag", &tagged).completes().await?.succeeded, 1);
    registry.seed(&second, "team/app:v1")?;
    assert_eq!(job("there-already", &tagged).policy("IfNotPresent").completes().await?.succeeded, 1);
    assert_eq!(node.images().await?.get(&tagged).map(String::as_str), Some(first.digest()));
    assert_eq!(job("moved", &tagged).policy("Always").completes().await?.succeeded, 1);
    assert_eq!(node.images().await?.get(&tagged).map(String::as_str), Some(second.digest()));
    Ok(())
}

#[tokio::test]
async fn a_changed_policy_reaches_the_nodes() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    let (_, reference) = site.seed_image("deleted", &[LARGE])?;
    let node = site.add_node("edge-1").await?.await?;
    site.link.throttle(Some(2 * MIB));
    let job = site.pull_job("deleted", &reference).on_nodes(["edge-1"]).limits(300, 1).apply().await?;
    let tag = site.cluster.node_image("edge-1").referenced_tag(&reference);
    node.accepts_a_task().await?;
    job.patch_spec(json!({"pullPolicy": {"timeoutSeconds": 200}})).await?;
    tag.until_met("has the new limit", |spec, _| {
        let limits = spec.and_then(|spec| spec.pull_policy.as_ref());
        limits.is_some_and(|limits| limits.timeout_seconds == Some(200))
    })
    .await?;

    job.delete().await?;
    tag.is_gone().await?;
    node.forgets_all_tasks().await?;
    ensure!(!node.has_image(&reference).await?, "it was pulled to the end");
    site.link.throttle(None);
    assert_eq!(site.pull_job("another", &reference).on_nodes(["edge-1"]).completes().await?.succeeded, 1);
    Ok(())
}
