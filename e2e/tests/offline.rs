//! The promise: an image is pulled ahead, its registry goes off, and a pod starts from it. The kubelet's behaviour
//! depends on its policy and on its own records of pulls.

use std::time::{Duration, Instant};

use prepull_api::crd::remove::RemoveSpec;
use prepull_api::task::{KeepCode, KubeletRecord};
use prepull_e2e::images::delta::Delta;
use prepull_e2e::kubernetes::Fate::{Asks, Runs};
use prepull_e2e::kubernetes::{Installation, pods};
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

/// The namespace of the pods.
const PODS: &str = "default";
/// The kubelet's records of pulls that have begun, on a worker.
const INTENTS: &str = "/var/lib/kubelet/image_manager/pulling";

/// A pod on the edge. With a secret it may pull.
fn pod(name: &str, image: &str, secret: bool) -> Value {
    pods::pod(name, "edge-1", image, secret.then_some("shop"))
}

#[tokio::test]
async fn pods_start_while_the_registry_is_off() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_server, mut edge) =
        tokio::try_join!(kubernetes.add_worker("server-1"), kubernetes.add_worker("edge-1"))?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;
    let _installation = Installation::install_on(&kubernetes).await?;

    let mut shop = Registry::start().user("alice", &password("alice")).await?;
    edge.reaches(&shop)?;
    cluster.registry_secret(PODS, "shop", &[shop.login("alice")?]).await?;
    cluster.annotate_secret(PODS, "shop", "prepull.kubeedge.io/allow", Some("*")).await?;
    let ahead = |name: &str, image: &str| {
        cluster.job(name).images([image]).on(["edge-1"]).secret("default/shop").retries(3)
    };

    // Pulled by the agent alone.
    let plain = shop.seed(&Image::small("plain")?, "team/plain:v1")?;
    ahead("plain", &plain).completes().await?;
    // Pulled by the kubelet before, under another name.
    let recorded = Image::small("recorded")?;
    let elsewhere = shop.seed(&recorded, "old/recorded:v1")?;
    let recorded = shop.seed(&recorded, "team/recorded:v1")?;
    assert_eq!(kubernetes.fate(&pod("elsewhere", &elsewhere, true)).await?, Runs);
    let status = ahead("recorded", &recorded).completes().await?;
    let image = status.image("edge-1", &recorded).context("no status")?;
    assert_eq!(image.facts.kubelet_record, Some(KubeletRecord::OtherRepository), "{image:?}");
    // Pulled by the agent, after the kubelet had begun and died.
    let begun = shop.seed(&Image::of_layers("begun", &[4 * MIB])?, "team/begun:v1")?;
    shop.pause()?;
    cluster.apply(&pod("begun", &begun, true).to_string()).await?;
    let intents = edge.path(INTENTS);
    eventually("the kubelet pulls", Duration::from_secs(60), async || {
        ensure!(std::fs::read_dir(&intents)?.next().is_some(), "no intent in {}", intents.display());
        Ok(())
    })
    .await?;
    edge.kill_kubelet()?;
    kubernetes.delete_pod("begun").await?;
    shop.resume()?;
    ahead("begun", &begun).completes().await?;
    edge.restart_kubelet(&json!({})).await?;
    let status = ahead("begun-again", &begun).completes().await?;
    let image = status.image("edge-1", &begun).context("no status")?;
    assert_eq!(image.facts.kubelet_record, Some(KubeletRecord::NoCredentials), "{image:?}");

    // An update that came as a delta, which the agent in its pod applied to the image before.
    let versions = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    let first = shop.seed(&versions[0], "team/updated:v1")?;
    ahead("before", &first).completes().await?;
    let updated = shop.seed(&versions[1], "team/updated:v2")?;
    shop.seed_delta("team/updated", &Delta::between(&versions[0], &versions[1])?)?;
    let status = ahead("updated", &updated).completes().await?;
    let image = status.image("edge-1", &updated).context("no status")?;
    ensure!(image.facts.delta_saved_bytes.is_some_and(|saved| saved > 11 * MIB), "{image:?}");

    // `why` warns in advance.
    let why = Person::new(cluster.kubeconfig()).runs("why edge-1 recorded").await?;
    why.is(0, &["a record of it from another repository"])?;

    shop.stop()?;
    let table = [
        ("NeverVerifyPreloadedImages", &plain, false, Runs),
        ("NeverVerifyPreloadedImages", &plain, true, Runs),
        ("NeverVerifyPreloadedImages", &updated, false, Runs),
        ("NeverVerifyPreloadedImages", &recorded, false, Asks),
        ("NeverVerifyPreloadedImages", &recorded, true, Asks),
        ("NeverVerifyPreloadedImages", &begun, true, Asks),
        ("NeverVerify", &recorded, false, Runs),
        ("NeverVerify", &begun, false, Runs),
        ("NeverVerifyAllowlistedImages", &recorded, false, Runs),
        ("NeverVerifyAllowlistedImages", &begun, false, Runs),
        ("NeverVerifyAllowlistedImages", &elsewhere, false, Asks),
        ("AlwaysVerify", &plain, false, Asks),
        ("AlwaysVerify", &plain, true, Asks),
    ];
    let mut policy = "NeverVerifyPreloadedImages";
    let mut wrong = Vec::new();
    for (number, (wanted, image, secret, expected)) in table.into_iter().enumerate() {
        if wanted != policy {
            let host = shop.host();
            let listed = if wanted == "NeverVerifyAllowlistedImages" {
                json!([format!("{host}/team/*")])
            } else {
                json!([])
            };
            let settings = json!({
                "imagePullCredentialsVerificationPolicy": wanted,
                "preloadedImagesVerificationAllowlist": listed,
            });
            edge.restart_kubelet(&settings).await?;
            policy = wanted;
        }
        let began = Instant::now();
        let fate = kubernetes.fate(&pod(&format!("row-{number}"), image, secret)).await?;
        println!("{wanted:28} {image:40} secret {secret:5} {fate:?} after {:?}", began.elapsed());
        if fate != expected {
            wrong.push((wanted, image, secret, fate));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");

    // A pod that has shown its secret once restarts without the registry; one that always asks never does.
    shop.restart().await?;
    assert_eq!(kubernetes.fate(&pod("shown", &plain, true)).await?, Runs);
    shop.stop()?;
    assert_eq!(kubernetes.fate(&pod("shown-again", &plain, true)).await?, Runs);
    let mut always = pod("always", &plain, true);
    always["spec"]["containers"][0]["imagePullPolicy"] = "Always".into();
    assert_eq!(kubernetes.fate(&always).await?, Asks);
    Ok(())
}

/// A workload on the edge with a moving tag.
fn workload(kind: &str, name: &str, image: &str) -> Value {
    let labels = json!({"app": name});
    let mut workload = json!({
        "apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": PODS},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeSelector": {"node-role.kubernetes.io/edge": ""}, "terminationGracePeriodSeconds": 0,
                    "containers": [{
                        "name": "app", "image": image, "imagePullPolicy": "Always",
                        "command": ["/bin/sleep", "1000000"],
                    }],
                },
            },
        },
    });
    if kind == "Deployment" {
        workload["spec"]["replicas"] = 1.into();
    }
    workload
}

/// A removal while the kubelet starts a pod from the image: whichever comes first, the pod runs.
async fn removals_beside_starting_pods(kubernetes: &Kubernetes, edge: &Worker) -> Result<()> {
    let mut outcomes = Vec::new();
    for number in 0..3_u64 {
        let name = format!("raced-{number}");
        let reference =
            kubernetes.registry().seed(&Image::of_layers(&name, &[2 * MIB])?, &format!("shop/{name}:v1"))?;
        edge.containerd().pull(&reference, None).await?;
        let job = kubernetes.cluster().job(&name).on(["edge-1"]);
        let job = job.spec(|job| {
            let images = vec![reference.clone()];
            job.image_pre_pull_template.remove = Some(RemoveSpec { images, ..RemoveSpec::default() });
        });
        let starting = pods::pod(&name, "edge-1", &reference, None);
        let (fate, status) = tokio::join!(kubernetes.fate(&starting), async {
            tokio::time::sleep(Duration::from_millis(150 * number)).await;
            job.completes().await
        });
        assert_eq!(fate?, Runs);
        outcomes.push(status?.reason);
    }
    eprintln!("{outcomes:?}");
    Ok(())
}

#[tokio::test]
async fn workloads_roll_out_from_prepulled_images() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let edge = kubernetes.worker_with_disk("edge-1", 512 * MIB);
    let (_server, mut edge) = tokio::try_join!(kubernetes.add_worker("server-1"), edge)?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;
    let installation = Installation::install_on(&kubernetes).await?;
    let (registry, me) = (kubernetes.registry(), Person::new(cluster.kubeconfig()));
    let fetched = || registry.requests().for_repository("shop/web").blob_fetches().total_bytes();

    // A moving tag: its current image is pulled ahead, and the rollout downloads nothing.
    let (old, new) = (Image::small("web-old")?, Image::small("web-new")?);
    let stable = registry.seed(&old, "shop/web:stable")?;
    registry.seed(&new, "shop/web:next")?;
    edge.containerd().pull(&stable, None).await?;
    registry.retag("shop/web", "next", "stable")?;
    let before = fetched();
    let app = cluster.place().new_dir("app")?.join("app.json");
    let list = [workload("Deployment", "web", &stable), workload("DaemonSet", "web-node", &stable)];
    std::fs::write(&app, json!({"apiVersion": "v1", "kind": "List", "items": list}).to_string())?;
    let from = format!("from -f {} --name web --apply-then --wait=2m", app.display());
    me.runs(&from).await?.is(0, &["Completed"])?;
    let ahead = fetched();
    assert!(ahead > before, "the tag has moved");
    assert_eq!(edge.containerd().images().await?.get(&stable).map(String::as_str), Some(new.digest()));
    for workload in ["deployment/web", "daemonset/web-node"] {
        installation.is_rolled_out(PODS, workload).await?;
    }
    assert_eq!(fetched(), ahead, "the rollout downloads nothing");

    // Pods use the image now, so a removal keeps it.
    let removed = me.runs(&format!("remove {stable} --name unused --node edge-1 --wait=2m")).await?;
    removed.is(0, &["Completed", "nothing was removed; 1 kept"])?;
    let node = cluster.existing_job("unused").node_status("edge-1").await?;
    let kept = node.removal.and_then(|removal| removal.images.first().cloned()).context("no image")?;
    assert_eq!(kept.code, Some(KeepCode::InUse), "{kept:?}");
    assert!(edge.containerd().has_image(&stable).await?);

    // The kubelet and the agent pull the same image at the same time: both succeed, and it's downloaded twice at most.
    let large = Image::of_layers("at-once", &[6 * MIB, 2 * MIB])?;
    let reference = registry.seed(&large, "shop/at-once:v1")?;
    let job = cluster.job("at-once").images([&reference]).on(["edge-1"]).retries(3);
    let pulling = pods::pod("at-once", "edge-1", &reference, None);
    let (job, ()) = tokio::try_join!(job.apply(), async { cluster.apply(&pulling.to_string()).await })?;
    job.completes().await?;
    let bytes = registry.requests().for_repository("shop/at-once").blob_fetches().total_bytes();
    println!("{bytes} of {} bytes", large.size());
    assert!(bytes <= 2 * large.size() + MIB, "{bytes}");
    kubernetes.delete_pod("at-once").await?;

    removals_beside_starting_pods(&kubernetes, &edge).await?;

    // A kubelet with a full disk removes images that no pod uses and no job pins.
    let kept = registry.seed(&Image::small("kept")?, "shop/kept:v1")?;
    let lost = registry.seed(&Image::of_layers("lost", &[32 * MIB])?, "shop/lost:v1")?;
    let ahead = |name: &str, image: &str| cluster.job(name).images([image]).on(["edge-1"]);
    let status = ahead("kept", &kept).spec(|spec| spec.pin = true).completes().await?;
    let pinned =
        status.image("edge-1", &kept).and_then(|image| image.pinned).context("no word on the pin")?;
    ahead("lost", &lost).completes().await?;
    let threshold = (edge.free_space()? + 8 * MIB).to_string();
    let evicting = |threshold: &str| {
        json!({
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": threshold},
            "evictionPressureTransitionPeriod": "1s", "imageMinimumGCAge": "1ms",
        })
    };
    edge.restart_kubelet(&evicting(&threshold)).await?;
    let removed = async || {
        let there = edge.containerd().has_image(&lost).await?;
        ensure!(!there, "{lost} is still there");
        Ok(())
    };
    eventually("the kubelet removes images", Duration::from_secs(60), removed).await?;
    edge.restart_kubelet(&evicting("0%")).await?;
    // containerd before 1.6.25 knows no pins, which the status has reported. The kubelet may have ended before this
    // one.
    let there = edge.containerd().has_image(&kept).await?;
    assert!(there || !pinned, "what is pinned stays");
    let (status, words) = if there { (0, "1 of 1 nodes still have") } else { (1, "missing on 1") };
    me.runs("verify kept").await?.is(status, &[words])?;
    me.runs("verify lost").await?.is(1, &["missing on 1", "retry lost"])?;
    me.runs("retry lost").await?.is(0, &["round 1"])?;
    me.runs("status lost --watch --timeout 1m").await?.is(0, &["Completed"])?;
    assert!(edge.containerd().has_image(&lost).await?);
    Ok(())
}
