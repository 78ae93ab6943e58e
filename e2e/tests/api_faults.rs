//! Faults of the Kubernetes API during two jobs, one on simulated edges and one on real ones. Both must complete,
//! nothing may be pulled twice, and every result must be acknowledged, which happens only after the API server has
//! stored it.

use std::time::Duration;

use prepull_api::crd::status::NodeStatus;
use prepull_e2e::api_proxy::Verb;
use prepull_e2e::prelude::*;

/// Number of simulated edges, three times the job's concurrency.
const SIMULATED: usize = 30;
const AT_A_TIME: i64 = 10;
const REAL: [&str; 2] = ["edge-1", "edge-2"];
/// Limit for a job if the test holds up the API server for longer than the default limit.
const LONG: Duration = Duration::from_secs(120);

/// A site with simulated and real edges, and with a proxy between the cloud and the API server.
struct Scene {
    // Fields are dropped in this order.
    fleet: Fleet,
    nodes: Vec<EdgeNode>,
    site: Site,
    api: ApiProxy,
    image: Image,
    reference: String,
}

impl Scene {
    async fn start() -> Result<Self> {
        Self::within(Cluster::start().await?).await
    }

    /// Starts a scene with an API server of its own, which the test may stop.
    async fn own() -> Result<Self> {
        Self::within(Cluster::own().await?).await
    }

    async fn within(cluster: Cluster) -> Result<Self> {
        // The seed selects the requests that meet a fault; any number would do.
        const SEED: u64 = 3;
        let (site, api) = Site::with_api_proxy(cluster, &["--heartbeat", "1s"], SEED).await?;
        let mut nodes = Vec::new();
        for name in REAL {
            nodes.push(site.add_node(name).await?.await?);
        }
        let fleet = Fleet::start(&site.cluster, &site.cloud, SIMULATED)
            .pulls_take(Duration::from_millis(300))
            .await?;
        let (image, reference) = site.seed_image("api-faults", &[4 * MIB])?;
        site.link.throttle(Some(4 * MIB));
        Ok(Self { fleet, nodes, site, api, image, reference })
    }

    /// Applies a job on the simulated edges, and one on the real ones.
    async fn jobs(&self) -> Result<[Job; 2]> {
        let simulated =
            self.site.cluster.job("simulated").images(["harbor.example/a:v1"]).timeout_seconds(100);
        let simulated = simulated.on(self.fleet.names()).concurrency(AT_A_TIME).apply().await?;
        let real = self.site.job("real").images([&self.reference]).on(REAL).timeout_seconds(100);
        let real = real.concurrency(2).apply().await?;
        Ok([simulated.within(LONG), real.within(LONG)])
    }

    /// Waits until both jobs are under way.
    async fn are_under_way(&self, [simulated, _]: &[Job; 2]) -> Result<()> {
        simulated.until("some have ended", |status| status.summary.successful > 0).await?;
        for node in &self.nodes {
            node.accepts_a_task().await?;
        }
        Ok(())
    }

    /// Waits until both jobs complete, and checks that nothing was lost or repeated.
    async fn end_right(&self, [simulated, real]: &[Job; 2]) -> Result<()> {
        let status = simulated.completes().await?;
        assert_eq!((status.summary.desired, status.summary.successful), (30, 30));
        ensure!(status.node_status.iter().all(|node| node.attempt == 1), "{:?}", status.node_status);
        assert_eq!((self.fleet.pulls(), self.fleet.pulled_twice()), (30, 0));
        self.fleet.all_acknowledged().await?;

        let status = real.completes().await?;
        assert_eq!((status.summary.desired, status.summary.successful), (2, 2));
        for node in &self.nodes {
            assert_eq!(status.node(node.name()).map(|node| node.attempt), Some(1));
            ensure!(node.has_image(&self.reference).await?);
            node.forgets_all_tasks().await?;
        }
        assert_eq!(self.site.fetches(&self.image), REAL.len() * self.image.blobs().len());
        Ok(())
    }
}

#[tokio::test]
async fn refused_writes_lose_nothing() -> Result<()> {
    let scene = Scene::start().await?;
    // Faults delay the job.
    scene.site.link.throttle(Some(2 * MIB));
    let a_third = || {
        // A tenth of all requests each: requests that the first rule spares are subject to the second.
        for (share, status) in [(0.1, 409), (0.1 / 0.9, 429), (0.1 / 0.8, 500)] {
            scene.api.inject(Requests::WRITES, share, Fault::Status(status));
        }
    };
    a_third();
    let jobs = scene.jobs().await?;
    scene.are_under_way(&jobs).await?;

    // While all writes are refused, no result may be acknowledged.
    // The client itself retries after 429 and 503, with a backoff; a 500 is returned to cloudcore.
    let every = Fault::Status(500);
    scene.api.heal();
    scene.api.inject(Requests::WRITES, 1.0, every);
    for node in &scene.nodes {
        node.ends_a_task().await?;
    }
    let before = scene.api.injected(Requests::WRITES, every);
    eventually("more writes are refused", SOON, async || {
        let refused = scene.api.injected(Requests::WRITES, every) - before;
        ensure!(refused >= 4, "{refused}");
        Ok(())
    })
    .await?;
    for node in &scene.nodes {
        assert_eq!(node.read_ledger()?.len(), 1, "{} got an acknowledgement", node.name());
    }
    scene.api.heal();
    a_third();
    scene.end_right(&jobs).await?;
    let refused = |status| scene.api.injected(Requests::WRITES, Fault::Status(status));
    let refused = [refused(409), refused(429), refused(500)];
    ensure!(refused.iter().sum::<usize>() >= 3, "hardly any write was refused: {refused:?}");
    Ok(())
}

#[tokio::test]
async fn late_responses_only_delay_jobs() -> Result<()> {
    let scene = Scene::start().await?;
    let late = Fault::Late(Duration::from_secs(1), Duration::from_secs(2));
    scene.api.inject(Requests::ALL, 1.0, late);
    let jobs = scene.jobs().await?;
    scene.end_right(&jobs).await?;
    let writes = scene.api.injected(Requests::WRITES.on("imageprepulljobs"), late);
    // Each round takes at least two writes, and each write a second.
    ensure!((6..=60).contains(&writes), "{writes} writes");
    Ok(())
}

#[tokio::test]
async fn a_lost_response_is_harmless() -> Result<()> {
    let scene = Scene::start().await?;
    scene.api.inject(Requests::WRITES, 0.5, Fault::LostAnswer);
    let jobs = scene.jobs().await?;
    scene.end_right(&jobs).await?;
    let lost: Vec<_> = scene.api.seen().into_iter().filter(|s| s.fault == Some(Fault::LostAnswer)).collect();
    let took = lost.iter().filter(|seen| seen.about.subresource == "status" && seen.status == Some(200));
    ensure!(took.count() >= 2, "hardly any write took without an answer: {lost:?}");
    Ok(())
}

#[tokio::test]
async fn cut_connections_are_reestablished() -> Result<()> {
    let scene = Scene::start().await?;
    scene.api.inject(Requests::ALL, 0.3, Fault::Cut);
    let jobs = scene.jobs().await?;
    scene.api.expire_watches();
    scene.end_right(&jobs).await?;
    let cut = scene.api.injected(Requests::ALL, Fault::Cut);
    ensure!(cut >= 3, "{cut} connections were cut");
    Ok(())
}

#[tokio::test]
async fn expired_watches_miss_no_change() -> Result<()> {
    let scene = Scene::start().await?;
    let cluster = &scene.site.cluster;
    let jobs = scene.jobs().await?;
    scene.are_under_way(&jobs).await?;
    let doomed =
        cluster.job("doomed").images(["harbor.example/b:v1"]).on(["nobody", "sim-0"]).apply().await?;
    doomed.until("it has begun", |status| status.phase != JobPhase::Init).await?;

    // The watches end and are refused as too old, and the lists that would replace them fail.
    scene.api.inject(Requests::WATCHES, 1.0, Fault::Status(410));
    for kind in ["nodes", "imageprepulljobs"] {
        scene.api.inject(Requests::LISTS.on(kind), 1.0, Fault::Status(500));
    }
    scene.api.expire_watches();
    eventually("cloudcore lists in vain", SOON, async || {
        for kind in ["nodes", "imageprepulljobs"] {
            let lists = scene.api.injected(Requests::LISTS.on(kind), Fault::Status(500));
            ensure!(lists > 0, "{kind} were not listed");
        }
        Ok(())
    })
    .await?;
    cluster.edge_nodes(&["edge-3"]).await?;
    // Without its Node it's rejected.
    let late = EdgeNode::start(cluster, &scene.site.cloud, "edge-3").await?;
    doomed.delete().await?;
    cluster.mark_ready("sim-1", false).await?;
    let watched = scene.api.count(Requests::WATCHES.on("nodes"));

    // Watches are refused twice more, with a list before each, as by a server that is still catching up.
    scene.api.heal();
    scene.api.inject_next(2, Requests::WATCHES, Fault::Status(410));
    eventually("nodes are watched again", SOON, async || {
        let again = scene.api.seen().into_iter().filter(|seen| {
            (seen.about.verb, seen.about.resource.as_str()) == (Verb::Watch, "nodes")
                && seen.status == Some(200)
        });
        let again = again.count();
        ensure!(scene.api.count(Requests::WATCHES.on("nodes")) > watched && again > 1, "{again} watches");
        Ok(())
    })
    .await?;
    late.is_connected().await?;

    let after = scene.site.job("after").images([&scene.reference]).on(["edge-3", "sim-1", "sim-2"]);
    let status = after.concurrency(3).completes().await?;
    assert_eq!(status.skipped("sim-1"), Some("NotReady"));
    assert_eq!((status.summary.successful, status.summary.skipped), (2, 1));
    ensure!(late.has_image(&scene.reference).await?);
    for job in &jobs {
        assert_eq!(job.completes().await?.summary.failure, 0);
    }
    late.forgets_all_tasks().await?;
    assert_eq!(scene.fleet.pulled_twice(), 0);
    scene.fleet.all_acknowledged().await
}

#[tokio::test]
async fn a_hanging_api_server_loses_nothing() -> Result<()> {
    let scene = Scene::own().await?;
    let jobs = scene.jobs().await?;
    scene.are_under_way(&jobs).await?;
    scene.site.cluster.pause_api()?;
    let paused = std::time::Instant::now();
    // The edges work without the API server.
    for node in &scene.nodes {
        node.ends_a_task().await?;
    }
    // Longer than the 30 s that cloudcore waits for a write.
    tokio::time::sleep(Duration::from_secs(40).saturating_sub(paused.elapsed())).await;
    assert_eq!(scene.fleet.connected(), SIMULATED, "the sessions have nothing to do with it");
    for node in &scene.nodes {
        assert_eq!(node.read_ledger()?.len(), 1, "{} got an acknowledgement", node.name());
    }
    scene.site.cluster.resume_api()?;
    scene.end_right(&jobs).await
}

#[tokio::test]
async fn a_killed_etcd_loses_nothing() -> Result<()> {
    let scene = Scene::own().await?;
    let jobs = scene.jobs().await?;
    scene.are_under_way(&jobs).await?;
    scene.site.cluster.stop_etcd()?;
    for node in &scene.nodes {
        node.ends_a_task().await?;
    }
    // kube-apiserver gives up requests that wait for etcd only after a minute. It's faster to let etcd return while
    // they wait.
    tokio::time::sleep(Duration::from_secs(3)).await;
    for node in &scene.nodes {
        assert_eq!(node.read_ledger()?.len(), 1, "{} got an acknowledgement", node.name());
    }
    scene.site.cluster.start_etcd().await?;
    scene.end_right(&jobs).await
}

#[tokio::test]
async fn an_unreadable_secret_delays_no_other_job() -> Result<()> {
    /// More than the number of secrets that cloudcore reads at the same time.
    const STUCK: usize = 70;
    const OTHERS: usize = 100;
    let cluster = Cluster::with_kruise().await?;
    let api = ApiProxy::start(&cluster, 3)?;
    let cloud = Cloud::with_kruise(&cluster).through(&api).await?;
    let fleet = Fleet::start(&cluster, &cloud, 2 * STUCK + 2 * OTHERS).await?;
    fleet.all_connected().await?;
    for secret in ["lost", "good"] {
        let login = ("registry.example", "alice", &*password("alice"));
        cluster.registry_secret("default", secret, &[login]).await?;
    }
    api.inject(Requests::ALL.on("secrets").named("lost"), 1.0, Fault::Status(500));
    let (stuck, others) = fleet.names().split_at(2 * STUCK);
    let ((stuck, kruise_stuck), (others, kruise_others)) = (stuck.split_at(STUCK), others.split_at(OTHERS));
    let job = |name: &str, secret: &str, nodes: &[String]| {
        let job = cluster.job(name).images([format!("registry.example/{name}:v1")]).on(nodes).tolerate("0");
        job.secret(&format!("default/{secret}")).concurrency(200).timeout_seconds(600)
    };
    let pull_job = |name: &str, secret: &str, nodes: &[String]| {
        let job = cluster.pull_job(name, &format!("registry.example/{name}:v1")).on_nodes(nodes);
        job.secrets(&[secret]).parallelism(200)
    };
    // A job takes the nodes that have a NodeImage when it begins.
    for name in kruise_stuck.iter().chain(kruise_others) {
        cluster.node_image(name).exists().await?;
    }
    let waiting = job("stuck", "lost", stuck).apply().await?;
    let kruise_waiting = pull_job("kruise-stuck", "lost", kruise_stuck).apply().await?;
    // Nodes that wait for a secret give back their slots, and say why.
    let says_why = |reason: &str| reason.contains("secret default/lost could not be read");
    waiting
        .until("waits with the reason", |status| {
            let waits = |node: &&NodeStatus| node.phase == NodePhase::Pending && says_why(&node.reason);
            status.node_status.iter().filter(waits).count() > STUCK / 2 && says_why(&status.reason)
        })
        .await?;
    assert_eq!(job("other", "good", others).completes().await?.summary.successful, 100);
    assert_eq!(pull_job("kruise-other", "good", kruise_others).completes().await?.succeeded, 100);
    // Also on the very nodes that wait.
    assert_eq!(job("same-nodes", "good", stuck).completes().await?.summary.successful, 70);
    let status = waiting.status().await?;
    assert_eq!((status.summary.successful, status.summary.failure, status.completion_time), (0, 0, None));
    let status = kruise_waiting.status().await?;
    assert_eq!((status.succeeded, status.failed, status.completion_time), (0, 0, None));
    assert_eq!(fleet.pulled_twice(), 0);
    fleet.all_acknowledged().await?;
    fleet.stop().await;
    Ok(())
}
