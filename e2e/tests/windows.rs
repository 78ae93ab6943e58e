//! Windows: a pull waits for one, stops with it, and continues with the next; and the terms of a running job change.

use std::time::Duration;

use jiff::{Timestamp, ToSpan};
use prepull_api::crd::download::{DownloadSpec, WindowSpec};
use prepull_api::crd::kruise::{ImageTagStatus, PullPhase};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_e2e::prelude::*;
use serde_json::json;
use tokio::time::timeout;

use crate::unpacking::half_unpacked;

const SIZE: u64 = 24 * MIB;
/// At this rate the pull takes longer than one window.
const RATE: u64 = 2 * MIB;
/// Seconds.
const OPEN: u64 = 8;

/// A window that opens in the minute of this time, by UTC.
fn window(opens: Timestamp, duration: String) -> WindowSpec {
    let (start, time_zone) = (opens.strftime("%H:%M").to_string(), "UTC".to_owned());
    WindowSpec { days: Vec::new(), start, duration, time_zone }
}

#[tokio::test]
async fn a_pull_waits_for_its_window() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("windowed", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    site.link.throttle(Some(RATE));
    let far = window(Timestamp::now().checked_add(12.hours())?, "1h".to_owned());
    let waits = format!("waits for its window, opens at {} UTC", far.start);
    // Less than a window: with the time in between it would be over long before the pull is.
    let job = site.job("windowed").images([&reference]).on(["edge-1"]).timeout_seconds(40);
    let job = job.spec(|spec| spec.windows = vec![far]).apply().await?;
    job.until("the node waits and says until when", |status| {
        status
            .node("edge-1")
            .is_some_and(|node| node.phase == NodePhase::Pending && node.reason.starts_with(&waits))
    })
    .await?;
    assert_eq!((site.link.bytes_of(layer), node.open_tasks()), (0, 0), "nothing begins before");

    // One is open now, and then one at each whole minute that leaves time to see it closed.
    let next = Timestamp::now().checked_add((i64::try_from(OPEN)? + 65).seconds())?;
    let later = (0..7).map(|later| Ok(window(next.checked_add(later.minutes())?, format!("{OPEN}s"))));
    let now = closing_after(Duration::from_secs(OPEN));
    let windows: Vec<_> = std::iter::once(now).chain(later).collect::<Result<_>>()?;
    job.patch_spec(json!({"windows": windows})).await?;
    let during = |status: &ImagePrePullJobStatus| {
        let node = status.node("edge-1")?;
        Some(node.phase == NodePhase::InProgress && node.reason.starts_with("waits for its window"))
    };
    job.until("the window has closed in the middle of the pull", |status| during(status) == Some(true))
        .await?;
    let fetched = site.link.bytes_of(layer);
    ensure!(fetched > 0 && fetched < SIZE, "{fetched} bytes when the window had closed");

    let status = job.completes().await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((of_image.status, of_image.attempts), (Tristate::True, 1), "{of_image:?}");
    let of_node = status.node("edge-1").context("no node")?;
    assert_eq!((of_node.reason.as_str(), &of_node.clock), ("", &None));
    let fetched = site.link.bytes_of(layer);
    ensure!(fetched <= SIZE + SIZE / 4, "{fetched} bytes of {SIZE}: it restarted");
    ensure!(node.has_image(&reference).await?);
    Ok(())
}

/// A window that is open now, and closes after this time.
fn closing_after(span: Duration) -> Result<WindowSpec> {
    let now = Timestamp::now();
    let opened = now.as_second() - now.as_second() % 60;
    let open = now.checked_add(span)?.as_second() - opened;
    Ok(window(Timestamp::from_second(opened)?, format!("{open}s")))
}

/// Whether the node has begun, and reports a closed window.
fn window_is_closed(status: &ImagePrePullJobStatus) -> bool {
    let node = status.node("edge-1");
    node.is_some_and(|node| {
        node.phase == NodePhase::InProgress && node.reason.starts_with("waits for its window")
    })
}

#[tokio::test]
async fn no_window_interrupts_the_last_unpacking() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("arrived", &[96 * MIB])?;
    let job = site.job("arrived").images([&reference]).on(["edge-1"]).apply().await?;
    let unpacks = async {
        while half_unpacked(node.containerd()).await?.is_empty() {}
        Ok::<_, anyhow::Error>(())
    };
    timeout(SOON, unpacks).await.context("nothing is unpacked")??;
    // A box with a slow disk, so that the window closes before the end. The next one opens tomorrow.
    node.containerd().pause()?;
    job.patch_spec(json!({"windows": [closing_after(Duration::from_secs(3))?]})).await?;
    let status = job.until("the window has closed", window_is_closed).await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    assert_ne!(of_image.status, Tristate::True, "{of_image:?}");
    node.containerd().resume()?;

    let status = job.completes().await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((of_image.status, of_image.attempts), (Tristate::True, 1), "{of_image:?}");
    assert_eq!(node.containerd().check_unpacked(&image).await?, 1);
    Ok(())
}

#[tokio::test]
async fn a_box_in_1970_keeps_todays_windows() -> Result<()> {
    let authority = Authority::new("registry")?;
    let (cluster, registry) =
        tokio::try_join!(Cluster::start(), async { Registry::start().tls(&authority).await })?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").without_agent().await?;
    // Shortly after the start of 1970, and twelve hours off by the time of day: the registry's certificate isn't valid
    // yet then, and the window isn't open.
    let now = Timestamp::now();
    let today = now.as_second() - now.as_second() % 86_400;
    node.set_clock_off_by(12 * 3600 - today)?;
    node.restart_agent()?;
    let reference = registry.seed(&Image::small("boxed")?, "team/boxed:v1")?;
    let open = window(now.checked_sub(2.hours())?, "4h".to_owned());
    let job = cluster.job("boxed").images([&reference]).on(["edge-1"]).retries(0);
    let status = job.spec(|spec| spec.windows = vec![open]).completes().await?;
    let image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((image.status, image.attempts), (Tristate::True, 1), "{image:?}");
    ensure!(node.agent_log().contains("1970-01-"), "its clock is right: {}", node.agent_log());
    Ok(())
}

#[tokio::test]
async fn an_image_pull_job_waits_for_its_window() -> Result<()> {
    let site = Site::with_kruise(&[]).await?;
    // Windows open at whole minutes: the next one that leaves time to apply a job and to see it wait.
    let opening = Timestamp::now().checked_add(80.seconds())?;
    let WindowSpec { start, duration, time_zone, .. } = window(opening, "1h".to_owned());
    let window = format!("{start}+{duration} {time_zone}");
    let node = site.add_node("edge-1").await?.args(&["--download-window", &window]).await?;
    let (image, reference) = site.seed_image("pull-job-windowed", &[MIB])?;
    let tag = site.cluster.node_image("edge-1").referenced_tag(&reference);
    let job = site.pull_job("windowed", &reference).on_nodes(["edge-1"]).apply().await?;
    let waits = format!("waits for its window, opens at {start} UTC");
    let says = |status: Option<&ImageTagStatus>| {
        status.is_some_and(|status| status.phase == PullPhase::Pulling && status.message.starts_with(&waits))
    };
    tag.until_met("says what it waits for", |_, status| says(status)).await?;
    assert_eq!((site.fetches(&image), node.has_image(&reference).await?), (0, false));

    let status = job.with_limit(Duration::from_secs(180)).completes().await?;
    assert_eq!((status.succeeded, status.failed), (1, 0), "{status:?}");
    let tag = tag.status().await?.context("no status")?;
    assert_eq!((tag.phase, tag.message.as_str()), (PullPhase::Succeeded, ""), "{tag:?}");
    ensure!(tag.start_time.zip(tag.completion_time).is_some_and(|(start, end)| start.0 < end.0));
    ensure!(node.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn changed_windows_stop_and_release_a_pull() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("edited", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    site.link.throttle(Some(RATE));
    let job = site.job("edited").images([&reference]).on(["edge-1"]).timeout_seconds(40).apply().await?;
    site.link_carries(MIB).await?;
    node.accepts_a_task().await?;

    let far = window(Timestamp::now().checked_add(12.hours())?, "1h".to_owned());
    let start = far.start.clone();
    job.patch_spec(json!({"windows": [far], "download": {"maxRate": "1Mi"}})).await?;
    job.until("the node waits", |status| {
        let waits = format!("waits for its window, opens at {start} UTC");
        status.node("edge-1").is_some_and(|node| node.reason.starts_with(&waits))
    })
    .await?;
    let stopped = site.link.bytes_of(layer);
    ensure!(stopped < SIZE, "it was whole before");
    tokio::time::sleep(Duration::from_secs(2)).await; // in which 4 MiB would arrive
    let later = site.link.bytes_of(layer);
    ensure!(later < stopped + MIB, "{} bytes arrived although no window is open", later - stopped);

    let refused =
        job.patch_spec(json!({"windows": [{"start": "25:00", "duration": "1h", "timeZone": "UTC"}]}));
    ensure!(refused.await.is_err(), "the schema refuses such a time");
    job.patch_spec(json!({"windows": [], "download": null})).await?;
    let status = job.completes().await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((of_image.status, of_image.attempts), (Tristate::True, 1), "{of_image:?}");
    ensure!(site.link.bytes_of(layer) <= SIZE + SIZE / 4, "it restarted");
    Ok(())
}

#[tokio::test]
async fn a_changed_limit_applies_to_a_download() -> Result<()> {
    const SPAN: Duration = Duration::from_secs(2);
    let site = Site::start().await?;
    let _node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("recapped", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    // Slow enough for the change to arrive long before the layer, also on a busy machine.
    site.link.throttle(Some(2 * MIB));
    let job = site.job("recapped").images([&reference]).on(["edge-1"]).apply().await?;
    site.link_carries(2 * MIB).await?;
    // The link alone would carry eight times as much.
    job.patch_spec(json!({"download": {"maxRate": "256Ki"}})).await?;
    eventually("the limit holds on the wire", SOON, async || {
        let before = site.link.bytes_of(layer);
        tokio::time::sleep(SPAN).await;
        let carried = site.link.bytes_of(layer) - before;
        ensure!(carried <= MIB, "{carried} bytes in {SPAN:?}");
        Ok(())
    })
    .await?;
    let carried = site.link.bytes_of(layer);
    ensure!(carried < SIZE, "the layer was whole before the limit held");
    let (before, begun) = (carried, std::time::Instant::now());
    tokio::time::sleep(2 * SPAN).await;
    let (carried, took) = (site.link.bytes_of(layer) - before, begun.elapsed());
    println!("{carried} bytes in {took:?} under a limit of 256Ki");
    ensure!(carried <= MIB + took.as_secs() * MIB / 2, "{carried} bytes in {took:?}: the limit is 256Ki");

    // Under the limit it would exceed the job's time; the link isn't the bottleneck any more.
    site.link.throttle(None);
    job.patch_spec(json!({"download": null})).await?;
    let status = job.completes().await?;
    let of_image = status.image("edge-1", &reference).context("no image")?;
    assert_eq!((of_image.status, of_image.attempts), (Tristate::True, 1), "{of_image:?}");
    let fetched = site.link.bytes_of(layer);
    ensure!(fetched <= SIZE * 105 / 100, "{fetched} bytes: it restarted");
    Ok(())
}

#[tokio::test]
async fn uncapped_jobs_wait_for_no_cap() -> Result<()> {
    let site = Site::start().await?;
    let _node = site.add_node("edge-1").await?.args(&["--max-tasks", "2"]).await?;
    // The smallest layer comes last: under its cap the large ones take a minute.
    let capped = Image::on_base("capped", &[MIB], "own", 8 * MIB)?;
    let uncapped = Image::on_base("capped", &[MIB], "other", MIB)?;
    let references =
        [site.registry.seed(&capped, "team/capped:v1")?, site.registry.seed(&uncapped, "team/uncapped:v1")?];
    let slow = site.job("slow").images([&references[0]]).on(["edge-1"]).spec(|spec| {
        spec.download = Some(DownloadSpec { max_rate: Some("128Ki".to_owned()), ..DownloadSpec::default() });
    });
    let slow = slow.apply().await?;
    site.link_carries(256 * 1024).await?;
    let begun = std::time::Instant::now();
    site.job("fast").images([&references[1]]).on(["edge-1"]).completes().await?;
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(20), "{took:?}");
    slow.patch_spec(json!({"download": null})).await?;
    slow.completes().await?;
    Ok(())
}
