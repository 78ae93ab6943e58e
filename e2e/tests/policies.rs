//! Pull policies, with the kubelet's meaning.

use prepull_e2e::prelude::*;

/// Digest and attempts of an image on edge-1.
fn pulled(
    status: &prepull_api::crd::status::ImagePrePullJobStatus,
    image: &str,
) -> Result<(Option<String>, Tristate, u32)> {
    let image = status.image("edge-1", image).with_context(|| format!("no {image} in {status:?}"))?;
    Ok((image.digest.clone(), image.status, image.attempts))
}

#[tokio::test]
async fn only_always_follows_a_moved_tag() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let (before, after) = (Image::small("before")?, Image::small("after")?);
    let digest = |image: &Image| Some(image.digest().to_owned());
    let reference = registry.seed(&before, "team/app:stable")?;
    let job = |name: &str| stage.cluster.job(name).on(["edge-1"]).images([&reference]);

    let status = job("first").completes().await?;
    assert_eq!(pulled(&status, &reference)?, (digest(&before), Tristate::True, 1));

    registry.seed(&after, "team/app:stable")?;
    let asked = registry.requests().len();
    let status = job("if-not-present").policy("IfNotPresent").completes().await?;
    assert_eq!(pulled(&status, &reference)?, (digest(&before), Tristate::True, 0), "it is there");
    assert_eq!(registry.requests().len(), asked, "no request was needed");

    let status = job("always").policy("Always").completes().await?;
    assert_eq!(pulled(&status, &reference)?, (digest(&after), Tristate::True, 1));
    assert_eq!(stage.edge("edge-1")?.images().await?.get(&reference), digest(&after).as_ref());

    // The tag hasn't moved: the registry is asked, and no blob is fetched again.
    let before = (registry.requests().blob_fetches().len(), registry.requests().len());
    job("always-again").policy("Always").completes().await?;
    assert_eq!(registry.requests().blob_fetches().len(), before.0);
    ensure!(registry.requests().len() > before.1, "nobody asked");
    Ok(())
}

#[tokio::test]
async fn never_uses_only_present_images() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let image = Image::small("never")?;
    let there = registry.seed(&image, "team/there:v1")?;
    let absent = registry.seed(&image, "team/absent:v1")?;
    stage.edge("edge-1")?.containerd().pull(&there, None).await?;
    let asked = registry.requests().len();

    let job = stage.cluster.job("never").on(["edge-1"]).images([&there, &absent]).policy("Never").retries(3);
    let status = job.fails().await?;
    assert_eq!(pulled(&status, &there)?, (Some(image.digest().to_owned()), Tristate::True, 0));
    assert_eq!(pulled(&status, &absent)?, (None, Tristate::False, 0));
    let reason = &status.image("edge-1", &absent).context("no image")?.reason;
    ensure!(reason.contains("Never") && reason.contains("not"), "{reason}");
    assert_eq!(registry.requests().len(), asked, "no request is allowed");
    Ok(())
}
