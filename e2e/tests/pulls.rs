//! Successful jobs: images, digests, bytes, and the output of kubectl.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::job::ImageSource;
use prepull_api::crd::status::{Action, ImagePrePullJobStatus};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::parts;
use prepull_e2e::prelude::*;

const EPOCH: Time = Time(jiff::Timestamp::UNIX_EPOCH);
const NODES: [&str; 3] = ["edge-1", "edge-2", "edge-3"];

/// An image by its parts, with a secret of its own.
fn source(registry: &Registry, repository: &str, tag: &str, secret: &str) -> ImageSource {
    ImageSource {
        registry: Some(registry.host().to_owned()),
        repository: repository.to_owned(),
        tag: Some(tag.to_owned()),
        image_secret: Some(secret.to_owned()),
        ..ImageSource::default()
    }
}

#[tokio::test]
async fn three_nodes_pull_from_two_registries() -> Result<()> {
    let authority = Authority::new("a CA of its own")?;
    let plain = Registry::start().user("alice", &password("alice")).user("bob", &password("bob")).await?;
    let tls = Registry::start()
        .with_host("harbor.example")
        .user("carol", &password("carol"))
        .user("dave", &password("dave"))
        .tls(&authority)
        .await?;
    let stage = Stage::with_edges(&NODES).await?;
    let wanted = [
        (&plain, "alice", "team/web", Image::small("web")?),
        (&plain, "bob", "team/cache", Image::of_layers("cache", &[2 * MIB, MIB])?),
        (&tls, "carol", "shop/app", Image::multi_arch("app")?),
        (&tls, "dave", "model", Image::of_layers("model", &[3 * MIB])?),
    ];
    let mut job = stage.cluster.job("three-nodes").on(NODES).concurrency(3);
    for (registry, user, repository, image) in &wanted {
        registry.push(image, &format!("{repository}:v1"), user).await?;
        stage.cluster.registry_secret("pull-secrets", user, &[registry.login(user)?]).await?;
        let source = source(registry, repository, "v1", &format!("pull-secrets/{user}"));
        job = job.source(ImageSource { name: Some(format!("of-{user}")), ..source });
    }
    let job = job.apply().await?;
    let status = job.completes().await?;

    assert_eq!((status.summary.desired, status.summary.successful), (3, 3), "{:?}", status.summary);
    assert_eq!(status.reason, "");
    assert!(status.start_time.is_some() && status.start_time <= status.completion_time);
    let digests: BTreeMap<_, _> = wanted
        .iter()
        .map(|(registry, _, repository, image)| {
            (registry.image(&format!("{repository}:v1")), image.digest().to_owned())
        })
        .collect();
    for node in NODES {
        assert_eq!(stage.edge(node)?.images().await?, digests, "in the containerd of {node}");
        let of_node = status.node(node).context("not in the status")?;
        assert_eq!((of_node.phase, of_node.reason.as_str()), (NodePhase::Successful, ""));
        let flow: Vec<_> = of_node.action_flow.iter().map(|step| (step.action, step.status)).collect();
        assert_eq!(flow, [(Action::Check, Tristate::True), (Action::Pull, Tristate::True)]);
        for (registry, user, repository, image) in &wanted {
            let reference = registry.image(&format!("{repository}:v1"));
            let of_image = status.image(node, &reference).with_context(|| reference.clone())?;
            assert_eq!(of_image.name, Some(format!("of-{user}")));
            assert_eq!(of_image.pulled_image, reference);
            assert_eq!(of_image.digest.as_deref(), Some(image.digest()), "{of_image:?}");
            assert_eq!((of_image.status, of_image.attempts), (Tristate::True, 1), "{of_image:?}");
            let bytes = of_image.bytes.context("containerd can tell the bytes")?;
            assert_eq!(bytes.done, bytes.total, "{of_image:?}");
            assert_eq!(bytes.total, image.size(), "{of_image:?}");
        }
    }
    for (registry, user, repository, _) in &wanted {
        assert_eq!(
            registry.requests().for_repository(repository).users(),
            BTreeSet::from([*user]),
            "{repository}"
        );
    }

    // The output of kubectl.
    let columns = stage.cluster.kubectl(&["get", "ippj"]).await?;
    let rows: Vec<Vec<_>> = columns.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "PHASE", "DESIRED", "SUCCESSFUL", "FAILED", "SKIPPED", "AGE"], "{columns}");
    assert_eq!(rows[1][..5], ["three-nodes", "Completed", "3", "3", "0"], "{columns}");
    let wide = stage.cluster.kubectl(&["get", "ippj", "-o", "wide"]).await?;
    ensure!(wide.lines().next().is_some_and(|header| header.trim_end().ends_with("REASON")), "{wide}");

    let managers = "jsonpath={.metadata.managedFields[*].manager}";
    let managers = stage.cluster.kubectl(&["get", "ippj", "three-nodes", "-o", managers]).await?;
    ensure!(managers.split(' ').any(|manager| manager == "cloudcore-prepull"), "{managers}");

    let (kind, message) = job.event("Completed").await?;
    assert_eq!((kind.as_str(), message.as_str()), ("Normal", "3 successful, 0 failed, 0 unknown"));
    let events = job.events().await?;
    let reasons: Vec<_> = events.iter().map(|(_, reason, _)| reason.as_str()).collect();
    assert_eq!(reasons, ["Started", "Completed"], "{events:?}");
    let described = stage.cluster.kubectl(&["describe", "ippj", "three-nodes"]).await?;
    ensure!(described.contains("4 images on 3 nodes, 0 skipped"), "no event in {described}");
    Ok(())
}

/// A manifest of KubeEdge's documentation, word for word except for the names.
fn kubeedge_manifest(version: &str, name: &str, image: &str) -> String {
    format!(
        r#"apiVersion: operations.kubeedge.io/{version}
kind: ImagePrePullJob
metadata:
  name: {name}
  labels:
    description: ImagePrePullLabel
spec:
  imagePrePullTemplate:
    concurrency: 1
    images:
      - {image}
    nodeNames:
      - edge-1
      - edge-2
    checkItems:
      - disk
    failureTolerate: "0.3"
    imageSecrets: default/my-registry
    timeoutSeconds: 300
    retryTimes: 1
"#
    )
}

/// Removes the differences between the statuses of two equal jobs.
fn comparable(mut status: ImagePrePullJobStatus, image: &str) -> serde_json::Value {
    (status.start_time, status.completion_time, status.active_since) = (None, None, None);
    status.spec_hash.clear();
    status.conditions.iter_mut().for_each(|condition| condition.last_transition_time = EPOCH);
    for node in &mut status.node_status {
        node.start_time = None;
        node.action_flow.iter_mut().for_each(|step| step.time = EPOCH);
    }
    let text = serde_json::to_string(&status).unwrap_or_default().replace(image, "IMAGE");
    serde_json::from_str(&text).unwrap_or_default()
}

#[tokio::test]
async fn kubeedges_manifest_works_in_both_versions() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = Stage::with_edges(&["edge-1", "edge-2"]).await?;
    stage.cluster.registry_secret("default", "my-registry", &[registry.login("alice")?]).await?;
    let mut statuses = Vec::new();
    for version in ["v1alpha1", "v1alpha2"] {
        let image = Image::small("kubeedge")?;
        let reference = registry.seed(&image, &format!("team/{version}:v1.0.0"))?;
        let file = stage.cluster.place().dir().join("job.yaml");
        let name = format!("imageprepull-{version}");
        std::fs::write(&file, kubeedge_manifest(version, &name, &reference))?;
        let file = file.to_str().context("not UTF-8")?;
        stage.cluster.kubectl(&["apply", "-f", file]).await?;
        let status = stage.cluster.existing_job(&name).completes().await?;
        assert_eq!(status.summary.successful, 2);
        for edge in stage.edges() {
            assert_eq!(edge.images().await?.get(&reference).map(String::as_str), Some(image.digest()));
        }
        statuses.push(comparable(status, &reference));
        assert_eq!(
            registry.requests().for_repository(&format!("team/{version}")).users(),
            BTreeSet::from(["alice"])
        );

        let resource = format!("imageprepulljobs.{version}.operations.kubeedge.io");
        let phase = ["get", &resource, &name, "-o", "jsonpath={.apiVersion} {.status.phase}"];
        let read = stage.cluster.kubectl(&phase).await?;
        assert_eq!(read, format!("operations.kubeedge.io/{version} Completed"));
    }
    assert_eq!(statuses[0], statuses[1]);
    Ok(())
}

#[tokio::test]
async fn kubectl_explains_fields_and_accepts_samples() -> Result<()> {
    let cluster = Cluster::start().await?;
    let samples = parts::workspace().join("manifests/samples");
    let files: Vec<_> = std::fs::read_dir(&samples)?.flatten().map(|file| file.path()).collect();
    // The samples of Kruise's API need its definitions.
    let ours = |path: &&PathBuf| !path.to_string_lossy().contains("/kruise-");
    let count = files.iter().filter(ours).count();
    for file in files.iter().filter(ours) {
        cluster.kubectl(&["apply", "-f", file.to_str().context("not UTF-8")?]).await?;
    }
    let objects = cluster.kubectl(&["get", "ippj,ipps", "-o", "name"]).await?;
    assert_eq!(objects.lines().count(), count, "an object in each file: {objects}");
    // The API server publishes the schema of a new definition some seconds later.
    let explained = eventually("the schema is published", SOON, async || {
        cluster.kubectl(&["explain", "imageprepulljob.spec.imagePrePullTemplate"]).await
    })
    .await?;
    for field in [
        "images",
        "imageSources",
        "registrySecrets",
        "imageSecrets",
        "nodeNames",
        "labelSelector",
        "checkItems",
        "failureTolerate",
        "concurrency",
        "timeoutSeconds",
        "retryTimes",
        "imagePullPolicy",
    ] {
        let mut lines = explained.lines().skip_while(|line| {
            !line.trim_start().starts_with(&format!("{field}\t"))
                && !line.trim_start().starts_with(&format!("{field} "))
        });
        let described = lines.nth(1).unwrap_or_default().trim();
        ensure!(
            described.len() > 20 && !described.contains("<no description>"),
            "{field}: {described:?} in\n{explained}"
        );
    }
    ensure!(explained.contains("What to pull, on which nodes, and how."), "{explained}");
    Ok(())
}

#[tokio::test]
async fn a_permanent_failure_spares_other_images() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let host = registry.host();
    stage.cluster.registry_secret("default", "right", &[registry.login("alice")?]).await?;
    stage.cluster.registry_secret("default", "wrong", &[(host, "alice", &password("mallory"))]).await?;
    let first = registry.seed(&Image::small("first")?, "team/first:v1")?;
    let locked = registry.seed(&Image::small("locked")?, "team/locked:v1")?;
    let unknown = registry.image("team/first:v2");
    let last = registry.seed(&Image::small("last")?, "team/last:v1")?;

    let job = |name| {
        let job = stage.cluster.job(name).on(["edge-1"]).retries(3).secret("default/right");
        job.images([&first, &unknown, &last]).source(source(&registry, "team/locked", "v1", "default/wrong"))
    };
    let status = job("no-tolerance").tolerate("0").fails().await?;
    for (reference, word) in [(&locked, "401"), (&unknown, "not found")] {
        let image = status.image("edge-1", reference).context("not in the status")?;
        assert_eq!((image.status, image.attempts, &image.digest), (Tristate::False, 1, &None), "{image:?}");
        ensure!(image.reason.to_lowercase().contains(word), "{image:?}");
        ensure!(!image.reason.contains(CANARY), "{image:?}");
    }
    for reference in [&first, &last] {
        let image = status.image("edge-1", reference).context("not in the status")?;
        assert_eq!((image.status, image.attempts), (Tristate::True, 1), "{image:?}");
        ensure!(stage.edge("edge-1")?.has_image(reference).await?, "{reference}");
    }
    let node = status.node("edge-1").context("not in the status")?;
    assert_eq!(node.phase, NodePhase::Failure);
    let says = "2 of 4 images failed";
    ensure!(node.reason.contains(says) && node.reason.contains(&unknown), "{}", node.reason);
    assert_eq!(status.reason, "1 of 1 nodes failed, more than failureTolerate 0 allows (NotFound 1)");
    // containerd itself retries a few times before it gives up; four attempts would be four times as many requests.
    let asked = registry.requests().filter(|request| request.path.ends_with("/manifests/v2")).len();
    ensure!(asked <= 3, "{asked} requests for {unknown}");

    // A job that tolerates these failures completes.
    let tolerant = job("tolerant").tolerate("1").apply().await?;
    let status = tolerant.completes().await?;
    assert_eq!(status.node("edge-1").map(|node| node.phase), Some(NodePhase::Failure));
    assert_eq!(status.reason, "1 of 1 nodes failed, within failureTolerate 1 (NotFound 1)");
    let (kind, message) = tolerant.event("NodeFailed").await?;
    assert_eq!(kind, "Warning");
    ensure!(message.starts_with("edge-1: ") && message.contains(&unknown), "{message}");
    Ok(())
}

#[tokio::test]
async fn a_manual_pull_ends_with_130() -> Result<()> {
    let registry = Registry::start().await?;
    let containerd = Containerd::start("by-hand").await?;
    let image = Image::small("by-hand")?;
    let reference = registry.seed(&image, "team/app:v1")?;
    let pull = |image: &str| -> Result<tokio::process::Command> {
        let mut command = tokio::process::Command::new(parts::program_path("edgecore-prepull")?);
        command.args(["pull", "--retries", "0", "--runtime-endpoint", &containerd.endpoint(), image]);
        command.stdout(std::process::Stdio::piped()).kill_on_drop(true);
        Ok(command)
    };
    let digest = image.digest().get(..19).context("a digest")?;
    for (line, summary) in [
        (format!("✓ {reference}: pulled, {digest}, "), "✓ 1 image: 1 pulled"),
        (format!("✓ {reference}: already there, {digest}\n"), "✓ 1 image: 1 already there"),
    ] {
        let output = pull(&reference)?.output().await?;
        let said = String::from_utf8(output.stdout)?;
        ensure!(output.status.success() && said.contains(&line) && said.contains(summary), "{said}");
    }

    // A registry that accepts connections and stays silent.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let reference = format!("{}/team/app:v1", silent.local_addr()?);
    let pulling = pull(&reference)?.spawn()?;
    let _asked = tokio::time::timeout(SOON, silent.accept()).await.context("not asked")??;
    let pid =
        pulling.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())).context("ended")?;
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let output = tokio::time::timeout(SOON, pulling.wait_with_output()).await??;
    let said = String::from_utf8(output.stdout)?;
    assert_eq!(output.status.code(), Some(130), "{said}");
    ensure!(said.contains("✗ 1 image: 1 not on this machine"), "{said}");
    Ok(())
}
