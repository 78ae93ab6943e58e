//! Refusals: invalid jobs, unreadable objects, and clusters where another controller serves Kruise's API.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use prepull_api::crd::kruise::{ImagePullJob, PART_OF_LABEL};
use prepull_e2e::kruise::{DEFINITIONS, FLAG};
use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

#[tokio::test]
async fn an_invalid_job_is_refused_in_kruises_words() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    let _cloud = Cloud::with_kruise(&cluster).await?;
    let image = json!("registry.example/app:v1");
    // The API server refuses the first one, since Kubernetes 1.25; cloudcore the second one.
    for (name, spec, words) in [
        ("percent", json!({"parallelism": "50%"}), "parallelism does not support percentage value"),
        ("image", json!({"image": "No Such:Image:"}), "invalid image No Such:Image:"),
    ] {
        let mut job = json!({
            "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ImagePullJob",
            "metadata": {"name": name}, "spec": {"image": image},
        });
        for (key, value) in spec.as_object().context("an object")? {
            job["spec"][key] = value.clone();
        }
        match cluster.apply_yaml::<ImagePullJob>(&job.to_string()).await {
            Ok(job) => {
                job.message_contains(words).await?;
                let status = job.status().await?;
                assert_eq!((status.desired, status.completion_time), (0, None), "{name}");
                let (kind, note) = job.wait_for_event("Invalid").await?;
                ensure!(kind == "Warning" && note.contains(words), "{kind} {note}");
            }
            Err(error) => ensure!(format!("{error:#}").contains(words), "{error:#}"),
        }
    }
    for (kind, field) in [("ImagePullJob", "spec.image"), ("ImageListPullJob", "spec.images")] {
        let job = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "metadata": {"name": "nothing"}, "spec": {},
        });
        let Err(error) = cluster.apply(&job.to_string()).await else { bail!("{kind}: a job without images") };
        ensure!(format!("{error:#}").contains(&format!("{field}: Required value")), "{error:#}");
    }
    Ok(())
}

#[tokio::test]
async fn the_secrets_of_a_job_are_immutable() -> Result<()> {
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let stage = Stage::with_kruise(&["edge-1"]).await?;
    let reference = registry.seed(&Image::small("secrets")?, "team/secrets:v1")?;
    stage.cluster.registry_secret("default", "right", &[registry.login("alice")?]).await?;
    let job = stage.cluster.pull_job("secrets", &reference).secrets(&["right"]).never_ends().apply().await?;
    job.until_met("is through", |job| job.status.as_ref().is_some_and(|s| s.succeeded == 1)).await?;
    match job.patch_spec(json!({"pullSecrets": ["other"]})).await {
        // Only a CEL rule can refuse this, since only the API server knows the previous value.
        Ok(_) => {
            let version = stage.cluster.version().await?;
            ensure!(version.contains(" v1.2") && version.as_str() < "Kubernetes v1.25", "{version}");
        }
        Err(error) => ensure!(format!("{error:#}").contains("immutable"), "{error:#}"),
    }
    Ok(())
}

#[tokio::test]
async fn an_unreadable_object_harms_no_other() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::for_changes().await?; // its definitions are changed
    cluster.install_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let stage = Stage::from_parts(cluster, cloud, &["edge-1", "edge-2"]).await?;
    let cluster = &stage.cluster;
    let reference = registry.seed(&Image::small("readable")?, "team/readable:v1")?;
    cluster.node_image("edge-2").exists().await?;
    // Such an object is left over from foreign definitions, which accepted anything.
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    for name in DEFINITIONS {
        let mut definition = definitions.get(name).await?;
        for version in &mut definition.spec.versions {
            let anything =
                json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
            version.schema = Some(serde_json::from_value(anything)?);
        }
        definitions.replace(name, &PostParams::default(), &definition).await?;
    }
    let odd = |kind: &str, name: &str, spec: Value| json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    prepull_e2e::cleanup::eventually("the API server takes anything", SOON, async || {
        cluster.apply(&odd("ImagePullJob", "odd", json!({"image": 7, "parallelism": [1]})).to_string()).await
    })
    .await?;
    cluster.apply(&odd("ImageListPullJob", "odd", json!({"images": "all"})).to_string()).await?;
    cluster.apply(&odd("NodeImage", "edge-2", json!({"images": {"nginx": "latest"}})).to_string()).await?;

    let job = cluster.pull_job("readable", &reference).on_nodes(["edge-1"]).apply().await?;
    assert_eq!(job.completes().await?.succeeded, 1);
    for kind in ["imagepulljob", "imagelistpulljob"] {
        prepull_e2e::cleanup::eventually("it says that it cannot be read", SOON, async || {
            let message = cluster.kubectl(&["get", kind, "odd", "-o", "jsonpath={.status.message}"]).await?;
            ensure!(!message.is_empty(), "{kind} odd says nothing");
            Ok(())
        })
        .await?;
    }
    // A valid object replaces it.
    let repaired = json!({"spec": {"images": null}});
    cluster.kubectl(&["patch", "nodeimage", "edge-2", "--type=merge", "-p", &repaired.to_string()]).await?;
    let job = cluster.pull_job("repaired", &reference).on_nodes(["edge-2"]).apply().await?;
    assert_eq!(job.completes().await?.succeeded, 1);
    Ok(())
}

#[tokio::test]
async fn the_api_is_disabled_by_default() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    let mut cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let job = cluster.pull_job("ignored", "nginx:1.9.1").apply().await?;
    // When this job has ended, cloudcore would have processed the earlier one as well.
    let theirs = cluster.job("noticed").images(["nginx:1.9.1"]).on(["nobody"]).apply().await?;
    theirs.fails().await?;
    assert_eq!(job.get().await?.status, None);
    ensure!(!cluster.node_image("edge-1").exists_now().await?);
    cloud.terminate().await?;

    // With the API enabled, the job is processed.
    let _cloud = Cloud::with_kruise(&cluster).named("switched-on").await?;
    cluster.node_image("edge-1").exists().await?;
    job.until_met("has begun", |job| job.status.as_ref().is_some_and(|status| status.desired == 1)).await?;
    Ok(())
}

/// Checks that cloudcore serves ImagePrePullJobs and not Kruise's API, with the reason.
async fn says_why_not(cluster: &Cluster, cloud: &Cloud, job: &str, words: &[&str]) -> Result<()> {
    prepull_e2e::cleanup::eventually("/readyz says why", SOON, async || {
        let (status, body) = cloud.readiness().await?;
        ensure!(status == 200 && body.starts_with("ok\nOpenKruise's API is not served: "), "{status} {body}");
        has_all(&body, words)
    })
    .await?;
    let log = cloud.log();
    let said = log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count();
    assert_eq!(said, 1, "{log}");
    cluster.job(job).images(["nginx:1.9.1"]).on(["nobody"]).apply().await?.fails().await?;
    Ok(())
}

fn has_all(said: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(said.contains(word), "no {word:?} in {said}");
    }
    Ok(())
}

#[tokio::test]
async fn without_kruises_definitions_its_api_is_off() -> Result<()> {
    let cluster = Cluster::own().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    cluster.apply_file(&parts::workspace().join("manifests/kruise/rbac.yaml")).await?;
    let mut cloud = Cloud::start(&cluster).arg(FLAG).await?;
    let missing = ["imagepulljobs.apps.kruise.io is missing", "manifests/kruise"];
    says_why_not(&cluster, &cloud, "missing", &missing).await?;

    // Once they exist it's served, without a restart by hand.
    cluster.install_kruise().await?;
    cluster.node_image("edge-1").exists().await?;
    cloud.leads(SOON).await?;
    assert_eq!(cloud.readiness().await?, (200, "ok\n".to_owned()));
    cluster.job("served").images(["nginx:1.9.1"]).on(["nobody"]).apply().await?.fails().await?;
    cloud.terminate().await?;

    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let label = |value: Option<&str>| Patch::Merge(json!({"metadata": {"labels": {PART_OF_LABEL: value}}}));
    definitions.patch("nodeimages.apps.kruise.io", &PatchParams::default(), &label(None)).await?;
    cloud.restart().await?;
    says_why_not(&cluster, &cloud, "foreign", &["nodeimages.apps.kruise.io", PART_OF_LABEL]).await
}

#[tokio::test]
async fn beside_kruises_controller_its_api_is_off() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    cluster.namespace("kruise-system").await?;
    let leases: Api<Lease> = Api::namespaced(cluster.client(), "kruise-system");
    let renewed = |age: i64| {
        let time = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(age);
        LeaseSpec {
            holder_identity: Some("kruise-controller-manager-7d9c_1".to_owned()),
            lease_duration_seconds: Some(15),
            renew_time: Some(MicroTime(time)),
            ..LeaseSpec::default()
        }
    };
    let metadata = ObjectMeta { name: Some("kruise-manager".to_owned()), ..ObjectMeta::default() };
    let lease = Lease { metadata, spec: Some(renewed(0)) };
    leases.create(&PostParams::default(), &lease).await?;
    let cloud = Cloud::start(&cluster).arg(FLAG).await?;
    let words = ["kruise-system/kruise-manager", "kruise-controller-manager-7d9c_1", FLAG];
    says_why_not(&cluster, &cloud, "beside", &words).await?;
    ensure!(!cluster.node_image("edge-1").exists_now().await?, "it writes Kruise's objects");

    // A Lease that expired long ago is no reason to refuse.
    let stale = Patch::Merge(json!({"spec": renewed(3600)}));
    leases.patch("kruise-manager", &PatchParams::default(), &stale).await?;
    cluster.node_image("edge-1").exists().await.map(drop)
}

#[tokio::test]
async fn kubectl_explains_fields_and_accepts_samples() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let folder = |name: &str| parts::workspace().join(name).display().to_string();
    let apply = async |name: &str| cluster.kubectl(&["apply", "--validate=false", "-k", &folder(name)]).await;
    apply("manifests/kruise").await?;
    cluster.definitions_are_established().await?;
    let _cloud = Cloud::with_kruise(&cluster).await?;
    let samples = std::fs::read_dir(parts::workspace().join("manifests/samples"))?.flatten();
    let mut files: Vec<_> = samples.map(|file| file.path()).collect();
    files.retain(|path| path.to_string_lossy().contains("/kruise-"));
    files.sort();
    assert!(files.len() >= 6, "{files:?}");
    for file in &files {
        cluster.kubectl(&["apply", "-f", file.to_str().context("not UTF-8")?]).await?;
    }
    let kinds = "imagepulljobs,imagelistpulljobs";
    let jobs = cluster.kubectl(&["get", kinds, "--all-namespaces", "-o", "json"]).await?;
    let jobs: Value = serde_json::from_str(&jobs)?;
    let jobs: Vec<_> = jobs["items"].as_array().context("no items")?.iter().collect();
    assert!(jobs.len() >= files.len(), "a job in each file");
    for job in jobs {
        let (name, namespace) = (&job["metadata"]["name"], &job["metadata"]["namespace"]);
        let (name, namespace) = (name.as_str().unwrap_or_default(), namespace.as_str().unwrap_or_default());
        if job["kind"] == "ImagePullJob" {
            // The cluster has no nodes; a message with this prefix shows that the job is accepted.
            let job: KruisePullJob = cluster.applied_job(namespace, name);
            job.message_contains("job ").await.context(name.to_owned())?;
        }
    }
    for path in ["imagepulljob.spec", "imagelistpulljob.spec", "nodeimage.spec.images"] {
        let explained = prepull_e2e::cleanup::eventually("the schema is published", SOON, async || {
            let explained = cluster.kubectl(&["explain", path]).await?;
            ensure!(explained.to_lowercase().contains("pullsecrets"), "{explained}");
            Ok(explained)
        })
        .await?;
        ensure!(!explained.contains("<no description>"), "{explained}");
    }
    Ok(())
}
