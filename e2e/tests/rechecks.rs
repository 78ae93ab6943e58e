//! Re-checks: which of a job's images nodes still have, and how the rest comes back.

use prepull_e2e::prelude::*;

const NAMES: [&str; 3] = ["edge-1", "edge-2", "edge-3"];

/// A site, its nodes, and a job that has pulled this image onto all of them.
async fn pulled() -> Result<(Site, Vec<EdgeNode>, String)> {
    let site = Site::start().await?;
    let mut nodes = Vec::new();
    for name in NAMES {
        nodes.push(site.add_node(name).await?.await?);
    }
    let (_, web) = site.seed_image("web", &[MIB])?;
    let status = site.job("web").images([&web]).on(NAMES).concurrency(3).completes().await?;
    assert_eq!(status.summary.successful, 3);
    Ok((site, nodes, web))
}

#[tokio::test]
async fn verify_finds_what_retry_brings_back() -> Result<()> {
    let (site, nodes, web) = pulled().await?;
    let me = Person::new(site.cluster.kubeconfig());
    me.runs("retry web")
        .await?
        .is(1, &["all 3 nodes of job web succeeded: nothing to try again", "verify web"])?;
    me.runs("why edge-2 web").await?.is(0, &["not checked since"])?;
    let before = site.registry.requests().len();
    me.runs("verify web").await?.is(0, &["job web: 3 of 3 nodes still have every image"])?;
    me.runs("why edge-2 web").await?.is(0, &["its images were still there"])?;
    assert_eq!(site.registry.requests().len(), before, "a look asks no registry");

    // Like the kubelet's garbage collection.
    nodes[1].remove_image(&web).await?;
    let said =
        me.runs("verify web").await?.is(1, &["2 of 3 nodes", "missing on 1", "edge-2", "retry web"])?;
    eprintln!("{}", said.out);
    // A repeated request isn't forgotten.
    me.runs("verify web").await?.is(1, &["2 of 3 nodes", "missing on 1"])?;
    me.runs("failures web").await?.is(0, &["edge-2", "Removed"])?;
    me.runs("events web").await?.is(0, &["Rechecking", "ImagesPresent", "ImagesMissing", "Removed 1"])?;
    let status = site.cluster.existing_job("web").status().await?;
    assert_eq!(status.phase, JobPhase::Failure);
    assert_eq!(site.registry.requests().len(), before, "a look asks no registry");

    // Only this node downloads, and only once.
    let pulls = |node: &EdgeNode| node.agent_log().matches("image ended").count();
    let (looks, carried) = (nodes.iter().map(pulls).collect::<Vec<_>>(), site.link.bytes());
    me.runs("retry web").await?.is(0, &["web is tried again, round 1"])?;
    me.runs("status web --watch --timeout 1m").await?.is(0, &["Completed", "3 of 3"])?;
    let carried = site.link.bytes() - carried;
    ensure!((MIB..MIB + MIB / 4).contains(&carried), "{carried} bytes were downloaded");
    let now: Vec<_> = nodes.iter().zip(&looks).map(|(node, looks)| pulls(node) - looks).collect();
    assert_eq!(now, [0, 1, 0]);
    ensure!(nodes[1].has_image(&web).await?, "it is not back");
    me.runs("retry web").await?.is(1, &["all 3 nodes of job web succeeded"])?;
    Ok(())
}

#[tokio::test]
async fn a_recheck_outlives_cloudcore_and_agent() -> Result<()> {
    let (mut site, mut nodes, web) = pulled().await?;
    nodes[0].remove_image(&web).await?;
    nodes[2].remove_image(&web).await?;
    // One node is offline, and another one is silent, when the leader dies.
    nodes[2].kill9_agent()?;
    nodes[1].stop_agent()?;
    let job = site.cluster.existing_job("web");
    job.patch_spec(serde_json::json!({"recheck": 1})).await?;
    job.until("has found one that lacks the image", |status| {
        status.recheck.as_ref().is_some_and(|recheck| recheck.missing == 1)
    })
    .await?;
    let before = site.registry.requests().len();
    site.cloud.restart().await?;
    nodes[1].cont_agent()?;
    nodes[1].restart_agent()?;
    nodes[2].restart_agent()?;
    let status = job.until("has ended", |status| status.completion_time.is_some()).await?;
    let recheck = status.recheck.clone().context("no re-check")?;
    assert_eq!((recheck.rounds, recheck.present, recheck.missing, recheck.not_checked), (1, 1, 2, 0));
    assert_eq!((status.phase, status.summary.failure), (JobPhase::Failure, 2));
    assert_eq!(site.registry.requests().len(), before, "a look asks no registry");
    Ok(())
}
