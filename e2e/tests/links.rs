//! Faulty registries and links: transient errors are retried, permanent ones are reported, and a cut causes no repeated
//! download.

use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;
use prepull_e2e::proxy::ProxiedRequest;

#[tokio::test]
async fn a_returning_registry_is_retried_in_time() -> Result<()> {
    let mut site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("comes-back", &[MIB])?;
    site.registry.stop()?;

    let job = site.job("comes-back").images([&reference]).on(["edge-1"]).retries(5).apply().await?;
    let refused = job
        .until("a try has failed, and it goes on", |status| {
            status.image("edge-1", &reference).is_some_and(|image| !image.reason.is_empty())
        })
        .await?;
    assert_eq!(refused.phase, JobPhase::InProgress);
    let during = refused.image("edge-1", &reference).context("no image")?;
    assert_eq!(during.status, Tristate::Unknown, "nothing is decided yet: {during:?}");

    site.registry.restart().await?;
    let status = job.completes().await?;
    let image_status = status.image("edge-1", &reference).context("no image")?;
    assert_eq!(image_status.digest.as_deref(), Some(image.digest()));
    ensure!((2..=6).contains(&image_status.attempts), "{image_status:?}");
    assert_eq!(image_status.reason, "", "an image that is there has nothing to complain of");
    ensure!(node.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn a_busy_or_broken_registry_is_retried() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    // containerd itself retries a 429, and some releases a 500 as well, each with its own number of retries. So the
    // registry fails until an attempt of the agent has ended.
    for (name, path, answer, code) in [
        ("busy", "/manifests/", 429, FailureCode::RateLimited),
        ("broken", "/blobs/", 500, FailureCode::RegistryError),
    ] {
        let (_, reference) = site.seed_image(name, &[MIB])?;
        site.link.fail_next_on(path, 1000, answer);
        let job = site.job(name).images([&reference]).on(["edge-1"]).retries(5).apply().await?;
        job.until("a try has failed, and it goes on", |status| {
            let image = status.image("edge-1", &reference);
            image.is_some_and(|image| image.status == Tristate::Unknown && image.code == Some(code))
        })
        .await?;
        site.link.stop_failing();
        let status = job.completes().await?;
        let image = status.image("edge-1", &reference).context("no image")?;
        ensure!((2..=6).contains(&image.attempts), "{image:?}");
        ensure!(node.has_image(&reference).await?);
    }
    Ok(())
}

#[tokio::test]
async fn a_lasting_failure_names_reason_and_tries() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (_, broken) = site.seed_image("broken", &[MIB])?;
    let (_, fine) = site.seed_image("fine", &[MIB])?;
    let missing = site.registry.image("team/fine:v2");
    site.link.fail_next_on("/broken/manifests/", 1000, 503);

    let images = [&broken, &missing, &fine];
    let job = site.job("broken").images(images).on(["edge-1"]).retries(2).apply().await?;
    let status = job.fails().await?;
    let image = |reference: &str| status.image("edge-1", reference).context("no image");
    let (of_broken, of_missing, of_fine) = (image(&broken)?, image(&missing)?, image(&fine)?);
    assert_eq!((of_broken.status, of_broken.attempts), (Tristate::False, 3), "{of_broken:?}");
    assert_eq!(of_broken.code, Some(FailureCode::RegistryError), "{of_broken:?}");
    assert_eq!(of_missing.code, Some(FailureCode::NotFound), "{of_missing:?}");
    ensure!(of_broken.reason.contains("503"), "the registry's answer is not in {of_broken:?}");
    // The first attempt and two more. In each, some releases of containerd send several requests.
    let asked = || site.link.records().iter().filter(|record| record.injected).count();
    let asked_for_broken = asked();
    ensure!((3..=30).contains(&asked_for_broken), "{asked_for_broken} requests");

    assert_eq!(
        (of_missing.status, of_missing.attempts),
        (Tristate::False, 1),
        "no try can help: {of_missing:?}"
    );
    ensure!(of_missing.reason.to_lowercase().contains("not found"), "{of_missing:?}");
    // An image that fails does not affect the others.
    assert_eq!((of_fine.status, of_fine.attempts), (Tristate::True, 1), "{of_fine:?}");
    ensure!(node.has_image(&fine).await?);

    let of_node = status.node("edge-1").context("no node")?;
    assert_eq!(of_node.phase, NodePhase::Failure);
    ensure!(of_node.reason.contains("2 of 3 images"), "{of_node:?}");
    assert_eq!(status.reason, "1 of 1 nodes failed, more than failureTolerate 0.1 allows (RegistryError 1)");
    assert_eq!(asked(), asked_for_broken, "no requests after the end");
    Ok(())
}

#[tokio::test]
async fn a_cut_layer_resumes() -> Result<()> {
    const SIZE: u64 = 64 * MIB;
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("large", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    site.link.throttle(Some(24 * MIB));

    let job = site.job("large").images([&reference]).on(["edge-1"]).retries(5).apply().await?;
    site.link_carries(SIZE / 2).await?;
    site.link.refuse();
    let before = site.link.bytes_of(layer);
    ensure!(before < SIZE, "the link was cut too late");
    // Long enough for containerd to give up, so that a retry of the agent resumes the pull.
    job.until("a try has failed", |status| {
        status.image("edge-1", &reference).is_some_and(|image| !image.reason.is_empty())
    })
    .await?;
    site.link.throttle(None);
    site.link.accept_again()?;

    let status = job.completes().await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    ensure!(of_image.attempts >= 2, "{of_image:?}");
    let bytes = of_image.bytes.context("containerd can tell")?;
    assert_eq!((bytes.done, bytes.total), (image.size(), image.size()));
    let records: Vec<ProxiedRequest> =
        site.link.records().into_iter().filter(|record| record.path.ends_with(layer.as_str())).collect();
    let resumed = records.last().context("no request")?;
    ensure!(resumed.range.is_some() && resumed.status == 206, "no range was asked for: {records:#?}");
    let fetched = site.link.bytes_of(layer);
    ensure!(fetched < SIZE + SIZE / 8, "{fetched} bytes for a layer of {SIZE}: {records:#?}");
    ensure!(node.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn a_silent_tunnel_ends_on_both_sides() -> Result<()> {
    let site = Site::with_cloud_args(&["--heartbeat", "1s"]).await?;
    let tunnel = Proxy::for_tcp(site.cloud.tunnel_addr())?;
    let node = site.add_node("edge-1").await?.tunnel_through(&tunnel).await?;
    let (image, reference) = site.seed_image("silent-tunnel", &[4 * MIB])?;
    site.link.throttle(Some(2 * MIB));
    let job = site.job("pulls").images([&reference]).on(["edge-1"]).apply().await?;
    site.link_carries(MIB).await?;
    site.cloud.has_sessions(1).await?;

    // Like a NAT that has forgotten the connection: neither end gets a message.
    let dialled = tunnel.connections();
    tunnel.freeze();
    eventually("the cloud ends the session", Duration::from_secs(6), async || {
        ensure!(site.cloud.sessions().await? < 0.5, "it still has one");
        Ok(())
    })
    .await?;
    eventually("the edge ends the session, and dials again", Duration::from_secs(6), async || {
        ensure!(tunnel.connections() > dialled, "it has not dialled");
        Ok(())
    })
    .await?;
    // The pull continues without the tunnel.
    node.ends_a_task().await?;
    let during = job.status().await?;
    assert_eq!((during.phase, during.summary.in_progress), (JobPhase::InProgress, 1), "{during:?}");
    let waiting = site.job("waits").images([&reference]).on(["edge-1"]).apply().await?;
    waiting
        .until("the node is known to be offline", |status| {
            status.node("edge-1").is_some_and(|node| node.reason.contains("offline"))
        })
        .await?;

    tunnel.thaw();
    let status = job.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
    waiting.completes().await?;
    node.forgets_all_tasks().await?;
    assert_eq!(site.fetches(&image), image.blobs().len(), "the image was pulled once");
    Ok(())
}
