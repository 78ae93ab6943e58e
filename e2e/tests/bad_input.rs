//! Invalid jobs: each is refused with its reason, and cloudcore continues with the others.

use std::time::{Duration, Instant};

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_e2e::cleanup::eventually;
use prepull_e2e::prelude::*;
use serde_json::json;

/// A job with the given spec, as YAML.
fn yaml(name: &str, spec: &serde_json::Value) -> String {
    json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2",
        "kind": "ImagePrePullJob",
        "metadata": {"name": name},
        "spec": spec,
    })
    .to_string()
}

/// A valid template with one field changed.
fn template(field: &str, value: serde_json::Value) -> serde_json::Value {
    let mut template = json!({"images": ["r.example/app:v1"], "nodeNames": ["edge-1"]});
    template[field] = value;
    json!({ "imagePrePullTemplate": template })
}

#[tokio::test]
async fn a_senseless_job_is_refused_with_its_reason() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    stage.cluster.label_node("edge-1", "region", Some("hangzhou")).await?;
    let pid = stage.cloud.process()?.pid();
    let sources: Vec<_> = (0..129).map(|n| json!({"repository": format!("source-{n}")})).collect();
    let mut too_many = template("imageSources", json!(sources));
    too_many["imagePrePullTemplate"]["images"] = (0..128).map(|n| format!("r.example/app-{n}:v1")).collect();
    let mut overridden = template("nodeNames", json!(["edge-1"]));
    let rule = json!({"component": "Repository", "operator": "replace", "value": "App"});
    overridden["imagePrePullOverriders"] = json!([{"imagePrePullOverrider":
        {"nodeLabel": "region=hangzhou", "overriders": {"imageOverriders": [rule]}}}]);

    let longest = "n".repeat(253);
    let cases = [
        ("upper-case", template("images", json!(["r.example/App:v1"])), vec!["images[0]", "lowercase"]),
        ("too-many-images", too_many, vec!["257", "at most 256"]),
        (
            "override-makes-nonsense",
            overridden,
            vec!["imageOverriders[0]", "region=hangzhou", "Repository replace \"App\"", "lowercase"],
        ),
        (longest.as_str(), template("images", json!([])), vec!["name at least one image"]),
    ];
    for (name, spec, words) in cases {
        let job = match stage.cluster.apply_job(&yaml(name, &spec)).await {
            Ok(job) => job,
            // Since 1.25, an API server knows CEL rules, and rejects the job immediately with these words.
            Err(error) => {
                let refusal = refused(&error).with_context(|| format!("{name}: {error:#}"))?;
                ensure!(words.iter().all(|word| refusal.contains(word)), "{name}: {words:?}: {refusal}");
                continue;
            }
        };
        let status = job.fails().await?;
        ensure!(status.reason.starts_with("spec."), "{name}: the field comes first: {}", status.reason);
        for word in words {
            ensure!(status.reason.contains(word), "{name}: {word:?} is not in {:?}", status.reason);
        }
        assert_eq!(status.observed_generation, Some(1), "{name}");
        let valid = status.conditions.iter().find(|condition| condition.type_ == "Valid");
        assert_eq!(valid.map(|valid| valid.status.as_str()), Some("False"), "{name}");
        let (kind, message) = job.event("InvalidSpec").await?;
        assert_eq!((kind.as_str(), message.as_str()), ("Warning", status.reason.as_str()), "{name}");
    }

    let reference = registry.seed(&Image::small("good")?, "team/good:v1")?;
    stage.cluster.job("good").images([&reference]).on(["edge-1"]).completes().await?;
    assert_eq!(stage.cloud.process()?.pid(), pid);
    ensure!(stage.cloud.is_ready().await?, "it is not ready");
    ensure!(!stage.cloud.log().contains("panicked"), "it panicked");
    Ok(())
}

#[tokio::test]
async fn an_edited_job_is_validated_again() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let reference = registry.seed(&Image::small("good")?, "team/good:v1")?;

    let job = stage.cluster.job("typo").images([reference.replace("team", "Team")]).on(["edge-1"]);
    let job = job.apply().await?;
    job.fails().await?;
    // Another mistake gets another reason.
    job.patch(json!({"spec": {"imagePrePullTemplate": {"images": [reference], "nodeNames": ["edge-9"]}}}))
        .await?;
    let status = job.until("the edit was read", |status| status.observed_generation == Some(2)).await?;
    assert_eq!(status.phase, JobPhase::Failure);
    ensure!(status.reason.contains("edge-9 is not found"), "{}", status.reason);

    job.patch(json!({"spec": {"imagePrePullTemplate": {"nodeNames": ["edge-1"]}}})).await?;
    let status = job.until("it is Completed", |status| status.phase == JobPhase::Completed).await?;
    assert_eq!((status.summary.successful, status.summary.skipped), (1, 0), "{status:?}");
    assert_eq!((status.reason.as_str(), status.skipped_nodes.len()), ("", 0));
    let failed = status.conditions.iter().find(|condition| condition.type_ == "Failed");
    assert_eq!(failed.map(|failed| failed.status.as_str()), Some("False"));
    ensure!(stage.edge("edge-1")?.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn ten_thousand_names_keep_the_object_small() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let reference = registry.seed(&Image::small("good")?, "team/good:v1")?;
    let names: Vec<_> = (0..10_000).map(|n| format!("node-{n:05}")).collect();

    let began = Instant::now();
    let none = stage.cluster.job("none").images([&reference]).on(&names).apply().await?;
    let status = none.fails().await?;
    ensure!(
        status.reason.contains("node-00000 is not found") && status.reason.contains("9997 more"),
        "{}",
        status.reason
    );
    ensure!(status.reason.len() < 500, "{}", status.reason);
    assert_eq!((status.summary.skipped, status.skipped_nodes.len()), (10_000, 200));

    let (first, last) = names.split_at(5_000);
    let one = stage.cluster.job("one").images([&reference]).on(first).on(["edge-1"]).on(last);
    let one = one.spec(|spec| spec.allow_missing_nodes = true).apply().await?;
    let status = one.completes().await?;
    ensure!(began.elapsed() < Duration::from_secs(60), "both took {:?}", began.elapsed());
    assert_eq!((status.summary.desired, status.summary.skipped), (1, 10_000));
    for job in ["none", "one"] {
        let mut object = stage.cluster.existing_job(job).get().await?;
        // The list of names in the spec is the user's own.
        object.spec = ImagePrePullJobSpec::default();
        let size = serde_json::to_vec(&object)?.len();
        ensure!(size < 32 * 1024, "job {job} has grown by {size} bytes");
    }
    Ok(())
}

#[tokio::test]
async fn an_unreadable_object_fails_alone() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::for_changes().await?; // its definition is changed
    let cloud = Cloud::start(&cluster).await?;
    let stage = Stage::from_parts(cluster, cloud, &["edge-1"]).await?;
    let reference = registry.seed(&Image::small("good")?, "team/good:v1")?;
    // Such an object is older than its definition: without a schema, the server accepts any spec.
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let patch: Vec<_> = (0..2)
        .map(|version| {
            let path = format!("/spec/versions/{version}/schema/openAPIV3Schema/properties/spec");
            json!({"op": "replace", "path": path, "value": anything})
        })
        .collect();
    let patch = serde_json::to_string(&patch)?;
    let crd = "imageprepulljobs.operations.kubeedge.io";
    stage.cluster.kubectl(&["patch", "crd", crd, "--type", "json", "-p", &patch]).await?;

    let text = yaml("unreadable", &template("images", json!("nginx")));
    let job =
        eventually("the server takes anything", SOON, async || stage.cluster.apply_job(&text).await).await?;
    // The object can't be parsed as a job, so we read it with kubectl.
    let says = ["get", "ippj", "unreadable", "-o", "jsonpath={.status.phase}: {.status.reason}"];
    eventually("the status says why", SOON, async || {
        let status = stage.cluster.kubectl(&says).await?;
        let expected = "Failure: the object cannot be read: spec.imagePrePullTemplate.images: ";
        ensure!(status.starts_with(expected) && status.contains("expected a sequence"), "{status}");
        Ok(())
    })
    .await?;
    let events = ["get", "events", "--field-selector", "involvedObject.name=unreadable", "--no-headers"];
    eventually("an event says why", SOON, async || {
        let events = stage.cluster.kubectl(&events).await?;
        ensure!(events.contains("InvalidSpec") && events.contains("Warning"), "{events}");
        Ok(())
    })
    .await?;
    stage.cluster.job("good").images([&reference]).on(["edge-1"]).completes().await?;

    stage.cluster.apply(&yaml("unreadable", &template("images", json!([reference])))).await?;
    job.until("it is Completed", |status| status.phase == JobPhase::Completed).await?;
    Ok(())
}

#[tokio::test]
async fn the_api_server_refuses_wrong_types() -> Result<()> {
    let cluster = Cluster::start().await?;
    let too_many: Vec<_> = (0..257).map(|n| format!("r.example/app-{n}:v1")).collect();
    for (name, field, value) in [
        ("images", "images", json!("nginx")),
        ("image", "images", json!([{"name": "nginx"}])),
        ("names", "nodeNames", json!("edge-1")),
        ("tolerance", "failureTolerate", json!(0.3)),
        ("concurrency", "concurrency", json!("many")),
        ("timeout", "timeoutSeconds", json!(1.5)),
        ("secrets", "registrySecrets", json!([{"registry": "r.example"}])),
        ("selector", "labelSelector", json!("site=factory")),
        ("too-many-images", "images", json!(too_many)),
        ("negative-concurrency", "concurrency", json!(-1)),
        ("negative-timeout", "timeoutSeconds", json!(-5)),
        ("long-timeout", "timeoutSeconds", json!(i64::MAX)),
        ("negative-retries", "retryTimes", json!(-1)),
        ("huge-retries", "retryTimes", json!(1e20)),
    ] {
        let error = cluster.apply(&yaml(name, &template(field, value.clone()))).await;
        let Err(error) = error else { bail!("{field}: {value} was taken") };
        let error = format!("{error:#}");
        ensure!(error.contains(&format!("spec.imagePrePullTemplate.{field}")), "{field}: {value}: {error}");
    }
    for (name, field, value) in [
        ("negative-round", "retry", json!(-1)),
        ("huge-round", "retry", json!(1e20)),
        ("no-time", "activeDeadlineSeconds", json!(0)),
        ("negative-ttl", "ttlSecondsAfterFinished", json!(-1)),
        ("negative-pause", "rollout", json!({"pauseSeconds": -1})),
        ("too-many-waves", "rollout", json!({"steps": vec!["1"; 21]})),
    ] {
        let mut spec = template("images", json!(["nginx"]));
        spec[field] = value.clone();
        let Err(error) = cluster.apply(&yaml(name, &spec)).await else { bail!("{field}: {value} was taken") };
        ensure!(format!("{error:#}").contains(&format!("spec.{field}")), "{field}: {value}: {error:#}");
    }
    assert_eq!(cluster.kubectl(&["get", "ippj", "--no-headers"]).await?, "");
    Ok(())
}
