//! The course of a job over many nodes: reports, waves, suspension, its removal, nodes that join. The edges are
//! simulated, everything else is real.

use std::collections::BTreeSet;
use std::time::Duration;

use prepull_api::crd::report::ImagePrePullReport;
use prepull_e2e::prelude::*;
use serde_json::json;

/// Image for simulated edges, which never contact a registry.
const IMAGE: &str = "harbor.example/app:v1";

#[tokio::test]
async fn a_large_job_outlives_its_cloud() -> Result<()> {
    const EDGES: u32 = 600;
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES as usize)
        .pulls_take(Duration::from_millis(500))
        .the_first_fail(3)
        .await?;
    let job = cluster.job("large").images([IMAGE]).on(fleet.names()).concurrency(200).apply().await?;
    job.until("some have ended", |status| status.summary.successful >= 100).await?;
    cloud.kill9()?;
    cloud.restart().await?;
    let status = job.completes().await?;
    assert_eq!((status.summary.desired, status.summary.successful, status.summary.failure), (600, 597, 3));
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (EDGES.into(), 0));
    fleet.all_acknowledged().await?;

    let reports = job.reports().await?;
    let lengths: Vec<_> = reports.iter().map(|report| report.body.node_status.len()).collect();
    assert_eq!(lengths, [250, 250, 100]);
    let nodes = || reports.iter().flat_map(|report| &report.body.node_status);
    assert_eq!(nodes().map(|node| &node.node_name).collect::<BTreeSet<_>>().len(), 600);
    assert_eq!(nodes().filter(|node| node.phase == NodePhase::Successful).count(), 597);
    assert!(nodes().all(|node| node.phase == NodePhase::Failure || node.image_status[0].digest.is_some()));
    let uid = job.uid().await?;
    for report in &reports {
        let owner = &report.metadata.owner_references.as_ref().context("no owner")?[0];
        assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("ImagePrePullJob", uid.as_str()));
    }
    // The status of the job lists nodes that need attention first.
    assert_eq!(status.node_status.len(), 200);
    assert!(status.node_status[..3].iter().all(|node| node.phase == NodePhase::Failure));
    let shown = cluster.kubectl(&["get", "ippr", "-l", "operations.kubeedge.io/job-name=large"]).await?;
    assert_eq!(shown.lines().count(), 4, "{shown}");
    ensure!(shown.contains("large   250     247          3        0"), "{shown}");
    Ok(())
}

#[tokio::test]
async fn a_release_opens_its_gate_once_pulled() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 300).pulls_take(Duration::from_millis(300)).await?;
    let release = async |version: &str, nodes: usize| {
        let image = format!("harbor.example/app:{version}");
        let nodes = &fleet.names()[..nodes];
        let job = cluster.job("app").images([image]).on(nodes).concurrency(100).build();
        cluster.apply_job(&serde_json::to_string(&job)?).await
    };
    let gate = async || {
        let open = ["wait", "--for=condition=Complete", "ippj/app", "--timeout=120s"];
        cluster.kubectl(&open).await
    };
    let job = release("v1", 300).await?;
    gate().await?;
    assert_eq!(fleet.pulls(), 300);

    // The next release, for fewer nodes. Its leader dies in the middle.
    release("v2", 280).await?;
    let opened = async {
        gate().await?;
        anyhow::Ok(fleet.pulls())
    };
    let dies = async {
        job.until("is in the middle", |status| {
            status.first_attempt.is_some() && status.summary.successful > 50
        })
        .await?;
        cloud.kill9()?;
        cloud.restart().await
    };
    let (pulls, ()) = tokio::try_join!(opened, dies)?;
    assert_eq!((pulls, fleet.pulled_twice()), (580, 0));
    fleet.all_acknowledged().await?;
    let status = job.status().await?;
    assert_eq!((status.summary.desired, status.summary.successful), (280, 280));
    let reports = job.reports().await?;
    let nodes = || reports.iter().flat_map(|report| &report.body.node_status);
    assert_eq!(nodes().map(|node| &node.node_name).collect::<BTreeSet<_>>().len(), 280);
    assert!(nodes().all(|node| node.attempt == 2 && node.image_status[0].image.ends_with("app:v2")));
    Ok(())
}

#[tokio::test]
async fn a_deleted_report_comes_back() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 2).await?;
    cluster.edge_nodes(&["absent"]).await?;
    let names = fleet.names().iter().map(String::as_str).chain(["absent"]);
    let job = cluster.job("quiet").images([IMAGE]).on(names).concurrency(3).apply().await?;
    job.until("only waits for a node", |status| status.summary.successful == 2).await?;
    let ends = |reports: &[ImagePrePullReport]| {
        let nodes = reports.iter().flat_map(|report| &report.body.node_status);
        nodes.filter(|node| node.phase == NodePhase::Successful).count()
    };
    eventually("the report has both", SOON, async || {
        ensure!(ends(&job.reports().await?) == 2, "it has not");
        Ok(())
    })
    .await?;
    cluster.kubectl(&["delete", "ippr", "--all"]).await?;
    eventually("the report is back", SOON, async || {
        ensure!(ends(&job.reports().await?) == 2, "it is not");
        Ok(())
    })
    .await?;
    cloud.restart().await?;
    fleet.all_connected().await?;
    job.until("goes on", |status| status.summary.pending == 1).await?;
    assert_eq!((ends(&job.reports().await?), fleet.pulls(), fleet.pulled_twice()), (2, 2, 0));
    Ok(())
}

#[tokio::test]
async fn too_many_failures_end_the_waves() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 40).the_first_fail(1).await?;
    let job = |name: &str| cluster.job(name).images([IMAGE]).concurrency(40).tolerate("0.2");

    let good = job("good").on(&fleet.names()[1..]).waves(&["5%", "25%", "100%"], 2).apply().await?;
    let mut seen = Vec::new();
    let watched = good.watch(|status| {
        let wave = status.rollout.as_ref().map_or(0, |wave| wave.step);
        let started = status.summary.desired - status.summary.pending;
        if let Some(wave) = &status.rollout {
            assert!(started <= wave.nodes, "{status:?}");
        }
        if seen.last() != Some(&wave) {
            seen.push(wave);
        }
        status.completion_time.is_some()
    });
    let restarted = async {
        good.until("the first wave pauses", |status| {
            status.rollout.as_ref().is_some_and(|wave| wave.paused_until.is_some())
        })
        .await?;
        cloud.restart().await
    };
    let (watched, restarted) = tokio::time::timeout(SOON, async { tokio::join!(watched, restarted) }).await?;
    watched?;
    restarted?;
    assert_eq!(seen.into_iter().filter(|wave| *wave > 0).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(good.status().await?.phase, JobPhase::Completed);
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (39, 0));

    // Of the two nodes in the first wave one fails, which is more than a fifth. They are the first two to connect.
    fleet.all_connected().await?;
    let bad = job("bad").on(fleet.names()).waves(&["5%"], 0).fails().await?;
    assert_eq!((bad.summary.failure, bad.summary.successful, bad.summary.pending), (1, 1, 38));
    ensure!(bad.reason.contains("1 of the 2 nodes of wave 1 failed"), "{}", bad.reason);
    Ok(())
}

#[tokio::test]
async fn a_suspended_job_waits_for_its_resumption() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 20).pulls_take(Duration::from_millis(300)).await?;
    let job = cluster.job("held").images([IMAGE]).on(fleet.names()).concurrency(2).apply().await?;
    job.until("some have ended", |status| status.summary.successful >= 4).await?;
    job.patch_spec(json!({"suspend": true})).await?;
    let held = job
        .until("nothing runs", |status| {
            let suspended = status.conditions.iter().any(|c| c.type_ == "Suspended" && c.status == "True");
            suspended && status.summary.in_progress == 0
        })
        .await?;
    // A start that was being recorded is undone. Until that's recorded too, the next leader would let it continue.
    eventually("no start is on record that was taken back", SOON, async || {
        let reports = job.reports().await?;
        let mut nodes = reports.iter().flat_map(|report| &report.body.node_status);
        ensure!(nodes.all(|node| node.phase != NodePhase::InProgress), "there is one");
        Ok(())
    })
    .await?;
    let pulls = fleet.pulls();
    ensure!(held.summary.pending > 0 && pulls == u64::from(held.summary.successful), "{held:?}");
    // The suspension survives a restart.
    cloud.restart().await?;
    fleet.all_connected().await?;
    job.event("Suspended").await?;
    assert_eq!((fleet.pulls(), job.status().await?.phase), (pulls, JobPhase::InProgress));
    job.patch_spec(json!({"suspend": false, "imagePrePullTemplate": {"concurrency": 20}})).await?;
    assert_eq!(job.completes().await?.summary.successful, 20);
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (20, 0));
    Ok(())
}

#[tokio::test]
async fn a_finished_job_goes_after_its_ttl() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 2).await?;
    let builder = cluster.job("short").images([IMAGE]).on(fleet.names()).concurrency(2);
    let job = builder.spec(|spec| spec.ttl_seconds_after_finished = Some(1)).apply().await?;
    job.completes().await?;
    job.is_gone().await?;
    fleet.all_acknowledged().await
}

#[tokio::test]
async fn newly_eligible_nodes_join_the_job() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 4).pulls_take(Duration::from_secs(1)).await?;
    for node in &fleet.names()[..2] {
        cluster.label_node(node, "pool", Some("a")).await?;
    }
    cluster.mark_ready("sim-1", false).await?;
    let builder = cluster.job("follow").images([IMAGE]).on_label("pool", "a");
    let job = builder.spec(|spec| spec.follow_nodes = true).apply().await?;
    let status = job.until("it runs", |status| status.summary.in_progress == 1).await?;
    assert_eq!((status.summary.desired, status.skipped("sim-1")), (1, Some("NotReady")));
    cluster.mark_ready("sim-1", true).await?;
    cluster.label_node("sim-2", "pool", Some("a")).await?;
    let status = job.completes().await?;
    let nodes: Vec<_> = status.node_status.iter().map(|node| node.node_name.as_str()).collect();
    assert_eq!((nodes, status.summary.skipped), (vec!["sim-0", "sim-1", "sim-2"], 0));
    assert_eq!(fleet.pulls(), 3);
    Ok(())
}
