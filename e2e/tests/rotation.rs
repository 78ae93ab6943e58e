//! Rotation of the CA, with edges that are away, clouds that are killed, and jobs that go on. The steps themselves are
//! tested in cloudcore-prepull/tests/tunnel.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use tokio_util::sync::{CancellationToken, DropGuard};

use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;

use crate::revocation::Machine;

/// Limit for a step that waits ten seconds on purpose.
const STEP: Duration = Duration::from_secs(45);
const NAMESPACE: &str = "prepull-system";

fn pki(node: &EdgeNode, file: &str) -> Result<String> {
    Ok(std::fs::read_to_string(node.state_dir().join("pki").join(file))?)
}

/// The keys in the CA's Secret.
async fn parts(cluster: &Cluster) -> Result<Vec<String>> {
    let secret = Api::<Secret>::namespaced(cluster.client(), NAMESPACE).get("prepull-ca").await?;
    Ok(secret.data.unwrap_or_default().into_keys().collect())
}

async fn secret_gets(cluster: &Cluster, part: &str) -> Result<()> {
    eventually(&format!("the Secret gets {part}"), STEP, async || {
        let parts = parts(cluster).await?;
        ensure!(parts.iter().any(|name| name == part), "it has {parts:?}");
        Ok(())
    })
    .await
}

/// Waits until the edge trusts the published CAs, and has another certificate than before.
async fn renews(node: &EdgeNode, cluster: &Cluster, before: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), NAMESPACE);
    eventually(&format!("{} has a certificate of the new CA", node.name()), STEP, async || {
        let published = maps.get("prepull-ca").await?.data.unwrap_or_default().remove("ca.crt");
        ensure!(pki(node, "client.crt")? != before, "it has the certificate of before");
        ensure!(Some(pki(node, "ca.crt")?) == published, "it does not trust what is published");
        Ok(())
    })
    .await
    .with_context(|| prepull_e2e::place::last_lines(&node.agent_log(), 20))
}

#[tokio::test]
async fn a_rotation_needs_no_joins() -> Result<()> {
    let mut site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    let mut away = site.add_node("edge-2").await?.await?;
    for node in [&node, &away] {
        node.is_connected().await?;
    }
    let (image, reference) = site.seed_image("rotated", &[MIB, 72 * MIB])?;
    let (_, other) = site.seed_image("afterwards", &[MIB])?;
    let (first, of_away) = (pki(&node, "client.crt")?, pki(&away, "client.crt")?);
    away.kill9_agent()?;
    // Slow enough to last until the new CA signs.
    site.link.throttle(Some(MIB));
    let job = site.job("through").images([&reference]).on(["edge-1"]).timeout_seconds(300).apply().await?;
    node.accepts_a_task().await?;

    site.cloud.command(&["ca", "rotate"]).await?;
    let again = format!("{:#}", site.cloud.command(&["ca", "rotate"]).await.err().context("twice")?);
    ensure!(again.contains("a rotation is under way already"), "{again}");
    // Before the leader can have made the next step.
    site.cloud.restart().await?;
    secret_gets(&site.cluster, "previous.crt").await?;
    ensure!(!parts(&site.cluster).await?.contains(&"next.key".to_owned()), "a key was left");
    // At the moment of the renewal: it fails, and the edge soon retries.
    eventually("the edge gets the CA that signs", STEP, async || {
        let told = node.agent_log().matches("the CAs that the cloud named are trusted").count();
        ensure!(told >= 2, "it got them {told} times");
        Ok(())
    })
    .await?;
    site.cloud.kill9()?;
    eventually("the edge has tried to renew", STEP, async || {
        let has_failed = node.agent_log().contains("the certificate was not renewed");
        ensure!(has_failed || pki(&node, "client.crt")? != first, "not yet");
        Ok(())
    })
    .await?;
    site.cloud.restart().await?;
    renews(&node, &site.cluster, &first).await?;
    assert_eq!(job.node_status("edge-1").await?.phase, NodePhase::InProgress, "the pull was over too soon");

    site.cloud.restart().await?;
    // It knows only the old CA.
    assert_eq!(pki(&away, "client.crt")?, of_away);
    away.restart_agent()?;
    renews(&away, &site.cluster, &of_away).await?;
    site.link.throttle(None);
    let status = job.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.attempt), Some(1));
    assert_eq!(site.fetches(&image), image.blobs().len(), "each blob was fetched once");

    let early = format!("{:#}", site.cloud.command(&["ca", "retire"]).await.err().context("too early")?);
    ensure!(early.contains("--now"), "{early}");
    eventually("all have renewed", STEP, async || {
        let shown = site.cloud.command(&["ca", "show"]).await?;
        ensure!(shown.contains("Of 2 connected edges 2 trust both, 2 have a certificate"), "{shown}");
        Ok(())
    })
    .await?;
    site.cloud.command(&["ca", "retire", "--now"]).await?;
    eventually("one CA is left", SOON, async || {
        let cas = [pki(&node, "ca.crt")?, pki(&away, "ca.crt")?];
        ensure!(cas.iter().all(|cas| cas.matches("BEGIN").count() == 1), "{cas:?}");
        Ok(())
    })
    .await?;
    assert_eq!(parts(&site.cluster).await?, ["since", "tls.crt", "tls.key"]);
    site.cloud.restart().await?;
    let status = site.job("after").images([&other]).on(["edge-1", "edge-2"]).completes().await?;
    assert_eq!(status.summary.successful, 2);
    Ok(())
}

#[tokio::test]
async fn a_restored_ca_brings_the_edges_back() -> Result<()> {
    let mut site = Site::start().await?;
    let node = site.add_node("edge-1").await?.await?;
    node.is_connected().await?;
    let secrets: Api<Secret> = Api::namespaced(site.cluster.client(), NAMESPACE);
    let mut backup = secrets.get("prepull-ca").await?;
    secrets.delete("prepull-ca", &DeleteParams::default()).await?;
    // It makes another CA, which the edge doesn't trust.
    site.cloud.restart().await?;
    eventually("the edge refuses the new CA", SOON, async || {
        let log = node.agent_log();
        ensure!(log.contains("not from the CA that this node has joined"), "{log}");
        Ok(())
    })
    .await?;

    secrets.delete("prepull-ca", &DeleteParams::default()).await?;
    backup.metadata.resource_version = None;
    backup.metadata.uid = None;
    secrets.create(&PostParams::default(), &backup).await?;
    let (_, reference) = site.seed_image("restored", &[MIB])?;
    site.job("after-restore").images([&reference]).on(["edge-1"]).completes().await?;
    Ok(())
}

/// A CA from the manual's commands, and a cross certificate of another one.
struct CaFiles(PathBuf);

impl CaFiles {
    async fn openssl(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("openssl");
        command.current_dir(&self.0).args(arguments);
        prepull_e2e::parts::run_command(command).await.map(drop)
    }

    /// Creates NAME.crt and NAME.key.
    async fn make(&self, name: &str) -> Result<()> {
        let (key, certificate, subject) =
            (format!("{name}.key"), format!("{name}.crt"), format!("/CN={name}"));
        let new_key = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        let rest = ["-days", "3650", "-subj", &subject, "-keyout", &key, "-out", &certificate];
        self.openssl(&[&new_key[..], &rest].concat()).await
    }

    /// Creates cross.crt: the key of `new`, certified by `old`.
    async fn certify(&self) -> Result<()> {
        let extensions =
            "basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n";
        std::fs::write(self.0.join("extensions"), extensions)?;
        self.openssl(&["req", "-new", "-key", "new.key", "-subj", "/CN=new", "-out", "cross.csr"]).await?;
        let sign =
            ["x509", "-req", "-in", "cross.csr", "-CA", "old.crt", "-CAkey", "old.key", "-days", "3650"];
        self.openssl(&[&sign[..], &["-out", "cross.crt", "-extfile", "extensions"]].concat()).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The new files of `--ca-cert` and `--ca-key`. The key first: for a moment the two don't match.
    fn use_now(&self, certificates: &[&str], key: &str) -> Result<()> {
        std::fs::copy(self.path(&format!("{key}.key")), self.path("ca.key"))?;
        let read = |name: &&str| std::fs::read_to_string(self.path(&format!("{name}.crt")));
        let all = certificates.iter().map(read).collect::<std::io::Result<Vec<_>>>()?;
        Ok(std::fs::write(self.path("ca.crt"), all.concat())?)
    }
}

/// An edge with the agent's automatic handling of its certificate.
fn runs(machine: &Machine, cloud: &Cloud) -> (crate::revocation::Session, DropGuard) {
    let stop = CancellationToken::new();
    let enroll = format!("https://{}", cloud.enroll_addr());
    tokio::spawn(machine.identity.clone().keep_renewed(enroll, stop.clone()));
    (machine.dials(cloud), stop.drop_guard())
}

/// Waits until this many connected edges still have something from before a change.
async fn are_outdated(cloud: &Cloud, part: &str, edges: f64) -> Result<()> {
    eventually(&format!("{edges} edges have an old {part}"), STEP, async || {
        let found = cloud.metrics().await?.sum("cloudcore_prepull_outdated_edges", &[("part", part)]);
        ensure!((found - edges).abs() < 0.5, "{found}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_ca_in_files_is_replaced() -> Result<()> {
    let cluster = Cluster::start().await?;
    let place = Place::here()?;
    let files = CaFiles(place.new_dir("ca")?);
    for name in ["old", "new"] {
        files.make(name).await?;
    }
    files.certify().await?;
    files.use_now(&["old"], "old")?;
    let arguments = [("--ca-cert", "ca.crt"), ("--ca-key", "ca.key")]
        .map(|(flag, name)| format!("{flag}={}", files.path(name).display()));
    let mut cloud = Cloud::start(&cluster).args(&arguments.each_ref().map(String::as_str)).await?;
    cluster.edge_nodes(&["present", "away", "too-late"]).await?;
    let present = Machine::joins(&cloud, &place, "present").await?;
    let away = Machine::joins(&cloud, &place, "away").await?;
    let too_late = Machine::joins(&cloud, &place, "too-late").await?;
    let cas = |machine: &Machine| std::fs::read_to_string(machine.state.join("pki/ca.crt"));
    let trusts = async |machine: &Machine, cas_to_trust: usize| {
        eventually(&format!("it trusts {cas_to_trust} CAs"), STEP, async || {
            let trusted = cas(machine)?.matches("BEGIN").count();
            ensure!(trusted == cas_to_trust, "{trusted}");
            Ok(())
        })
        .await
    };
    let (mut session, _present) = runs(&present, &cloud);
    session.is(true).await?;

    files.use_now(&["old", "new"], "old")?;
    trusts(&present, 2).await?;
    are_outdated(&cloud, "trust", 0.0).await?;

    let certificate = |machine: &Machine| std::fs::read(machine.state.join("pki/client.crt"));
    let renews = async |machine: &Machine, before: &[u8]| {
        eventually("it has renewed", STEP, async || {
            ensure!(certificate(machine)? != before, "not yet");
            Ok(())
        })
        .await
    };
    let (of_present, of_away) = (certificate(&present)?, certificate(&away)?);
    files.use_now(&["new", "old", "cross"], "new")?;
    renews(&present, &of_present).await?;
    are_outdated(&cloud, "certificate", 0.0).await?;
    // An edge that was away is known by its certificate, and comes back with only the old CA.
    eventually("the list distinguishes them", STEP, async || {
        let listed = cloud.command(&["node", "list"]).await?;
        let ca_of = |node: &str| {
            let line = listed.lines().find(|line| line.starts_with(&format!("{node} ")));
            line.and_then(|line| line.split_whitespace().nth(3)).context("it is not listed")
        };
        let (of_present, of_away) = (ca_of("present")?, ca_of("away")?);
        ensure!(of_present != of_away, "{listed}");
        let shown = cloud.command(&["ca", "show"]).await?;
        let signer = shown.lines().nth(1).context("no CA is shown")?;
        ensure!(signer.starts_with(of_present), "{listed}\n{shown}");
        Ok(())
    })
    .await?;
    assert_eq!(cas(&away)?.matches("BEGIN").count(), 1);
    let (mut second, _away) = runs(&away, &cloud);
    second.is(true).await?;
    trusts(&away, 2).await?;
    // The count lags by some seconds: its current value may be from before this edge came back.
    renews(&away, &of_away).await?;
    are_outdated(&cloud, "certificate", 0.0).await?;

    files.use_now(&["new"], "new")?;
    for machine in [&present, &away] {
        trusts(machine, 1).await?;
    }
    cloud.restart().await?;
    for session in [&mut session, &mut second] {
        session.is(true).await?;
    }
    refusal(
        too_late.identity.renew(format!("https://{}", cloud.enroll_addr())).await.map_err(Into::into),
        "not from the CA that this node has joined",
    )?;
    Ok(())
}

#[tokio::test]
async fn making_tokens_needs_no_ca_key() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let cloud = Cloud::start(&cluster).await?;
    let manifest = workspace().join("manifests/cloudcore-prepull/optional/token-admin.yaml");
    cluster.apply_file(&manifest).await?;
    let kubeconfig = cluster.kubeconfig_as("system:serviceaccount:prepull-system:prepull-token-admin")?;
    let token = cloud.command_as(&kubeconfig, &["token", "create", "--node", "edge-1"]).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    EdgeNode::start(&cluster, &cloud, "edge-1").with_token(&token).await?.is_connected().await?;
    let other = cloud.token("edge-1").await?;
    assert_eq!(token.split('.').next(), other.split('.').next(), "it names another CA");

    // Neither by name nor in a list, and it can't delete it either.
    let client = Cluster::client_of(&kubeconfig).await?;
    let secrets: Api<Secret> = Api::namespaced(client, NAMESPACE);
    let refused = |error: kube::Error| matches!(error, kube::Error::Api(status) if status.code == 403);
    ensure!(secrets.get("prepull-ca").await.err().is_some_and(refused), "it reads the key");
    ensure!(secrets.list(&ListParams::default()).await.err().is_some_and(refused), "it lists the key");
    let deleted = secrets.delete("prepull-ca", &DeleteParams::default()).await;
    ensure!(deleted.err().is_some_and(refused), "it deletes the CA");
    the_plugin_makes_tokens_and_keeps_nodes_out(&cluster, &cloud, &Person::new(&kubeconfig)).await
}

/// `maker` may only create tokens.
async fn the_plugin_makes_tokens_and_keeps_nodes_out(
    cluster: &Cluster,
    cloud: &Cloud,
    maker: &Person,
) -> Result<()> {
    let me = Person::new(cluster.kubeconfig());
    let ann = Person::new(&cluster.kubeconfig_as("ann")?);
    cluster.edge_nodes(&["edge-2"]).await?;
    let created = maker.runs("tokens create --node edge-2 -o json").await?;
    let created = created.is(0, &["--node-name edge-2", "Valid until"])?;
    let created: serde_json::Value = serde_json::from_str(&created.out)?;
    assert_eq!(created["node"], "edge-2");
    let (token, id) = (created["token"].as_str(), created["id"].as_str());
    let (token, id) = (token.context("no token")?, id.context("no ID")?);
    let node = EdgeNode::start(cluster, cloud, "edge-2").with_token(token).await?;
    node.is_connected().await?;
    maker.runs("tokens list").await?.is(
        1,
        &["lacks a right: to list secrets in namespace prepull-system", "the key of the CA as well"],
    )?;
    ann.runs("tokens create")
        .await?
        .is(1, &["user ann lacks a right: to get configmaps", "prepull-token-admin"])?;
    me.runs("tokens list").await?.is(0, &["ID", "USED", id, "node edge-2", "yes"])?;
    let listed: serde_json::Value =
        serde_json::from_str(&me.runs("tokens list -o json").await?.is(0, &[])?.out)?;
    let mine = listed.as_array().into_iter().flatten().find(|token| token["id"] == id);
    ensure!(mine.is_some_and(|token| token["node"] == "edge-2" && token["used"] == true), "{listed}");
    me.runs(&format!("tokens revoke {token}")).await?.is(0, &[&format!("token {id} revoked")])?;
    me.runs(&format!("tokens revoke {id}")).await?.is(1, &["there is no token"])?;
    me.runs("tokens revoke x").await?.is(1, &["12 hex digits, as `kubectl prepull tokens list` shows"])?;

    cluster.apply_file(&workspace().join("manifests/cloudcore-prepull/optional/node-admin.yaml")).await?;
    let guard = cluster.kubeconfig_as("system:serviceaccount:prepull-system:prepull-node-admin")?;
    let guard = Person::new(&guard);
    ann.runs("node revoke edge-2")
        .await?
        .is(1, &["lacks a right: to get configmaps", "prepull-node-admin"])?;
    guard.runs("node revoke edge-3").await?.is(1, &["no edge of the name edge-3", "--unknown"])?;
    guard
        .runs("node revoke edge-2")
        .await?
        .is(0, &["node edge-2 revoked: its session ends within seconds"])?;
    eventually("edge-2 is out", SOON, async || {
        let refused =
            cloud.metrics().await?.sum("cloudcore_prepull_refused_edges_total", &[("reason", "revoked")]);
        ensure!(refused > 0.0, "it was not refused");
        Ok(())
    })
    .await?;
    guard.runs("node allow edge-2").await?.is(0, &["node edge-2 allowed"])?;
    guard.runs("node allow edge-2").await?.is(1, &["node edge-2 is not revoked"])?;
    node.is_connected().await?;
    Ok(())
}
