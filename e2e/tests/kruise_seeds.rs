//! The examples of Kruise's manual, word for word: its YAML, its commands and their output. The images are those of
//! Docker Hub, which the containerds of these tests find on loopback; the nodes have the names of the manual.

use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::kruise::manual::{
    EDIT, EDITED, EMPTY_NODE_IMAGE, FAQ, JOB, JOB_IN_ENGLISH, LIST, PATCH, POLICY, READ, SANDBOX, SECRETS,
};
use prepull_e2e::kruise::{KruiseObject, PullJobKind};
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const BOTH: &str = "can not set both names and labelSelector in this spec.selector";
const NGINX: &str = "docker.io/library/nginx:1.9.1";

/// Starts a registry for docker.io, with the images of the manual.
async fn hub() -> Result<Registry> {
    let hub = Registry::start().with_host("docker.io").await?;
    for image in ["nginx:1.9.1", "busybox:1.29.2", "ubuntu:latest"] {
        hub.seed(&Image::small(image)?, &format!("library/{image}"))?;
    }
    Ok(hub)
}

/// Starts two nodes. The second has the label of the manual.
async fn stage() -> Result<Stage> {
    let stage = Stage::with_kruise(&["node-1", "node-2"]).await?;
    stage.cluster.label_node("node-2", "node-type", Some("xxx")).await?;
    stage.cluster.node_image("node-2").until_met("has the label", labelled).await?;
    Ok(stage)
}

fn labelled(node: &prepull_api::crd::kruise::NodeImage) -> bool {
    node.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("node-type"))
}

/// Removes a part from a text, which must contain it.
fn without(text: &str, part: &str) -> String {
    assert!(text.contains(part), "no {part:?} in {text}");
    text.replacen(part, "", 1)
}

/// Applies an invalid job, which the API server (since Kubernetes 1.25) or the status rejects.
async fn is_refused<K: PullJobKind>(cluster: &Cluster, name: &str, yaml: &str, words: &str) -> Result<()> {
    match cluster.kubectl_apply(yaml).await {
        Ok(_) => {
            let job: KruiseObject<K> = cluster.applied_job("default", name);
            job.message_contains(words).await?;
            ensure!(job.get().await?.ended().is_none(), "it is over");
        }
        Err(error) => ensure!(format!("{error:#}").contains(words), "{error:#}"),
    }
    Ok(())
}

#[tokio::test]
async fn names_and_labels_exclude_each_other() -> Result<()> {
    let _hub = hub().await?;
    let stage = stage().await?;
    let job: KruisePullJob = stage.cluster.applied_job("default", "job-with-always");
    let (names, labels) =
        ("    names:\n    - node-1\n    - node-2\n", "    matchLabels:\n      node-type: xxx\n");
    for (yaml, other, nodes) in
        [(JOB_IN_ENGLISH, names, vec!["node-2"]), (JOB, labels, vec!["node-1", "node-2"])]
    {
        is_refused::<ImagePullJob>(&stage.cluster, "job-with-always", yaml, BOTH).await?;
        stage.cluster.kubectl_apply(&without(yaml, other)).await?;
        let status = job.completes().await?;
        let counts = (status.desired, status.active, status.succeeded, status.failed);
        let nodes_of_job = i32::try_from(nodes.len())?;
        assert_eq!(counts, (nodes_of_job, 0, nodes_of_job, 0), "{status:?}");
        assert_eq!(status.message, "job has completed");
        ensure!(status.start_time.is_some() && status.start_time <= status.completion_time);
        for node in ["node-1", "node-2"] {
            let has = stage.edge(node)?.has_image(NGINX).await?;
            assert_eq!(has, nodes.contains(&node), "{node}");
        }
        for node in nodes {
            let wanted = stage.cluster.node_image(node).tag("nginx", "1.9.1").is_requested().await?;
            let limits = wanted.pull_policy.unwrap_or_default();
            assert_eq!((limits.timeout_seconds, limits.backoff_limit), (Some(300), Some(3)), "{limits:?}");
            assert_eq!(limits.active_deadline_seconds, Some(1200), "{limits:?}");
        }
        job.delete().await?;
        job.is_gone().await?;
    }
    Ok(())
}

#[tokio::test]
async fn pod_selectors_of_the_manuals_work() -> Result<()> {
    let _hub = hub().await?;
    let stage = stage().await?;
    stage.cluster.create_pod("default", "app", "node-2", &[("pod-label", "xxx")]).await?;
    stage.cluster.create_pod("default", "other", "node-1", &[("pod-label", "yyy")]).await?;
    let job: KruisePullJob = stage.cluster.applied_job("default", "job-with-always");
    let selector = "    names:\n    - node-1\n    - node-2\n    matchLabels:\n      node-type: xxx\n";
    let comment = |yaml: &str, mark: &str, by: &str| {
        let lines = yaml.lines().map(|line| {
            let comment = line.trim_start().starts_with('#');
            if comment { line.replacen(mark, by, 1) } else { line.to_owned() }
        });
        lines.collect::<Vec<_>>().join("\n")
    };
    let chinese = comment(JOB, "#", " ");
    // The indentation of the requirement in the manual is not valid YAML.
    let (wrong, right) = (
        "       operator: In\n         values:\n         - xxx",
        "      operator: In\n      values:\n      - xxx",
    );
    ensure!(chinese.contains(wrong), "{chinese}");
    for yaml in [comment(JOB_IN_ENGLISH, "# ", ""), chinese.replace(wrong, right)] {
        let both = without(&yaml, "    names:\n    - node-1\n    - node-2\n");
        let words = "can not set both selector and podSelector";
        is_refused::<ImagePullJob>(&stage.cluster, "job-with-always", &both, words).await?;
        let line = yaml.lines().find(|line| line.starts_with("  selector:")).context("no selector")?;
        let yaml = without(&without(&yaml, selector), &format!("{line}\n"));
        stage.cluster.kubectl_apply(&yaml).await?;
        let status = job.completes().await?;
        assert_eq!((status.desired, status.succeeded), (1, 1), "{status:?}");
        ensure!(stage.edge("node-2")?.has_image(NGINX).await?);
        ensure!(!stage.edge("node-1")?.has_image(NGINX).await?, "no such pod is there");
        job.delete().await?;
        job.is_gone().await?;
        stage.edge("node-2")?.remove_image(NGINX).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_list_runs_with_one_selector() -> Result<()> {
    let _hub = hub().await?;
    let stage = stage().await?;
    let refused = async |yaml: &str, words: &str| {
        is_refused::<ImageListPullJob>(&stage.cluster, "job-with-always", yaml, words).await
    };
    let without_dots = without(LIST, "  - ...\n");
    refused(&without_dots, BOTH).await?;
    let labels = "    matchLabels:\n      node-type: xxx\n";
    refused(&without(LIST, labels), "...").await?;

    stage.cluster.kubectl_apply(&without(&without_dots, labels)).await?;
    let list: KruiseListJob = stage.cluster.applied_job("default", "job-with-always");
    let status = list.completes().await?;
    let counts = (status.desired, status.active, status.completed, status.succeeded);
    assert_eq!(counts, (2, 0, 2, 2), "{status:?}");
    assert_eq!(status.failed_image_statuses, []);
    for node in ["node-1", "node-2"] {
        for image in [NGINX, "docker.io/library/busybox:1.29.2"] {
            ensure!(stage.edge(node)?.has_image(image).await?, "{image} is not on {node}");
        }
    }
    let children = list.children().await?;
    let images: Vec<_> = children.iter().map(|child| child.spec.image.as_str()).collect();
    assert_eq!(images, ["busybox:1.29.2", "nginx:1.9.1"]);
    let table = stage.cluster.shell("kubectl get imagelistpulljob").await?;
    let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "TOTAL", "SUCCEEDED", "COMPLETED", "AGE"], "{table}");
    assert_eq!(rows[1][..4], ["job-with-always", "2", "2", "2"], "{table}");
    Ok(())
}

/// A job with this name that contains a fragment of the manual.
fn with_fragment(name: &str, fragment: &str) -> Result<String> {
    let mut job = json!({
        "apiVersion": "apps.kruise.io/v1alpha1",
        "kind": "ImagePullJob",
        "metadata": {"name": name},
        "spec": {"image": "nginx:1.9.1"},
    });
    // The dots stand for omitted fields.
    let fragment: Value = serde_saphyr::from_str(&fragment.replace("  ...\n", ""))?;
    for (key, value) in fragment["spec"].as_object().context("no spec")? {
        job["spec"][key] = value.clone();
    }
    Ok(job.to_string())
}

#[tokio::test]
async fn secrets_are_named_by_the_manual() -> Result<()> {
    let hub = Registry::start().with_host("docker.io").user("me", &password("me")).await?;
    hub.seed(&Image::small("nginx:1.9.1")?, "library/nginx:1.9.1")?;
    let stage = Stage::with_kruise(&["node-1"]).await?;
    let other = ("registry.example", "me", &*password("other"));
    stage.cluster.registry_secret("default", "secret-name1", &[other]).await?;
    stage.cluster.registry_secret("default", "secret-name2", &[hub.login("me")?]).await?;
    let job: KruisePullJob = stage.cluster.apply_yaml(&with_fragment("private", SECRETS)?).await?;
    let status = job.completes().await?;
    assert_eq!((status.succeeded, status.failed), (1, 0), "{status:?}");
    ensure!(stage.edge("node-1")?.has_image(NGINX).await?);
    Ok(())
}

#[tokio::test]
async fn sandbox_metadata_reaches_the_runtime() -> Result<()> {
    let _hub = hub().await?;
    let cluster = Cluster::with_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    cluster.edge_nodes(&["node-1"]).await?;
    let node = EdgeNode::start(&cluster, &cloud, "node-1").eavesdropped().await?;
    // A job takes the nodes that are there when it begins.
    cluster.node_image("node-1").exists().await?;
    let job: KruisePullJob = cluster.apply_yaml(&with_fragment("metadata", SANDBOX)?).await?;
    assert_eq!(job.completes().await?.succeeded, 1);
    for said in
        ["io.kubernetes.image.metrics.tags", "cluster=cn-shanghai", "io.kubernetes.image.app", "nginx:1.9.1"]
    {
        ensure!(node.has_sent_to_runtime(said)?, "{said}");
    }
    ensure!(!node.has_sent_to_runtime("cluster=cn-hangzhou")?);
    Ok(())
}

#[tokio::test]
async fn both_image_pull_policies_work() -> Result<()> {
    let hub = hub().await?;
    let stage = Stage::with_kruise(&["node-1"]).await?;
    let asked = || {
        hub.requests().for_repository("library/nginx").filter(|r| r.is_manifest() && r.status == 200).len()
    };
    let node = stage.edge("node-1")?;
    let (first, second) = (Image::small("nginx:1.9.1")?, Image::small("nginx, rebuilt")?);
    for (policy, other, digest) in
        [("IfNotPresent", "Always | ", first.digest()), ("Always", " | IfNotPresent", second.digest())]
    {
        let yaml = with_fragment(&policy.to_lowercase(), &without(POLICY, other))?;
        let job: KruisePullJob = stage.cluster.apply_yaml(&yaml).await?;
        job.completes().await?;
        if policy == "IfNotPresent" {
            // The tag moves, and a node that has the image does not ask the registry.
            hub.seed(&second, "library/nginx:1.9.1")?;
            let before = asked();
            let again = yaml.replace("ifnotpresent", "ifnotpresent-again");
            stage.cluster.apply_yaml::<ImagePullJob>(&again).await?.completes().await?;
            assert_eq!(asked(), before, "the registry was asked");
        }
        assert_eq!(node.images().await?.get(NGINX).map(String::as_str), Some(digest), "{policy}");
    }
    Ok(())
}

/// Checks that everything in the manual is present, with the same values except for times and reasons of failures.
fn shows(found: &Value, manual: &Value, path: &str) -> Result<()> {
    match manual {
        Value::Object(fields) => {
            for (key, value) in fields {
                shows(&found[key], value, &format!("{path}.{key}"))?;
            }
        }
        Value::Array(items) => {
            assert_eq!(found.as_array().map(Vec::len), Some(items.len()), "{path}: {found}");
            for (index, item) in items.iter().enumerate() {
                shows(&found[index], item, &format!("{path}[{index}]"))?;
            }
        }
        _ if path.ends_with("Time") => {
            found.as_str().context("no time")?.parse::<jiff::Timestamp>().context(path.to_owned())?;
        }
        _ if path.contains("imageStatuses") && path.ends_with("message") => {
            ensure!(found.as_str().is_some_and(|text| !text.is_empty()), "{path}: {found}");
        }
        _ => assert_eq!(found, manual, "{path}"),
    }
    Ok(())
}

#[tokio::test]
async fn the_faqs_steps_explain_a_failure() -> Result<()> {
    // The registry has no such image.
    let _hub = Registry::start().with_host("docker.io").await?;
    let nodes = ["cn-hangzhou.x.125", "cn-hangzhou.x.126", "cn-hangzhou.x.127", "cn-hangzhou.x.128"];
    let stage = Stage::with_kruise(&nodes).await?;
    let line = JOB.lines().find(|line| line.starts_with("  selector:")).context("no selector")?;
    let selector = "    names:\n    - node-1\n    - node-2\n    matchLabels:\n      node-type: xxx\n";
    stage.cluster.kubectl_apply(&without(JOB, &format!("{line}\n{selector}"))).await?;
    let job: KruisePullJob = stage.cluster.applied_job("default", "job-with-always");
    let status = job.completes().await?;
    assert_eq!((status.succeeded, status.failed), (0, 4), "{status:?}");

    let words = |table: &str| -> Vec<Vec<String>> {
        table.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let (command, printed) = FAQ[0];
    let (found, manual) = (words(&stage.cluster.shell(command).await?), words(printed));
    assert_eq!(found.len(), 2, "{found:?}");
    for (found, manual) in found.iter().zip(&manual) {
        // All columns except for the age.
        let but_age = |row: &[String]| [row[..5].to_vec(), row[6..].to_vec()].concat();
        assert_eq!(but_age(found), but_age(manual));
    }
    assert_eq!(found[0][5], "AGE");
    for (command, printed) in &FAQ[1..] {
        let found: Value = serde_saphyr::from_str(&stage.cluster.shell(command).await?)?;
        let manual: Value = serde_saphyr::from_str(printed)?;
        shows(&found["status"], &manual["status"], "status")?;
        assert_eq!(found["kind"], manual["kind"]);
    }
    let failed = stage.cluster.node_image(nodes[0]).tag("nginx", "1.9.1").fails().await?;
    // Without the image's name, which is beside it, and with the mirror of the request.
    ensure!(failed.message.starts_with("not found at 127.0.0.1:"), "{failed:?}");
    Ok(())
}

#[tokio::test]
async fn a_node_image_is_edited_by_the_manual() -> Result<()> {
    let _hub = hub().await?;
    let cluster = Cluster::with_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let node = cluster.node("node-xxx").edge().ready();
    node.label("kubernetes.io/arch", "amd64").label("kubernetes.io/os", "linux").create().await?;
    let edge = EdgeNode::start(&cluster, &cloud, "node-xxx").await?;
    let node_image = cluster.node_image("node-xxx");
    node_image.exists().await?;
    let manual: Value = serde_saphyr::from_str(EMPTY_NODE_IMAGE)?;
    eventually("it looks as in the manual", SOON, async || {
        let found: Value = serde_saphyr::from_str(&cluster.shell(READ).await?)?;
        for part in ["metadata", "spec"] {
            shows(&found[part], &manual[part], part)?;
        }
        assert_eq!(found["spec"], manual["spec"]);
        // A new NodeImage may have no status yet.
        if !found["status"].is_null() {
            shows(&found["status"], &manual["status"], "status")?;
        }
        Ok(())
    })
    .await?;

    let tag = node_image.tag("ubuntu", "latest");
    cluster.kubectl_edit(EDIT, "spec: {}", EDITED).await?;
    let status = tag.succeeds().await?;
    ensure!(edge.has_image("docker.io/library/ubuntu:latest").await?);
    assert_eq!((status.progress, status.tag.as_str()), (100, "latest"), "{status:?}");
    let limits = tag.spec().await?.context("it is wanted for 300 s")?.pull_policy.context("as it was")?;
    assert_eq!(limits.active_deadline_seconds, Some(1200), "{limits:?}");
    let seen = node_image.get().await?.status.unwrap_or_default();
    assert_eq!((seen.desired, seen.succeeded, seen.failed, seen.pulling), (1, 1, 0, 0), "{seen:?}");

    node_image.patch_spec(json!({"images": null})).await?;
    tag.is_gone().await?;
    edge.remove_image("docker.io/library/ubuntu:latest").await?;
    cluster.shell(PATCH).await?;
    tag.succeeds().await?;
    ensure!(edge.has_image("docker.io/library/ubuntu:latest").await?);
    let read = cluster.shell(READ).await?;
    ensure!(read.contains("phase: Succeeded"), "{read}");
    Ok(())
}
