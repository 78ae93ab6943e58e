//! `edgecore-prepull install`: installs the program, joins and starts the agent. It's safe to repeat.
//!
//! ```text
//!  machine::look ─▶ Facts ─┐
//!  command line ─▶ Wish ───┴─▶ plan (pure) ─▶ Steps, carried out here one by one ─▶ health::ask
//! ```

pub(crate) mod args;
pub(crate) mod elsewhere;
pub(crate) mod machine;
pub(crate) mod places;
pub(crate) mod plan;
pub(crate) mod proxies;
mod settings;
pub(crate) mod systemd;

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use prepull_api::enroll::JoinToken;
use prepull_api::task::NodeName;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use crate::cloud::endpoint::{ENROLL_SCHEME, TUNNEL_SCHEME};
use crate::cloud::identity::{StateDir, replace_file, temporary_of};
use crate::cloud::join::{self, JoinArgs, resolve_urls};
use crate::config::{AgentSettings, Effective, Listen};
use crate::health;
use crate::images::providers::{Providers, Stderr};
use crate::upgrade;
use args::InstallArgs;
use places::{InstallPlaces, UNIT};
use plan::{InstallPlan, InstallRefusal, InstallStep, InstallWish, UNIT_FILE};

/// Interval of asking the agent.
const POLL: Duration = Duration::from_millis(200);
/// Interval of the progress lines while there's no connection yet.
const PROGRESS: Duration = Duration::from_secs(10);
/// Time after which we give up on a unit without a process: it restarts the agent after 5 s.
const PATIENCE_WITH_UNIT: Duration = Duration::from_secs(12);
/// Time for finding a runtime once the agent is connected. The agent probes it at its start.
const PATIENCE_WITH_RUNTIME: Duration = Duration::from_secs(3);
/// Exit status if everything is in place and there's no systemd to start the agent.
const NO_SYSTEMD: u8 = 3;

/// Installs the agent on this machine, and waits until it is connected.
pub(crate) async fn run(args: InstallArgs) -> anyhow::Result<ExitCode> {
    let places = InstallPlaces::default();
    let began = Instant::now();
    let is_dry = args.dry_run;
    if !is_dry && !rustix::process::geteuid().is_root() {
        return Err(InstallRefusal::NotRoot("install").into());
    }
    let token = args.token.read()?;
    let wish = parse_wish(&args, token.as_ref(), &places)?;
    let facts = machine::collect_facts(&places, token.as_ref().map(|token| &token.ca), &wish).await?;
    let plan = plan::plan_install(&facts, &wish, &places)?;
    plan.connection.tunnel_urls.parse_endpoints(TUNNEL_SCHEME)?;
    plan.connection.enroll_urls.parse_endpoints(ENROLL_SCHEME)?;
    if is_dry {
        for step in &plan.steps {
            print_line(&step.describe(&plan, &places))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    for file in places.replaced_whole() {
        // A run that was killed during a write may have left it.
        let _ = fs::remove_file(temporary_of(file));
    }
    let work = Work {
        places,
        plan,
        token,
        rejoin: args.rejoin,
        is_packaged: facts.is_packaged,
        is_restart_due: facts.is_restart_due,
        program: facts.program,
        timeout: args.timeout,
    };
    print_line(&format!("edgecore-prepull {} on node {}", env!("CARGO_PKG_VERSION"), work.plan.node))?;
    for step in &work.plan.steps {
        if let Some(status) = work.carry_out(step, began).await? {
            return Ok(status);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The options of the command line, checked as far as that's possible without looking at the machine.
fn parse_wish(
    args: &InstallArgs,
    token: Option<&JoinToken>,
    places: &InstallPlaces,
) -> anyhow::Result<InstallWish> {
    let mut given = args.settings.clone();
    let (enroll_urls, tunnel_urls) = resolve_urls(
        &args.server,
        std::mem::take(&mut given.enroll_url),
        std::mem::take(&mut given.tunnel_url),
    );
    if given.state_dir.take().is_some_and(|dir| dir != places.state) {
        let (state, file) = (places.state.clone(), places.settings.clone());
        return Err(InstallRefusal::StateDir { state, file }.into());
    }
    let [config, bin_dir] =
        [&given.image_credential_provider_config, &given.image_credential_provider_bin_dir];
    for path in [config, bin_dir].into_iter().flatten() {
        if path.is_relative() {
            bail!(
                "{}: the agent needs the path from the root, as in /etc/edgecore-prepull/x.yaml",
                path.display()
            );
        }
    }
    Ok(InstallWish {
        enroll_urls,
        tunnel_urls,
        has_token: token.is_some(),
        node: args.node_name.clone().filter(|node| !node.is_empty()).map(NodeName),
        rejoin: args.rejoin,
        upgrade_key: args.upgrade_key.as_deref().map(upgrade::read_key).transpose()?,
        settings: settings::given_values(&given),
    })
}

/// A plan in progress.
struct Work {
    places: InstallPlaces,
    plan: InstallPlan,
    token: Option<JoinToken>,
    rejoin: bool,
    is_packaged: bool,
    /// Whether a restart was due before we did anything.
    is_restart_due: bool,
    program: std::path::PathBuf,
    timeout: Duration,
}

impl Work {
    /// Carries out a step. A returned status ends the work.
    async fn carry_out(&self, step: &InstallStep, began: Instant) -> anyhow::Result<Option<ExitCode>> {
        let Self { places, plan, .. } = self;
        if step.needs_restart() {
            // Before the change: if this run ended between the two, the next one would find nothing to change.
            self.mark_restart_due(step)?;
        }
        match step {
            InstallStep::CreateStateDir => {
                make_dir(&places.state, 0o700)?;
            }
            InstallStep::Join { renew } => match self.join(*renew).await {
                Ok(joined) => print_line(&joined)?,
                Err(error) => {
                    if !self.is_restart_due {
                        self.forget_restart();
                    }
                    return Err(error);
                }
            },
            InstallStep::Redirect(connection) => {
                StateDir::new(&places.state).replace_urls(connection)?;
                print_line(&format!("cloudcore is at {}", connection.tunnel_urls))?;
            }
            InstallStep::CopyProgram => {
                let program = fs::read(&self.program)
                    .with_context(|| format!("cannot read {}", self.program.display()))?;
                put_file(&places.program, &program, machine::PROGRAM_MODE)?;
            }
            InstallStep::WriteUnit => put_file(&places.unit, UNIT_FILE.as_bytes(), 0o644)?,
            InstallStep::WriteSettings(text) => {
                self.check_settings(text)?;
                put_file(&places.settings, text.as_bytes(), 0o644)?;
            }
            // A proxy may have a password.
            InstallStep::WriteProxies(text) => put_file(&places.proxies, text.as_bytes(), 0o600)?,
            InstallStep::WriteUpgradeKey(text) => put_file(&places.upgrade_key, text.as_bytes(), 0o644)?,
            InstallStep::Remove(path) => {
                fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
                print_line(&format!("removed {}, which a package has replaced", path.display()))?;
            }
            InstallStep::Reload => systemd::systemctl(&["daemon-reload"]).await?,
            InstallStep::Enable => systemd::systemctl(&["--quiet", "reenable", UNIT]).await?,
            InstallStep::Start | InstallStep::Restart => {
                if let (InstallStep::Start, Listen::On(address)) = (step, self.effective()?.metrics_listen) {
                    check_port(address).await?;
                }
                systemd::systemctl(&[if *step == InstallStep::Start { "start" } else { "restart" }, UNIT])
                    .await?;
                self.forget_restart();
                print_line(&format!(
                    "{UNIT} {}",
                    if *step == InstallStep::Start { "started" } else { "restarted" }
                ))?;
            }
            InstallStep::AwaitConnection => {
                // A boot may have been the restart.
                self.forget_restart();
                let node = &plan.node;
                print_line(&match self.wait_for_connection().await? {
                    Some(session) => {
                        let seconds = began.elapsed().as_secs_f64();
                        format!("connected to {session} as node {node}, {seconds:.1} s after the start")
                    }
                    None => format!(
                        "started as node {node}; whether it connects is not known, since metricsListen is off: `journalctl \
                         --unit {UNIT}` shows it"
                    ),
                })?;
            }
            InstallStep::Explain(init) => {
                self.forget_restart();
                let program = if self.is_packaged { &places.program_of_package } else { &places.program };
                print_line(&format!(
                    "joined; program and settings are in place, and no systemd runs here to start the agent.\n{}",
                    elsewhere::explain_start(*init, program, places)
                ))?;
                return Ok(Some(ExitCode::from(NO_SYSTEMD)));
            }
        }
        Ok(None)
    }

    /// Notes that a restart is due, and the key of a node that joins.
    fn mark_restart_due(&self, step: &InstallStep) -> anyhow::Result<()> {
        let InstallPlaces { state, restart_due, .. } = &self.places;
        if let InstallStep::Join { .. } = step {
            let (key, file) = (StateDir::new(state).requested_key()?.public_key(), self.places.joining_key());
            replace_file(&file, &key, 0o600).with_context(|| format!("cannot write {}", file.display()))?;
        }
        let marked = fs::OpenOptions::new().create(true).append(true).open(restart_due);
        marked.map(drop).with_context(|| format!("cannot write {}", restart_due.display()))
    }

    fn forget_restart(&self) {
        let _ = fs::remove_file(&self.places.restart_due);
        let _ = fs::remove_file(self.places.joining_key());
    }

    async fn join(&self, renew: bool) -> anyhow::Result<String> {
        let connection = &self.plan.connection;
        let args = JoinArgs {
            server: Vec::new(),
            enroll_url: connection.enroll_urls.clone().into(),
            tunnel_url: connection.tunnel_urls.clone().into(),
            token: self.token.clone().map(Into::into).unwrap_or_default(),
            node_name: self.plan.node.0.clone(),
            state_dir: self.places.state.clone(),
            force: self.rejoin,
            unless_joined: renew,
        };
        // A shell of sudo has no proxies.
        let proxies = proxies::of_agent(self.plan.proxies.as_deref().unwrap_or_default());
        let joined = join::run_through(args, &proxies);
        let not_joined = if self.rejoin {
            "this node has not joined again; when that is mended, run the same line again"
        } else {
            "this node has not joined; when that is mended, run the same line again"
        };
        let joined = joined.await.context(not_joined)?;
        // If the certificate was renewed, or was still valid, the addresses haven't changed.
        StateDir::new(&self.places.state).follow_urls(connection)?;
        Ok(joined.to_string())
    }

    /// The settings as the agent reads them.
    fn effective(&self) -> anyhow::Result<Effective> {
        Ok(AgentSettings::default().or_file(AgentSettings::from_file(&self.places.settings)?))
    }

    /// Whether the agent would start with these settings.
    fn check_settings(&self, text: &str) -> anyhow::Result<()> {
        let file = self.places.settings.display();
        let settings = AgentSettings::from_text(text).map_err(|problem| anyhow!("{file}{problem}"))?;
        Providers::load(&settings.or_file(AgentSettings::default()).providers, Stderr::Dropped, None)?;
        Ok(())
    }

    /// Waits until the agent has a session, and returns its address. Without the agent's metrics that can't be seen: none.
    async fn wait_for_connection(&self) -> anyhow::Result<Option<String>> {
        let Listen::On(listen) = self.effective()?.metrics_listen else { return Ok(None) };
        let (began, since) = (Instant::now(), SystemTime::now());
        let (mut next_line, mut running_at) = (began + PROGRESS, began);
        loop {
            // Until systemd notices that the old process has ended, an answer may come from that one.
            let unit = systemd::unit_state().await?;
            if unit.active == "active" {
                running_at = Instant::now();
            }
            if unit.active == "active"
                && let Ok(health) = health::fetch_health(listen).await
                && let Some(session) = health.session
            {
                self.look_at_runtime(listen).await?;
                return Ok(Some(session));
            }
            let waited = began.elapsed();
            if waited >= self.timeout || running_at.elapsed() >= PATIENCE_WITH_UNIT {
                let log = systemd::log_since(since).await;
                bail!(
                    "{UNIT} is {}, and not connected to {} after {:.0} s. It goes on trying; `journalctl --unit {UNIT}` \
                     says why, and the same line{} waits again.{}{log}",
                    unit.active,
                    self.plan.connection.tunnel_urls,
                    waited.as_secs_f64(),
                    if self.rejoin { " without --rejoin" } else { "" },
                    if log.is_empty() { "" } else { " Its last lines:" },
                );
            }
            if Instant::now() >= next_line {
                let of = self.timeout.as_secs();
                print_line(&format!(
                    "waiting for the connection, {} s of {of} s ({UNIT} is {})",
                    waited.as_secs(),
                    unit.active
                ))?;
                next_line += PROGRESS;
            }
            sleep(POLL).await;
        }
    }

    /// Warns if the container runtime does not answer.
    async fn look_at_runtime(&self, listen: std::net::SocketAddr) -> anyhow::Result<()> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE_WITH_RUNTIME {
            if health::fetch_health(listen).await.is_ok_and(|health| health.is_runtime_up) {
                return Ok(());
            }
            sleep(POLL).await;
        }
        print_line(
            "warning: no container runtime answers yet, and pulls wait for it; give --runtime-endpoint if it has a socket \
             in another place than usual",
        )
    }
}

/// Checks that the agent will be able to listen there. No agent of ours runs now.
async fn check_port(address: std::net::SocketAddr) -> anyhow::Result<()> {
    match TcpListener::bind(address).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => bail!(
            "another program listens on {address}, where the agent serves metrics and health: give --metrics-listen \
             another address (`ss -tlnp` shows who it is)"
        ),
        Err(error) => Err(anyhow!(error).context(format!("cannot listen on --metrics-listen {address}"))),
    }
}

/// Puts a file in place, and creates the directories above it. It's created in its final directory, so that SELinux
/// gives it the right label.
fn put_file(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        make_dir(dir, 0o755)?;
    }
    replace_file(path, content, mode).with_context(|| format!("cannot write {}", path.display()))?;
    print_line(&format!("wrote {}", path.display()))
}

fn make_dir(dir: &Path, mode: u32) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(mode).create(dir);
    made.with_context(|| format!("cannot create {}", dir.display()))
}

/// Prints a line for the person at the terminal.
pub(crate) fn print_line(line: &str) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{}", line.trim_end())?)
}
