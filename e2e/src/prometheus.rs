//! A real Prometheus, of Debian's package, with the alerts and the queries of manifests/monitoring.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::cleanup::{Child, SOON, eventually};
use crate::cluster::Cluster;
use crate::parts::{self, workspace};
use crate::plain_http;
use crate::ports::Port;

/// Directory of the alerts and the dashboard.
pub const MONITORING: &str = "manifests/monitoring";

/// The folder of prometheus and promtool.
pub async fn programs() -> Result<PathBuf> {
    Ok(parts::run_command(Command::new(parts::setup_dir().join("prometheus.sh"))).await?.trim().into())
}

/// The queries of the dashboard, for the last minute and every job.
pub fn dashboard() -> Result<Vec<String>> {
    let board = std::fs::read_to_string(workspace().join(MONITORING).join("dashboard.json"))?;
    let board: Value = serde_json::from_str(&board)?;
    let panels = board["panels"].as_array().context("no panels")?;
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    let queries = targets.filter_map(|target| Some(target["expr"].as_str()?.to_owned()));
    Ok(queries.map(|query| query.replace("$__rate_interval", "1m").replace("$job_name", ".*")).collect())
}

/// A Prometheus that scrapes once a second, and evaluates the alerts as often.
pub struct Prometheus {
    address: SocketAddr,
    process: Child,
    #[expect(dead_code, reason = "held until the end")]
    port: Port,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these.
    pub async fn start(cluster: &Cluster, targets: &[SocketAddr]) -> Result<Self> {
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

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The current values of a query.
    pub async fn query(&self, query: &str) -> Result<Vec<f64>> {
        let escaped: Vec<_> = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer = self.get_data(&format!("/api/v1/query?query={}", escaped.concat())).await?;
        let values = answer["result"].as_array().context("no result")?;
        let number = |sample: &Value| sample["value"][1].as_str().and_then(|value| value.parse().ok());
        Ok(values.iter().filter_map(number).collect())
    }

    /// The single current value of a query.
    pub async fn value(&self, query: &str) -> Result<f64> {
        let values = self.query(query).await?;
        let [value] = values[..] else { anyhow::bail!("{query} has the values {values:?}, and not one") };
        Ok(value)
    }

    /// Waits until each rule has been evaluated, and fails if that was impossible for one. Returns their number.
    pub async fn rules_are_sound(&self) -> Result<usize> {
        let rules = async || {
            let groups = self.get_data("/api/v1/rules").await?["groups"].take();
            let groups = groups.as_array().context("no groups")?.clone();
            let rules = groups
                .into_iter()
                .flat_map(|mut group| group["rules"].as_array_mut().map(std::mem::take).unwrap_or_default());
            anyhow::Ok(rules.collect::<Vec<_>>())
        };
        let rules = eventually("every rule has been evaluated", SOON, async || {
            let rules = rules().await?;
            ensure!(!rules.is_empty() && rules.iter().all(|rule| rule["health"] != "unknown"), "{rules:#?}");
            Ok(rules)
        })
        .await?;
        let bad: Vec<_> = rules.iter().filter(|rule| rule["health"] != "ok").collect();
        ensure!(bad.is_empty(), "{bad:#?}");
        Ok(rules.len())
    }

    async fn get_data(&self, path: &str) -> Result<Value> {
        let (status, body) = plain_http::get(self.address, path).await?;
        let mut answer: Value =
            serde_json::from_str(&body).with_context(|| format!("{path}: {status} {body}"))?;
        ensure!(answer["status"] == "success", "{path}: {body}");
        Ok(answer["data"].take())
    }
}
