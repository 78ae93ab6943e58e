//! helm, and our chart.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::parts::{self, workspace};

/// Directory of the chart, in the workspace.
pub const CHART: &str = "manifests/chart";

/// A helm from the cache, into which `make setup` and `make test` build it. If it's missing there, it's built now, which takes
/// minutes.
pub struct Helm {
    program: PathBuf,
}

impl Helm {
    /// Finds helm.
    pub async fn find() -> Result<Self> {
        let script = Command::new(parts::setup_dir().join("helm.sh"));
        Ok(Self { program: parts::run_command(script).await?.trim().into() })
    }

    /// A command, to be run in the workspace.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(workspace());
        command
    }

    /// The objects of the chart with these values, as of a release in `namespace`.
    pub async fn template(&self, namespace: &str, values: &Value) -> Result<Vec<Value>> {
        let json = format!("--set-json={}", pairs(values)?);
        // Without a cluster helm takes the oldest Kubernetes that it knows.
        let version = "--kube-version=1.36.0";
        let template =
            self.command(&["template", "prepull", CHART, "--namespace", namespace, version, &json]);
        Ok(serde_saphyr::from_multiple(&parts::run_command(template).await?)?)
    }
}

/// The values as the flag `--set-json` takes them.
fn pairs(values: &Value) -> Result<String> {
    let values = values.as_object().context("the values are no object")?;
    Ok(values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","))
}
