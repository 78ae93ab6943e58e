//! Tests of the harness itself, on real parts. If many tests fail, look here first: all others depend on the harness.

#![allow(clippy::expect_used, clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};
use prepull_e2e::cleanup::Child;
use prepull_e2e::prelude::*;
use prepull_e2e::proxy::ProxiedRequest;
use prepull_e2e::reaper;
use serde_json::{Value, json};

#[tokio::test]
async fn an_existing_cluster_stays_the_same() -> Result<()> {
    let own = Cluster::start_empty().await?;
    own.node("theirs").create().await?;
    let lent = Cluster::existing(own.kubeconfig()).await?;
    lent.edge_nodes(&["ours"]).await?;
    let job = lent.job("ours").images(["nginx:1.25"]).on(["ours"]).apply().await?;
    // The client has the rights of the ServiceAccount, by a token of the API server itself.
    let nodes = Api::<Node>::all(lent.cloudcore_client().await?).list(&ListParams::default()).await?;
    assert_eq!(nodes.items.len(), 2);
    ensure!(lent.stop_api().is_err(), "it is not ours to stop");
    drop(lent);

    assert_eq!(own.kubectl(&["get", "nodes", "--output", "name"]).await?.trim(), "node/theirs");
    job.is_gone().await
}

#[tokio::test]
async fn a_shared_cluster_is_empty_for_the_next_test() -> Result<()> {
    let Some(pool) = std::env::var_os("PREPULL_E2E_POOL").map(PathBuf::from) else {
        eprintln!("PREPULL_E2E_POOL is not set: no test shares a cluster");
        return Ok(());
    };
    // Servers for this test alone, which end with those of the others.
    let own = tempfile::tempdir_in(&pool)?.keep();
    std::os::unix::fs::symlink(pool.join("reaper"), own.join("reaper"))?;

    let first = Cluster::shared(&own, false).await?;
    let server = first.kubeconfig().to_owned();
    ensure!(first.stop_api().is_err(), "it is not this test's to stop");
    first.install_kruise().await?;
    first.edge_nodes(&["edge-1", "edge-2"]).await?;
    first.registry_secret("team", "registry", &[("registry.example", "alice", &password("alice"))]).await?;
    first.create_pod("team", "web", "edge-1", &[]).await?;
    first.job("left").images(["nginx:1.25"]).on(["edge-1"]).apply().await?;
    first.pull_job("left", "nginx:1.25").in_namespace("team").apply().await?;
    first.create_node_image("edge-1").await?;
    first.kubectl(&["create", "clusterrole", "looks", "--verb=list", "--resource=nodes"]).await?;
    first.kubectl(&["create", "rolebinding", "looks", "--clusterrole=looks", "--user=jane"]).await?;
    let cloud = Cloud::with_kruise(&first).replica().await?;
    first.existing_job("left").until("has begun", |status| status.phase != JobPhase::Init).await?;
    let _fresh = cloud.token("edge-1").await?;
    drop(first);
    ensure!(!own.join("0/idle").exists(), "a cloud still writes to it");
    drop(cloud);

    let second = Cluster::shared(&own, false).await?;
    assert_eq!(second.kubeconfig(), server);
    let left = second.kubectl(&["get", "nodes,ippj,ippr,nodeimages", "-o", "name"]).await?;
    assert_eq!(left, "");
    let rights = second.kubectl(&["get", "clusterroles,rolebindings", "-A", "-o", "name"]).await?;
    ensure!(!rights.contains("/looks") && rights.contains("/cloudcore-prepull\n"), "{rights}");
    for namespace in ["default", "team", prepull_e2e::cluster::NAMESPACE] {
        let kinds = "secrets,pods,leases,events,imagepulljobs,imagelistpulljobs";
        let left = second.kubectl(&["get", kinds, "--namespace", namespace, "-o", "name"]).await?;
        assert_eq!(left, "", "in {namespace}");
    }
    let pods = Api::<Pod>::all(second.cloudcore_client().await?).list(&ListParams::default()).await;
    ensure!(pods.is_err(), "cloudcore still has the rights that Kruise's API needs");

    // No other test gets the server of a running test, nor that of a killed one.
    ensure!(!own.join("0/idle").exists(), "it is marked as idle while a test has it");
    let third = Cluster::shared(&own, false).await?;
    ensure!(third.kubeconfig() != server, "two tests have the same server");
    drop(second);

    changes_are_undone(&own).await
}

/// A test that changes definitions, rights and admission leaves the next one a server that is like a new one.
async fn changes_are_undone(pool: &Path) -> Result<()> {
    let first = Cluster::shared(pool, true).await?;
    let server = first.kubeconfig().to_owned();
    let reports = "imageprepullreports.operations.kubeedge.io";
    first.kubectl(&["delete", "crd", reports]).await?;
    let jobs = "imageprepulljobs.operations.kubeedge.io";
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let patch = json!([{"op": "replace", "path": schema, "value": anything}]).to_string();
    first.kubectl(&["patch", "crd", jobs, "--type=json", "-p", &patch]).await?;
    let namespace = ["-n", prepull_e2e::cluster::NAMESPACE];
    first.kubectl(&[&namespace[..], &["delete", "role", "cloudcore-prepull-leader-label"]].concat()).await?;
    first.kubectl(&[&namespace[..], &["create", "quota", "none", "--hard=count/secrets=0"]].concat()).await?;
    drop(first);

    let second = Cluster::shared(pool, false).await?;
    assert_eq!(second.kubeconfig(), server);
    second.kubectl(&["get", "ippr"]).await?;
    let crd = second.kubectl(&["get", "crd", jobs, "-o", "json"]).await?;
    ensure!(serde_json::from_str::<Value>(&crd)?.pointer(schema) != Some(&anything), "{crd}");
    for kind in ["role/cloudcore-prepull-leader-label", "quota"] {
        let found = second.kubectl(&[&namespace[..], &["get", kind, "-o", "name"]].concat()).await?;
        assert_eq!(found.is_empty(), kind == "quota", "{found}");
    }
    let cloud = Cloud::start(&second).standby().await?;
    cloud.leads(SOON).await
}

#[tokio::test]
async fn a_proxy_cuts_fails_and_records() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let proxy = Proxy::for_http(registry.addr())?;
    registry.route_through(&proxy)?;
    let containerd = Containerd::start("edge-1").await?;
    let login = Some(("alice", "s3cr3t-canary-alice"));
    let image = Image::of_layers("cut", &[3 * MIB])?;
    let reference = registry.seed(&image, "team/cut:v1")?;

    // containerd 2.1 retries one 500 by itself; no release retries a 403.
    proxy.fail_next_on("/manifests/", 1000, 403);
    let error = containerd.pull(&reference, login).await.expect_err("the proxy answers 403");
    ensure!(format!("{error:#}").contains("403"), "{error:#}");
    proxy.stop_failing();

    proxy.refuse();
    ensure!(containerd.pull(&reference, login).await.is_err(), "the proxy refuses");
    proxy.accept_again()?;

    // The cut is within the layer, and containerd itself resumes it with a Range.
    proxy.cut_after(1024 * 1024);
    containerd.pull(&reference, login).await?;
    let records = proxy.records();
    ensure!(records.iter().any(|record| record.injected && record.status == 403), "{records:#?}");
    let layer = image.blobs().last().context("no layer")?;
    let of_layer: Vec<&ProxiedRequest> =
        records.iter().filter(|record| record.path.ends_with(layer.as_str())).collect();
    let (cut, resumed) = (of_layer.first().context("no request")?, of_layer.last().context("no request")?);
    ensure!(cut.range.is_none() && cut.bytes < MIB && cut.authorized, "{of_layer:#?}");
    ensure!(resumed.range.is_some() && resumed.status == 206, "{of_layer:#?}");
    ensure!(resumed.bytes < image.size(), "fetched again what was there: {of_layer:#?}");
    Ok(())
}

/// The process that the next test kills: it starts the parts of a test, prints their ids, and hangs.
#[tokio::test]
#[ignore = "run by sigkill_leaves_nothing_behind"]
async fn victim() -> Result<()> {
    let registry = Registry::start().await?;
    let containerd = Containerd::start("victim").await?;
    let mut shell = Command::new("sh");
    shell.args(["-c", "sleep 1000 & sleep 1000"]);
    let shell = Child::spawn(&*Place::here()?, "shell", shell)?;
    println!("READY {} {} {}", Place::here()?.dir().display(), shell.pid(), reaper::pid()?);
    std::future::pending::<()>().await;
    drop((registry, containerd));
    Ok(())
}

#[tokio::test]
async fn sigkill_leaves_nothing_behind() -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["harness::victim", "--exact", "--ignored", "--nocapture"]);
    let mut victim = Child::spawn(&*Place::here()?, "victim", command)?;
    let said = prepull_e2e::cleanup::eventually("the victim is ready", SOON, async || {
        let log = victim.log();
        let line = log.lines().find_map(|line| line.split_once("READY ")).context("not ready")?;
        Ok(line.1.to_owned())
    });
    let said = said.await.with_context(|| victim.log())?;
    let [dir, shell, reaper] = said.split(' ').collect::<Vec<_>>()[..] else { bail!("it said {said}") };
    let started = processes_with(dir)?;
    ensure!(started.len() >= 2, "a registry and a containerd run: {started:?}");
    let in_group = processes_in_group(shell)?;
    ensure!(in_group.len() >= 3, "the shell and its children run: {in_group:?}");

    victim.kill9()?;
    prepull_e2e::cleanup::eventually("the reaper is done", SOON, async || {
        ensure!(!std::path::Path::new("/proc").join(reaper).exists(), "it still works");
        Ok(())
    })
    .await?;
    assert_eq!(processes_with(dir)?, Vec::<String>::new());
    assert_eq!(processes_in_group(shell)?, Vec::<String>::new());
    ensure!(!std::path::Path::new(dir).exists(), "{dir} is still there");
    Ok(())
}

/// Group, id and command line of the processes with a text in their command line.
fn processes_with(text: &str) -> Result<Vec<String>> {
    processes(|line| line.contains(text))
}

/// Group, id and command line of the processes of a group.
fn processes_in_group(group: &str) -> Result<Vec<String>> {
    processes(|line| line.split_whitespace().next() == Some(group))
}

fn processes(which: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let output = Command::new("ps").args(["-ww", "-eo", "pgid,pid,args"]).stdin(Stdio::null()).output()?;
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(lines.lines().filter(|line| which(line)).map(str::to_owned).collect())
}

#[tokio::test]
async fn a_kept_demo_keeps_its_logs() -> Result<()> {
    let place = Place::here()?;
    let logs = place.new_dir("logs")?;
    std::fs::write(logs.join(".prepull-e2e-logs"), "")?;
    std::fs::write(logs.join("demo.log"), "kept")?;
    // A `sleep`, as the one that the demo leaves behind.
    let mut keeper = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn()?;
    std::fs::write(logs.join(".kept"), keeper.id().context("it has ended")?.to_string())?;
    let run = async |status: u8| -> Result<(Option<i32>, String)> {
        let mut command = tokio::process::Command::new("bash");
        let script = prepull_e2e::parts::setup_dir().join("with-parts.sh");
        command.arg(script).args([
            "/nowhere",
            "bash",
            "-c",
            &format!("echo in $PREPULL_E2E_LOGS.; exit {status}"),
        ]);
        // An unused cluster, so that none is looked for.
        command.env("PREPULL_E2E_KUBECONFIG", "none").env("PREPULL_E2E_LOGS", &logs).env_remove("KEEP");
        let output = command.kill_on_drop(true).output().await?;
        let said = [output.stdout, output.stderr].concat();
        Ok((output.status.code(), String::from_utf8(said)?))
    };

    let (status, said) = run(0).await?;
    ensure!(status == Some(0) && said.contains(&format!("in {}-2.", logs.display())), "{said}");
    assert_eq!(std::fs::read_to_string(logs.join("demo.log"))?, "kept");

    // The demo has ended. This run is interrupted, and hasn't failed.
    keeper.kill().await?;
    let (status, said) = run(130).await?;
    ensure!(status == Some(130) && said.contains(&format!("in {}.", logs.display())), "{said}");
    ensure!(said.contains("interrupted after") && !said.contains("FAILED"), "{said}");
    ensure!(!logs.join("demo.log").exists(), "the logs of the last run are still there");
    Ok(())
}
