//! The shipped manifests on a whole cluster: from a first mistake to an upgrade in the middle of a job, and then the chart.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use prepull_api::crd::upgrade::UpgradeSpec;
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::helm::{CHART, Helm};
use prepull_e2e::kubernetes::{EDGE_NAMESPACE, Installation};
use prepull_e2e::parts;
use prepull_e2e::prelude::*;

const DEPLOYMENT: &str = "deployment/cloudcore-prepull";

/// Drains a worker, and lets it take pods again.
async fn drain(cluster: &Cluster, worker: &str) -> Result<()> {
    let drain = ["drain", worker, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s"];
    cluster.kubectl(&drain).await?;
    cluster.kubectl(&["uncordon", worker]).await.map(drop)
}

/// Name of the worker on which a pod of cloudcore-prepull runs.
async fn worker_of(cluster: &Cluster, pod: &str) -> Result<String> {
    let get = ["--namespace", NAMESPACE, "get", "pod", pod, "--output=jsonpath={.spec.nodeName}"];
    cluster.kubectl(&get).await
}

#[tokio::test]
async fn manifests_install_drain_and_upgrade_as_documented() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_one, _two, edge) = tokio::try_join!(
        kubernetes.add_worker("server-1"),
        kubernetes.add_worker("server-2"),
        kubernetes.add_worker("edge-1"),
    )?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;
    let installation = Installation::copy_manifests(&kubernetes).await?;
    installation.set_images()?;

    // The address was forgotten: the pods end with an error, and hold up no drain.
    installation.apply_folder("cluster").await?;
    crashes(cluster).await?;
    drain(cluster, "server-1").await?;

    let began = Instant::now();
    installation.set_address()?;
    installation.install_cloud().await?;
    let leader = installation.leader_after("").await?;
    println!("rolled out with a leader after {:?}", began.elapsed());
    installation.install_edges().await?;

    let registry = kubernetes.registry();
    let image = registry.seed(&Image::small("installed")?, "team/app:v1")?;
    cluster.job("first").images([&image]).on(["edge-1"]).completes().await?;
    assert!(edge.containerd().has_image(&image).await?);

    // A leader is deleted: another one leads, and continues with the edge.
    cluster.kubectl(&["--namespace", NAMESPACE, "delete", "pod", &leader, "--wait=false"]).await?;
    let leader = installation.leader_after(&leader).await?;
    let second = registry.seed(&Image::small("deleted")?, "team/app:v2")?;
    cluster.job("second").images([&second]).on(["edge-1"]).completes().await?;

    // Kubernetes upgrades the agent here, and no job does.
    let agent = registry.seed(&Image::small("agent")?, "team/edgecore-prepull:v2")?;
    let upgrade = cluster.job("upgrade").images([&agent]).on(["edge-1"]);
    let upgrade = upgrade.spec(|spec| spec.image_pre_pull_template.upgrade = Some(UpgradeSpec::default()));
    let status = upgrade.fails().await?;
    let reason = &status.node("edge-1").context("no node")?.reason;
    ensure!(reason.contains("the agent runs in a container: Kubernetes upgrades it"), "{reason}");

    // Its node is drained.
    installation.is_rolled_out(NAMESPACE, DEPLOYMENT).await?;
    drain(cluster, &worker_of(cluster, &leader).await?).await?;
    let leader = installation.leader_after(&leader).await?;
    installation.is_rolled_out(NAMESPACE, DEPLOYMENT).await?;

    // An upgrade in the middle of a job.
    let layers = [MIB; 6];
    let slow = registry.seed(&Image::of_layers("upgraded", &layers)?, "team/large:v1")?;
    let download = serde_json::from_value(serde_json::json!({"maxRate": "500k"}))?;
    let job = cluster.job("third").images([&slow]).on(["edge-1"]);
    let job = job.spec(|spec| spec.download = Some(download)).apply().await?;
    job.until("the edge pulls", |status| {
        status.node("edge-1").is_some_and(|node| node.phase == NodePhase::InProgress)
    })
    .await?;
    installation.replace_text("cluster/kustomization.yaml", "newTag: 0.1.0", "newTag: 0.1.1")?;
    kubernetes.publish_as("cloudcore-prepull", "0.1.1")?;
    installation.install_cloud().await?;
    let next = installation.leader_after(&leader).await?;
    assert_ne!(worker_of(cluster, &next).await?, "edge-1");
    job.completes().await?;
    let large = Image::of_layers("upgraded", &layers)?;
    let fetched = registry.requests().for_repository("team/large").blob_fetches().total_bytes();
    assert!(fetched < large.size() + MIB / 10, "each byte once: {fetched}");

    // No request by cloudcore-prepull was refused.
    let refused = kubernetes.refusals()?;
    let ours: Vec<_> = refused.iter().filter(|refusal| refusal.is_of(NAMESPACE)).collect();
    assert!(ours.is_empty(), "{ours:?}");
    let others: BTreeSet<_> = refused.iter().map(|refusal| refusal.user.clone()).collect();
    println!("refused to others: {others:?}");

    let again = registry.seed(&Image::small("charted")?, "team/app:v3")?;
    chart_takes_over_upgrades_and_leaves(&kubernetes, &installation, &again).await
}

/// The chart over the same objects, as its README documents it: it takes them over, upgrades them, leaves jobs and definitions
/// at its removal, and installs them from the start.
async fn chart_takes_over_upgrades_and_leaves(
    kubernetes: &Kubernetes,
    installation: &Installation<'_>,
    image: &str,
) -> Result<()> {
    let cluster = kubernetes.cluster();
    let helm = Helm::find().await?;
    let kubeconfig = cluster.kubeconfig().display().to_string();
    let run = async |line: &[&str]| {
        let to = ["--kubeconfig", &kubeconfig, "--namespace", NAMESPACE];
        parts::run_command(helm.command(&[line, &to].concat())).await
    };
    let advertise = format!("advertise={{{}}}", kubernetes.balancer());
    let repository = format!("image.repository={}", kubernetes.registry().image("cloudcore-prepull"));
    let values = ["--set", &advertise, "--set", &repository, "--set", "image.tag=0.1.1"];
    let pulls = async |name: &str| {
        let job = cluster.job(name).images([image]).on(["edge-1"]).policy("Always");
        job.completes().await.map(drop)
    };

    run(&[&["install", "prepull", CHART, "--take-ownership"], &values[..]].concat()).await?;
    installation.is_rolled_out(NAMESPACE, DEPLOYMENT).await?;
    pulls("taken-over").await?;

    let changed = ["--set", "replicas=1", "--set", "podAnnotations.upgraded=yes"];
    run(&[&["upgrade", "prepull", CHART], &values[..], &changed].concat()).await?;
    installation.is_rolled_out(NAMESPACE, DEPLOYMENT).await?;
    let now = "--output=jsonpath={.spec.replicas} {.spec.template.metadata.annotations.upgraded}";
    let now = cluster.kubectl(&["--namespace", NAMESPACE, "get", DEPLOYMENT, now]).await?;
    assert_eq!(now, "1 yes");
    pulls("upgraded").await?;

    run(&["uninstall", "prepull", "--wait"]).await?;
    let gone = ["--namespace", NAMESPACE, "get", DEPLOYMENT, "--ignore-not-found"];
    assert_eq!(cluster.kubectl(&gone).await?, "", "the Deployment is still there");
    let left = cluster.existing_job("taken-over").status().await?;
    assert_eq!(left.phase, JobPhase::Completed, "jobs and definitions stay");

    // From the start, and with the agents: the DaemonSet is the chart's now.
    let agent = format!("agents.image.repository={}", kubernetes.registry().image("edgecore-prepull"));
    let room =
        "agents.settings.PREPULL_DISK_MIN_FREE=64MiB,agents.settings.PREPULL_IMAGE_GC_HIGH_THRESHOLD=100%";
    let agents = [
        "agents.enabled=true",
        "agents.createNamespace=false",
        "agents.podAnnotations.of=chart",
        &agent,
        room,
    ];
    let agents: Vec<_> = agents.into_iter().flat_map(|value| ["--set", value]).collect();
    let install = ["install", "prepull", CHART, "--take-ownership"];
    run(&[&install[..], &values, &agents].concat()).await?;
    installation.is_rolled_out(NAMESPACE, DEPLOYMENT).await?;
    installation.is_rolled_out(EDGE_NAMESPACE, "daemonset/edgecore-prepull").await?;
    let of = ["get", "pods", "--selector=app.kubernetes.io/name=edgecore-prepull"];
    let of = [
        &["--namespace", EDGE_NAMESPACE],
        &of[..],
        &["--output=jsonpath={.items[*].metadata.annotations.of}"],
    ]
    .concat();
    assert_eq!(cluster.kubectl(&of).await?, "chart");
    pulls("installed-again").await?;
    Ok(())
}

/// Waits until the pods have ended with the error that names the missing setting.
async fn crashes(cluster: &Cluster) -> Result<()> {
    let logs = ["--namespace", NAMESPACE, "logs", "--selector=app.kubernetes.io/name=cloudcore-prepull"];
    eventually("the pods end", Duration::from_secs(60), async || {
        let said = cluster.kubectl(&logs).await?;
        ensure!(said.contains("is the placeholder"), "{said}");
        Ok(())
    })
    .await
}
