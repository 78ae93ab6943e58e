//! Made-up jobs that have ended: one that removed images, its dry run, and one that rebuilt images from deltas.

use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, PostParams};
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const OLD: &str = "registry.invalid/shop/checkout:2026.10";
const NEW: &str = "registry.invalid/shop/checkout:2026.11";
/// Nodes of each job.
const NODES: u64 = 3;

/// A job that has removed images, or with `dry_run` would remove them.
pub(super) async fn removal(cluster: &Cluster, name: &str, dry_run: bool) -> Result<()> {
    let repositories = vec!["registry.invalid/shop/checkout".to_owned()];
    let spec = RemoveSpec { repositories, keep_last: Some(2), dry_run, ..RemoveSpec::default() };
    let job = cluster.job(name).on(["edge-0"]);
    let job = job.spec(move |job| job.image_pre_pull_template.remove = Some(spec)).apply().await?;
    let end = if dry_run { "Removable" } else { "Removed" };
    let freed = 214 * MIB;
    let images = json!([
        { "image": OLD, "outcome": end, "bytes": freed },
        { "image": NEW, "outcome": "Kept", "code": "KeepLast", "reason": "it is one of the 2 newest of its repository" },
        { "image": "registry.invalid/shop/checkout:2026.09", "outcome": "Kept", "code": "InUse",
            "reason": "container checkout-7d9f of pod shop/checkout-7d9f-x2x uses it" },
    ]);
    let record = json!({ "removal": { "removed": 1, "kept": 2, "freedBytes": freed, "images": images } });
    let sum = json!({ "removed": NODES, "kept": 2 * NODES, "freedBytes": NODES * freed, "nodes": NODES });
    let did = if dry_run { "removing 3 images would free" } else { "removed 3 images, which freed" };
    let reason = format!("{did} 642.0 MiB on 3 nodes; 6 kept");
    ended(cluster, &job, name, ("Remove", &record), json!({ "removal": sum, "reason": reason })).await
}

/// A job that has rebuilt its image from an earlier one and deltas.
pub(super) async fn deltas(cluster: &Cluster, name: &str) -> Result<()> {
    let job = cluster.job(name).images([NEW]).on(["edge-0"]).apply().await?;
    let (total, saved) = (230 * MIB, 187 * MIB);
    let record = json!({ "imageStatus": [{
        "image": NEW, "pulledImage": NEW, "digest": format!("sha256:{}", "0123456789abcdef".repeat(4)), "status": "True",
        "attempts": 1, "pulledBy": "Agent", "signedBy": "sha256:90d49bb14a4a",
        "bytes": { "done": total, "total": total }, "deltaSavedBytes": saved,
    }] });
    ended(cluster, &job, name, ("Pull", &record), json!({})).await
}

/// Writes a report with this record of each node, and the status of a job that has ended.
async fn ended(
    cluster: &Cluster,
    job: &Job,
    name: &str,
    (step, record): (&str, &Value),
    more: Value,
) -> Result<()> {
    let end = Timestamp::now();
    let began = end - SignedDuration::from_secs(95);
    let node = |number: u64| {
        let flow = ["Check", step].map(|action| json!({ "action": action, "status": "True", "time": end }));
        let mut node = json!({ "nodeName": format!("edge-{number}"), "phase": "Successful", "attempt": 1,
            "startTime": began, "actionFlow": flow });
        merge(&mut node, record.clone());
        node
    };
    let report: ImagePrePullReport = serde_json::from_value(json!({
        "apiVersion": "operations.kubeedge.io/v1alpha1", "kind": "ImagePrePullReport",
        "metadata": { "name": format!("{name}-0"), "labels": { JOB_UID_LABEL: job.uid().await? } },
        "jobName": name, "index": 0, "nodeStatus": (0..NODES).map(node).collect::<Vec<_>>(),
    }))?;
    let report = ImagePrePullReport { types: Some(ImagePrePullReport::type_meta()), ..report };
    Api::<ImagePrePullReport>::all(cluster.client()).create(&PostParams::default(), &report).await?;
    let mut status = json!({ "phase": "Completed", "startTime": began, "completionTime": end, "observedGeneration": 1,
        "summary": { "desired": NODES, "successful": NODES } });
    merge(&mut status, more);
    job.set_status(&status).await
}

fn merge(into: &mut Value, more: Value) {
    if let (Some(into), Value::Object(more)) = (into.as_object_mut(), more) {
        into.extend(more);
    }
}
