//! Edge nodes, each a containerd and an edgecore-prepull.

mod containerd;
mod eavesdropper;
mod ledger;
mod start;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

pub use containerd::Containerd;
pub(crate) use containerd::{Paths, command_inside};
pub use ledger::LedgerTask;
pub use start::NodeStart;

use crate::cleanup::{Child, SOON, eventually};
use crate::cloud::{Cloud, Metrics};
use crate::cluster::Cluster;
use crate::network::{Passage, Space};
use crate::parts::Programs;
use crate::place::Place;
use crate::plain_http;
use crate::ports::Port;
use eavesdropper::Eavesdropper;

/// Limit for the end of the agent after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(20);
const PROGRAM: &str = "edgecore-prepull";

/// An edge node that has joined with a token. The test creates its Node object.
pub struct EdgeNode {
    place: Arc<Place>,
    name: String,
    containerd: Containerd,
    state: PathBuf,
    metrics: Port,
    arguments: Vec<OsString>,
    /// Namespace of the agent, if it isn't that of this process, and the passage to its metrics.
    space: Option<(Space, Passage)>,
    environment: Vec<(&'static str, OsString)>,
    /// Records the agent's requests to the runtime.
    eavesdropper: Option<Eavesdropper>,
    agent: Option<Child>,
    programs: Programs,
}

impl EdgeNode {
    /// Starts a containerd, joins with a token of the cloud, and starts the agent:
    /// `EdgeNode::start(&cluster, &cloud, "edge-1").await?`.
    pub fn start<'a>(_cluster: &Cluster, cloud: &'a Cloud, name: &str) -> NodeStart<'a> {
        NodeStart::new(cloud, name)
    }

    /// Name of the Node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Container runtime of the node.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// Container runtime of the node, to kill and restart it.
    pub fn containerd_mut(&mut self) -> &mut Containerd {
        &mut self.containerd
    }

    /// Images of the runtime: reference and digest.
    pub async fn images(&self) -> Result<BTreeMap<String, String>> {
        self.containerd.images().await
    }

    /// Whether the runtime has an image under this exact reference.
    pub async fn has_image(&self, reference: &str) -> Result<bool> {
        self.containerd.has_image(reference).await
    }

    /// Removes an image from the runtime.
    pub async fn remove_image(&self, reference: &str) -> Result<()> {
        self.containerd.remove_image(reference).await
    }

    /// Process of the agent.
    pub fn agent(&self) -> Result<&Child> {
        self.agent.as_ref().with_context(|| format!("the agent of {} is stopped", self.name))
    }

    /// Kills the agent with SIGKILL.
    pub fn kill9_agent(&mut self) -> Result<()> {
        self.agent.take().map_or(Ok(()), |mut agent| agent.kill9())
    }

    /// Ends the agent with SIGTERM, and waits until it has ended.
    pub async fn terminate_agent(&mut self) -> Result<()> {
        let mut agent =
            self.agent.take().with_context(|| format!("the agent of {} is stopped", self.name))?;
        agent.terminate()?;
        let status = agent.wait(STOP_LIMIT).await?;
        ensure!(status.success(), "the agent of {} ended with {status} after SIGTERM", self.name);
        Ok(())
    }

    /// Ends the agent as an update does, and starts today's program with the same state.
    pub async fn upgrade_agent(&mut self) -> Result<()> {
        self.terminate_agent().await?;
        self.programs = Programs::Built;
        self.restart_agent()
    }

    /// Kills the agent, and starts that of an earlier release in this directory, or today's, with the same state.
    pub fn replace_agent(&mut self, before: Option<&Path>) -> Result<()> {
        self.programs = before.map_or(Programs::Built, |dir| Programs::Before(dir.to_owned()));
        self.restart_agent()
    }

    /// Kills the agent, if it runs, and starts it with the same state.
    pub fn restart_agent(&mut self) -> Result<()> {
        self.kill9_agent()?;
        let mut command = Command::new(self.programs.path(PROGRAM)?);
        command.arg("run").arg("--state-dir").arg(&self.state);
        let endpoint = match &self.eavesdropper {
            Some(eavesdropper) => eavesdropper.endpoint(),
            None => self.containerd.endpoint(),
        };
        command.args(["--runtime-endpoint", &endpoint]);
        command.arg("--metrics-listen").arg(self.metrics.addr().to_string()).args(&self.arguments);
        // The defaults are percentages of the disk, which would fail on a build machine.
        command.envs([("PREPULL_DISK_MIN_FREE", "64MiB"), ("PREPULL_IMAGE_GC_HIGH_THRESHOLD", "100%")]);
        command.envs(self.environment.iter().cloned());
        if let Some((space, _)) = &self.space {
            command = space.wrap_command(&command);
        }
        self.agent = Some(Child::spawn(&self.place, &format!("agent-{}", self.name), command)?);
        Ok(())
    }

    /// Whether the agent has ended by itself.
    pub fn has_agent_ended(&mut self) -> bool {
        self.agent.as_mut().is_some_and(|agent| !agent.is_running())
    }

    /// Sets the agent's wall clock ahead by this many seconds, or behind, from its next start on.
    pub fn set_clock_off_by(&mut self, seconds: i64) -> Result<()> {
        self.environment = if seconds == 0 { Vec::new() } else { start::clock_off_by(seconds)? };
        Ok(())
    }

    /// Whether the agent has sent this text to its runtime. Needs [`NodeStart::eavesdropped`].
    pub fn has_sent_to_runtime(&self, text: &str) -> Result<bool> {
        let eavesdropper = self
            .eavesdropper
            .as_ref()
            .context("nothing was recorded: start the node with .eavesdropped()")?;
        Ok(eavesdropper.has_heard(text.as_bytes()))
    }

    /// Freezes the agent with SIGSTOP: its connection stays open.
    pub fn stop_agent(&self) -> Result<()> {
        self.agent()?.stop()
    }

    /// Resumes the agent after [`Self::stop_agent`].
    pub fn cont_agent(&self) -> Result<()> {
        self.agent()?.cont()
    }

    /// Kills containerd and starts it with the same data.
    pub async fn restart_containerd(&mut self) -> Result<()> {
        self.containerd.restart().await
    }

    /// Log of the agent, over all its restarts.
    pub fn agent_log(&self) -> String {
        std::fs::read_to_string(self.agent_log_path()).unwrap_or_default()
    }

    /// File of the agent's log.
    pub fn agent_log_path(&self) -> PathBuf {
        self.place.log_file(&format!("agent-{}", self.name))
    }

    /// State directory of the agent.
    pub fn state_dir(&self) -> &Path {
        &self.state
    }

    /// Number of tasks in the agent's ledger, one file each.
    pub fn open_tasks(&self) -> usize {
        let files = std::fs::read_dir(self.state.join("tasks")).into_iter().flatten().flatten();
        files.filter(|file| file.path().extension().is_some_and(|extension| extension == "json")).count()
    }

    /// Waits until the agent reports that its tunnel is connected.
    pub async fn is_connected(&self) -> Result<()> {
        eventually(&format!("the agent of {} is connected", self.name), SOON, async || {
            let connected = self.metrics().await?.sum("edgecore_prepull_connected", &[]);
            ensure!(connected > 0.0, "edgecore_prepull_connected is {connected}");
            Ok(())
        })
        .await
        .with_context(|| crate::place::last_lines(&self.agent_log(), 20))
    }

    /// Runs `edgecore-prepull status` with the agent's settings. Returns its exit status and its output.
    pub async fn status(&self) -> Result<(i32, String)> {
        let mut command = Command::new(self.programs.path(PROGRAM)?);
        command.args(["status", "--runtime-endpoint", &self.containerd.endpoint()]).arg("--state-dir");
        command.arg(&self.state).arg("--metrics-listen").arg(self.metrics.addr().to_string());
        if let Some((space, _)) = &self.space {
            command = space.wrap_command(&command);
        }
        let output = tokio::process::Command::from(command).output().await.context("status cannot be run")?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        Ok((output.status.code().context("a signal has ended it")?, said))
    }

    /// Reads the current metrics of the agent.
    pub async fn metrics(&self) -> Result<Metrics> {
        let (status, body) = plain_http::get(self.metrics_addr(), "/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {body}");
        Ok(Metrics(body))
    }

    /// Address of the agent's metrics endpoint.
    pub fn metrics_addr(&self) -> SocketAddr {
        self.metrics.addr()
    }
}
