//! Who pulls when: never more than the concurrency allows, nobody waits for a node that is silent or offline, and
//! nothing starts once too many have failed.

use std::time::Duration;

use prepull_e2e::prelude::*;

#[tokio::test]
async fn a_node_that_accepts_and_is_silent_becomes_unknown_and_frees_its_slot() -> Result<()> {
    let site = Site::start().await?;
    let (silent, next) = (site.node("edge-1").await?.await?, site.node("edge-2").await?.await?);
    let (_, reference) = site.image("silent", &[MIB])?;
    // The silent one has nothing to say before its deadline.
    let its_link = Proxy::http(site.registry.addr())?;
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
    silent.accepts().await?;
    silent.stop_agent()?;
    let mut most = 0;
    let status = job
        .until("is over", |status| {
            most = most.max(status.summary.in_progress);
            status.phase == JobPhase::Completed
        })
        .await?;
    assert_eq!(most, 1);
    let (of_silent, of_next) = (status.node("edge-1").context("-")?, status.node("edge-2").context("-")?);
    assert_eq!((of_silent.phase, of_next.phase), (NodePhase::Unknown, NodePhase::Successful));
    ensure!(of_silent.reason.contains("timeoutSeconds (3)"), "{of_silent:?}");
    let started = |node: &prepull_api::crd::status::NodeStatus| node.start_time.clone().map(|time| time.0);
    let waited = started(of_next).context("-")?.duration_since(started(of_silent).context("-")?);
    ensure!((3.0..9.0).contains(&waited.as_secs_f64()), "the slot was free after {waited:?}");
    ensure!(next.has_image(&reference).await?);

    // It wakes up, is told to stop, and says what it has done: nothing that changes the job.
    its_link.thaw();
    silent.cont_agent()?;
    silent.forgets().await?;
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
async fn a_node_that_is_offline_takes_no_slot_and_gets_its_task_when_it_comes_back() -> Result<()> {
    let site = Site::start().await?;
    let mut offline = site.node("edge-1").await?.without_agent().await?;
    let others = [site.node("edge-2").await?.await?, site.node("edge-3").await?.await?];
    let (_, reference) = site.image("offline", &[MIB])?;
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
            status.summary.successful == 2 && status.reason.contains("1 nodes that are offline")
        })
        .await?;
    assert_eq!((status.phase, status.summary.pending), (JobPhase::InProgress, 1));
    let waiting = status.node("edge-1").context("no node")?;
    assert_eq!((waiting.phase, waiting.start_time.as_ref()), (NodePhase::Pending, None));
    ensure!(waiting.reason.starts_with("offline"), "{waiting:?}");
    for node in &others {
        ensure!(node.has_image(&reference).await?, "{}", node.name());
    }
    // Its time counts from its start: it may be offline for longer than that.
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
async fn a_node_that_goes_offline_in_the_middle_keeps_its_task_until_its_deadline() -> Result<()> {
    let site = Site::start().await?;
    let (mut lost, next) = (site.node("edge-1").await?.await?, site.node("edge-2").await?.await?);
    let (_, reference) = site.image("lost", &[MIB])?;
    let its_link = Proxy::http(site.registry.addr())?;
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
    lost.accepts().await?;
    lost.kill9_agent()?;
    let status = job.completes().await?;
    let of_lost = status.node("edge-1").context("no node")?;
    assert_eq!(of_lost.phase, NodePhase::Unknown);
    ensure!(of_lost.reason.contains("the node is offline"), "{of_lost:?}");
    ensure!(next.has_image(&reference).await?);

    // Back after the end of the job: its task is over, and it is not pulled any more.
    lost.restart_agent()?;
    lost.forgets().await?;
    let after = job.status().await?;
    assert_eq!((after.phase, after.completion_time), (JobPhase::Completed, status.completion_time));
    Ok(())
}
