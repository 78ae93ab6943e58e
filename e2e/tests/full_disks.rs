//! Disks full of images that nothing needs: they count as free, and `--make-room` removes them, or the kubelet does.

use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_e2e::kubernetes::{EDGE_NAMESPACE, Installation, pods};
use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

use crate::settings::Settings;

/// A box of 16 GB, scaled down.
const DISK: u64 = 160 * MIB;
/// A common layer of all versions, and the layer of each.
const BASE: u64 = 4 * MIB;
const OWN: u64 = 4 * MIB;
/// To an agent with a clock that's an hour fast, no image is too new for removal.
const HOUR: i64 = 3600;
/// The defaults, which the harness has turned off.
const RULES: [&str; 4] = ["--disk-min-free", "10%", "--image-gc-high-threshold", "85%"];

/// A version of an image, with its reference.
fn version(registry: &Registry, name: &str) -> Result<(Image, String)> {
    let image = Image::on_base("full-disk", &[BASE], name, OWN)?;
    let reference = registry.seed(&image, &format!("shop/app:{name}"))?;
    Ok((image, reference))
}

#[tokio::test]
async fn twelve_versions_fit_one_after_another() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.ext4(DISK).clock_off_by(HOUR)?;
    let node = node.args(&RULES).args(&["--make-room"]).await?;
    let (_, kept) = site.seed_image("kept", &[OWN])?;
    let pinned = site.job("kept").images([&kept]).on(["edge-1"]);
    pinned.spec(|spec| spec.pin = true).completes().await?;
    let old = (1..=5).map(|n| site.seed_image(&format!("old-{n}"), &[OWN])).collect::<Result<Vec<_>>>()?;
    let references = old.iter().map(|(_, reference)| reference);
    site.job("old").images(references).on(["edge-1"]).completes().await?;
    let (_, size) = node.containerd().disk_space()?;
    node.containerd().fill_disk(size / 20)?;

    let mut versions = Vec::new();
    for n in 1..=12 {
        let (image, reference) = version(&site.registry, &format!("v{n}"))?;
        let job = site.job(&format!("v{n}")).images([&reference]).on(["edge-1"]);
        let status = job.completes().await?;
        assert_eq!(status.image("edge-1", &reference).context("no image")?.status, Tristate::True, "v{n}");
        let (free, _) = node.containerd().disk_space()?;
        ensure!(free * 100 >= size * 15, "v{n}: the kubelet would remove images at {free} of {size} bytes");
        ensure!(node.has_image(&kept).await?, "v{n}: what a job pins was removed");
        versions.push((image, reference));
    }
    let (first, last) = versions.first().zip(versions.last()).context("no versions")?;
    let mut both = first.0.blobs().iter().filter(|blob| last.0.blobs().contains(blob));
    let base = both.next().context("no common layer")?;
    ensure!(site.link.bytes_of(base) < 2 * BASE, "the common layer went with an older version");
    let images = node.images().await?;
    for (_, reference) in &old {
        ensure!(!images.contains_key(reference), "{reference} was the oldest");
    }
    ensure!(images.contains_key(&last.1), "{images:?}");
    let metrics = node.metrics().await?;
    let removed = metrics.sum("edgecore_prepull_removed_images_total", &[]);
    println!("{removed} images removed, {} left", images.len());
    ensure!(removed >= 10.0, "{removed} images removed");
    ensure!(metrics.sum("edgecore_prepull_removed_image_bytes_total", &[]) > 0.0);
    let log = node.agent_log();
    ensure!(log.contains("removed an image that nothing needs, to make room"), "the log says nothing");
    Ok(())
}

#[tokio::test]
async fn a_refusal_says_what_could_go() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.ext4(DISK).clock_off_by(HOUR)?.args(&RULES).await?;
    let (_, old) = site.seed_image("unneeded", &[10 * MIB, 10 * MIB])?;
    site.job("old").images([&old]).on(["edge-1"]).completes().await?;
    let (new, reference) = site.seed_image("needed", &[8 * MIB])?;
    let (_, size) = node.containerd().disk_space()?;
    let attempt = async |name: &str, free: u64, succeeds: bool| {
        node.containerd().fill_disk(free)?;
        let job = site.job(name).images([&reference]).on(["edge-1"]).retries(0);
        // Without the check of the disk, which would fail first.
        let job = job.checks(&["mem"]);
        if succeeds { job.completes().await } else { job.fails().await }
    };

    // Above the threshold of the kubelet, which would remove the old one.
    attempt("above", size * 15 / 100 + 14 * MIB, true).await?;
    ensure!(node.has_image(&reference).await? && node.has_image(&old).await?);
    node.remove_image(&reference).await?;

    let fetched = || new.blobs().iter().map(|blob| site.link.bytes_of(blob)).sum::<u64>();
    let before = fetched();
    let status = attempt("full", size * 5 / 100, false).await?;
    let image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((image.status, image.code), (Tristate::False, Some(FailureCode::NoSpace)), "{image:?}");
    let reason = &image.reason;
    println!("{reason}");
    ensure!(reason.contains("removing an image that nothing needs") && reason.contains(&old), "{reason}");
    ensure!(reason.contains("--make-room"), "{reason}");
    ensure!(node.has_image(&old).await?, "only --make-room removes it");
    // Only the unpacked sizes of layers were requested.
    ensure!(fetched() - before < MIB / 16, "{} bytes were fetched", fetched() - before);

    // The cloud decides where the node's own settings leave it open.
    let settings = Settings::of(&site.cluster);
    settings.apply("room", json!({ "nodeNames": ["edge-1"], "makeRoom": true })).await?;
    settings.are_in_force("room").await?;
    attempt("made", size * 5 / 100, true).await?;
    ensure!(node.has_image(&reference).await? && !node.has_image(&old).await?);
    Ok(())
}

/// The disk of a worker, which has the agent's own image as well.
const DISK_OF_WORKER: u64 = 512 * MIB;
/// The layer of a version there. It's on the disk both compressed and unpacked.
const LAYER: u64 = 12 * MIB;

/// Literals for the agent's settings that make its clock an hour fast. The library for that is on the disk that its pod
/// has mounted.
fn fast_clock(edge: &Worker) -> Result<String> {
    let dir = "/var/lib/containerd/clock";
    std::fs::create_dir_all(edge.path(dir))?;
    let library = parts::libfaketime()?;
    let of_system = library.ancestors().nth(2).context("no directory")?;
    // The agent's image may lack the second library, which the first one needs.
    for file in [of_system.join("libm.so.6"), library.clone()] {
        let name = file.file_name().context("no name")?;
        std::fs::copy(&file, edge.path(dir).join(name)).with_context(|| file.display().to_string())?;
    }
    let preload = format!("LD_PRELOAD={dir}/libm.so.6:{dir}/libfaketimeMT.so.1");
    let settings = [preload.as_str(), "FAKETIME=+3600s", "FAKETIME_DONT_FAKE_MONOTONIC=1", "NO_FAKE_STAT=1"];
    Ok(settings.map(|setting| format!("\n      - {setting}")).concat())
}

#[tokio::test]
async fn the_kubelet_makes_room_and_evicts_nothing() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let (cluster, registry) = (kubernetes.cluster(), kubernetes.registry());
    let edge = kubernetes.worker_with_disk("edge-1", DISK_OF_WORKER);
    let (_server, mut edge) = tokio::try_join!(kubernetes.add_worker("server-1"), edge)?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;
    let installation = Installation::copy_manifests(&kubernetes).await?;
    installation.set_images()?;
    installation.set_address()?;
    let settings = "edgecore-prepull/kustomization.yaml";
    installation.replace_text(settings, "DISK_MIN_FREE=64MiB", "DISK_MIN_FREE=10%")?;
    let threshold = format!("GC_HIGH_THRESHOLD=85%{}", fast_clock(&edge)?);
    installation.replace_text(settings, "GC_HIGH_THRESHOLD=100%", &threshold)?;
    installation.install_cloud().await?;
    installation.install_edges().await?;

    let version = |name: &str| {
        let image = Image::of_layers(&format!("left-to-kubelet-{name}"), &[LAYER])?;
        registry.seed(&image, &format!("shop/app:{name}"))
    };
    let mut before = version("v0")?;
    edge.containerd().pull(&before, None).await?;
    let running = registry.seed(&Image::small("running")?, "shop/running:v1")?;
    cluster.apply(&pods::pod("running", "edge-1", &running, None).to_string()).await?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "pod/running", "--timeout=60s"]).await?;
    // Its defaults, except for the age of an image.
    let kubelet = json!({
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "15%"},
        "imageGCHighThresholdPercent": 85, "imageMinimumGCAge": "1s",
    });
    let (_, size) = edge.disk_space()?;
    let least = size * 15 / 100;

    for name in ["v1", "v2", "v3"] {
        // It looks for images every five minutes. After a start, it takes all of them for old. Without the restart, the agent
        // would count on an image that the kubelet hasn't seen.
        edge.restart_kubelet(&kubelet).await?;
        // While the disk is full, it admits none, not even the agent and the running pod.
        eventually("the kubelet has both pods", SOON, async || {
            let pods = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/edge-1/proxy/pods"]).await?;
            let pods: Value = serde_json::from_str(&pods)?;
            let pods = pods["items"].as_array().map_or(0, Vec::len);
            ensure!(pods == 2, "it has {pods}");
            Ok(())
        })
        .await?;
        if name == "v1" {
            edge.fill_disk(least + LAYER)?;
        }
        let new = version(name)?;
        cluster.job(name).images([&new]).on(["edge-1"]).completes().await?;
        eventually("the kubelet removes the version before", Duration::from_secs(60), async || {
            let (there, free) = (edge.containerd().has_image(&before).await?, edge.free_space()?);
            ensure!(!there && free >= least, "{before} is there: {there}; {free} of {size} bytes are free");
            Ok(())
        })
        .await?;
        ensure!(
            edge.containerd().has_image(&new).await?,
            "{new} was removed, which the kubelet has just seen"
        );
        before = new;
    }
    let log = ["--namespace", EDGE_NAMESPACE, "logs", "daemonset/edgecore-prepull"];
    let log = cluster.kubectl(&log).await?;
    let left = log.matches("from where on the kubelet removes images that nothing needs").count();
    assert_eq!(left, 3, "{log}");

    let pods = cluster.kubectl(&["get", "pods", "--all-namespaces", "--output=json"]).await?;
    let pods: Value = serde_json::from_str(&pods)?;
    for pod in pods["items"].as_array().context("no pods")? {
        let (name, status) = (&pod["metadata"]["name"], &pod["status"]);
        assert_eq!(status["phase"], "Running", "{name}: {status}");
        assert_eq!(status["containerStatuses"][0]["restartCount"], 0, "{name}: {status}");
    }
    // Present images continue to work. New ones must wait.
    cluster.apply(&pods::pod("late", "edge-1", &running, None).to_string()).await?;
    eventually("the kubelet refuses a new pod", SOON, async || {
        let status = ["get", "pod", "late", "--output=jsonpath={.status}"];
        let status: Value = serde_json::from_str(&cluster.kubectl(&status).await?)?;
        let message = status["message"].as_str().unwrap_or_default();
        ensure!(status["phase"] == "Failed" && message.contains("DiskPressure"), "{status}");
        Ok(())
    })
    .await
}
