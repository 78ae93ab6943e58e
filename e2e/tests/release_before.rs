//! Upgrades: the state of release 0.1 (`e2e/testdata/release-0.1`) with the programs of today, and programs of an
//! earlier release that are replaced in the middle of jobs.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use edgecore_prepull::cloud::identity::Identity;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, PostParams};
use prepull_api::crd::download::{DownloadSpec, WindowSpec};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::wire::{CloudMessage, TUNNEL_PATH};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};

use prepull_e2e::boxes::{Order, SERVING};
use prepull_e2e::prelude::*;
use tokio_tungstenite::tungstenite::Message;

fn left(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/release-0.1").join(file)
}

async fn restore(cluster: &Cluster, file: &str, change: impl Fn(&mut Secret)) -> Result<()> {
    let mut secret: Secret = serde_json::from_str(&std::fs::read_to_string(left(file))?)?;
    change(&mut secret);
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "prepull-system");
    secrets.create(&PostParams::default(), &secret).await?;
    Ok(())
}

/// Whether the node's certificate has this text in it.
fn names(node: &EdgeNode, subject: &str) -> Result<bool> {
    let pem = std::fs::read(node.state_dir().join("pki/client.crt"))?;
    let der = CertificateDer::from_pem_slice(&pem)?;
    Ok(der.windows(subject.len()).any(|bytes| bytes == subject.as_bytes()))
}

#[tokio::test]
async fn an_earlier_releases_edge_keeps_its_identity() -> Result<()> {
    let cluster = Cluster::start().await?;
    restore(&cluster, "ca.secret.json", |_| {}).await?;
    restore(&cluster, "join-token.secret.json", |secret| {
        let end = humantime::format_rfc3339_seconds(SystemTime::now() + Duration::from_secs(3600));
        let data = secret.data.get_or_insert_default();
        data.insert("expiration".to_owned(), ByteString(end.to_string().into_bytes()));
    })
    .await?;
    let cloud = Cloud::start(&cluster).args(&["--accept-system-nodes", "true"]).await?;
    cluster.edge_nodes(&["edge-1", "edge-2"]).await?;
    let registry = Registry::start().await?;
    let reference = registry.seed(&Image::of_layers("of-today", &[MIB])?, "team/of-today:v1")?;

    // Its addresses have changed since.
    let tunnel = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
    let enroll = format!("https://{}", cloud.enroll_addr());
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1")
        .joined_before(&left("state"))
        .args(&["--tunnel-url", &tunnel, "--enroll-url", &enroll])
        .without_agent()
        .await?;
    assert_eq!(node.read_ledger()?.len(), 2);
    let file = node.state_dir().join("pki/client.crt");
    let certificate = || std::fs::read(&file);
    let old = certificate()?;
    ensure!(names(&node, "system:node:edge-1")?, "it is not what release 0.1 has left");
    node.restart_agent()?;
    node.is_connected().await?;
    // One task has ended, the other one belongs to a deleted job: both are acknowledged and forgotten.
    node.forgets_all_tasks().await?;
    ensure!(
        node.agent_log().contains("the ledger has tasks from before the restart tasks=2"),
        "{}",
        node.agent_log()
    );
    // An operator waits for this before rejecting the old subject.
    let outdated = async |cloud: &Cloud, edges: f64| {
        eventually(&format!("{edges} edges have the old subject"), SOON, async || {
            let metrics = cloud.metrics().await?;
            let found = metrics.sum("cloudcore_prepull_outdated_edges", &[("part", "subject")]);
            ensure!((found - edges).abs() < 0.5, "{found}");
            Ok(())
        })
        .await
    };
    outdated(&cloud, 1.0).await?;
    eventually("it is listed with the old subject", SOON, async || {
        let listed = cloud.command(&["node", "list"]).await?;
        let is_listed = |line: &str| line.starts_with("edge-1 ") && line.contains("  old  ");
        ensure!(listed.lines().any(is_listed), "{listed}");
        Ok(())
    })
    .await?;
    cluster.job("with-old").images([&reference]).on(["edge-1"]).completes().await?;
    ensure!(certificate()? == old, "it was renewed by itself");

    node.terminate_agent().await?;
    Identity::load(node.state_dir())?.renew(enroll).await?;
    ensure!(certificate()? != old, "it was not renewed");
    ensure!(names(&node, "prepull:node:edge-1")?, "the subject is not of our own");
    node.restart_agent()?;
    node.is_connected().await?;
    outdated(&cloud, 0.0).await?;
    node.remove_image(&reference).await?;
    cluster.job("with-new").images([&reference]).on(["edge-1"]).completes().await?;

    let token = std::fs::read_to_string(left("join-token"))?;
    let other = EdgeNode::start(&cluster, &cloud, "edge-2").with_token(token.trim()).await?;
    other.is_connected().await?;
    Ok(())
}

/// An agent of a later release, with messages that this cloud doesn't know: it stays connected, and the job reports its
/// failure.
#[tokio::test]
async fn an_agent_of_the_future_gets_and_gives_answers() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut agent = Intruder::of(&cluster, &cloud, "edge-1").await?.open_websocket().await?;
    let frame = |message: Value| Message::text(message.to_string());
    let gone = json!({"job": "gone", "attempt": 1});
    agent.send_frame(frame(json!({"type": "overture", "later": 1}))).await?;
    let hello = json!({"type": "hello", "version": "9.0.0", "os": "linux", "arch": "amd64", "later": {"of": []},
        "open": [{"task": gone, "phase": "hibernating"}]});
    agent.send_frame(frame(hello)).await?;
    ensure!(matches!(agent.receive().await?, CloudMessage::Welcome(_)));
    let job = cluster.job("of-today").images(["harbor.example/app:v1"]).on(["edge-1"]).apply().await?;
    let assign = loop {
        if let CloudMessage::Assign(assign) = agent.receive().await? {
            break assign;
        }
    };
    let task = json!({"job": assign.task.id.job.0, "attempt": assign.task.id.attempt});
    let image = json!({"outcome": "teleported", "code": "Later", "attempts": 1, "later": 1});
    for message in [
        json!({"type": "accepted", "task": task}),
        json!({"type": "later", "task": task}),
        json!({"type": "progress", "task": task, "images": [{"index": 0, "phase": "beaming", "attempts": 1}]}),
        json!({"type": "result", "task": task, "outcome": "transcended", "images": [image], "took": 1}),
    ] {
        agent.send_frame(frame(message)).await?;
    }
    let status = job.fails().await?;
    let node = status.node("edge-1").context("no record")?;
    ensure!(node.reason.contains("update cloudcore-prepull"), "{node:?}");
    // The session is the same: skipped messages don't end it.
    while !matches!(agent.receive().await?, CloudMessage::ResultAck { .. }) {}
    Ok(())
}

/// Moves all times to now, as if it had been written a moment ago: the deadlines of the nodes count from them.
fn left_just_now(value: &mut Value, now: &str) {
    match value {
        Value::String(text) if text.parse::<Timestamp>().is_ok() => now.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(|item| left_just_now(item, now)),
        Value::Object(fields) => fields.values_mut().for_each(|field| left_just_now(field, now)),
        _ => {}
    }
}

/// The state of a killed cloudcore-prepull of an earlier release in `e2e/testdata/running`. The simulated edges don't
/// know the job any more, like newly installed machines.
#[tokio::test]
async fn an_earlier_releases_job_continues() -> Result<()> {
    let cluster = Cluster::start().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 6).await?;
    cloud.kill9()?;

    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let read = |file: &str| -> Result<Value> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/running").join(file);
        let mut value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
        left_just_now(&mut value, &now);
        Ok(value)
    };
    let (job, reports) = (read("job.json")?, read("reports.json")?);
    let new = json!({"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": {"name": "running"},
        "spec": job["spec"]});
    let running = cluster.apply_job(&new.to_string()).await?;
    let old = job["metadata"]["uid"].as_str().context("no UID")?;
    // A report has the UID in its labels, and its beginning in its name.
    let uid = running.uid().await?;
    let (short, new_short) = (old.get(..8).context("no UID")?, uid.get(..8).context("no UID")?);
    let reports = reports.to_string().replace(old, &uid).replace(short, new_short);
    cluster.apply(&reports).await?;
    running.set_status(&job["status"]).await?;
    let ended = running.status().await?.summary.successful;
    ensure!(ended == 2, "{ended} nodes had ended");

    cloud.restart().await?;
    let status = running.completes().await?;
    assert_eq!((status.summary.successful, status.summary.desired), (6, 6), "{status:?}");
    assert_eq!(status.reason, "", "it was restarted, or has changed");
    ensure!(status.node_status.iter().all(|node| node.attempt == 1), "{:?}", status.node_status);
    // Two images on each of the four that had not ended.
    assert_eq!((fleet.pulls(), fleet.pulled_twice()), (8, 0));
    fleet.all_acknowledged().await
}

/// The programs of an earlier release, and a running job on two edges: a pull that takes a while, and one that waits.
struct Upgrade {
    site: Site,
    node: EdgeNode,
    image: Image,
    reference: String,
    job: Job,
    certificate: Vec<u8>,
}

impl Upgrade {
    async fn start() -> Result<Self> {
        let dir = std::env::var_os("PREPULL_E2E_BEFORE").context("PREPULL_E2E_BEFORE is not set")?;
        let site = Site::with_old_programs(Path::new(&dir)).await?;
        let node = site.add_node("edge-1").await?.await?;
        let (image, reference) = site.seed_image("upgraded", &[MIB / 4, 24 * MIB])?;
        site.link.throttle(Some(2 * MIB));
        let job = site.job("upgraded").images([&reference]).on(["edge-1"]).retries(8).apply().await?;
        node.accepts_a_task().await?;
        site.link_carries(MIB).await?;
        let certificate = std::fs::read(node.state_dir().join("pki/client.crt"))?;
        Ok(Self { site, node, image, reference, job, certificate })
    }

    async fn is_under_way(&self) -> Result<()> {
        let status = self.job.node_status("edge-1").await?;
        ensure!(status.phase == NodePhase::InProgress, "the pull was over too soon: {status:?}");
        Ok(())
    }

    /// Both sides are of today. The job completes at its first attempt, no whole layer was fetched twice, and no edge
    /// joined again.
    async fn ends_right(self) -> Result<()> {
        let Self { site, node, image, reference, job, certificate } = self;
        site.link.throttle(None);
        let status = job.completes().await?;
        assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
        ensure!(node.has_image(&reference).await?);
        node.forgets_all_tasks().await?;
        let fetches = site.fetches(&image);
        ensure!(fetches <= image.blobs().len() + 1, "{fetches} fetches, and one of them was cut");
        ensure!(
            std::fs::read(node.state_dir().join("pki/client.crt"))? == certificate,
            "it has another certificate"
        );
        let (_, again) = site.seed_image("afterwards", &[MIB / 4])?;
        site.job("afterwards").images([&again]).on(["edge-1"]).completes().await?;
        Ok(())
    }
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn a_job_survives_cloud_then_edge_upgrade() -> Result<()> {
    let mut upgrade = Upgrade::start().await?;
    upgrade.site.cloud.upgrade().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.node.upgrade_agent().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.ends_right().await
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn a_job_survives_edge_then_cloud_upgrade() -> Result<()> {
    let mut upgrade = Upgrade::start().await?;
    upgrade.node.upgrade_agent().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.site.cloud.upgrade().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.ends_right().await
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn an_older_agent_ignores_new_fields() -> Result<()> {
    let dir = std::env::var_os("PREPULL_E2E_BEFORE").context("PREPULL_E2E_BEFORE is not set")?;
    let mut site = Site::with_old_programs(Path::new(&dir)).await?;
    let node = site.add_node("edge-1").await?.await?;
    site.cloud.upgrade().await?;
    node.is_connected().await?;
    let (_, reference) = site.seed_image("of-today", &[MIB / 4])?;
    let job = site.job("of-today").images([&reference]).on(["edge-1"]).checks(&["disk", "mem"]);
    let job = job.spec(|spec| {
        spec.download = Some(DownloadSpec { max_rate: Some("64Mi".to_owned()), ..DownloadSpec::default() });
        spec.windows = vec![WindowSpec {
            start: "00:00".to_owned(),
            duration: "168h".to_owned(),
            time_zone: "Node".to_owned(),
            ..WindowSpec::default()
        }];
        spec.pin = true;
    });
    let status = job.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
    ensure!(node.has_image(&reference).await?);
    node.forgets_all_tasks().await
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn an_older_agent_shares_a_site() -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(150);
    let dir = std::env::var_os("PREPULL_E2E_BEFORE").context("PREPULL_E2E_BEFORE is not set")?;
    let plan = Plan {
        boxes: 3,
        uplink: Uplink::with_rate(100_000_000),
        layers: vec![6 * MIB, 4 * MIB],
        agent: vec![SERVING.to_owned()],
        cloud: Vec::new(),
    };
    let mut boxes = Boxes::start(&plan).await?;
    boxes.all[0].node.replace_agent(Some(Path::new(&dir)))?;
    boxes.all[0].node.is_connected().await?;
    let order = Order { share: true, ..Order::new("mixed", boxes.names(3), LIMIT) };
    let (row, _) = Run::of(&boxes, &order).await?.finish(&boxes, "mixed", None).await?;
    let image = boxes.image_bytes()?;
    ensure!(row.down < image * 3 / 2, "the uplink has carried {} bytes for an image of {image}", row.down);
    for node in boxes.all.iter().map(|found| &found.node) {
        ensure!(node.has_image(&boxes.reference).await?, "{} has no image", node.name());
    }
    let reports = boxes.cluster.existing_job("mixed").reports().await?;
    let nodes = reports.iter().flat_map(|report| &report.body.node_status);
    let images: Vec<_> = nodes.flat_map(|node| &node.image_status).collect();
    ensure!(images.iter().all(|image| image.facts.unshared_reason.is_empty()), "{images:?}");
    Ok(())
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn an_older_agent_only_looks() -> Result<()> {
    let dir = std::env::var_os("PREPULL_E2E_BEFORE").context("PREPULL_E2E_BEFORE is not set")?;
    let mut site = Site::with_old_programs(Path::new(&dir)).await?;
    let node = site.add_node("edge-1").await?.await?;
    let (_, reference) = site.seed_image("checked", &[MIB / 4])?;
    let job = site.job("checked").images([&reference]).on(["edge-1"]).apply().await?;
    job.completes().await?;
    site.cloud.upgrade().await?;
    node.is_connected().await?;
    let recheck = async |number: u32| {
        job.patch_spec(json!({"recheck": number})).await?;
        let ended = |status: &ImagePrePullJobStatus| {
            let recheck = status.recheck.as_ref();
            recheck.is_some_and(|recheck| recheck.rounds == number && recheck.completion_time.is_some())
        };
        let status = job.until("the re-check ends", ended).await?;
        let recheck = status.recheck.context("no re-check")?;
        anyhow::Ok((recheck.present, recheck.missing, recheck.not_checked))
    };
    let before = site.registry.requests().len();
    assert_eq!(recheck(1).await?, (1, 0, 0));
    node.remove_image(&reference).await?;
    let found = recheck(2).await?;
    assert_eq!(found, (0, 1, 0));
    assert_eq!(site.registry.requests().len(), before, "a look asks no registry");
    ensure!(!node.has_image(&reference).await?, "a look has pulled the image");
    Ok(())
}
