//! cloudcore-prepull as a process, running as its own ServiceAccount.

mod start;

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::config::Kubeconfig;
use prepull_api::wire::TUNNEL_PATH;

use crate::cleanup::{Child, SOON, eventually};
use crate::cluster::{Cluster, Hold, NAMESPACE};
use crate::front::{Backend, Front};
use crate::keep::keeps_everything;
use crate::network::{Passage, Space};
use crate::parts::{self, Programs};
use crate::place::{Place, last_lines};
use crate::plain_http;
use crate::ports::Port;
pub use start::Start;

/// Limit for the end after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(20);
const PROGRAM: &str = "cloudcore-prepull";
/// The flag of `run` and of `plan`.
const WITHOUT_CONSENT: &str = "--require-secret-consent=false";

/// A cloudcore-prepull, with what is needed to restart it on the same ports.
pub struct Cloud {
    place: Arc<Place>,
    name: String,
    kubeconfig: PathBuf,
    dir: PathBuf,
    tunnel: Port,
    enroll: Port,
    metrics: Port,
    edges: Port,
    /// Address of the list of the edges, if it differs from that of the tunnel.
    edges_at: Option<Ipv4Addr>,
    front: Option<SocketAddr>,
    arguments: Vec<OsString>,
    standby: bool,
    /// Name of the pod that it acts for.
    pod: Option<String>,
    /// The file that sets its clock.
    clock: Option<PathBuf>,
    /// Namespace of the process, if not that of the test, and the passages to and from it.
    space: Option<(Space, Vec<Passage>)>,
    process: Option<Child>,
    /// Keeps the cluster. Dropped after the process, which writes to the cluster until it has ended.
    #[expect(dead_code, reason = "held until the end")]
    hold: Hold,
    programs: Programs,
}

impl Cloud {
    /// Starts a cloud with the rights that manifests/ gives it: `Cloud::start(&cluster).await?`. By default it runs
    /// without leader election, and without asking for the consent of secrets' owners; see [`Start::replica`] and
    /// [`Start::requires_consent`].
    pub fn start(cluster: &Cluster) -> Start<'_> {
        Start::new(cluster)
    }

    /// Address for edges: that on which the cloud listens, or that of the [front](Self::behind).
    pub fn tunnel_addr(&self) -> SocketAddr {
        self.front.unwrap_or_else(|| self.tunnel_listen())
    }

    /// Address on which the cloud listens for edges while it leads.
    pub fn tunnel_listen(&self) -> SocketAddr {
        self.tunnel.addr()
    }

    /// Addresses of this replica for a [`Front`].
    pub fn backend(&self) -> Backend {
        Backend { tunnel: self.tunnel_listen(), health: self.metrics_addr() }
    }

    /// Lets edges that are started from now on dial the front.
    pub fn behind(&mut self, front: &Front) {
        self.front = Some(front.addr());
    }

    /// Address at which edges join.
    pub fn enroll_addr(&self) -> SocketAddr {
        self.enroll.addr()
    }

    /// Address of /metrics, /healthz and /readyz.
    pub fn metrics_addr(&self) -> SocketAddr {
        self.metrics.addr()
    }

    /// Address of the list of the edges. In a network namespace it is served on all addresses, as in a pod.
    pub fn edges_addr(&self) -> SocketAddr {
        self.edges.addr()
    }

    /// Creates a token for a node with `cloudcore-prepull token create --node`.
    pub async fn token(&self, node: &str) -> Result<String> {
        self.command(&["token", "create", "--node", node]).await
    }

    /// The command to join a node, with the addresses of the tunnel and for joining.
    pub(crate) fn join_command(
        &self,
        token: &str,
        node: &str,
        state_dir: &Path,
        (tunnel, enroll): (SocketAddr, SocketAddr),
    ) -> Result<Command> {
        let mut command = Command::new(self.programs.path("edgecore-prepull")?);
        command.args(["join", "--token", token, "--node-name", node]).arg("--state-dir").arg(state_dir);
        command.args(["--enroll-url", &format!("https://{enroll}")]);
        command.args(["--tunnel-url", &format!("wss://{tunnel}{TUNNEL_PATH}")]);
        Ok(command)
    }

    /// Runs `edgecore-prepull join`, and returns its output.
    pub async fn join(&self, token: &str, node: &str, state_dir: &Path) -> Result<String> {
        parts::run_command(self.join_command(
            token,
            node,
            state_dir,
            (self.tunnel_addr(), self.enroll_addr()),
        )?)
        .await
    }

    /// Runs a command of cloudcore-prepull against the cluster, and returns its output.
    pub async fn command(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.programs.path(PROGRAM)?);
        command.args(arguments).arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", NAMESPACE]);
        Ok(parts::run_command(command).await?.trim().to_owned())
    }

    /// Runs a command like [`Self::wrap_command`], with another kubeconfig.
    pub async fn command_as(&self, kubeconfig: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(parts::program_path(PROGRAM)?);
        command.args(arguments).arg("--kubeconfig").arg(kubeconfig).args(["--namespace", NAMESPACE]);
        Ok(parts::run_command(command).await?.trim().to_owned())
    }

    /// Runs `plan` against the cluster, with the rights of the cloud, and returns its output.
    pub async fn plan(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(parts::program_path(PROGRAM)?);
        command.arg("plan").args(arguments).arg("--kubeconfig").arg(&self.kubeconfig);
        command.args(self.arguments.iter().filter(|argument| *argument == WITHOUT_CONSENT));
        parts::run_command(command).await
    }

    /// Reads the current metrics.
    pub async fn metrics(&self) -> Result<Metrics> {
        let (status, body) = plain_http::get(self.metrics_addr(), "/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {body}");
        Ok(Metrics(body))
    }

    /// Number of edges that have a session.
    pub async fn sessions(&self) -> Result<f64> {
        Ok(self.metrics().await?.sum("cloudcore_prepull_edge_sessions", &[]))
    }

    /// Waits until exactly this many edges have a session.
    pub async fn has_sessions(&self, expected: u32) -> Result<()> {
        eventually(&format!("the cloud has {expected} sessions"), SOON, async || {
            let sessions = self.sessions().await?;
            ensure!((sessions - f64::from(expected)).abs() < 0.5, "it has {sessions}");
            Ok(())
        })
        .await
    }

    /// Whether the cloud reports that it is ready.
    pub async fn is_ready(&self) -> Result<bool> {
        Ok(self.readiness().await?.0 == 200)
    }

    /// Status and body of /readyz.
    pub async fn readiness(&self) -> Result<(u16, String)> {
        plain_http::get(self.metrics_addr(), "/readyz").await
    }

    /// Status and body of /availablez.
    pub async fn availability(&self) -> Result<(u16, String)> {
        plain_http::get(self.metrics_addr(), "/availablez").await
    }

    /// Waits until the cloud is ready, that is, until it leads.
    pub async fn leads(&self, limit: Duration) -> Result<()> {
        eventually("cloudcore-prepull leads", limit, async || {
            let (status, body) = self.readiness().await?;
            ensure!(status == 200, "{status} {body}");
            Ok(())
        })
        .await
        .with_context(|| last_lines(&self.log(), 20))
    }

    /// Waits until the cloud ends by itself.
    pub async fn ends(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut process = self.process.take().context("cloudcore-prepull is stopped")?;
        process.wait(limit).await
    }

    /// Log of the cloud, over all its restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// File of the log.
    pub fn log_path(&self) -> PathBuf {
        self.place.log_file(&self.name)
    }

    /// Process of the cloud.
    pub fn process(&self) -> Result<&Child> {
        self.process.as_ref().context("cloudcore-prepull is stopped")
    }

    /// Whether the cloud has ended by itself, as a leader does when it loses its Lease.
    pub fn has_ended(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| !process.is_running())
    }

    /// Kills the cloud with SIGKILL.
    pub fn kill9(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill9())
    }

    /// Ends the cloud with SIGTERM, and waits until it has ended.
    pub async fn terminate(&mut self) -> Result<()> {
        let mut process = self.process.take().context("cloudcore-prepull is stopped")?;
        process.terminate()?;
        let status = process.wait(STOP_LIMIT).await?;
        ensure!(status.success(), "cloudcore-prepull ended with {status} after SIGTERM");
        Ok(())
    }

    /// Kills the cloud, if it runs, and starts it on the same ports, without any other state.
    pub async fn restart(&mut self) -> Result<()> {
        self.kill9()?;
        let ports_file = self.dir.join("ports.json");
        let _ = std::fs::remove_file(&ports_file);
        let mut command = Command::new(self.programs.path(PROGRAM)?);
        if matches!(self.programs, Programs::Before(_)) {
            // Not as a flag, because the earliest release doesn't know it.
            command.env("PREPULL_REQUIRE_SECRET_CONSENT", "false");
        }
        command.arg("run").arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", NAMESPACE]);
        // In a network namespace of its own, only the edges of the test can reach the cloud.
        let tunnel = if self.space.is_some() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        for (flag, address) in [
            ("--tunnel-listen", (tunnel, self.tunnel.number()).into()),
            ("--enroll-listen", self.enroll.addr()),
            ("--metrics-listen", self.metrics.addr()),
        ] {
            command.arg(flag).arg(SocketAddr::to_string(&address));
        }
        if matches!(self.programs, Programs::Built) {
            let address =
                SocketAddr::from((self.edges_at.unwrap_or(tunnel), self.edges.number())).to_string();
            command.args(["--edges-listen", &address]);
        }
        command.arg("--ports-file").arg(&ports_file).args(&self.arguments);
        if let Some(pod) = &self.pod {
            command.env("POD_NAME", pod).args(["--advertise", "localhost"]);
        }
        if let Some(file) = &self.clock {
            command
                .envs(parts::faketime()?)
                .env("FAKETIME_TIMESTAMP_FILE", file)
                .env("FAKETIME_NO_CACHE", "1");
        }
        if let Some((space, _)) = &self.space {
            command = space.wrap_command(&command);
        }
        let mut process = Child::spawn(&self.place, &self.name, command)?;
        let (standby, health) = (self.standby, self.metrics.addr());
        let up = || {
            let (running, said) = (process.check_running(), standby || ports_file.exists());
            async move {
                // Only the outer error is retried.
                if running.is_err() {
                    return Ok(running);
                }
                ensure!(said, "it has not written its ports file");
                if standby {
                    plain_http::get(health, "/healthz").await?;
                }
                Ok(Ok(()))
            }
        };
        eventually("cloudcore-prepull listens", SOON, up).await??;
        self.process = Some(process);
        Ok(())
    }

    /// Ends the cloud as an update does, and starts today's program on the same ports.
    pub async fn upgrade(&mut self) -> Result<()> {
        self.terminate().await?;
        self.programs = Programs::Built;
        self.arguments.push(WITHOUT_CONSENT.into());
        self.restart().await
    }

    /// The programs for the cloud and for joining its edges.
    pub(crate) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Opens passages from this namespace to the ports of the cloud, and from the cloud to the API server.
    fn passages(&self, space: &Space) -> Result<Vec<Passage>> {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        let cluster = kubeconfig.clusters.first().and_then(|named| named.cluster.as_ref());
        let server = cluster.and_then(|cluster| cluster.server.as_deref()).unwrap_or_default();
        let server = server.trim_start_matches("https://").trim_end_matches('/');
        let server = server.parse().with_context(|| format!("the API server {server} is not on loopback"))?;
        let mut passages = vec![Passage::between_spaces(Some(space), None, server)?];
        for addr in [self.tunnel_addr(), self.enroll_addr(), self.metrics_addr()] {
            passages.push(Passage::between_spaces(None, Some(space), addr)?);
        }
        Ok(passages)
    }

    /// Freezes the cloud with SIGSTOP: connections stay open and nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.process()?.stop()
    }

    /// Resumes the cloud after [`Self::pause`].
    pub fn resume(&self) -> Result<()> {
        self.process()?.cont()
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        let Some(process) = self.process.as_ref().filter(|_| !keeps_everything()) else { return };
        // If the cloud has ended or hangs, the log directory gets no metrics.
        let _ = process.cont();
        let (addr, file) = (self.metrics_addr(), self.place.log_file(&format!("{}-metrics", self.name)));
        let scrape = std::thread::spawn(move || -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (_, body) = runtime.block_on(plain_http::get(addr, "/metrics"))?;
            Ok(std::fs::write(file, body)?)
        });
        let _ = scrape.join();
    }
}

/// Metrics in the text format of Prometheus.
#[derive(Clone, Debug)]
pub struct Metrics(pub String);

impl Metrics {
    /// Sum of the samples with this name and all of these labels; 0 if there are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples = self.0.lines().filter(|line| !line.starts_with('#'));
        let fitting = samples.filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, found_labels) = series.split_once('{').unwrap_or((series, ""));
            let has = |(key, value): &(&str, &str)| found_labels.contains(&format!("{key}=\"{value}\""));
            (found == name && labels.iter().all(has)).then(|| value.parse::<f64>().ok())?
        });
        fitting.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_by_name_and_labels() {
        let text = "# HELP a x\n# TYPE a gauge\na{phase=\"ok\",x=\"1\"} 2\na{phase=\"ok\",x=\"2\"} 3\na{phase=\"no\"} 4\nab 9\nb 7.5\n";
        let metrics = Metrics(text.to_owned());
        let found = [
            metrics.sum("a", &[]),
            metrics.sum("a", &[("phase", "ok")]),
            metrics.sum("b", &[]),
            metrics.sum("c", &[]),
        ];
        assert!(
            found.iter().zip([9.0, 5.0, 7.5, 0.0]).all(|(a, b)| (a - b).abs() < f64::EPSILON),
            "{found:?}"
        );
    }
}
