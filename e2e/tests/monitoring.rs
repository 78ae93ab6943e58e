//! Prometheus and our metrics: promtool has no complaints about them, its tests of the alerts pass, and a real
//! Prometheus scrapes a run and answers every query of the dashboard.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};

use prepull_e2e::parts::{self, workspace};
use prepull_e2e::prelude::*;
use prepull_e2e::prometheus::{MONITORING, Prometheus, dashboard, programs};
use serde_json::{Value, json};

/// The complaints of `promtool check metrics`; empty if there are none.
fn lint(programs: &std::path::Path, metrics: &str) -> Result<String> {
    let mut command = Command::new(programs.join("promtool"));
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn()?;
    process.stdin.take().context("no stdin")?.write_all(metrics.as_bytes())?;
    let output = process.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok(format!("{}{}", String::from_utf8_lossy(&said), if output.status.success() { "" } else { "(failed)" }))
}

#[tokio::test]
async fn the_alerts_fire_only_when_needed() -> Result<()> {
    let mut command = Command::new(programs().await?.join("promtool"));
    command.args(["test", "rules", "alerts-test.yaml"]).current_dir(workspace().join(MONITORING));
    let said = parts::run_command(command).await?;
    ensure!(said.contains("SUCCESS"), "{said}");
    // Each alert must fire in one test, and stay silent in another.
    let read = |file: &str| std::fs::read_to_string(workspace().join(MONITORING).join(file));
    let (alerts, tests) = (read("alerts.yaml")?, read("alerts-test.yaml")?);
    for alert in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let silent = tests.matches(&format!("alertname: {alert}}}")).count();
        let fires = tests.matches(&format!("alertname: {alert}\n")).count();
        ensure!(silent > 0 && fires > 0, "{alert} is not tested both ways");
    }
    Ok(())
}

#[tokio::test]
async fn a_prometheus_answers_the_dashboards_queries() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let image = registry.seed(&Image::of_layers("web", &[2 * MIB])?, "shop/web:v1")?;
    stage.cluster.job("web").on(["edge-1"]).images([&image]).completes().await?;
    // One line for the end of the image, and one for that of the task in each program.
    let line = |log: &str, words: &str| log.lines().find(|line| line.contains(words)).map(str::to_owned);
    let ended =
        line(&node.agent_log(), "image ended").context("the agent does not say how the image ended")?;
    for field in ["image=", "outcome=Pulled", "bytes=", "seconds=", "rate=", "attempts=1"] {
        ensure!(ended.contains(field), "no {field} in {ended}");
    }
    let ended =
        line(&stage.cloud.log(), "task ended").context("the cloud does not say how the task ended")?;
    for field in ["node=edge-1", "task=", "outcome=Succeeded", "images=1", "bytes=", "seconds="] {
        ensure!(ended.contains(field), "no {field} in {ended}");
    }
    let programs = programs().await?;
    for metrics in [stage.cloud.metrics().await?, node.metrics().await?] {
        assert_eq!(lint(&programs, &metrics.0)?, "");
    }

    let prometheus =
        Prometheus::start(&stage.cluster, &[stage.cloud.metrics_addr(), node.metrics_addr()]).await?;
    for (query, expected) in [
        ("sum(cloudcore_prepull_leader)", 1.0),
        ("edgecore_prepull_connected", 1.0),
        ("edgecore_prepull_sessions_total", 1.0),
        ("sum(cloudcore_prepull_task_duration_seconds_count{outcome=\"succeeded\"})", 1.0),
        ("sum(cloudcore_prepull_image_duration_seconds_count{outcome=\"pulled\"})", 1.0),
        ("sum(cloudcore_prepull_task_queue_duration_seconds_count)", 1.0),
        ("sum(cloudcore_prepull_image_tries_total)", 1.0),
        ("sum(cloudcore_prepull_pulled_image_bytes_total) > bool 1000000", 1.0),
        ("sum(edgecore_prepull_image_duration_seconds_count)", 1.0),
        ("count(edgecore_prepull_certificate_not_after_timestamp_seconds > time())", 1.0),
        ("count(cloudcore_prepull_build_info) + count(edgecore_prepull_build_info)", 2.0),
        ("sum(cloudcore_prepull_status_write_duration_seconds_count{outcome=\"done\"}) > bool 0", 1.0),
    ] {
        eventually(query, SOON, async || {
            let found = prometheus.query(query).await?;
            ensure!(found == [expected], "{found:?}");
            Ok(())
        })
        .await?;
    }
    let firing = prometheus.query("ALERTS{alertstate=\"firing\"}").await?;
    ensure!(firing.is_empty(), "{firing:?}");

    // Each rule has been evaluated, and each query of the dashboard is answered.
    prometheus.rules_are_sound().await?;
    let queries = dashboard()?;
    ensure!(queries.len() > 20, "{queries:?}");
    for query in queries {
        prometheus.query(&query).await?;
    }
    Ok(())
}

#[tokio::test]
async fn series_do_not_grow_with_edges() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let series = async || {
        let metrics = cloud.metrics().await?.0;
        let samples = metrics.lines().filter(|line| !line.starts_with('#'));
        anyhow::Ok(
            samples.filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned())).collect::<BTreeSet<_>>(),
        )
    };
    let fleet = Fleet::start(&cluster, &cloud, 40).await?;
    let (few, all) = (&fleet.names()[..2], fleet.names());
    let job = |name: &str, nodes: &[String]| {
        cluster.job(name).images(["registry.example/a:v1"]).on(nodes).concurrency(40)
    };
    job("few", few).completes().await?;
    let before = series().await?;
    job("many", all).completes().await?;
    let after = series().await?;
    let new: Vec<_> = after.difference(&before).collect();
    // Neither for an edge nor for an ended job; another outcome may occur for the first time.
    ensure!(new.len() < 20, "{new:#?}");
    ensure!(!new.iter().any(|series| series.contains("many") || series.contains("sim-")), "{new:#?}");
    Ok(())
}

#[tokio::test]
async fn the_scrape_configuration_is_sound() -> Result<()> {
    let monitoring = workspace().join(MONITORING);
    let mut config: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(monitoring.join("scrape.yaml"))?)?;
    // Debian's Prometheus is built without Kubernetes. Everything else is as it is.
    for job in config["scrape_configs"].as_array_mut().context("no scrape_configs")? {
        let job = job.as_object_mut().context("not an object")?;
        let Some(found) = job.remove("kubernetes_sd_configs") else { continue };
        let [ref found] = found.as_array().context("no list")?[..] else { bail!("not one: {found}") };
        assert_eq!(found["role"], "pod");
        let namespace = &found["namespaces"]["names"];
        ensure!(
            ["prepull-system", "prepull-edge"].iter().any(|name| *namespace == json!([name])),
            "{namespace}"
        );
    }
    config["rule_files"] = json!([monitoring.join("alerts.yaml")]);
    let place = Place::here()?;
    let file = place.new_dir("config")?.join("prometheus.yml");
    std::fs::write(&file, config.to_string())?;
    let mut command = Command::new(programs().await?.join("promtool"));
    command.args(["check", "config"]).arg(&file);
    let said = parts::run_command(command).await?;
    ensure!(said.contains("rules found"), "{said}");
    Ok(())
}
