//! Layers are unpacked while others still arrive.

use std::collections::BTreeSet;

use prepull_api::task::PulledBy;
use prepull_e2e::prelude::*;
use prepull_e2e::proxy::ProxiedRequest;
use tokio::time::timeout;

use crate::fetch::{Hand, pull_command, said};

/// Prefix of the names of half unpacked snapshots; those of unpacked ones are digests.
const HALF: &str = "extract-";

/// Waits for this many layers and no half unpacked one.
async fn layers_are_unpacked(hand: &Hand, layers: usize) -> Result<()> {
    let snapshots = hand.containerd.snapshots().await?;
    ensure!(
        snapshots.len() == layers && !snapshots.keys().any(|name| name.starts_with(HALF)),
        "{snapshots:?}"
    );
    Ok(())
}

/// Requests of the runtime: only the runtime asks for a digest in this way, when it continues.
fn asked_by_runtime(hand: &Hand) -> Vec<ProxiedRequest> {
    let asked = hand.link.records().into_iter().filter(|record| record.method == "HEAD");
    asked.filter(|record| record.path.contains("/manifests/sha256:")).collect()
}

#[tokio::test]
async fn layers_unpack_during_the_download() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("ahead", &[MIB, 16 * MIB])?;
    hand.link.throttle(Some(MIB));
    let pulling = hand.pull(&[&reference])?.spawn()?;
    eventually("the lower layer is unpacked", SOON, async || {
        let snapshots = hand.containerd.snapshots().await?;
        ensure!(snapshots.keys().any(|name| !name.starts_with(HALF)), "{snapshots:?}");
        Ok(())
    })
    .await?;
    let arrived = hand.bytes_of(&image);
    ensure!(arrived < image.size(), "all {arrived} bytes were there before a layer was unpacked");
    hand.link.throttle(None);
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    layers_are_unpacked(&hand, 2).await
}

#[tokio::test]
async fn half_unpacked_layers_go_after_a_kill() -> Result<()> {
    let mut hand = Hand::start().await?;
    // The lower layer takes a while to unpack, and the upper one takes longer to arrive.
    let (_, reference) = hand.image("half-unpacked", &[48 * MIB, 64 * MIB])?;
    hand.link.throttle(Some(24 * MIB));
    let pulling = hand.pull(&["--retries", "30", &reference])?.spawn()?;
    // Usually we see half of it; on a busy machine it may be complete by then.
    eventually("the lower layer is being unpacked", SOON, async || {
        ensure!(!hand.containerd.snapshots().await?.is_empty(), "nothing is unpacked yet");
        Ok(())
    })
    .await?;
    hand.containerd.restart().await?;
    hand.link.throttle(None);
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    let by_runtime = asked_by_runtime(&hand);
    ensure!(by_runtime.is_empty(), "{by_runtime:?}");
    // containerd collects content without a lease at its own pace.
    eventually("nothing half is left", SOON, async || layers_are_unpacked(&hand, 2).await).await
}

/// Names of half unpacked snapshots.
pub(crate) async fn half_unpacked(containerd: &Containerd) -> Result<BTreeSet<String>> {
    Ok(containerd.snapshots().await?.into_keys().filter(|name| name.starts_with(HALF)).collect())
}

#[tokio::test]
async fn killed_agents_leave_at_most_one_half() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("killed-twice", &[160 * MIB, MIB])?;
    let job = site.job("killed-twice").images([&reference]).on(["edge-1"]).retries(3).apply().await?;
    let mut seen = BTreeSet::new();
    for kill in 1..=3 {
        let unpacks = async {
            loop {
                let half = half_unpacked(node.containerd()).await?;
                if !half.is_subset(&seen) {
                    break Ok::<_, anyhow::Error>(half);
                }
            }
        };
        let half =
            timeout(SOON, unpacks).await.with_context(|| format!("kill {kill}: nothing is unpacked"))??;
        assert_eq!(half.len(), 1, "before kill {kill}");
        seen.extend(half);
        node.kill9_agent()?;
        node.restart_agent()?;
    }
    let status = job.completes().await?;
    let pulled = status.image("edge-1", &reference).context("no status")?;
    assert_eq!(pulled.facts.pulled_by, Some(PulledBy::Agent), "{pulled:?}");
    is_whole(node.containerd(), &image).await
}

/// Checks that both layers of the image are unpacked correctly, and that nothing half unpacked is left.
async fn is_whole(containerd: &Containerd, image: &Image) -> Result<()> {
    eventually("nothing half is left", SOON, async || {
        let half = half_unpacked(containerd).await?;
        ensure!(half.is_empty(), "{half:?}");
        Ok(())
    })
    .await?;
    assert_eq!(containerd.check_unpacked(image).await?, 2);
    Ok(())
}

#[tokio::test]
async fn an_agent_and_a_person_pull_the_same() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    // Without users, since the person gives none.
    let registry = Registry::start().await?;
    let image = Image::of_layers("both", &[160 * MIB, MIB])?;
    let reference = registry.seed(&image, "team/both:v1")?;
    let job = site.cluster.job("both").images([&reference]).on(["edge-1"]).apply().await?;
    let unpacks = async {
        while half_unpacked(node.containerd()).await?.is_empty() {}
        Ok::<_, anyhow::Error>(())
    };
    timeout(SOON, unpacks).await.context("nothing is unpacked")??;
    let output = pull_command(node.containerd(), &[&reference])?.output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 1);
    is_whole(node.containerd(), &image).await
}

#[tokio::test]
async fn deaths_during_unpacking_count_as_failures() -> Result<()> {
    let mut hand = Hand::start().await?;
    let (image, reference) = hand.image("deadly", &[96 * MIB])?;
    let mut pulling = hand.pull(&["--retries", "0", &reference])?.spawn()?;
    // A half unpacked snapshot outlives its containerd, so only a new one shows that the layer is being unpacked again.
    let mut halves = BTreeSet::new();
    let mut deaths = 0;
    while pulling.try_wait()?.is_none() {
        let snapshots = hand.containerd.snapshots().await?;
        if snapshots.into_keys().any(|name| name.starts_with(HALF) && halves.insert(name)) {
            deaths += 1;
            ensure!(deaths < 8, "the image kills containerd for the 8th time, and is still tried again");
            hand.containerd.restart().await?;
        }
    }
    let text = said(&pulling.wait_with_output().await?);
    // The same number as for pulls by the runtime: two crashes are pardoned, and no retry is left for the third.
    assert_eq!(deaths, 3, "{text}");
    let layer = image.blobs().last().context("no layer")?;
    ensure!(text.contains("ended while it unpacked layer") && text.contains(layer.as_str()), "{text}");
    Ok(())
}

#[tokio::test]
async fn processes_unpack_beside_each_other() -> Result<()> {
    let hand = Hand::start().await?;
    // One reference has one lease for both.
    let (image, reference) = hand.image("beside", &[160 * MIB, MIB])?;
    let first = hand.pull(&[&reference])?.spawn()?;
    let begun = async {
        while half_unpacked(&hand.containerd).await?.is_empty() {}
        Ok::<_, anyhow::Error>(())
    };
    timeout(SOON, begun).await.context("nothing is unpacked")??;
    let second = hand.pull(&[&reference])?.spawn()?;
    let (first, second) = tokio::try_join!(first.wait_with_output(), second.wait_with_output())?;
    for output in [first, second] {
        ensure!(output.status.success(), "{}", said(&output));
    }
    let by_runtime = asked_by_runtime(&hand);
    ensure!(by_runtime.is_empty(), "{by_runtime:?}");
    eventually("nothing half is left", SOON, async || layers_are_unpacked(&hand, 2).await).await?;
    assert_eq!(hand.containerd.check_unpacked(&image).await?, 2);
    Ok(())
}

#[tokio::test]
async fn a_wrong_layer_is_not_kept_unpacked() -> Result<()> {
    let hand = Hand::start().await?;
    let image = Image::of_wrong_diff_ids("lies")?;
    let reference = hand.registry.seed(&image, "team/lies:v1")?;
    let output = hand.pull(&["--retries", "0", &reference])?.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1) && text.contains("wrong diff id"), "{text}");
    assert_eq!(hand.containerd.snapshots().await?.len(), 0);
    Ok(())
}
