//! Two replicas of cloudcore-prepull: one leads, and however it ends, the other one continues its jobs. Nothing is lost,
//! nothing is pulled twice, and a replica that no longer leads writes nothing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::api::Api;
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::prelude::*;
use tokio::net::TcpStream;

/// Lease duration in the harness: the wait of a standby.
const LEASE: Duration = Duration::from_secs(4);
/// Renew deadline in the harness: time after which a leader that can't renew ends.
const DEADLINE: Duration = Duration::from_secs(3);
/// Retry period in the harness: interval of checking the Lease.
const PERIOD: Duration = Duration::from_millis(500);
/// Limit for actions that take no time on an idle machine: reading jobs and nodes and listening, or ending.
const AT_ONCE: Duration = Duration::from_secs(2);
/// Limit for a standby to lead after waiting for the Lease to expire.
const FAILOVER: Duration = Duration::from_secs(10);
/// Heartbeat. A dead session is noticed after two of them.
const FLAGS: [&str; 2] = ["--heartbeat", "1s"];

/// A leader, a standby, and the front that edges connect to.
struct Pair {
    // Fields are dropped in this order.
    first: Cloud,
    second: Cloud,
    #[expect(dead_code, reason = "held until the end")]
    front: Front,
    cluster: Cluster,
}

impl Pair {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start().await?;
        let first = Cloud::start(&cluster).standby().args(&FLAGS).await?;
        Self::with(cluster, first).await
    }

    /// Starts the standby, and waits until it knows the leader.
    async fn with(cluster: Cluster, mut first: Cloud) -> Result<Self> {
        first.leads(SOON).await?;
        let mut second = second(&cluster).await?;
        let front = Front::of(&[first.backend(), second.backend()])?;
        first.behind(&front);
        second.behind(&front);
        let pair = Self { first, second, front, cluster };
        pair.knows_the_leader(&pair.second).await?;
        Ok(pair)
    }

    async fn lease(&self) -> Result<LeaseSpec> {
        let api: Api<Lease> = Api::namespaced(self.cluster.client(), NAMESPACE);
        api.get("cloudcore-prepull").await?.spec.context("the Lease says nothing")
    }

    async fn holder(&self) -> Result<String> {
        Ok(self.lease().await?.holder_identity.unwrap_or_default())
    }

    async fn knows_the_leader(&self, standby: &Cloud) -> Result<()> {
        let expected = (503, format!("not the leader: {} leads\n", self.holder().await?));
        eventually("the standby knows the leader", SOON, async || {
            let readiness = standby.readiness().await?;
            ensure!(readiness == expected, "{readiness:?}, not {expected:?}");
            Ok(())
        })
        .await
    }

    /// Starts simulated edges with pulls that take a while.
    async fn fleet(&self, edges: usize) -> Result<Fleet> {
        Fleet::start(&self.cluster, &self.first, edges).pulls_take(Duration::from_millis(200)).await
    }

    /// Applies a job over all edges that takes some seconds, and waits until some nodes are done.
    async fn under_way(&self, fleet: &Fleet, name: &str) -> Result<Job> {
        let images = ["a", "b"].map(|image| format!("harbor.example/{name}/{image}:v1"));
        let job = self.cluster.job(name).images(images).on(fleet.names()).concurrency(5).apply().await?;
        let begun = job.until("some are done", |status| status.summary.successful > 5).await?;
        ensure!(begun.phase == JobPhase::InProgress, "it was over too soon");
        Ok(job)
    }
}

async fn second(cluster: &Cluster) -> Result<Cloud> {
    Cloud::start(cluster).named("cloudcore-prepull-2").standby().args(&FLAGS).await
}

/// Waits until the job completes, and checks that all nodes succeeded at the first attempt, that each image was pulled
/// once over the `nth` jobs of the fleet, and that all results are acknowledged.
async fn ends_right(job: &Job, fleet: &Fleet, nth: usize) -> Result<()> {
    let nodes = fleet.names().len();
    let status = job.completes().await?;
    assert_eq!(usize::try_from(status.summary.successful)?, nodes, "{:?}", status.summary);
    let again: Vec<_> = status.node_status.iter().filter(|node| node.attempt != 1).collect();
    ensure!(again.is_empty(), "{again:?}");
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (u64::try_from(nodes * 2 * nth)?, 0));
    fleet.all_acknowledged().await
}

async fn refuses(addr: SocketAddr) -> bool {
    TcpStream::connect(addr).await.is_err()
}

async fn gauges(cloud: &Cloud) -> Result<[String; 2]> {
    let metrics = cloud.metrics().await?;
    Ok(["leader", "lease_transitions"]
        .map(|name| metrics.sum(&format!("cloudcore_prepull_{name}"), &[]).to_string()))
}

/// Time at which the program logged the loss of its leadership.
fn lost_at(cloud: &Cloud) -> Result<Timestamp> {
    let log = cloud.log();
    let line = log.lines().find(|line| line.contains("leadership is lost")).context("it has said nothing")?;
    Ok(line.split(' ').next().unwrap_or_default().parse()?)
}

#[tokio::test]
async fn a_leader_that_is_terminated_hands_over() -> Result<()> {
    let mut pair = Pair::start().await?;
    let leader = pair.holder().await?;
    for addr in [pair.second.tunnel_listen(), pair.second.enroll_addr()] {
        ensure!(refuses(addr).await, "the standby listens on {addr}");
    }
    assert_eq!(
        (gauges(&pair.first).await?, gauges(&pair.second).await?),
        (["1", "0"].map(Into::into), ["0", "0"].map(Into::into))
    );
    let fleet = pair.fleet(40).await?;
    let job = pair.under_way(&fleet, "handed-over").await?;

    let began = Instant::now();
    pair.first.terminate().await?;
    let ended = began.elapsed();
    pair.second.leads(SOON).await?;
    let after = began.elapsed().saturating_sub(ended);
    eprintln!("the leader ended {ended:?} after SIGTERM, its successor was ready {after:?} later");
    ensure!(ended < AT_ONCE + AT_ONCE, "the leader ended {ended:?} after SIGTERM");
    ensure!(after < PERIOD + AT_ONCE, "{after:?} after the end of the leader");
    let lease = pair.lease().await?;
    ensure!(lease.holder_identity.as_ref() != Some(&leader), "{lease:?}");
    assert_eq!(lease.lease_transitions, Some(1));
    assert_eq!(gauges(&pair.second).await?, ["1", "1"].map(String::from));
    // The edges reconnect by themselves.
    ends_right(&job, &fleet, 1).await?;

    // The first one becomes the standby, which has nothing to finish and no Lease to release when it ends.
    pair.first.restart().await?;
    pair.knows_the_leader(&pair.first).await?;
    let began = Instant::now();
    pair.first.terminate().await?;
    ensure!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
    assert_eq!(pair.holder().await?, lease.holder_identity.unwrap_or_default());
    ensure!(pair.second.is_ready().await?, "the leader was disturbed");
    Ok(())
}

#[tokio::test]
async fn a_killed_leader_is_followed() -> Result<()> {
    let mut pair = Pair::start().await?;
    let fleet = pair.fleet(60).await?;
    let job = pair.under_way(&fleet, "killed").await?;

    let began = Instant::now();
    pair.first.kill9()?;
    pair.second.leads(FAILOVER).await?;
    let took = began.elapsed();
    eprintln!("the successor was ready {took:?} after SIGKILL");
    // The last renewal was at most one period ago; until its lease expires no replica can know that the leader is gone.
    ensure!(took + 2 * PERIOD > LEASE, "{took:?}: the Lease was not respected");
    ends_right(&job, &fleet, 1).await
}

#[tokio::test]
async fn a_frozen_leader_writes_nothing() -> Result<()> {
    let mut pair = Pair::start().await?;
    let fleet = pair.fleet(60).await?;
    let job = pair.under_way(&fleet, "frozen").await?;

    pair.first.pause()?;
    pair.second.leads(FAILOVER).await?;
    ends_right(&job, &fleet, 1).await?;
    let (version, events) = (job.get().await?.metadata.resource_version, job.events().await?);
    // The first one continues in the middle of the job, with results and writes at hand.
    pair.first.resume()?;
    let status = pair.first.ends(AT_ONCE).await?;
    assert_eq!(status.code(), Some(1), "{status}");
    lost_at(&pair.first)?;
    // Time for a request that it may have sent at the very end.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(job.get().await?.metadata.resource_version, version, "it has written to the job");
    assert_eq!(job.events().await?, events);

    // The other way round; this time the frozen one continues while the next leader is in the middle of the job.
    pair.first.restart().await?;
    pair.knows_the_leader(&pair.first).await?;
    let job = pair.under_way(&fleet, "frozen-again").await?;
    pair.second.pause()?;
    pair.first.leads(FAILOVER).await?;
    pair.second.resume()?;
    let status = pair.second.ends(AT_ONCE).await?;
    assert_eq!(status.code(), Some(1), "{status}");
    ends_right(&job, &fleet, 2).await?;
    ensure!(pair.first.is_ready().await?);
    Ok(())
}

#[tokio::test]
async fn a_cut_off_leader_ends_first() -> Result<()> {
    let cluster = Cluster::start().await?;
    let config = std::fs::read_to_string(cluster.cloudcore_kubeconfig())?;
    let mut config: serde_json::Value = serde_json::from_str(&config)?;
    let server = config["clusters"][0]["cluster"]["server"].take();
    let api = server.as_str().and_then(|url| url.strip_prefix("https://")).context("no server")?.parse()?;
    let link = Proxy::for_tcp(api)?;
    config["clusters"][0]["cluster"]["server"] = format!("https://{}", link.addr()).into();
    let file = cluster.place().dir().join("through-the-link.kubeconfig");
    std::fs::write(&file, config.to_string())?;
    let first = Cloud::start(&cluster).standby().args(&FLAGS).kubeconfig(&file).await?;
    let mut pair = Pair::with(cluster, first).await?;
    let fleet = pair.fleet(60).await?;
    let job = pair.under_way(&fleet, "cut-off").await?;

    // The worse of two outages: requests are neither refused nor answered.
    link.freeze();
    let began = Instant::now();
    let status = pair.first.ends(DEADLINE + AT_ONCE).await?;
    assert_eq!(status.code(), Some(1), "{status}");
    eprintln!("it ended {:?} after the last word of the API server", began.elapsed());
    pair.second.leads(FAILOVER).await?;
    let (ended, acquired) = (lost_at(&pair.first)?, pair.lease().await?.acquire_time.context("no time")?.0);
    ensure!(ended < acquired, "one led until {ended}, the other from {acquired}");
    ends_right(&job, &fleet, 1).await
}

#[tokio::test]
async fn one_of_two_replicas_leads() -> Result<()> {
    let cluster = Cluster::start().await?;
    let start = Cloud::start(&cluster).standby().args(&FLAGS);
    let (mut one, mut other) = tokio::try_join!(start.into_future(), second(&cluster))?;
    eventually("one of them leads", SOON, async || {
        ensure!(one.is_ready().await? || other.is_ready().await?, "none");
        Ok(())
    })
    .await?;
    if other.is_ready().await? {
        std::mem::swap(&mut one, &mut other);
    }
    ensure!(!other.is_ready().await?, "both lead");
    let front = Front::of(&[one.backend(), other.backend()])?;
    one.behind(&front);
    // One replica created the CA and the other one adopted it, so that an edge trusts both.
    let fleet = Fleet::start(&cluster, &one, 5).await?;
    one.terminate().await?;
    other.leads(SOON).await?;
    fleet.all_connected().await?;
    cluster.job("both").images(["harbor.example/a:v1"]).on(fleet.names()).completes().await?;
    Ok(())
}
