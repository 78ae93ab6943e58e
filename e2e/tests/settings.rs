//! Settings of nodes from the cloud (`ImagePrePullSettings`), in force on real agents.

use std::time::{Duration, Instant};

use jiff::{Timestamp, ToSpan};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use prepull_api::crd::settings::{ImagePrePullSettings, ImagePrePullSettingsStatus};
use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const SIZE: u64 = 4 * MIB;
/// The cap of the cloud, in bytes a second: below the node's own.
const CAP: u64 = 512 * 1024;

/// The objects of a site's cluster.
pub(crate) struct Settings(Api<ImagePrePullSettings>);

impl Settings {
    pub(crate) fn of(cluster: &Cluster) -> Self {
        Self(Api::all(cluster.client()))
    }

    pub(crate) async fn apply(&self, name: &str, spec: Value) -> Result<()> {
        let object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullSettings",
            "metadata": { "name": name }, "spec": spec,
        });
        self.0.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&object)).await?;
        Ok(())
    }

    async fn until(
        &self,
        what: &str,
        name: &str,
        is_met: impl Fn(&ImagePrePullSettingsStatus, &str) -> bool,
    ) -> Result<()> {
        eventually(what, SOON, async || {
            let object = self.0.get_status(name).await?;
            let status = object.status.unwrap_or_default();
            let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
            let ready = ready.map(|ready| format!("{} {}: {}", ready.status, ready.reason, ready.message));
            let is_current = Some(status.observed_generation) == object.metadata.generation;
            let ready = ready.unwrap_or_default();
            ensure!(is_current && is_met(&status, &ready), "{status:?}");
            Ok(())
        })
        .await
    }

    pub(crate) async fn are_in_force(&self, name: &str) -> Result<()> {
        self.until("the settings are in force", name, |status, ready| {
            (status.nodes, status.informed, ready) == (1, 1, "True InForce: ")
        })
        .await
    }
}

/// Waits until `edgecore-prepull status` has, or hasn't, this line.
async fn says(node: &EdgeNode, line: &str, is_there: bool) -> Result<()> {
    eventually("the box says it", SOON, async || {
        let (_, text) = node.status().await?;
        ensure!(text.contains(line) == is_there, "{line:?} in {text}");
        Ok(())
    })
    .await
}

/// Whether the node's windows let it download, by its metrics.
async fn is_open(node: &EdgeNode) -> Result<bool> {
    Ok(node.metrics().await?.sum("edgecore_prepull_download_window_open", &[]) > 0.5)
}

#[tokio::test]
async fn settings_hold_for_running_tasks_and_restarts() -> Result<()> {
    let mut site = Site::start().await?;
    let settings = Settings::of(&site.cluster);
    let mut node = site.add_node("edge-1").await?.args(&["--max-download-rate", "2MiB"]).await?;
    let (image, reference) = site.seed_image("set", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;

    node.is_connected().await?;
    ensure!(is_open(&node).await?, "it has no window yet");

    // A group without the node, and one with a closed window.
    site.cluster.label_node("edge-1", "shop", Some("north")).await?;
    let opens = Timestamp::now().checked_add(12.hours())?.strftime("%H:%M").to_string();
    let night = json!({
        "labelSelector": { "matchLabels": { "shop": "north" } }, "maxDownloadRate": "512Ki",
        "windows": [{ "start": opens, "duration": "1h", "timeZone": "UTC" }],
    });
    settings
        .apply(
            "south",
            json!({ "labelSelector": { "matchLabels": { "shop": "south" } }, "maxDownloadRate": "1Ki" }),
        )
        .await?;
    settings.apply("north", night.clone()).await?;
    settings.are_in_force("north").await?;
    settings.until("no node is chosen", "south", |_, ready| ready.starts_with("True NoNodes")).await?;
    let set = format!("the cloud has set: at most 512.00 KiB/s, windows {opens}+1h UTC");
    says(&node, &set, true).await?;
    ensure!(!is_open(&node).await?, "its window is closed");
    let job = site.job("set").images([&reference]).on(["edge-1"]).timeout_seconds(300).apply().await?;
    let waits = format!("waits for its window, opens at {opens} UTC");
    job.until("the node waits", |status| {
        status.node("edge-1").is_some_and(|node| node.reason.starts_with(&waits))
    })
    .await?;

    // Neither a dead cloud nor a restart lifts them. Nor does a typing error, which the node keeps what it has under.
    site.cloud.kill9()?;
    node.kill9_agent()?;
    node.restart_agent()?;
    says(&node, &set, true).await?;
    says(&node, "not connected", true).await?;
    site.cloud.restart().await?;
    settings.apply("north", json!({ "labelSelector": { "matchLabels": { "shop": "north" } }, "windows": [{ "start": "01:00", "duration": "1h", "timeZone": "Mars" }] })).await?;
    let invalid = "False Invalid: spec.windows[0].timeZone: \"Mars\" is not a time zone";
    settings.until("the mistake is named", "north", |_, ready| ready.starts_with(invalid)).await?;
    says(&node, &set, true).await?;
    assert_eq!(site.link.bytes_of(layer), 0, "nothing is downloaded meanwhile");

    // Without the window the job goes on, within the cap; and faster while it runs, once that is lifted.
    let began = Instant::now();
    settings
        .apply(
            "north",
            json!({ "labelSelector": { "matchLabels": { "shop": "north" } }, "maxDownloadRate": "512Ki" }),
        )
        .await?;
    site.link_carries(2 * MIB).await?;
    let (took, capped) = (began.elapsed(), Duration::from_secs(2 * MIB / CAP));
    ensure!(took > capped.mul_f64(0.8), "2 MiB in {took:?}, although the cap is 512 KiB/s");
    site.cluster.label_node("edge-1", "shop", None).await?;
    says(&node, "the cloud has set", false).await?;
    job.completes().await?;
    ensure!(node.has_image(&reference).await?);
    settings.0.delete("south", &DeleteParams::default()).await?;
    settings.until("the node has left", "north", |status, _| status.nodes == 0).await
}

#[tokio::test]
async fn a_nodes_own_settings_are_the_upper_bound() -> Result<()> {
    let site = Site::start().await?;
    let settings = Settings::of(&site.cluster);
    let own = ["--max-download-rate", "512KiB", "--make-room=false"];
    let node = site.add_node("edge-1").await?.args(&own).await?;
    let (_, reference) = site.seed_image("bounded", &[2 * MIB])?;
    settings
        .apply("fast", json!({ "nodeNames": ["edge-1"], "maxDownloadRate": "64Mi", "makeRoom": true }))
        .await?;
    settings.are_in_force("fast").await?;
    let began = Instant::now();
    site.job("bounded").images([&reference]).on(["edge-1"]).completes().await?;
    let (took, capped) = (began.elapsed(), Duration::from_secs(2 * MIB / CAP));
    ensure!(took > capped.mul_f64(0.8), "2 MiB in {took:?}, although the node's own cap is 512 KiB/s");
    says(&node, "the cloud has set: at most 64.00 MiB/s, makes room", true).await?;

    // The sample applies as it is, and overrides by its name what is earlier.
    let sample = parts::workspace().join("manifests/samples/settings.yaml");
    let sample = sample.to_str().context("the path of the sample")?;
    site.cluster.label_node("edge-1", "site", Some("shop")).await?;
    settings.apply("10-all", json!({ "labelSelector": {}, "maxDownloadRate": "64Mi" })).await?;
    settings.0.delete("fast", &DeleteParams::default()).await?;
    site.cluster.kubectl(&["apply", "-f", sample]).await?;
    settings.are_in_force("50-shops").await?;
    says(
        &node,
        "at most 2.00 MiB/s, uploads at most 10.00 MiB/s, windows 22:00+6h Node, disk at most 80% full, makes room, keeps unfinished pulls for 6h",
        true,
    )
    .await?;
    let listed = site.cluster.kubectl(&["get", "ipps", "50-shops"]).await?;
    let row: Vec<_> = listed.lines().last().unwrap_or_default().split_whitespace().take(4).collect();
    assert_eq!(row, ["50-shops", "1", "1", "True"], "{listed}");
    Ok(())
}

#[tokio::test]
async fn jobs_go_on_without_the_right_to_read_settings() -> Result<()> {
    let mut site = Site::in_own_cluster().await?;
    let _node = site.add_node("edge-1").await?.await?;
    // A role of an earlier release.
    let role = site.cluster.kubectl(&["get", "clusterrole", "cloudcore-prepull", "-o", "json"]).await?;
    let mut role: Value = serde_json::from_str(&role)?;
    let rules = role["rules"].as_array_mut().context("no rules")?;
    rules.retain(|rule| !rule["resources"].to_string().contains("imageprepullsettings"));
    let file = site.cluster.place().dir().join("role.json");
    std::fs::write(&file, role.to_string())?;
    site.cluster.kubectl(&["replace", "-f", file.to_str().context("not UTF-8")?]).await?;
    site.cloud.terminate().await?;
    site.cloud.restart().await?;
    let (_, reference) = site.seed_image("goes-on", &[MIB])?;
    site.job("goes-on").images([&reference]).on(["edge-1"]).completes().await?;
    eventually("the log has the remedy", SOON, async || {
        let log = site.cloud.log();
        let remedy = "kubectl apply -f manifests/cloudcore-prepull/rbac.yaml";
        let has_remedy = |line: &str| line.contains("imageprepullsettings") && line.contains(remedy);
        ensure!(log.lines().any(has_remedy), "the log has no line with {remedy}");
        Ok(())
    })
    .await
}
