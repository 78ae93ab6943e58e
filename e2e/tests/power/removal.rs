//! Power cuts in the middle of a removal: each image is whole or gone, a reported one stays gone, and the job goes on.

use prepull_api::crd::remove::RemoveSpec;
use prepull_e2e::prelude::*;

use super::cuts;

/// Seeds images with layers of their own, which containerd pulls, and makes the spec that removes them.
async fn held(
    registry: &Registry,
    node: &EdgeNode,
    count: usize,
) -> Result<(Vec<(Image, String)>, RemoveSpec)> {
    let mut held = Vec::new();
    for n in 0..count {
        let image = Image::of_layers(&format!("cut-{n}"), &[MIB / 4, MIB / 16])?;
        let reference = registry.seed(&image, &format!("team/cut-{n}:v1"))?;
        node.containerd().pull(&reference, None).await?;
        held.push((image, reference));
    }
    // As if they had been there for long: a cut loses nothing of the pulls.
    rustix::fs::syncfs(std::fs::File::open(node.containerd().root())?)?;
    let images = held.iter().map(|(_, reference)| reference.clone()).collect();
    Ok((held, RemoveSpec { images, ..RemoveSpec::default() }))
}

#[tokio::test]
async fn a_removal_goes_on_after_a_power_cut() -> Result<()> {
    const IMAGES: u32 = 12;
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.ext4(256 * MIB).await?;
    let registry = Registry::start().await?;
    let (held, spec) = held(&registry, &node, IMAGES as usize).await?;
    let job = site.cluster.job("cut").on(["edge-1"]);
    let job = job.spec(|job| job.image_pre_pull_template.remove = Some(spec)).apply().await?;
    eventually("an image is gone", SOON, async || {
        let there = node.containerd().images().await?;
        ensure!(held.iter().any(|(_, reference)| !there.contains_key(reference)), "not yet");
        Ok(())
    })
    .await?;
    node.containerd_mut().cut_power()?;
    node.kill9_agent()?;
    node.containerd_mut().power_on().await?;
    for (image, reference) in &held {
        if node.has_image(reference).await? {
            assert_eq!(node.containerd().check_unpacked(image).await?, 2, "{reference} is half gone");
        }
    }
    node.restart_agent()?;
    let result = job.completes().await?.removal.context("no sum")?;
    assert_eq!((result.removed, result.kept, result.nodes), (IMAGES, 0, 1), "{result:?}");
    let there = node.containerd().images().await?;
    ensure!(!held.iter().any(|(_, reference)| there.contains_key(reference)), "{there:?}");
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn a_removal_survives_a_cut_at_any_write() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.recorded(Format::Ext4).await?;
    let registry = Registry::start().await?;
    let (held, spec) = held(&registry, &node, 4).await?;
    let begun = node.containerd_mut().recorded()?;
    let job = site.cluster.job("removed").on(["edge-1"]);
    let job = job.spec(|job| job.image_pre_pull_template.remove = Some(spec)).apply().await?;
    job.completes().await?;
    let known = node.containerd_mut().recorded()?;
    node.forgets_all_tasks().await?;
    node.kill9_agent()?;
    let recording = node.containerd_mut().end_recording()?;
    let mut chance = Chance::new(47, 0);
    for cut in recording.cuts(begun, cuts() * 2, &mut chance).into_iter().chain([known]) {
        let at = || format!("cut before event {cut} of {}, the cloud knew at {known}", recording.len());
        node.containerd_mut().start_after_cut(&recording, cut, &mut chance).await.with_context(at)?;
        let has_ended = node.read_ledger()?.iter().any(|task| task.ended);
        let mut left = 0;
        for (image, reference) in &held {
            if node.has_image(reference).await? {
                left += 1;
                let unpacked = node.containerd().check_unpacked(image).await.with_context(at)?;
                assert_eq!(unpacked, 2, "{}: {reference} is half gone", at());
            }
        }
        println!("{}: {left} images, ended in the ledger {has_ended}", at());
        ensure!(left == 0 || (!has_ended && cut < known), "{}: {left} images are back", at());
        node.restart_agent()?;
        node.is_connected().await.with_context(at)?;
        node.forgets_all_tasks().await.with_context(at)?;
        node.kill9_agent()?;
    }
    Ok(())
}
