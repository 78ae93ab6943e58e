//! What release 0.1 has left (`e2e/testdata/release-0.1`), with the programs of today; and the programs of an earlier
//! release that are replaced in the middle of jobs.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use edgecore_prepull::cloud::identity::Identity;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, PostParams};
use prepull_api::wire::TUNNEL_PATH;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use prepull_e2e::prelude::*;

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
async fn an_edge_of_the_release_before_goes_on_without_joining_again() -> Result<()> {
    let cluster = Cluster::start().await?;
    restore(&cluster, "ca.secret.json", |_| {}).await?;
    restore(&cluster, "join-token.secret.json", |secret| {
        let end = humantime::format_rfc3339_seconds(SystemTime::now() + Duration::from_secs(3600));
        let data = secret.data.get_or_insert_default();
        data.insert("expiration".to_owned(), ByteString(end.to_string().into_bytes()));
    })
    .await?;
    let cloud = Cloud::start(&cluster).await?;
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
    assert_eq!(node.ledger()?.len(), 2);
    let file = node.state_dir().join("pki/client.crt");
    let certificate = || std::fs::read(&file);
    let old = certificate()?;
    ensure!(names(&node, "system:node:edge-1")?, "it is not what release 0.1 has left");
    node.restart_agent()?;
    node.is_connected().await?;
    // The one task has ended, the other one is of a job that is gone: both are told and forgotten.
    node.forgets_all_tasks().await?;
    ensure!(
        node.agent_log().contains("the ledger has tasks from before the restart tasks=2"),
        "{}",
        node.agent_log()
    );
    cluster.job("with-old").images([&reference]).on(["edge-1"]).completes().await?;
    ensure!(certificate()? == old, "it was renewed by itself");

    node.terminate_agent().await?;
    Identity::load(node.state_dir())?.renew(enroll).await?;
    ensure!(certificate()? != old, "it was not renewed");
    ensure!(names(&node, "prepull:node:edge-1")?, "the subject is not of our own");
    node.restart_agent()?;
    node.is_connected().await?;
    node.remove_image(&reference).await?;
    cluster.job("with-new").images([&reference]).on(["edge-1"]).completes().await?;

    let token = std::fs::read_to_string(left("join-token"))?;
    let other = EdgeNode::start(&cluster, &cloud, "edge-2").with_token(token.trim()).await?;
    other.is_connected().await?;
    Ok(())
}

/// The programs of an earlier release, and a job under way on two edges: a pull that takes a while, and one that waits.
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
        let site = Site::before(Path::new(&dir)).await?;
        let node = site.node("edge-1").await?.await?;
        let (image, reference) = site.image("upgraded", &[MIB / 4, 24 * MIB])?;
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

    /// Both sides are of today. The job completes at its first attempt, no whole layer came twice, and nobody joined again.
    async fn ends_right(self) -> Result<()> {
        let Self { site, node, image, reference, job, certificate } = self;
        site.link.throttle(None);
        let status = job.completes().await?;
        assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
        ensure!(node.has_image(&reference).await?);
        node.forgets_all_tasks().await?;
        let fetches = site.fetches(&image);
        ensure!(fetches <= image.blobs().len() + 1, "{fetches} fetches, of which one was cut");
        ensure!(
            std::fs::read(node.state_dir().join("pki/client.crt"))? == certificate,
            "it has another certificate"
        );
        let (_, again) = site.image("afterwards", &[MIB / 4])?;
        site.job("afterwards").images([&again]).on(["edge-1"]).completes().await?;
        Ok(())
    }
}

#[tokio::test]
#[ignore = "needs the programs of an earlier release in the directory PREPULL_E2E_BEFORE"]
async fn a_job_goes_on_when_the_cloud_is_upgraded_and_then_the_edge() -> Result<()> {
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
async fn a_job_goes_on_when_the_edge_is_upgraded_and_then_the_cloud() -> Result<()> {
    let mut upgrade = Upgrade::start().await?;
    upgrade.node.upgrade_agent().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.site.cloud.upgrade().await?;
    upgrade.node.is_connected().await?;
    upgrade.is_under_way().await?;
    upgrade.ends_right().await
}
