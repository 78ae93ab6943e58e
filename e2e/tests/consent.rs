//! The consent of a secret's owner: the use and the knowledge that a tenant's job gets of a foreign secret.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::credentials::{ALLOW, ALLOW_HOSTS};
use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;
use serde_json::json;

/// From the consent to the end of a small pull. After two attempts a node retries by itself after ten seconds.
const WITHIN_SECONDS: Duration = Duration::from_secs(9);

const DISPATCHES: &str = "cloudcore_prepull_dispatches_total";

/// A stage with a cloud that uses a secret only for jobs that its owner allows.
async fn stage() -> Result<Stage> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).requires_consent().await?;
    Stage::from_parts(cluster, cloud, &["edge-1"]).await
}

/// A registry of the attacker that accepts the victim's credential, so its log shows which node was tricked into
/// sending it.
async fn thief(name: &str) -> Result<Registry> {
    Registry::start().with_host(name).user("alice", &password("alice")).await
}

/// Everything that a viewer of the job learns about a secret, with the names of job and secret removed.
async fn learnt(job: &Job, secret: &str, status: &ImagePrePullJobStatus) -> Result<Vec<String>> {
    let node = status.node("edge-1").context("not in the status")?;
    let image = node.image_status.first().context("no image")?;
    let conditions = status.conditions.iter().map(|c| format!("{} {} {}", c.type_, c.status, c.message));
    let flow = node.action_flow.iter().map(|step| step.reason.clone());
    let (kind, note) = job.event("NodeFailed").await?;
    let texts = [status.reason.clone(), node.reason.clone(), image.reason.clone(), format!("{kind} {note}")];
    let codes = format!("{:?} {:?} {:?}", node.code, image.code, status.failures_by_code);
    let texts = texts.into_iter().chain(conditions).chain(flow).chain([codes]);
    Ok(texts.map(|text| text.replace(secret, "SECRET").replace(job.name(), "JOB")).collect())
}

#[tokio::test]
async fn a_job_learns_nothing_of_foreign_secrets() -> Result<()> {
    let thief = thief("thief.example").await?;
    let stage = stage().await?;
    let cluster = &stage.cluster;
    let reference = thief.seed(&Image::small("loot")?, "team/loot:v1")?;
    let login = [thief.login("alice")?];
    cluster.registry_secret("bank", "unannotated", &login).await?;
    cluster.registry_secret("bank", "for-others", &login).await?;
    cluster.annotate_secret("bank", "for-others", ALLOW, Some("payroll,night-*")).await?;
    cluster.registry_secret("bank", "malformed", &login).await?;
    cluster.annotate_secret("bank", "malformed", ALLOW, Some("*,Everybody!")).await?;
    cluster.registry_secret("bank", "elsewhere", &[("other.example", "u", &*password("u"))]).await?;
    let opaque: [(&str, &[u8]); 1] = [("password", b"1")];
    cluster.secret("bank", "opaque", "Opaque", &opaque).await?;

    let mut all = BTreeSet::new();
    let secrets = ["unannotated", "for-others", "malformed", "elsewhere", "opaque", "missing"];
    for secret in secrets {
        // With so little time the job doesn't wait for an owner.
        let job = cluster.job(&format!("steal-{secret}")).on(["edge-1"]).images([&reference]);
        let job = job.secret(&format!("bank/{secret}")).timeout_seconds(10).tolerate("0").apply().await?;
        let status = job.fails().await?;
        let image = status.image("edge-1", &reference).context("no image")?;
        assert_eq!((image.code, image.attempts), (Some(FailureCode::SecretUnusable), 0), "{image:?}");
        all.insert(learnt(&job, secret, &status).await?);
    }
    assert_eq!(all.len(), 1, "the secrets can be distinguished: {all:#?}");
    // By an overrider as well.
    let job =
        cluster.job("steal-by-overrider").on(["edge-1"]).images([&reference]).secret("bank/unannotated");
    let rules = [("SecretName", "add", "bank/for-others")];
    let job = job.overrider("node-role.kubernetes.io/edge", &rules).timeout_seconds(10).tolerate("0");
    let reason = job.fails().await?.image("edge-1", &reference).context("no image")?.reason.clone();
    ensure!(
        reason.contains("bank/unannotated does not exist, or") && reason.contains("bank/for-others"),
        "{reason}"
    );
    assert_eq!(thief.requests().0, [], "the thief was asked for something");

    // The owner of cloudcore gets the problem of each.
    let log = std::fs::read_to_string(cluster.place().log_file("cloudcore-prepull"))?;
    for detail in [
        "bank/unannotated: its owner has allowed no use of it",
        "bank/for-others: only \\\"payroll,night-*\\\" is allowed to use it",
        "bank/malformed: the annotation prepull.kubeedge.io/allow has \\\"Everybody!\\\", which is no name",
        "bank/opaque: its owner has allowed no use of it",
        "secret bank/missing does not exist",
    ] {
        let plain = detail.replace('\\', "");
        ensure!(log.contains(detail) || log.contains(&plain), "the log does not say: {detail}");
    }

    // The reason tells the owner all that's needed.
    let job = cluster.existing_job("steal-unannotated");
    let reason = job.status().await?.image("edge-1", &reference).context("no image")?.reason.clone();
    let command = reason.split_once(": ").context("no command")?.1;
    ensure!(command == "kubectl prepull allow bank/unannotated steal-unannotated", "{reason}");
    cluster.shell(command).await?;
    // With time to wait: cloudcore caches a refusal for a second.
    job.patch_spec(json!({"retry": 1, "imagePrePullTemplate": {"timeoutSeconds": 300}})).await?;
    job.until("is Completed", |status| status.phase == JobPhase::Completed && status.retry == 1).await?;
    assert_eq!(thief.requests().for_repository("team/loot").users(), BTreeSet::from(["alice"]));
    Ok(())
}

#[tokio::test]
async fn consent_serves_waiting_nodes_within_seconds() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = stage().await?;
    let cluster = &stage.cluster;
    let reference = registry.seed(&Image::small("waits")?, "team/waits:v1")?;
    cluster.registry_secret("bank", "harbor", &[registry.login("alice")?]).await?;
    let job = |name: &str| {
        cluster.job(name).on(["edge-1"]).images([&reference]).secret("bank/harbor").policy("Always")
    };

    let first = job("release-1").apply().await?;
    let waits = |status: &ImagePrePullJobStatus| {
        status.node("edge-1").is_some_and(|node| {
            node.phase == NodePhase::Pending
                && node.reason.contains("kubectl prepull allow bank/harbor release-1")
        })
    };
    let status = first.until("waits, and says for what", waits).await?;
    assert_eq!(status.summary.in_progress, 0, "it holds no slot");
    let (kind, note) = first.event("SecretWithheld").await?;
    ensure!(kind == "Warning" && note.contains("kubectl prepull allow bank/harbor"), "{kind} {note}");
    first.until("says so itself", |status| status.reason.contains("waiting: secret bank/harbor")).await?;
    // After the second attempt the next one would be far away.
    eventually("the node has tried twice", WITHIN_SECONDS, async || {
        let tries = stage.cloud.metrics().await?.sum(DISPATCHES, &[("outcome", "withheld")]);
        ensure!(tries > 1.0, "{tries} times");
        Ok(())
    })
    .await?;
    first.until("waits again", waits).await?;
    assert_eq!(registry.requests().0, []);
    let allowed = Instant::now();
    cluster.annotate_secret("bank", "harbor", ALLOW, Some("release-*")).await?;
    first.completes().await?;
    let took = allowed.elapsed();
    ensure!(took < WITHIN_SECONDS, "{took:?}");

    // A withdrawn consent applies to everything that hasn't been sent yet. cloudcore caches a secret for five seconds.
    cluster.annotate_secret("bank", "harbor", ALLOW, None).await?;
    let taken_back = Instant::now();
    for number in 2.. {
        let next = job(&format!("release-{number}")).apply().await?;
        let is_decided = |status: &ImagePrePullJobStatus| {
            status.phase == JobPhase::Completed
                || status.node("edge-1").is_some_and(|node| node.reason.contains("has not allowed this use"))
        };
        if next.until("has the secret, or waits for it", is_decided).await?.phase != JobPhase::Completed {
            break;
        }
        ensure!(taken_back.elapsed() < WITHIN_SECONDS, "the consent still counts");
    }
    Ok(())
}

#[tokio::test]
async fn a_wildcard_serves_only_named_hosts() -> Result<()> {
    let harbor = Registry::start().with_host("harbor.corp.example").user("alice", &password("alice")).await?;
    let thief = thief("evil.corp.example").await?;
    let stage = stage().await?;
    let cluster = &stage.cluster;
    let image = Image::small("wild")?;
    let good = harbor.seed(&image, "team/wild:v1")?;
    let evil = thief.seed(&image, "team/wild:v1")?;
    let wildcard = [("*.corp.example", "alice", &*password("alice"))];
    cluster.registry_secret("bank", "wild", &wildcard).await?;
    cluster.annotate_secret("bank", "wild", ALLOW, Some("*")).await?;

    let job = |name: &str, image: &str| {
        cluster.job(name).on(["edge-1"]).images([image]).secret("bank/wild").tolerate("0")
    };
    let moved = |name: &str| {
        let rules = [("Registry", "replace", "evil.corp.example")];
        job(name, &good).overrider("node-role.kubernetes.io/edge", &rules)
    };
    let reason = async |status: ImagePrePullJobStatus, image: &str| {
        let image = status.image("edge-1", image).context("no image")?;
        assert_eq!(image.code, Some(FailureCode::SecretUnusable), "{image:?}");
        anyhow::Ok(image.reason.clone())
    };
    for hosts in [None, Some("harbor.corp.example")] {
        cluster.annotate_secret("bank", "wild", ALLOW_HOSTS, hosts).await?;
        let by = if hosts.is_some() { "named" } else { "unnamed" };
        let of_overrider = reason(moved(&format!("moved-{by}")).fails().await?, &good).await?;
        let of_image = reason(job(&format!("direct-{by}"), &evil).fails().await?, &evil).await?;
        assert_eq!(of_overrider, of_image, "an author may name a host in either way");
        ensure!(of_image.contains("its annotation prepull.kubeedge.io/allow-hosts"), "{of_image}");
    }
    assert_eq!(thief.requests().0, [], "the thief was asked for something");
    // The host that the owner has named gets its credential. The annotation is older than cloudcore's cache, or will
    // be.
    let mut names = (1..).map(|number| format!("honest-{number}"));
    eventually("harbor.corp.example is served", WITHIN_SECONDS, || {
        job(&names.next().unwrap_or_default(), &good).completes()
    })
    .await?;
    assert_eq!(harbor.requests().for_repository("team/wild").users(), BTreeSet::from(["alice"]));
    Ok(())
}

#[tokio::test]
async fn a_manual_node_image_needs_consent() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let cluster = Cluster::with_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).requires_consent().await?;
    let stage = Stage::from_parts(cluster, cloud, &["edge-1"]).await?;
    let cluster = &stage.cluster;
    // A job takes the nodes that are there when it begins.
    cluster.node_image("edge-1").exists().await?;
    cluster.registry_secret("team", "registry", &[registry.login("alice")?]).await?;
    let image = |name: &str| registry.seed(&Image::small(name)?, &format!("team/{name}:v1"));
    let (by_job, by_hand) = (image("by-job")?, image("by-hand")?);

    // As with a pod: a user who may create a job in the namespace may use its secrets.
    let job =
        cluster.pull_job("own", &by_job).on_nodes(["edge-1"]).in_namespace("team").secrets(&["registry"]);
    assert_eq!(job.apply().await?.completes().await?.succeeded, 1);
    // A job without a secret and without an end.
    let other = cluster
        .pull_job("other", &by_job)
        .on_nodes(["edge-1"])
        .in_namespace("team")
        .never_ends()
        .apply()
        .await?;
    let uid = other.uid().await?;

    let node_image = cluster.node_image("edge-1");
    let (name, _) = name_and_tag(&by_hand);
    let tag = node_image.tag(name, "v1");
    let owner = json!({"apiVersion": "apps.kruise.io/v1alpha1", "kind": "ImagePullJob", "name": "other",
        "namespace": "team", "uid": uid});
    // By hand, and with made-up owners: the job exists, but doesn't name the secret.
    for (version, owners) in [(1, json!([])), (2, json!([owner]))] {
        let limits = json!({"ttlSecondsAfterFinished": 300, "backoffLimit": 0});
        let tag_spec = json!({"tag": "v1", "version": version, "pullPolicy": limits, "imagePullPolicy": "Always",
            "ownerReferences": owners});
        let secrets = json!([{"namespace": "team", "name": "registry"}]);
        node_image
            .patch_spec(json!({"images": {name: {"pullSecrets": secrets, "tags": [tag_spec]}}}))
            .await?;
        let message = tag.fails().await.with_context(|| format!("owners {owners}"))?.message;
        ensure!(message.contains("kubectl prepull allow team/registry nodeimage/edge-1"), "{message}");
    }
    assert_eq!(registry.requests().for_repository("team/by-hand").users(), BTreeSet::new());

    cluster.annotate_secret("team", "registry", ALLOW, Some("nodeimage/edge-*")).await?;
    eventually("the NodeImage has the secret", WITHIN_SECONDS, async || {
        let version = node_image.get().await?.spec.images[name].tags[0].version + 1;
        let limits = json!({"ttlSecondsAfterFinished": 300, "backoffLimit": 0});
        let tag_spec =
            json!({"tag": "v1", "version": version, "pullPolicy": limits, "imagePullPolicy": "Always"});
        node_image.patch_spec(json!({"images": {name: {"tags": [tag_spec]}}})).await?;
        tag.succeeds().await
    })
    .await?;
    assert_eq!(registry.requests().for_repository("team/by-hand").users(), BTreeSet::from(["alice"]));
    Ok(())
}

#[tokio::test]
async fn a_present_image_needs_no_secret() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = stage().await?;
    let cluster = &stage.cluster;
    let [there, missing] =
        ["there", "missing"].map(|name| registry.seed(&Image::small(name)?, &format!("team/{name}:v1")));
    let (there, missing) = (there?, missing?);
    cluster.job("first").on(["edge-1"]).images([&there]).apply().await?.completes().await?;
    let job = |name: &str, image: &str| {
        cluster.job(name).on(["edge-1"]).images([image]).secret("bank/none").policy("IfNotPresent")
    };
    let begun = Instant::now();
    job("present", &there).apply().await?.completes().await?;
    ensure!(begun.elapsed() < WITHIN_SECONDS, "{:?}", begun.elapsed());
    let waits = job("absent", &missing).apply().await?;
    let says = |status: &ImagePrePullJobStatus| {
        status.node("edge-1").is_some_and(|node| {
            node.phase == NodePhase::Pending && node.reason.contains("kubectl prepull allow bank/none absent")
        })
    };
    waits.until("waits for its secret", says).await?;
    Ok(())
}
