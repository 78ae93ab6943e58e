//! The kubelet's records of pulls: jobs and `kubectl prepull why` show if the kubelet will ask the registry for an
//! image that's on the node.

use std::fs;
use std::path::Path;

use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::task::KubeletRecord;
use prepull_e2e::prelude::*;
use prepull_registry::digest::sha256;
use serde_json::{Value, json};

/// Writes a record of this image like the kubelet, after a pull from these repositories without a secret.
fn record(kubelet: &Path, image: &Image, repositories: &[&str]) -> Result<()> {
    let manifest: Value = serde_json::from_slice(&fs::read(image.blob_file(image.digest()))?)?;
    let id = manifest["config"]["digest"].as_str().context("no configuration")?;
    let everyone = |repository: &&str| ((*repository).to_owned(), json!({"nodePodsAccessible": true}));
    let mut record = json!({
        "kind": "ImagePulledRecord",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "lastUpdatedTime": "2026-11-21T09:00:00Z",
        "imageRef": id,
    });
    if !repositories.is_empty() {
        record["credentialMapping"] =
            repositories.iter().map(everyone).collect::<serde_json::Map<_, _>>().into();
    }
    let dir = kubelet.join("image_manager/pulled");
    fs::create_dir_all(&dir)?;
    Ok(fs::write(dir.join(sha256(id.as_bytes()).replace(':', "-")), record.to_string())?)
}

#[tokio::test]
async fn jobs_show_the_kubelets_requests() -> Result<()> {
    let mut site = Site::start().await?;
    let kubelet = site.cluster.place().new_dir("kubelet")?;
    let (moved, of_moved) = site.seed_image("moved", &[MIB])?;
    let (broken, of_broken) = site.seed_image("broken", &[MIB])?;
    let (known, of_known) = site.seed_image("known", &[MIB])?;
    let (_, of_new) = site.seed_image("new", &[MIB])?;
    let repository = of_known.rsplit_once(':').context("no tag")?.0.to_owned();
    record(&kubelet, &moved, &["mirror.example/team/moved"])?;
    record(&kubelet, &broken, &[])?;
    record(&kubelet, &known, &["mirror.example/team/known", &repository])?;

    let dir = kubelet.to_string_lossy().into_owned();
    let _first = site.add_node("edge-1").await?.args(&["--kubelet-dir", &dir]).await?;
    site.cluster.edge_nodes(&["edge-2"]).await?;
    let images = [&of_moved, &of_broken, &of_known, &of_new];
    let expected = [
        (&of_moved, Some(KubeletRecord::OtherRepository), "mirror.example/team/moved"),
        (&of_broken, Some(KubeletRecord::NoCredentials), "without credentials"),
        (&of_known, None, ""),
        (&of_new, None, ""),
    ];
    let is_shown = |status: &ImagePrePullJobStatus| -> Result<()> {
        for (reference, record, words) in &expected {
            let image = status.image("edge-1", reference).context("no image")?;
            let reason = &image.facts.kubelet_record_reason;
            ensure!(image.facts.kubelet_record == *record && reason.contains(words), "{image:?}");
            ensure!(record.is_some() == reason.contains("asks the registry"), "{image:?}");
        }
        Ok(())
    };

    // Pulled. Then another cloud starts, which reads its own records before it writes the status again.
    let pulled = site.job("pulled").images(images).on(["edge-1", "edge-2"]).concurrency(2).apply().await?;
    let of_first = |status: &ImagePrePullJobStatus| {
        status.node("edge-1").is_some_and(|node| node.phase == NodePhase::Successful)
    };
    is_shown(&pulled.until("edge-1 has succeeded", of_first).await?)?;
    site.cloud.restart().await?;
    let _second = EdgeNode::start(&site.cluster, &site.cloud, "edge-2").await?;
    let status = pulled.completes().await?;
    is_shown(&status)?;
    let elsewhere = status.image("edge-2", &of_moved).context("no image")?;
    assert_eq!(elsewhere.facts.kubelet_record, None, "there is no kubelet");

    // Present.
    let there = site.job("there").images(images).on(["edge-1"]).policy("IfNotPresent").completes().await?;
    is_shown(&there)?;
    let me = Person::new(site.cluster.kubeconfig());
    let words = ["! job there has brought", "mirror.example/team/moved", "/team/broken:v1"];
    me.runs("why edge-1 there").await?.is(0, &words)?;
    Ok(())
}
