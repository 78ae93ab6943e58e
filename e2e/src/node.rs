//! Edge nodes: a containerd and an edgecore-prepull each.

mod containerd;
mod eavesdropper;
mod ledger;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;

pub use containerd::Containerd;
pub use ledger::LedgerTask;

use crate::cleanup::{Child, eventually};
use crate::cloud::{Cloud, Metrics};
use crate::cluster::Cluster;
use crate::network::{Cable, Passage, Space};
use crate::parts;
use crate::place::Place;
use crate::plain_http;
use crate::ports::Port;
use crate::proxy::Proxy;
use eavesdropper::Eavesdropper;

/// SIGTERM is graceful, and not endless.
const STOP_LIMIT: Duration = Duration::from_secs(20);
/// It connects in a fraction of a second.
const START_LIMIT: Duration = Duration::from_secs(30);
const PROGRAM: &str = "edgecore-prepull";

/// A node that has joined with a token. The Node object is the test's to create.
pub struct EdgeNode {
    place: Arc<Place>,
    name: String,
    containerd: Containerd,
    state: PathBuf,
    metrics: Port,
    arguments: Vec<OsString>,
    /// Where the agent runs, if not where we do, and the way to its metrics.
    space: Option<(Space, Passage)>,
    environment: Vec<(&'static str, OsString)>,
    /// Between the agent and the runtime.
    eavesdropper: Option<Eavesdropper>,
    agent: Option<Child>,
}

/// An edge node to be; `.await` starts it.
pub struct Start<'a> {
    cloud: &'a Cloud,
    name: String,
    tunnel: SocketAddr,
    arguments: Vec<OsString>,
    space: Option<Space>,
    environment: Vec<(&'static str, OsString)>,
    disk: Option<u64>,
    eavesdropped: bool,
    agent: bool,
}

impl EdgeNode {
    /// Starts a containerd, joins with a token of the cloud, and starts the agent:
    /// `EdgeNode::start(&cluster, &cloud, "edge-1").await?`.
    pub fn start<'a>(_cluster: &Cluster, cloud: &'a Cloud, name: &str) -> Start<'a> {
        Start {
            cloud,
            name: name.to_owned(),
            tunnel: cloud.tunnel_addr(),
            arguments: Vec::new(),
            space: None,
            environment: Vec::new(),
            disk: None,
            eavesdropped: false,
            agent: true,
        }
    }

    /// Of the Node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its runtime.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// Its runtime, to be killed and restarted.
    pub fn containerd_mut(&mut self) -> &mut Containerd {
        &mut self.containerd
    }

    /// What is there: reference and digest.
    pub async fn images(&self) -> Result<BTreeMap<String, String>> {
        self.containerd.images().await
    }

    /// Whether it is there, under that very reference.
    pub async fn has_image(&self, reference: &str) -> Result<bool> {
        self.containerd.has_image(reference).await
    }

    /// Removes an image from the runtime.
    pub async fn remove_image(&self, reference: &str) -> Result<()> {
        self.containerd.remove_image(reference).await
    }

    /// The agent's process.
    pub fn agent(&self) -> Result<&Child> {
        self.agent.as_ref().with_context(|| format!("the agent of {} is stopped", self.name))
    }

    /// SIGKILL to the agent.
    pub fn kill9_agent(&mut self) -> Result<()> {
        self.agent.take().map_or(Ok(()), |mut agent| agent.kill9())
    }

    /// SIGTERM to the agent, and the wait for its end.
    pub async fn terminate_agent(&mut self) -> Result<()> {
        let mut agent =
            self.agent.take().with_context(|| format!("the agent of {} is stopped", self.name))?;
        agent.terminate()?;
        let status = agent.wait(STOP_LIMIT).await?;
        ensure!(status.success(), "the agent of {} ended with {status} after SIGTERM", self.name);
        Ok(())
    }

    /// Kills the agent, if it runs, and starts it with the same state.
    pub fn restart_agent(&mut self) -> Result<()> {
        self.kill9_agent()?;
        let mut command = Command::new(parts::program(PROGRAM)?);
        command.arg("run").arg("--state-dir").arg(&self.state);
        let endpoint = match &self.eavesdropper {
            Some(eavesdropper) => eavesdropper.endpoint(),
            None => self.containerd.endpoint(),
        };
        command.args(["--runtime-endpoint", &endpoint]);
        command.arg("--metrics-listen").arg(self.metrics.addr().to_string()).args(&self.arguments);
        // A machine that is used for building is not to fail the check for a tenth of its disk.
        command.env("PREPULL_DISK_MIN_FREE", "64MiB").envs(self.environment.iter().cloned());
        if let Some((space, _)) = &self.space {
            command = space.command(&command);
        }
        self.agent = Some(Child::spawn(&self.place, &format!("agent-{}", self.name), command)?);
        Ok(())
    }

    /// Whether the agent has said this to its runtime, word for word: see [`Start::eavesdropped`].
    pub fn told_its_runtime(&self, text: &str) -> Result<bool> {
        let eavesdropper = self.eavesdropper.as_ref().context("nobody listened")?;
        Ok(eavesdropper.has_heard(text.as_bytes()))
    }

    /// SIGSTOP to the agent: its connection stays open.
    pub fn stop_agent(&self) -> Result<()> {
        self.agent()?.stop()
    }

    /// The agent goes on.
    pub fn cont_agent(&self) -> Result<()> {
        self.agent()?.cont()
    }

    /// Kills containerd and starts it with the same data.
    pub async fn restart_containerd(&mut self) -> Result<()> {
        self.containerd.restart().await
    }

    /// What the agent logged, over all its restarts.
    pub fn agent_log(&self) -> String {
        std::fs::read_to_string(self.agent_log_path()).unwrap_or_default()
    }

    /// Where the agent logs.
    pub fn agent_log_path(&self) -> PathBuf {
        self.place.log_file(&format!("agent-{}", self.name))
    }

    /// The agent's state directory.
    pub fn state_dir(&self) -> &Path {
        &self.state
    }

    /// How many tasks are in the agent's ledger: each is a file there.
    pub fn open_tasks(&self) -> usize {
        let files = std::fs::read_dir(self.state.join("tasks")).into_iter().flatten().flatten();
        files.filter(|file| file.path().extension().is_some_and(|extension| extension == "json")).count()
    }

    /// Waits until the agent says that its tunnel is up.
    pub async fn is_connected(&self) -> Result<()> {
        eventually(&format!("the agent of {} is connected", self.name), START_LIMIT, async || {
            let connected = self.metrics().await?.sum("edgecore_prepull_connected", &[]);
            ensure!(connected > 0.0, "it is not");
            Ok(())
        })
        .await
        .with_context(|| crate::place::tail(&self.agent_log(), 20))
    }

    /// The agent's metrics, as they are now.
    pub async fn metrics(&self) -> Result<Metrics> {
        let (status, body) = plain_http::get(self.metrics_addr(), "/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {body}");
        Ok(Metrics(body))
    }

    /// Where the agent's metrics are.
    pub fn metrics_addr(&self) -> SocketAddr {
        self.metrics.addr()
    }
}

impl Start<'_> {
    /// Its tunnel goes through a proxy in front of [`Cloud::tunnel_addr`].
    #[must_use]
    pub fn tunnel_through(mut self, proxy: &Proxy) -> Self {
        self.tunnel = proxy.addr();
        self
    }

    /// Its agent runs at the end of a cable to the cloud, which is in the same network.
    #[must_use]
    pub fn on(mut self, cable: &Cable) -> Self {
        self.space = Some(cable.edge().clone());
        let port = self.cloud.tunnel_addr().port();
        self.tunnel_at((cable.cloud_address(), port).into())
    }

    /// Its tunnel is to be dialled there.
    #[must_use]
    pub fn tunnel_at(mut self, addr: SocketAddr) -> Self {
        self.tunnel = addr;
        self
    }

    /// Flags of the agent's `run`.
    #[must_use]
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(Into::into));
        self
    }

    /// Its runtime's data is on a disk of so many bytes.
    #[must_use]
    pub fn disk(mut self, size: u64) -> Self {
        self.disk = Some(size);
        self
    }

    /// What its agent says to its runtime is written down.
    #[must_use]
    pub fn eavesdropped(mut self) -> Self {
        self.eavesdropped = true;
        self
    }

    /// Its clock on the wall is so many seconds ahead, or behind; the monotonic one is as it should be.
    pub fn clock_off_by(mut self, seconds: i64) -> Result<Self> {
        self.environment.extend([
            ("LD_PRELOAD", parts::libfaketime()?.into()),
            ("FAKETIME", format!("{seconds:+}s").into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
            ("NO_FAKE_STAT", "1".into()),
        ]);
        Ok(self)
    }

    /// It joins, but its agent does not run yet: see [`EdgeNode::restart_agent`].
    #[must_use]
    pub fn without_agent(mut self) -> Self {
        self.agent = false;
        self
    }

    async fn start(self) -> Result<EdgeNode> {
        let Self { cloud, name, tunnel, arguments, space, environment, disk, eavesdropped, agent } = self;
        let (containerd, token) = tokio::try_join!(Containerd::start_on(&name, disk), cloud.token(&name))?;
        let place = Place::here()?;
        let state = containerd.dir().join("agent");
        let mut command = Command::new(parts::program(PROGRAM)?);
        command.args(["join", "--token", &token, "--node-name", &name]).arg("--state-dir").arg(&state);
        command.args(["--enroll-url", &format!("https://{}", cloud.enroll_addr())]);
        command.args(["--tunnel-url", &format!("wss://{tunnel}{}", prepull_api::wire::TUNNEL_PATH)]);
        command.envs(environment.iter().cloned());
        parts::output(command).await.with_context(|| format!("{name} cannot join"))?;
        let metrics = Port::reserve()?;
        let space = match space {
            Some(space) => {
                let passage = Passage::through(None, Some(&space), metrics.addr())?;
                Some((space, passage))
            }
            None => None,
        };
        let eavesdropper = eavesdropped.then(|| Eavesdropper::before(&containerd)).transpose()?;
        let mut node = EdgeNode {
            place,
            name,
            containerd,
            state,
            metrics,
            arguments,
            space,
            environment,
            eavesdropper,
            agent: None,
        };
        if agent {
            node.restart_agent()?;
        }
        Ok(node)
    }
}

impl<'a> IntoFuture for Start<'a> {
    type Output = Result<EdgeNode>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}
