//! Rollout of a job: concurrency is never exceeded, silent and offline nodes delay no other node, and no node starts
//! once too many have failed.

use std::time::Duration;

use prepull_api::crd::job::RolloutStrategy;
use prepull_api::crd::upgrade::UpgradeSpec;
use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;

/// Image for simulated edges, which never contact a registry.
const IMAGE: &str = "harbor.example/app:v1";

#[tokio::test]
async fn one_of_ten_may_fail_at_a_tenth() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 11).the_first_fail(2).await?;
    let job = |name: &str| cluster.job(name).images([IMAGE]).tolerate("0.1").concurrency(1);

    let one = job("one").on(&fleet.names()[1..]).completes().await?;
    assert_eq!((one.summary.desired, one.summary.failure, one.summary.successful), (10, 1, 9));
    assert_eq!(one.reason, "1 of 10 nodes failed, within failureTolerate 0.1 (Unreachable 1)");
    let failed = one.node("sim-1").context("no node")?;
    assert_eq!(
        (failed.phase, failed.reason.as_str()),
        (NodePhase::Failure, "simulated: the registry is away")
    );

    let pulled = fleet.pulls();
    let two = job("two").on(&fleet.names()[..10]).fails().await?;
    assert_eq!((two.summary.desired, two.summary.failure, two.summary.pending), (10, 2, 8));
    assert_eq!(
        two.reason,
        "2 of 10 nodes failed, more than failureTolerate 0.1 allows; 8 nodes not started (Unreachable 2)"
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((fleet.pulls(), fleet.most_at_once()), (pulled + 2, 1), "nothing else starts");
    let untouched = two.node("sim-2").context("no node")?;
    assert_eq!((untouched.phase, untouched.start_time.as_ref()), (NodePhase::Pending, None));
    ensure!(untouched.reason.contains("not started"), "{untouched:?}");
    Ok(())
}

#[tokio::test]
async fn a_thousand_agents_are_upgraded_within_a_budget() -> Result<()> {
    const AGENTS: usize = 1_000;
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, AGENTS).the_first_fail(20).await?;
    let upgrade = |version: &str, steps: &[&str]| {
        let spec = UpgradeSpec::default();
        let image = format!("registry.example/edgecore-prepull:{version}");
        let job = cluster.job(&format!("to-{version}")).images([image]).on(fleet.names()).concurrency(200);
        let steps: Vec<_> = steps.iter().map(ToString::to_string).collect();
        job.tolerate("0.05").spec(|job| {
            job.image_pre_pull_template.upgrade = Some(spec);
            job.rollout = Some(RolloutStrategy { steps, pause_seconds: 0 });
        })
    };
    // 20 agents of the first wave go back: it stops there.
    let status = upgrade("2.0.0", &["5%", "100%"]).fails().await?;
    let summary = &status.summary;
    assert_eq!((summary.failure, summary.successful, summary.pending), (20, 30, 950), "{summary:?}");
    assert_eq!(status.failures_by_code.first().map(|of| of.code), Some(FailureCode::UpgradeFailed));
    // 2 % go back, and all others run it. Each agent is restarted once per job.
    let status = upgrade("2.0.1", &["100%"]).completes().await?;
    assert_eq!((status.summary.failure, status.summary.successful), (20, 980));
    assert_eq!((fleet.pulls(), fleet.pulled_twice(), fleet.tally().restarts), (1_050, 0, 1_050));
    fleet.all_acknowledged().await
}

#[tokio::test]
async fn a_silent_node_frees_its_slot() -> Result<()> {
    let site = Site::start().await?;
    let (silent, next) = (site.add_node("edge-1").await?.await?, site.add_node("edge-2").await?.await?);
    let (_, reference) = site.seed_image("silent", &[MIB])?;
    // The silent node reports nothing before its deadline.
    let its_link = Proxy::for_http(site.registry.addr())?;
    site.registry.route_node_through(silent.containerd(), &its_link)?;
    its_link.freeze();

    let job = site
        .job("silent")
        .images([&reference])
        .on(["edge-1", "edge-2"])
        .concurrency(1)
        .timeout_seconds(3)
        .tolerate("0.5")
        .apply()
        .await?;
    silent.accepts_a_task().await?;
    silent.stop_agent()?;
    let mut most = 0;
    let status = job
        .until("is over", |status| {
            most = most.max(status.summary.in_progress);
            status.phase == JobPhase::Completed
        })
        .await?;
    assert_eq!(most, 1);
    let of_silent = status.node("edge-1").context("edge-1 is not in the status")?;
    let of_next = status.node("edge-2").context("edge-2 is not in the status")?;
    assert_eq!((of_silent.phase, of_next.phase), (NodePhase::Unknown, NodePhase::Successful));
    ensure!(of_silent.reason.contains("timeoutSeconds (3)"), "{of_silent:?}");
    let started = |node: &prepull_api::crd::status::NodeStatus| node.start_time.clone().map(|time| time.0);
    let started_silent = started(of_silent).context("edge-1 has no start time")?;
    let waited = started(of_next).context("edge-2 has no start time")?.duration_since(started_silent);
    ensure!((3.0..9.0).contains(&waited.as_secs_f64()), "the slot was free after {waited:?}");
    ensure!(next.has_image(&reference).await?);

    // The node resumes, is stopped, and reports its result, which doesn't change the job.
    its_link.thaw();
    silent.cont_agent()?;
    silent.forgets_all_tasks().await?;
    let after = job.status().await?;
    assert_eq!(after.phase, JobPhase::Completed);
    assert_eq!(after.summary.successful + after.summary.failure + after.summary.unknown, 2);
    assert_eq!(after.completion_time, status.completion_time);
    assert_eq!(after.node("edge-2"), status.node("edge-2"));
    let another = site.job("another").images([&reference]).on(["edge-1"]).completes().await?;
    assert_eq!(another.summary.successful, 1);
    Ok(())
}

#[tokio::test]
async fn the_next_job_resumes_an_overdue_pull() -> Result<()> {
    const SIZE: u64 = 8 * MIB;
    let site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let (image, reference) = site.seed_image("too-long", &[SIZE])?;
    site.link.throttle(Some(MIB));
    let job = |name: &str| site.job(name).images([&reference]).on(["edge-1"]);

    let status = job("too-long").timeout_seconds(4).retries(100).apply().await?.fails().await?;
    let of_node = status.node("edge-1").context("no node")?;
    assert_eq!(of_node.phase, NodePhase::Failure, "the edge said so itself: {of_node:?}");
    ensure!(of_node.reason.contains("deadline"), "{of_node:?}");
    let ended = status.completion_time.as_ref().context("no end")?.0;
    let took = ended.duration_since(of_node.start_time.as_ref().context("no start")?.0).as_secs_f64();
    ensure!((4.0..6.0).contains(&took), "it ended after {took} s");
    node.forgets_all_tasks().await?;
    let before = site.link.bytes_of(image.blobs().last().context("no layer")?);
    ensure!((MIB..SIZE).contains(&before), "{before} bytes");

    site.link.throttle(None);
    job("next").completes().await?;
    let fetched = site.link.bytes_of(image.blobs().last().context("no layer")?);
    ensure!(fetched < SIZE + SIZE / 8, "{fetched} bytes for a layer of {SIZE}, {before} of them before");
    Ok(())
}

#[tokio::test]
async fn an_offline_node_takes_no_slot() -> Result<()> {
    let site = Site::start().await?;
    let mut offline = site.add_node("edge-1").await?.without_agent().await?;
    let others = [site.add_node("edge-2").await?.await?, site.add_node("edge-3").await?.await?];
    let (_, reference) = site.seed_image("offline", &[MIB])?;
    let job = site
        .job("offline")
        .images([&reference])
        .on(["edge-1", "edge-2", "edge-3"])
        .concurrency(1)
        .timeout_seconds(5)
        .apply()
        .await?;
    let status = job
        .until("the others are done, and it is said who is waited for", |status| {
            status.summary.successful == 2 && status.reason.contains("1 offline node")
        })
        .await?;
    assert_eq!((status.phase, status.summary.pending), (JobPhase::InProgress, 1));
    let waiting = status.node("edge-1").context("no node")?;
    assert_eq!((waiting.phase, waiting.start_time.as_ref()), (NodePhase::Pending, None));
    ensure!(waiting.reason.starts_with("offline"), "{waiting:?}");
    for node in &others {
        ensure!(node.has_image(&reference).await?, "{}", node.name());
    }
    // The deadline counts from the start of the node, which may have been offline for longer before.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(job.node_status("edge-1").await?.phase, NodePhase::Pending);

    offline.restart_agent()?;
    let status = job.completes().await?;
    assert_eq!(status.summary.successful, 3);
    assert_eq!(status.node("edge-1").map(|node| node.reason.as_str()), Some(""));
    ensure!(offline.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn an_offline_node_keeps_its_task() -> Result<()> {
    let site = Site::start().await?;
    let (mut lost, next) = (site.add_node("edge-1").await?.await?, site.add_node("edge-2").await?.await?);
    let (_, reference) = site.seed_image("lost", &[MIB])?;
    let its_link = Proxy::for_http(site.registry.addr())?;
    site.registry.route_node_through(lost.containerd(), &its_link)?;
    its_link.freeze();
    let job = site
        .job("lost")
        .images([&reference])
        .on(["edge-1", "edge-2"])
        .concurrency(1)
        .timeout_seconds(3)
        .tolerate("0.5")
        .apply()
        .await?;
    lost.accepts_a_task().await?;
    lost.kill9_agent()?;
    let status = job.completes().await?;
    let of_lost = status.node("edge-1").context("no node")?;
    assert_eq!(of_lost.phase, NodePhase::Unknown);
    ensure!(of_lost.reason.contains("the node is offline"), "{of_lost:?}");
    ensure!(next.has_image(&reference).await?);

    // The node returns after the end of the job: its task has ended, and nothing is pulled any more.
    lost.restart_agent()?;
    lost.forgets_all_tasks().await?;
    let after = job.status().await?;
    assert_eq!((after.phase, after.completion_time), (JobPhase::Completed, status.completion_time));
    Ok(())
}
