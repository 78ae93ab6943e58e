//! What a Prometheus makes of the programs: promtool has nothing to say about their metrics, its tests of the alerts pass, and
//! a real one scrapes a run and answers every query of the dashboard.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use prepull_e2e::cleanup::Child;
use prepull_e2e::parts::{self, workspace};
use prepull_e2e::plain_http;
use prepull_e2e::ports::Port;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

const MONITORING: &str = "manifests/monitoring";

/// The folder of prometheus and promtool.
async fn programs() -> Result<PathBuf> {
    Ok(parts::output(Command::new(parts::setup_dir().join("prometheus.sh"))).await?.trim().into())
}

/// What `promtool check metrics` says; nothing if all is well.
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
async fn the_alerts_fire_where_they_have_to_and_nowhere_else() -> Result<()> {
    let mut command = Command::new(programs().await?.join("promtool"));
    command.args(["test", "rules", "alerts-test.yaml"]).current_dir(workspace().join(MONITORING));
    let said = parts::output(command).await?;
    ensure!(said.contains("SUCCESS"), "{said}");
    // Each alert has to fire in one test, and to be silent in another.
    let read = |file: &str| std::fs::read_to_string(workspace().join(MONITORING).join(file));
    let (alerts, tests) = (read("alerts.yaml")?, read("alerts-test.yaml")?);
    for alert in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let silent = tests.matches(&format!("alertname: {alert}}}")).count();
        let fires = tests.matches(&format!("alertname: {alert}\n")).count();
        ensure!(silent > 0 && fires > 0, "{alert} is not tested both ways");
    }
    Ok(())
}

/// A Prometheus that scrapes these.
struct Prometheus {
    address: SocketAddr,
    #[expect(dead_code, reason = "held until the end")]
    process: Child,
    #[expect(dead_code, reason = "held until the end")]
    port: Port,
}

impl Prometheus {
    async fn start(cluster: &Cluster, targets: &[SocketAddr]) -> Result<Self> {
        let (dir, port) = (cluster.place().new_dir("prometheus")?, Port::reserve()?);
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [workspace().join(MONITORING).join("alerts.yaml")],
            "scrape_configs": [{"job_name": "prepull", "static_configs": [{"targets": targets}]}],
        });
        let file = dir.join("prometheus.yml");
        std::fs::write(&file, config.to_string())?;
        let mut command = Command::new(programs().await?.join("prometheus"));
        command.arg("--config.file").arg(&file).arg("--storage.tsdb.path").arg(dir.join("data"));
        command.arg("--web.listen-address").arg(port.addr().to_string());
        let process = Child::spawn(cluster.place(), "prometheus", command)?;
        Ok(Self { address: port.addr(), process, port })
    }

    /// The values that a query has now.
    async fn query(&self, query: &str) -> Result<Vec<f64>> {
        let escaped: Vec<_> = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let path = format!("/api/v1/query?query={}", escaped.concat());
        let (status, body) = plain_http::get(self.address, &path).await?;
        let answer: Value =
            serde_json::from_str(&body).with_context(|| format!("{query}: {status} {body}"))?;
        ensure!(answer["status"] == "success", "{query}: {body}");
        let values = answer["data"]["result"].as_array().context("no result")?;
        let number = |sample: &Value| sample["value"][1].as_str().and_then(|value| value.parse().ok());
        Ok(values.iter().filter_map(number).collect())
    }
}

#[tokio::test]
async fn a_prometheus_scrapes_a_run_and_answers_every_query_of_the_dashboard() -> Result<()> {
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

    let board = std::fs::read_to_string(workspace().join(MONITORING).join("dashboard.json"))?;
    let board: Value = serde_json::from_str(&board)?;
    let panels = board["panels"].as_array().context("no panels")?;
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    let queries: Vec<_> = targets.filter_map(|target| Some(target["expr"].as_str()?.to_owned())).collect();
    ensure!(queries.len() > 20, "{queries:?}");
    for query in queries {
        prometheus.query(&query.replace("$__rate_interval", "1m").replace("$job_name", ".*")).await?;
    }
    Ok(())
}
