//! `edgecore-prepull install` and `uninstall`, on a machine with a real systemd.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use prepull_api::wire::TUNNEL_PATH;
use prepull_e2e::machine::Machine;
use prepull_e2e::parts;
use prepull_e2e::plain_http;
use prepull_e2e::ports::Port;
use prepull_e2e::prelude::*;

/// The downloaded program, under another name and outside of PATH.
const DOWNLOAD: &str = "/root/download";
/// Size of the disk of the runtime: an agent with its defaults refuses images when the disk of the host is nearly full.
const DISK: u64 = 256 * MIB;
const CERTIFICATE: &str = "/var/lib/edgecore-prepull/pki/client.crt";

/// An edge box, and the operator's commands there.
struct EdgeBox {
    machine: Machine,
    /// The arguments with the addresses of the cloud.
    addresses: [String; 4],
    metrics: Port,
}

impl EdgeBox {
    fn new(machine: Machine, cloud: &Cloud) -> Result<Self> {
        let enroll = format!("https://{}", cloud.enroll_addr());
        let tunnel = format!("wss://{}{TUNNEL_PATH}", cloud.tunnel_addr());
        let addresses = ["--enroll-url".to_owned(), enroll, "--tunnel-url".to_owned(), tunnel];
        Ok(Self { machine, addresses, metrics: Port::reserve()? })
    }

    async fn install(&self, token: &str, more: &[&str]) -> Result<String> {
        let metrics = self.metrics.addr().to_string();
        let mut command = self.machine.command(&[DOWNLOAD, "install"])?;
        command.args(&self.addresses).args(["--metrics-listen", &metrics, "--disk-min-free", "64MiB"]);
        command.args(more).env("PREPULL_TOKEN", token);
        parts::run_command(command).await
    }

    /// The same, killed as soon as it prints a line with this prefix.
    async fn is_killed_after(&self, said: &str, token: &str, more: &[&str]) -> Result<()> {
        let line = format!(
            "rm -f /tmp/said; mkfifo /tmp/said; {DOWNLOAD} install --metrics-listen {} --disk-min-free 64MiB \"$@\" \
             >/tmp/said & while read -r line; do case $line in '{said}'*) kill -9 $!;; esac; done </tmp/said; \
             wait $!; [ $? = 137 ]",
            self.metrics.addr()
        );
        let mut command = self.machine.command(&["sh", "-c", &line, "sh"])?;
        command.args(&self.addresses).args(more).env("PREPULL_TOKEN", token);
        parts::run_command(command).await.with_context(|| format!("it did not say {said}"))?;
        Ok(())
    }

    /// All files except for the kernel's, systemd's and the runtime's.
    async fn files(&self) -> Result<String> {
        let found = self
            .machine
            .run(&["find", "/etc", "/usr/local", "/var", "/root", "-printf", "%p %y %m\\n"])
            .await?;
        let mut lines: Vec<_> =
            found.lines().filter(|line| !line.starts_with("/var/tmp/systemd-private-")).collect();
        lines.sort_unstable();
        Ok(lines.join("\n"))
    }

    /// State that a needless restart, write or join would change.
    async fn traces(&self) -> Result<String> {
        let written = "/usr/local/bin/* /etc/edgecore-prepull/* /etc/systemd/system/*.service";
        let line = format!(
            "systemctl show edgecore-prepull --property=MainPID && stat -c '%n %y' {written} && sha256sum {CERTIFICATE}"
        );
        self.shell(&line).await
    }

    async fn shell(&self, line: &str) -> Result<String> {
        self.machine.run(&["sh", "-c", line]).await
    }
}

#[tokio::test]
async fn one_line_installs_another_removes() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (mut cloud, registry) =
        tokio::try_join!(Cloud::start(&cluster).into_future(), Registry::start().into_future())?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let reference = registry.seed(&Image::of_layers("installed", &[MIB])?, "team/installed:v1")?;
    let containerd = Containerd::start_on("edge-1", Some(DISK)).await?;
    let token = cloud.token("edge-1").await?;
    let secret = token.rsplit('.').next().context("a token has three parts")?.to_owned();
    // The host name is the node's.
    let machine = Machine::boot("edge-1", &containerd).await?;
    let node = EdgeBox::new(machine, &cloud)?;
    let before = node.files().await?;

    // A dry run, and a refused token, leave it unchanged, except for the key for the next attempt.
    let dry = node.install(&token, &["--dry-run"]).await?;
    ensure!(dry.contains("systemctl reenable edgecore-prepull.service") && !dry.contains(&secret), "{dry}");
    ensure!(node.files().await? == before, "a dry run has changed something");
    let wrong = token.replace(&secret, &"0".repeat(secret.len()));
    refusal(node.install(&wrong, &[]).await, "unknown token")?;
    ensure!(!node.files().await?.contains("edgecore-prepull.service"), "a unit without a certificate");

    let said = node.install(&token, &[]).await?;
    ensure!(said.contains("joined as node edge-1") && said.contains("connected to 127.0.0.1:"), "{said}");
    let modes = "stat -c %a /var/lib/edgecore-prepull /usr/local/bin/edgecore-prepull /etc/edgecore-prepull/config.yaml";
    assert_eq!(node.shell(modes).await?.split_whitespace().collect::<Vec<_>>(), ["700", "755", "644"]);
    assert_eq!(node.shell("systemctl is-enabled edgecore-prepull").await?.trim(), "enabled");
    cluster.job("installed").on(["edge-1"]).images([&reference]).completes().await?;
    ensure!(containerd.has_image(&reference).await?, "{reference} is not there");

    // Again, without the token, with the program now in PATH: nothing is touched.
    let traces = node.traces().await?;
    let again = node.install(&token, &[]).await?;
    let bare = node.machine.run(&["edgecore-prepull", "install"]).await?;
    for said in [again, bare] {
        ensure!(said.lines().count() == 2 && said.contains("connected to"), "{said}");
    }
    assert_eq!(node.traces().await?, traces);

    // A setting is applied with a restart, and without a new certificate.
    let changed = node.install("", &["--max-tasks", "2"]).await?;
    ensure!(
        changed.contains("wrote /etc/edgecore-prepull/config.yaml") && changed.contains("restarted"),
        "{changed}"
    );
    ensure!(node.traces().await?.lines().next() != traces.lines().next(), "the agent was not restarted");
    ensure!(node.traces().await?.lines().last() == traces.lines().last(), "another certificate");
    node.shell("grep -qx 'maxTasks: 2' /etc/edgecore-prepull/config.yaml").await?;

    // Without the cloud the wait ends, and shows the agent's log.
    cloud.kill9()?;
    let late = node.install("", &["--max-tasks", "3", "--timeout", "2s"]).await;
    refusal(late, "the same line waits again")?;
    cloud.restart().await?;
    node.install("", &[]).await?;

    let journal = node.machine.run(&["journalctl", "--no-pager"]).await?;
    ensure!(journal.contains("edgecore-prepull starts") && !journal.contains(&secret), "{journal}");

    // In the middle of a pull.
    let link = Proxy::for_http(registry.addr())?;
    link.throttle(Some(MIB));
    registry.route_through(&link)?;
    let half = registry.seed(&Image::of_layers("half", &[32 * MIB])?, "team/half:v1")?;
    cluster.job("half").on(["edge-1"]).images([&half]).apply().await?;
    eventually("a part of it is there", SOON, async || {
        ensure!(!containerd.leases().await?.is_empty() && !containerd.ingests().await?.is_empty(), "nothing");
        Ok(())
    })
    .await?;
    let gone = node.machine.run(&[DOWNLOAD, "uninstall"]).await?;
    ensure!(gone.contains("node revoke edge-1"), "{gone}");
    ensure!(gone.contains("released what 1 unfinished pulls had downloaded"), "{gone}");
    assert_eq!(containerd.leases().await?, Vec::<String>::new());
    assert_eq!(node.files().await?, before);
    let state =
        node.shell("systemctl show edgecore-prepull --property=LoadState,ActiveState --value").await?;
    assert_eq!(state.split_whitespace().collect::<Vec<_>>(), ["not-found", "inactive"]);
    let nothing = node.machine.run(&[DOWNLOAD, "uninstall", "--purge"]).await?;
    ensure!(nothing.contains("nothing of edgecore-prepull is installed here"), "{nothing}");
    Ok(())
}

/// Prints the duration of each command.
struct Clock {
    begun: Instant,
    last: Duration,
}

impl Clock {
    fn start() -> Self {
        Self { begun: Instant::now(), last: Duration::ZERO }
    }

    fn lap(&mut self, what: &str) {
        let now = self.begun.elapsed();
        eprintln!(
            "{:5.1} s, after {:5.1} s  {what}",
            now.saturating_sub(self.last).as_secs_f64(),
            now.as_secs_f64()
        );
        self.last = now;
    }
}

/// A copy of the manifests, with the values that an operator sets.
fn manifests_as_set(cluster: &Cluster) -> Result<PathBuf> {
    let dir = cluster.place().new_dir("manifests")?;
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .arg(parts::workspace().join("manifests/."))
        .arg(&dir)
        .status()?;
    ensure!(copied.success(), "the manifests cannot be copied");
    let file = dir.join("cluster/kustomization.yaml");
    let text = std::fs::read_to_string(&file)?;
    let set = text
        .replace("newName: cloudcore-prepull", "newName: registry.example/cloudcore-prepull")
        .replace("PREPULL_ADVERTISE=cloudcore.example", "PREPULL_ADVERTISE=127.0.0.1")
        // For Kubernetes from 1.21 on.
        .replace("  - ../components/disruption-budget", "  # - ../components/disruption-budget")
        .replace("components:\n", "components: []\n");
    ensure!(set != text, "{} has changed", file.display());
    std::fs::write(&file, set)?;
    Ok(dir)
}

/// The commands of "A first job" in the README, on a cluster and a box without our parts. There's no kubelet to run the
/// Deployment, so cloudcore-prepull runs beside the cluster, with the rights that were applied; its image is there, as
/// the agent's file is on the box.
#[tokio::test]
async fn the_readme_leads_to_a_completed_job() -> Result<()> {
    let cluster = Cluster::start_empty().await?;
    let (registry, containerd) =
        tokio::try_join!(Registry::start().into_future(), Containerd::start_on("edge-1", Some(DISK)))?;
    let reference = registry.seed(&Image::of_layers("first", &[MIB])?, "team/first:v1")?;
    cluster.node("edge-1").ready().create().await?;
    let machine = Machine::boot("edge-1", &containerd).await?;
    let manifests = manifests_as_set(&cluster)?;
    let at = |file: &str| manifests.join(file).display().to_string();
    let job = at("samples/minimal.yaml");
    std::fs::write(&job, std::fs::read_to_string(&job)?.replace("nginx:1.25", &reference))?;

    let mut clock = Clock::start();
    cluster.kubectl(&["apply", "--validate=false", "-k", &at("cluster")]).await?;
    clock.lap("kubectl apply -k manifests/cluster");
    // With an election, as in the Deployment: its right is one of those that were applied.
    let cloud = Cloud::start(&cluster).requires_consent().replica().await?;
    clock.lap("in place of kubectl rollout status: cloudcore-prepull runs and is ready");
    let line = cloud
        .command(&["token", "create", "--node", "edge-1", "--install-line", "--server", "127.0.0.1"])
        .await?;
    let token = line.split_whitespace().find_map(|word| word.strip_prefix("PREPULL_TOKEN="));
    let token = token.context("no token in the line")?;
    clock.lap("cloudcore-prepull token create --install-line");
    let node = EdgeBox::new(machine, &cloud)?;
    node.install(token, &[]).await?;
    clock.lap("edgecore-prepull install");
    cluster.kubectl(&["label", "node", "edge-1", "node-role.kubernetes.io/edge="]).await?;
    clock.lap("kubectl label node");
    cluster.kubectl(&["apply", "--validate=false", "-f", &job]).await?;
    clock.lap("kubectl apply -f manifests/samples/minimal.yaml");
    cluster.kubectl(&["wait", "--for=condition=Finished", "ippj/minimal", "--timeout=60s"]).await?;
    clock.lap("kubectl wait");

    let phase = cluster.kubectl(&["get", "ippj", "minimal", "-o", "jsonpath={.status.phase}"]).await?;
    assert_eq!(phase, "Completed");
    ensure!(containerd.has_image(&reference).await?, "{reference} is not there");
    Ok(())
}

#[tokio::test]
async fn the_same_line_finishes_a_killed_install() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let containerd = Containerd::start("edge-1").await?;
    let node = EdgeBox::new(Machine::boot("edge-1", &containerd).await?, &cloud)?;
    let before = node.files().await?;

    // During the copy of the program; between unit and settings; before the unit is linked.
    let moments = ["joined as", "wrote /etc/systemd", "wrote /etc/edgecore-prepull"];
    for said in moments {
        node.is_killed_after(said, &cloud.token("edge-1").await?, &[]).await?;
        node.machine.run(&[DOWNLOAD, "uninstall"]).await?;
        assert_eq!(node.files().await?, before, "killed after {said:?}");
    }
    node.install(&cloud.token("edge-1").await?, &[]).await?;
    let whole = node.files().await?;
    for said in moments {
        node.machine.run(&[DOWNLOAD, "uninstall"]).await?;
        let token = cloud.token("edge-1").await?;
        node.is_killed_after(said, &token, &[]).await?;
        let finished = node.install(&token, &[]).await?;
        ensure!(finished.contains("connected to") && !finished.contains("joined as"), "{finished}");
        assert_eq!(node.files().await?, whole, "killed after {said:?}");
    }

    // Joined again, and killed before the agent has loaded the new certificate.
    let certificate = async || node.shell(&format!("sha256sum {CERTIFICATE}")).await;
    let first = certificate().await?;
    let token = cloud.token("edge-1").await?;
    node.is_killed_after("joined as", &token, &["--rejoin"]).await?;
    let second = certificate().await?;
    ensure!(first != second, "it has not joined again");
    let finished = node.install(&token, &["--rejoin"]).await?;
    ensure!(finished.contains("restarted") && finished.contains("connected to"), "{finished}");
    assert_eq!(certificate().await?, second, "a token is for one certificate");
    assert_eq!(node.files().await?, whole);
    // The same with a power cut in place of the kill: a boot empties /run, and starts the agent.
    let token = cloud.token("edge-1").await?;
    node.is_killed_after("joined as", &token, &["--rejoin"]).await?;
    let third = certificate().await?;
    ensure!(third != second, "it has not joined again");
    node.shell("rm /run/edgecore-prepull.restart && systemctl restart edgecore-prepull").await?;
    let finished = node.install(&token, &["--rejoin"]).await?;
    ensure!(finished.contains("connected to") && !finished.contains("joined as"), "{finished}");
    assert_eq!(certificate().await?, third, "a token is for one certificate");
    assert_eq!(node.files().await?, whole);
    // The token is used, and there's nothing to do: a refusal restarts nothing, now or later.
    let traces = node.traces().await?;
    refusal(node.install(&token, &["--rejoin"]).await, "nothing to do")?;
    node.install("", &[]).await?;
    assert_eq!(node.traces().await?, traces);
    Ok(())
}

#[tokio::test]
async fn a_second_agent_or_taken_port_is_refused() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let containerd = Containerd::start("edge-1").await?;
    let machine = Machine::boot("edge-1", &containerd).await?;
    let node = EdgeBox::new(machine, &cloud)?;

    let taken = std::net::TcpListener::bind(node.metrics.addr())?;
    let token = cloud.token("edge-1").await?;
    refusal(node.install(&token, &[]).await, "give --metrics-listen another address")?;
    drop(taken);
    // Like a pod of the DaemonSet: without systemd.
    let health = Port::reserve()?;
    let line = [DOWNLOAD, "run", "--log", "off", "--metrics-listen", &health.addr().to_string()];
    let mut other = node.machine.command(&line)?;
    other.stderr(std::process::Stdio::null());
    let mut other = tokio::process::Command::from(other).kill_on_drop(true).spawn()?;
    eventually("the other agent runs", SOON, async || plain_http::get(health.addr(), "/healthz").await)
        .await?;
    refusal(node.install(&token, &[]).await, "another edgecore-prepull uses /var/lib/edgecore-prepull")?;
    node.shell("pkill -x download").await?;
    tokio::time::timeout(Duration::from_secs(20), other.wait()).await??;
    node.install(&token, &[]).await?;
    Ok(())
}
