//! Disks that are full of images that nothing needs: they count as free, and `--make-room` removes them.

use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;

/// A box of 16 GB, scaled down.
const DISK: u64 = 160 * MIB;
/// A layer that all versions have, and that of each.
const BASE: u64 = 4 * MIB;
const OWN: u64 = 4 * MIB;
/// To an agent whose clock is an hour fast, no image is too new to be removed.
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
async fn twenty_versions_fit_one_after_another() -> Result<()> {
    let site = Site::start().await?;
    let node = site.node("edge-1").await?.ext4(DISK).clock_off_by(HOUR)?;
    let node = node.args(&RULES).args(&["--make-room"]).await?;
    let (_, kept) = site.image("kept", &[OWN])?;
    let pinned = site.job("kept").images([&kept]).on(["edge-1"]);
    pinned.spec(|spec| spec.pin = true).completes().await?;
    let old = (1..=5).map(|n| site.image(&format!("old-{n}"), &[OWN])).collect::<Result<Vec<_>>>()?;
    let references = old.iter().map(|(_, reference)| reference);
    site.job("old").images(references).on(["edge-1"]).completes().await?;
    let (_, size) = node.containerd().space()?;
    node.containerd().fill_disk(size / 20)?;

    let mut versions = Vec::new();
    for n in 1..=20 {
        let (image, reference) = version(&site.registry, &format!("v{n}"))?;
        let job = site.job(&format!("v{n}")).images([&reference]).on(["edge-1"]);
        let status = job.completes().await?;
        assert_eq!(status.image("edge-1", &reference).context("no image")?.status, Tristate::True, "v{n}");
        let (free, _) = node.containerd().space()?;
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
    let node = site.node("edge-1").await?.ext4(DISK).clock_off_by(HOUR)?.args(&RULES).await?;
    let (_, old) = site.image("unneeded", &[10 * MIB, 10 * MIB])?;
    site.job("old").images([&old]).on(["edge-1"]).completes().await?;
    let (new, reference) = site.image("needed", &[8 * MIB])?;
    let (_, size) = node.containerd().space()?;
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
    // What was asked for is how large layers are when they are unpacked.
    ensure!(fetched() - before < MIB / 16, "{} bytes were fetched", fetched() - before);
    Ok(())
}
