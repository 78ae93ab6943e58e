//! cloudcore-prepull, as its own ServiceAccount.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use kube::config::Kubeconfig;

use crate::api_proxy::ApiProxy;
use crate::cleanup::{Child, eventually};
use crate::cluster::{Cluster, Hold, NAMESPACE};
use crate::front::{Backend, Front};
use crate::keep::keeping;
use crate::network::{Network, Passage, Space};
use crate::parts;
use crate::place::{Place, tail};
use crate::plain_http;
use crate::ports::Port;

/// It is up in well under a second; the machine may be busy.
const START_LIMIT: Duration = Duration::from_secs(30);
/// SIGTERM is graceful, and not endless.
const STOP_LIMIT: Duration = Duration::from_secs(20);
const PROGRAM: &str = "cloudcore-prepull";
/// Short, for tests wait for them, and long enough for a busy machine.
const ELECTION: [&str; 3] =
    ["--lease-duration=4s", "--lease-renew-deadline=3s", "--lease-retry-period=500ms"];

/// The cloud side: a process, and what it takes to start it again in the same place.
pub struct Cloud {
    place: Arc<Place>,
    name: String,
    kubeconfig: PathBuf,
    dir: PathBuf,
    tunnel: Port,
    enroll: Port,
    metrics: Port,
    front: Option<SocketAddr>,
    arguments: Vec<OsString>,
    standby: bool,
    /// Where it runs, if not where we do, and the ways there.
    space: Option<(Space, Vec<Passage>)>,
    process: Option<Child>,
    /// Behind the process, which writes to it until it is gone.
    #[expect(dead_code, reason = "held until the end")]
    hold: Hold,
}

/// A cloud to be; `.await` starts it.
pub struct Start<'a> {
    cluster: &'a Cluster,
    kubeconfig: PathBuf,
    name: String,
    arguments: Vec<OsString>,
    replica: bool,
    standby: bool,
    space: Option<Space>,
}

impl Cloud {
    /// Under RBAC, with the rights that manifests/ gives it: `Cloud::start(&cluster).await?`. It is the only one,
    /// without an election, unless it is told to be [`Start::replica`].
    pub fn start(cluster: &Cluster) -> Start<'_> {
        let kubeconfig = cluster.cloudcore_kubeconfig().to_owned();
        Start {
            cluster,
            kubeconfig,
            name: PROGRAM.to_owned(),
            arguments: Vec::new(),
            space: None,
            replica: false,
            standby: false,
        }
    }

    /// Where edges dial: what it listens on, or what stands [in front](Self::behind) of it.
    pub fn tunnel_addr(&self) -> SocketAddr {
        self.front.unwrap_or_else(|| self.tunnel_listen())
    }

    /// Where it listens for edges while it leads.
    pub fn tunnel_listen(&self) -> SocketAddr {
        self.tunnel.addr()
    }

    /// This replica, for a [`Front`].
    pub fn backend(&self) -> Backend {
        Backend { tunnel: self.tunnel_listen(), health: self.metrics_addr() }
    }

    /// Edges that are started from now on dial the front.
    pub fn behind(&mut self, front: &Front) {
        self.front = Some(front.addr());
    }

    /// Where edges join.
    pub fn enroll_addr(&self) -> SocketAddr {
        self.enroll.addr()
    }

    /// Where /metrics, /healthz and /readyz are.
    pub fn metrics_addr(&self) -> SocketAddr {
        self.metrics.addr()
    }

    /// A token for this node, as an operator makes it: `cloudcore-prepull token create --node`.
    pub async fn token(&self, node: &str) -> Result<String> {
        self.command(&["token", "create", "--node", node]).await
    }

    /// Runs another command of the program in the same cluster, and returns what it prints.
    pub async fn command(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(parts::program(PROGRAM)?);
        command.args(arguments).arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", NAMESPACE]);
        Ok(parts::output(command).await?.trim().to_owned())
    }

    /// Runs `plan` against the cluster, with the rights of the cloud, and returns what it prints.
    pub async fn plan(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(parts::program(PROGRAM)?);
        command.arg("plan").args(arguments).arg("--kubeconfig").arg(&self.kubeconfig);
        parts::output(command).await
    }

    /// The metrics, as they are now.
    pub async fn metrics(&self) -> Result<Metrics> {
        let (status, body) = plain_http::get(self.metrics_addr(), "/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {body}");
        Ok(Metrics(body))
    }

    /// Whether it says that it is ready.
    pub async fn is_ready(&self) -> Result<bool> {
        Ok(self.readiness().await?.0 == 200)
    }

    /// What it says of its readiness: status and body.
    pub async fn readiness(&self) -> Result<(u16, String)> {
        plain_http::get(self.metrics_addr(), "/readyz").await
    }

    /// Waits until it is ready, so until it leads.
    pub async fn leads(&self, limit: Duration) -> Result<()> {
        eventually("it leads", limit, async || {
            let (status, body) = self.readiness().await?;
            ensure!(status == 200, "{status} {body}");
            Ok(())
        })
        .await
        .with_context(|| tail(&self.log(), 20))
    }

    /// Waits until it ends by itself.
    pub async fn ends(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut process = self.process.take().context("cloudcore-prepull is stopped")?;
        process.wait(limit).await
    }

    /// What it logged, over all its restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Where it logs.
    pub fn log_path(&self) -> PathBuf {
        self.place.log_file(&self.name)
    }

    /// The process.
    pub fn process(&self) -> Result<&Child> {
        self.process.as_ref().context("cloudcore-prepull is stopped")
    }

    /// SIGKILL.
    pub fn kill9(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill9())
    }

    /// SIGTERM, and the wait for its end.
    pub async fn terminate(&mut self) -> Result<()> {
        let mut process = self.process.take().context("cloudcore-prepull is stopped")?;
        process.terminate()?;
        let status = process.wait(STOP_LIMIT).await?;
        ensure!(status.success(), "cloudcore-prepull ended with {status} after SIGTERM");
        Ok(())
    }

    /// Kills it, if it runs, and starts it on the same ports. Everything else it has to find again.
    pub async fn restart(&mut self) -> Result<()> {
        self.kill9()?;
        let ports_file = self.dir.join("ports.json");
        let _ = std::fs::remove_file(&ports_file);
        let mut command = Command::new(parts::program(PROGRAM)?);
        command.arg("run").arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", NAMESPACE]);
        // In a namespace of its own nobody else can get at it.
        let tunnel = if self.space.is_some() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        for (flag, address) in [
            ("--tunnel-listen", (tunnel, self.tunnel.number()).into()),
            ("--enroll-listen", self.enroll.addr()),
            ("--metrics-listen", self.metrics.addr()),
        ] {
            command.arg(flag).arg(SocketAddr::to_string(&address));
        }
        command.arg("--ports-file").arg(&ports_file).args(&self.arguments);
        if let Some((space, _)) = &self.space {
            command = space.command(&command);
        }
        let mut process = Child::spawn(&self.place, &self.name, command)?;
        let (standby, health) = (self.standby, self.metrics.addr());
        let up = || {
            let (running, said) = (process.check_running(), standby || ports_file.exists());
            async move {
                // The outer error is worth another try, the inner one is not.
                if running.is_err() {
                    return Ok(running);
                }
                ensure!(said, "it has not said so");
                if standby {
                    plain_http::get(health, "/healthz").await?;
                }
                Ok(Ok(()))
            }
        };
        eventually("cloudcore-prepull listens", START_LIMIT, up).await??;
        self.process = Some(process);
        Ok(())
    }

    /// Between where we are and where it runs: from us to its ports, and from it to the API server.
    fn passages(&self, space: &Space) -> Result<Vec<Passage>> {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        let cluster = kubeconfig.clusters.first().and_then(|named| named.cluster.as_ref());
        let server = cluster.and_then(|cluster| cluster.server.as_deref()).unwrap_or_default();
        let server = server.trim_start_matches("https://").trim_end_matches('/');
        let server = server.parse().with_context(|| format!("the API server {server} is not on loopback"))?;
        let mut passages = vec![Passage::through(Some(space), None, server)?];
        for addr in [self.tunnel_addr(), self.enroll_addr(), self.metrics_addr()] {
            passages.push(Passage::through(None, Some(space), addr)?);
        }
        Ok(passages)
    }

    /// SIGSTOP: its connections stay open and nothing answers.
    pub fn pause(&self) -> Result<()> {
        self.process()?.stop()
    }

    /// It goes on.
    pub fn resume(&self) -> Result<()> {
        self.process()?.cont()
    }
}

impl Start<'_> {
    /// One more flag of `run`.
    #[must_use]
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Flags of `run`.
    #[must_use]
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(Into::into));
        self
    }

    /// It reaches the API server through a proxy.
    #[must_use]
    pub fn through(mut self, api: &ApiProxy) -> Self {
        api.kubeconfig().clone_into(&mut self.kubeconfig);
        self
    }

    /// It runs in the network's place for the cloud.
    #[must_use]
    pub fn within(mut self, network: &Network) -> Self {
        self.space = Some(network.cloud().clone());
        self
    }

    /// One of several, of which one leads. A leader that hangs is followed within seconds.
    #[must_use]
    pub fn replica(mut self) -> Self {
        self.replica = true;
        self
    }

    /// A [`Self::replica`] that need not lead: it is up when it answers.
    #[must_use]
    pub fn standby(mut self) -> Self {
        self.standby = true;
        self.replica()
    }

    /// With this kubeconfig.
    #[must_use]
    pub fn kubeconfig(mut self, file: &Path) -> Self {
        file.clone_into(&mut self.kubeconfig);
        self
    }

    /// Under another name: a second one beside the first. It is the name of its log.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    async fn start(self) -> Result<Cloud> {
        let place = Arc::clone(self.cluster.place());
        let mut arguments = self.arguments;
        if self.replica {
            arguments.extend(ELECTION.map(Into::into));
        } else {
            arguments.push("--leader-elect=false".into());
        }
        // `make test` plays every recording again, and looks for credentials in it.
        if std::env::var_os("PREPULL_E2E_RECORD").is_some() {
            let file = place.logs().join(format!("{}.recording", self.name));
            arguments.extend(["--record".into(), file.into()]);
        }
        let mut cloud = Cloud {
            dir: place.new_dir("cloud")?,
            place,
            name: self.name,
            kubeconfig: self.kubeconfig,
            tunnel: Port::reserve()?,
            enroll: Port::reserve()?,
            metrics: Port::reserve()?,
            front: None,
            arguments,
            standby: self.standby,
            space: None,
            process: None,
            hold: self.cluster.hold(),
        };
        if let Some(space) = self.space {
            cloud.space = Some((space.clone(), cloud.passages(&space)?));
        }
        cloud.restart().await?;
        Ok(cloud)
    }
}

impl<'a> IntoFuture for Start<'a> {
    type Output = Result<Cloud>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.start().boxed()
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        let Some(process) = self.process.as_ref().filter(|_| !keeping()) else { return };
        // It may be stopped, or hang: the log directory then has no metrics.
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

/// Metrics in Prometheus' text format.
#[derive(Clone, Debug)]
pub struct Metrics(pub String);

impl Metrics {
    /// The sum of the samples of that name which have all of these labels. 0 where there is none.
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
