//! KubeEdge beside cloudcore-prepull: while KubeEdge is configured to serve ImagePrePullJobs, we serve none; jobs that
//! KubeEdge has begun are left alone. The objects are those of KubeEdge's manifests and source.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams, PostParams};
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const DEFINITION: &str = "imageprepulljobs.operations.kubeedge.io";
const FINALIZER: &str = "kubeedge.io/imageprepulljob-controller";

/// The objects of keadm and the chart for CloudCore.
fn configuration(task_manager: bool) -> Value {
    let yaml = format!(
        "apiVersion: cloudcore.config.kubeedge.io/v1alpha2\nkind: CloudCore\nmodules:\n  cloudHub:\n    nodeLimit: 1000\n  \
         taskManager:\n    enable: {task_manager}\n"
    );
    json!({"metadata": {"name": "cloudcore", "namespace": "kubeedge"}, "data": {"cloudcore.yaml": yaml}})
}

/// Waits until cloudcore-prepull reports that it doesn't work, with the reason.
async fn waits(cloud: &Cloud, words: &[&str]) -> Result<()> {
    eventually("what is in the way is named", SOON, async || {
        let (status, body) = cloud.readiness().await?;
        let named = words.iter().all(|word| body.contains(word));
        ensure!(status == 503 && named, "{status} {body}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn beside_kubeedge_nothing_is_done() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.namespace("kubeedge").await?;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "kubeedge");
    maps.create(&PostParams::default(), &serde_json::from_value(configuration(true))?).await?;
    let manager = json!({
        "metadata": {"name": "kubeedge-controller-manager", "namespace": "kubeedge"},
        "spec": {
            "selector": {"matchLabels": {"k8s-app": "controller-manager"}},
            "template": {
                "metadata": {"labels": {"k8s-app": "controller-manager"}},
                "spec": {"containers": [
                    {"name": "controller-manager", "image": "kubeedge/controller-manager:v1.23.0"},
                ]},
            },
        },
    });
    let deployments: Api<Deployment> = Api::namespaced(cluster.client(), "kubeedge");
    deployments.create(&PostParams::default(), &serde_json::from_value(manager)?).await?;
    // KubeEdge's definition lacks our additional fields.
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let mut foreign = serde_json::to_value(definitions.get(DEFINITION).await?)?;
    for version in 0..2 {
        let template = "schema/openAPIV3Schema/properties/spec/properties/imagePrePullTemplate/properties";
        let fields = foreign.pointer_mut(&format!("/spec/versions/{version}/{template}"));
        let fields = fields.and_then(Value::as_object_mut).context("no fields")?;
        fields.remove("registrySecrets").context("no such field")?;
    }
    definitions.replace(DEFINITION, &PostParams::default(), &serde_json::from_value(foreign)?).await?;

    let cloud = Cloud::start(&cluster).standby().await?;
    waits(
        &cloud,
        &["the definition imageprepulljobs.operations.kubeedge.io is KubeEdge's", "manifests/crds"],
    )
    .await?;
    let job = cluster.job("untouched").images(["r.example/a:v1"]).on(["nobody"]).apply().await?;

    cluster
        .apply_file(&workspace().join("manifests/crds/operations.kubeedge.io_imageprepulljobs.yaml"))
        .await?;
    waits(&cloud, &["modules.taskManager.enable to false in the ConfigMap kubeedge/cloudcore"]).await?;
    maps.replace("cloudcore", &PostParams::default(), &serde_json::from_value(configuration(false))?).await?;
    waits(&cloud, &["kubeedge/kubeedge-controller-manager", "--feature-gates=disableNodeTaskV1alpha2=true"])
        .await?;
    assert_eq!(job.get().await?.status, None, "it was touched");

    let container =
        json!({"name": "controller-manager", "args": ["--feature-gates=disableNodeTaskV1alpha2=true"]});
    let told = Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": [container]}}}}));
    deployments.patch("kubeedge-controller-manager", &PatchParams::default(), &told).await?;
    cloud.leads(SOON).await?;
    // No restart is needed.
    job.fails().await.map(drop)
}

#[tokio::test]
async fn a_standby_beside_kubeedge_is_unavailable() -> Result<()> {
    let cluster = Cluster::start().await?;
    let leader = Cloud::start(&cluster).standby().await?;
    leader.leads(SOON).await?;
    cluster.namespace("kubeedge").await?;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "kubeedge");
    maps.create(&PostParams::default(), &serde_json::from_value(configuration(true))?).await?;
    let standby = Cloud::start(&cluster).named("cloudcore-prepull-2").standby().await?;
    let is = async |expected: u16, words: &str| {
        eventually(words, SOON, async || {
            let (status, body) = standby.availability().await?;
            ensure!(status == expected && body.contains(words), "{status} {body}");
            Ok(())
        })
        .await
    };
    is(503, "could not take over: KubeEdge's TaskManager serves ImagePrePullJobs").await?;
    maps.replace("cloudcore", &PostParams::default(), &serde_json::from_value(configuration(false))?).await?;
    is(200, "standing by: ").await
}

/// A job with the metadata and the status that KubeEdge gives to it.
async fn theirs(
    cluster: &Cluster,
    name: &str,
    version: &str,
    finalizers: &[&str],
    status: Value,
) -> Result<Job> {
    let template = json!({"images": ["harbor.example/theirs:v1"], "labelSelector": {"matchLabels": {}}});
    let job = json!({
        "apiVersion": format!("operations.kubeedge.io/{version}"), "kind": "ImagePrePullJob",
        "metadata": {"name": name, "finalizers": finalizers},
        "spec": {"imagePrePullTemplate": template},
    });
    let job = cluster.apply_job(&job.to_string()).await?;
    job.set_status(&status).await?;
    Ok(job)
}

#[tokio::test]
async fn a_job_begun_by_kubeedge_is_left_alone() -> Result<()> {
    let cluster = Cluster::start().await?;
    let nodes = json!([{"nodeName": "edge-1", "phase": "Successful",
        "actionFlow": [{"action": "Pull", "status": "True", "time": "2026-11-21T09:00:00Z"}],
        "imageStatus": [{"image": "harbor.example/theirs:v1", "status": "True"}]}]);
    let ended = json!({"phase": "Completed", "nodeStatus": nodes});
    let jobs = [
        theirs(&cluster, "ended", "v1alpha2", &[FINALIZER], ended.clone()).await?,
        theirs(&cluster, "ended-and-freed", "v1alpha2", &[], ended).await?,
        theirs(&cluster, "of-v1alpha1", "v1alpha1", &[], json!({"state": "successful", "event": "Pull"}))
            .await?,
        theirs(&cluster, "just-taken", "v1alpha2", &[FINALIZER], json!({"phase": "Init"})).await?,
    ];
    let mut before = Vec::new();
    for job in &jobs {
        before.push(job.get().await?.metadata.resource_version);
    }
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 1).await?;
    for job in &jobs {
        let (kind, note) = job.event("LeftToKubeEdge").await?;
        ensure!(kind == "Warning" && note.contains("apply it again"), "{note}");
    }
    // A job of our own beside them, and enough time for theirs to begin.
    let image = ["harbor.example/ours:v1"];
    let ours = cluster.job("ours").images(image).on(fleet.names()).completes().await?;
    assert_eq!(ours.summary.successful, 1);
    for (job, before) in jobs.iter().zip(before) {
        assert_eq!(job.get().await?.metadata.resource_version, before, "{} was touched", job.name());
    }
    assert_eq!(fleet.pulls(), 1);

    // By the instructions of docs/kubeedge.md.
    let free = r#"{"metadata":{"finalizers":null}}"#;
    cluster.kubectl(&["patch", "imageprepulljob", "ended", "--type=merge", "-p", free]).await?;
    cluster.kubectl(&["delete", "imageprepulljob", "ended", "--timeout=20s"]).await?;
    let again =
        cluster.job("ended").images(["harbor.example/again:v1"]).on(fleet.names()).completes().await?;
    assert_eq!((again.summary.successful, fleet.pulls()), (1, 2));
    // Without the finalizer and status of KubeEdge it's a job like any other.
    cluster.kubectl(&["patch", "imageprepulljob", "just-taken", "--type=merge", "-p", free]).await?;
    let job = cluster.existing_job("just-taken");
    assert_eq!(job.completes().await?.summary.successful, 1);
    Ok(())
}
