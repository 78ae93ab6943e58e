//! Faults of the edge itself: its disk, its clock, its certificate, its connection to the cloud. The job must complete,
//! and no complete layer may be pulled twice.

use std::time::{Duration, Instant};

use prepull_api::wire::TUNNEL_PATH;
use prepull_e2e::prelude::*;

/// The agent fetches no image that doesn't fit; the runtime notices only when the disk is full.
const BY_RUNTIME: [&str; 4] = ["--disk-min-free", "10%", "--fetch", "runtime"];

/// Checks that not much more than the size of each blob was fetched, however often the pull was interrupted.
fn pulled_once(site: &Site, image: &Image) -> Result<()> {
    for blob in image.blobs() {
        let size = std::fs::metadata(image.blob_file(blob))?.len();
        let fetched = site.link.bytes_of(blob);
        ensure!(fetched <= size + size / 16, "{fetched} bytes of {blob}, which has {size}");
    }
    Ok(())
}

#[tokio::test]
async fn a_full_disk_gets_its_room_back() -> Result<()> {
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.disk(32 * MIB).args(&BY_RUNTIME).await?;
    let (_, small) = site.seed_image("small", &[MIB])?;
    let (_, other) = site.seed_image("other", &[2 * MIB])?;
    let (_, large) = site.seed_image("large", &[4 * MIB, 48 * MIB])?;

    // The check finds enough free space; the disk turns out to be too small only in the middle of the pull.
    let job = site.job("full").images([&small, &large]).on(["edge-1"]).retries(1).apply().await?;
    let status = job.fails().await?;
    let of_large = status.image("edge-1", &large).context("no image")?;
    assert_eq!((of_large.status, of_large.attempts), (Tristate::False, 2), "{of_large:?}");
    ensure!(of_large.reason.contains("no space left on device"), "{of_large:?}");
    ensure!(of_large.reason.contains(&node.containerd().dir().display().to_string()), "where? {of_large:?}");
    let of_small = status.image("edge-1", &small).context("no image")?;
    assert_eq!(of_small.status, Tristate::True, "one image takes no other with it: {of_small:?}");
    let of_node = status.node("edge-1").context("no node")?;
    ensure!(of_node.reason.contains("no space left on device"), "{of_node:?}");
    ensure!(node.agent()?.pid() > 0 && node.has_image(&small).await?, "both live on");
    node.is_connected().await?;
    node.forgets_all_tasks().await?;

    // Only we hold the pull's content: half of it would already fill the rest of the disk.
    eventually("the room is there again", SOON, async || {
        let free = node.containerd().free_space()?;
        ensure!(free > 24 * MIB, "{free} bytes are free");
        Ok(())
    })
    .await?;
    ensure!(node.has_image(&small).await?, "what was whole stays");
    site.job("other").images([&other]).on(["edge-1"]).completes().await?;

    node.containerd().resize_disk(256 * MIB).await?;
    let status = site.job("room").images([&small, &large]).on(["edge-1"]).completes().await?;
    assert_eq!(status.image("edge-1", &small).map(|image| image.status), Some(Tristate::True));
    ensure!(node.has_image(&large).await?);
    Ok(())
}

#[tokio::test]
async fn leftovers_go_when_room_is_needed() -> Result<()> {
    const LEAST: u64 = 2 * MIB;
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.disk(32 * MIB).args(&BY_RUNTIME).await?;
    let (_, reference) = site.seed_image("late", &[16 * MIB])?;
    site.link.throttle(Some(2 * MIB));
    site.job("late").images([&reference]).on(["edge-1"]).timeout_seconds(5).fails().await?;
    node.forgets_all_tasks().await?;
    let left = || async { anyhow::Ok(node.containerd().ingests().await?.values().sum::<u64>()) };
    let before = left().await?;
    ensure!(before > 2 * MIB, "only {before} bytes were left for the next round");

    let filler = usize::try_from(node.containerd().free_space()?.saturating_sub(LEAST))?;
    std::fs::write(node.containerd().root().join("filler"), vec![0; filler])?;
    eventually("what the pull had fetched is gone", SOON, async || {
        let (now, free) = (left().await?, node.containerd().free_space()?);
        ensure!(now == 0 && free >= LEAST + before, "{now} bytes are left, and {free} are free");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_readonly_node_still_reports() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.without_agent().await?;
    let (_, reference) = site.seed_image("told", &[8 * MIB])?;
    let tasks = node.state_dir().join("tasks");
    std::fs::create_dir_all(&tasks)?;
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=64k", "prepull-e2e"]).arg(&tasks);
    prepull_e2e::parts::run_command(mount).await?;
    node.restart_agent()?;
    site.link.throttle(Some(4 * MIB));
    let job = site.job("told").images([&reference]).on(["edge-1"]).apply().await?;
    site.link_carries(MIB).await?;
    node.accepts_a_task().await?;

    let full = std::fs::write(tasks.join("filler"), vec![0; 128 * 1024]);
    ensure!(full.is_err(), "the disk has room");
    job.completes().await?;
    ensure!(node.agent_log().contains("No space left on device"), "the result was stored");
    node.forgets_all_tasks().await?;
    std::fs::remove_file(tasks.join("filler"))?;
    site.job("next").images([&reference]).on(["edge-1"]).completes().await?;
    Ok(())
}

#[tokio::test]
async fn a_late_containerd_costs_no_try() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.without_agent().args(&["--max-tasks", "2"]).await?;
    let (_, checked) = site.seed_image("checked", &[MIB])?;
    let (_, unchecked) = site.seed_image("unchecked", &[MIB])?;
    node.containerd_mut().kill9()?;
    std::fs::remove_file(node.containerd().socket())?;
    node.restart_agent()?;
    let with = site.job("checked").images([&checked]).on(["edge-1"]).checks(&["disk"]).apply().await?;
    let without = site.job("unchecked").images([&unchecked]).on(["edge-1"]).checks(&[]).apply().await?;
    node.ledger_gets("both tasks", |tasks| tasks.len() == 2).await?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(node.read_ledger()?.iter().filter(|task| task.ended).count(), 0, "they wait");
    node.restart_containerd().await?;
    for (job, reference) in [(with, &checked), (without, &unchecked)] {
        let status = job.completes().await?;
        assert_eq!(status.image("edge-1", reference).map(|image| image.attempts), Some(1));
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_clock_changes_nothing() -> Result<()> {
    const OFF: i64 = 300;
    let site = Site::with_cloud_args(&["--heartbeat", "1s"]).await?;
    let mut behind = site.add_node("behind").await?.clock_off_by(-OFF)?.await?;
    let mut ahead = site.add_node("ahead").await?.clock_off_by(OFF)?.await?;
    for (node, off) in [(&behind, -OFF), (&ahead, OFF)] {
        node.is_connected().await?;
        let differs = first_second(node)? - jiff::Timestamp::now().as_second() - off;
        ensure!(differs.abs() < 60, "the clock of {} is not off by {off} s: {differs} s", node.name());
    }

    let (image, reference) = site.seed_image("clock", &[MIB, 12 * MIB])?;
    site.link.throttle(Some(6 * MIB));
    let nodes = ["behind", "ahead"];
    let job = site.job("clock").images([&reference]).on(nodes).concurrency(2).retries(3).apply().await?;
    for node in [&behind, &ahead] {
        node.accepts_a_task().await?;
    }
    site.link_carries(2 * MIB).await?;
    // After a restart, the agent knows the deadline only by its wall clock.
    behind.restart_agent()?;
    ahead.restart_agent()?;
    let status = job.completes().await?;
    for node in [&behind, &ahead] {
        let of_node = status.node(node.name()).context("no node")?;
        assert_eq!((of_node.phase, of_node.attempt), (NodePhase::Successful, 1), "{of_node:?}");
        ensure!(node.has_image(&reference).await?);
        node.forgets_all_tasks().await?;
    }
    let fetched: u64 = image.blobs().iter().map(|blob| site.link.bytes_of(blob)).sum();
    ensure!(fetched < 2 * image.size() + 4 * MIB, "{fetched} bytes for two nodes, {} each", image.size());

    // Another deadline passes in time.
    let (_, endless) = site.seed_image("endless", &[8 * MIB])?;
    site.link.throttle(Some(MIB / 8));
    let began = Instant::now();
    let job = site.job("late").images([&endless]).on(nodes).concurrency(2).timeout_seconds(6).apply().await?;
    job.fails().await?;
    let took = began.elapsed();
    ensure!(took > Duration::from_secs(5) && took < Duration::from_secs(20), "6 s took {took:?}");
    Ok(())
}

/// First second in the log of the agent, by the clock of the agent.
fn first_second(node: &EdgeNode) -> Result<i64> {
    let log = node.agent_log();
    let stamp = log.split_whitespace().next().context("no log")?;
    Ok(stamp.parse::<jiff::Timestamp>().with_context(|| stamp.to_owned())?.as_second())
}

#[tokio::test]
async fn a_renewed_certificate_disturbs_no_job() -> Result<()> {
    // A certificate is backdated by ten minutes: it's due for renewal within a twentieth of its fifteen minutes, and
    // then once a minute.
    const DUE: Duration = Duration::from_secs(45 + 60 + 20);
    let site = Site::with_cloud_args(&["--edge-cert-ttl", "5m", "--heartbeat", "1s"]).await?;
    // The cloud's clock counts, and not that of a board without a battery.
    let node = site.add_node("edge-1").await?.clock_off_by(-40 * 24 * 3600)?.await?;
    let (image, reference) = site.seed_image("renewed", &[MIB, 8 * MIB])?;
    site.link.throttle(Some(MIB));
    let job = site.job("renewed").images([&reference]).on(["edge-1"]).timeout_seconds(300).apply().await?;
    site.link_carries(3 * MIB).await?;
    node.accepts_a_task().await?;
    // Slow enough not to end before the renewal.
    site.link.throttle(Some(MIB / 64));

    let certificate = || std::fs::read(node.state_dir().join("pki/client.crt"));
    let renewals = || node.agent_log().matches("the certificate was renewed until=").count();
    let (before, old) = (renewals(), certificate()?);
    eventually("the certificate is renewed", DUE, async || {
        ensure!(renewals() > before, "it is not");
        Ok(())
    })
    .await?;
    ensure!(certificate()? != old);
    eventually("the session comes back", SOON, async || {
        let log = node.agent_log();
        let (_, since) = log.rsplit_once("reason=the certificate was renewed").context("it did not end")?;
        ensure!(since.contains("connected to the cloud"), "not yet");
        Ok(())
    })
    .await?;
    assert_eq!(job.status().await?.summary.in_progress, 1, "it was not in the middle of the job");
    assert_eq!(node.read_ledger()?.len(), 1);

    site.link.throttle(None);
    let status = job.completes().await?;
    let of_node = status.node("edge-1").context("no node")?;
    assert_eq!(of_node.attempt, 1);
    assert_eq!(status.image("edge-1", &reference).map(|image| image.attempts), Some(1), "it was not touched");
    pulled_once(&site, &image)?;
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn an_edge_switches_to_its_second_address() -> Result<()> {
    let site = Site::with_cloud_args(&["--heartbeat", "1s"]).await?;
    let (a, b) = (Proxy::for_tcp(site.cloud.tunnel_addr())?, Proxy::for_tcp(site.cloud.tunnel_addr())?);
    let urls = format!("wss://{}{TUNNEL_PATH},wss://{}{TUNNEL_PATH}", a.addr(), b.addr());
    let node = site.add_node("edge-1").await?.args(&["--tunnel-url", &urls]).await?;
    node.is_connected().await?;
    let with = async |proxy: &Proxy| {
        let address = proxy.addr().to_string();
        anyhow::Ok(node.metrics().await?.sum("edgecore_prepull_session", &[("address", &address)]) > 0.5)
    };
    ensure!(with(&a).await? && !with(&b).await?, "the first one comes first");

    let (image, reference) = site.seed_image("failover", &[MIB, 8 * MIB])?;
    site.link.throttle(Some(2 * MIB));
    let job = site.job("failover").images([&reference]).on(["edge-1"]).apply().await?;
    site.link_carries(2 * MIB).await?;
    a.refuse();
    eventually("the second one is used", SOON, async || {
        ensure!(with(&b).await? && !with(&a).await?, "it is not");
        Ok(())
    })
    .await?;
    job.completes().await?;
    pulled_once(&site, &image)?;
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn a_set_clock_ends_no_job() -> Result<()> {
    let cluster = Cluster::start().await?;
    let file = cluster.place().new_dir("clock")?.join("ahead");
    std::fs::write(&file, "-6h")?;
    let cloud = Cloud::start(&cluster).clock_of(&file).await?;
    let fleet = Fleet::start(&cluster, &cloud, 2).pulls_take(Duration::from_secs(45)).await?;
    let job = cluster.job("runs").images(["harbor.example/a:v1"]).on(fleet.names()).concurrency(2);
    let job = job.apply().await?;
    job.until("both nodes pull", |status| status.summary.in_progress == 2).await?;
    // As after a virtual machine was suspended, or before its time service has answered.
    std::fs::write(&file, "+0s")?;
    eventually("it is said", 4 * SOON, async || {
        ensure!(cloud.log().contains("the machine's clock was set"));
        Ok(())
    })
    .await?;
    let status = job.completes().await?;
    assert_eq!((status.summary.successful, fleet.pulls()), (2, 2), "{status:?}");
    fleet.all_acknowledged().await
}
