//! The program: dispatch of the commands, and the life of the agent from its settings to its shutdown.

use std::future::Future;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use prepull_program::errors::with_causes;
use prepull_program::log::{LogArgs, LogFormat};
use prepull_program::signals::wait_for_termination;
use prepull_program::{log, process};
use prepull_registry::Proxies;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, info, info_span, warn};

use crate::cloud::endpoint::{BadUrl, ENROLL_SCHEME, TUNNEL_SCHEME, Urls};
use crate::cloud::identity::{Connection, Identity, IdentityError};
use crate::cloud::join::{self, JoinArgs};
use crate::cloud::tunnel::TunnelSender;
use crate::cloud::tunnel::dial::{self, Dial};
use crate::commands::args::{AgentCommand, Cli, RunArgs};
use crate::commands::install::machine::{find_init, is_packaged};
use crate::commands::install::places::InstallPlaces;
use crate::commands::install::plan::Init;
use crate::commands::{install, pull, status, uninstall, upgrade};
use crate::config::{AgentSettings, Effective, Listen, MaxTasks};
use crate::images::fetch::{Fetching, Neighbourhood};
use crate::images::providers::{Providers, Stderr};
use crate::images::puller::Puller;
use crate::images::puller::cri::CriPuller;
use crate::images::runtime::RuntimeEndpoint;
use crate::images::site::Hub;
use crate::images::site::server::PeerServer;
use crate::metrics::AgentMetrics;
use crate::node_clock::node_clock;
use crate::settings::{CloudSettings, InForce};
use crate::tasks::ledger::Ledger;
use crate::tasks::node::{NodeAgent, NodeConfig, RecordWriter};
use crate::upgrade::{Launched, Obstacles, Upgrades, launch_chosen, relaunch};

mod http;

/// Capacity for events from the tunnel to the node. The node handles one within microseconds; while the queue is full
/// the tunnel stops reading.
const EVENTS: usize = 16;
/// Capacity for messages from the node to the tunnel. While the queue is full, results wait in the node and progress is
/// dropped.
const MESSAGES: usize = 16;
/// The interval at which the container runtime is probed for /readyz.
const RUNTIME_PROBE: Duration = Duration::from_secs(10);
/// A runtime that takes longer to answer a probe counts as down.
const PROBE_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for closing the session and for the last write to the ledger; our systemd unit kills after 20 s.
const DRAIN: Duration = Duration::from_secs(10);
/// Threads for blocking operations: name resolution, flushing, and questions that may hang on a dead file system. A disk
/// that hangs keeps one for flushes of each directory, one for each kind of question about its free space, and one each for
/// the kubelet's records, the cloud's settings and the identity. The others resolve names.
const BLOCKING_THREADS: usize = 8;

/// Parses the command line and runs its command. Errors go to stderr, with their causes.
pub fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => Ok(cli.command),
        Err(usage) if usage.use_stderr() && std::env::args_os().nth(1).is_some_and(|name| name == "run") => {
            Err(usage)
        }
        Err(usage) => usage.exit(),
    };
    if let Ok(AgentCommand::Join(args)) = &command
        && let Some(missing) = args.missing_cloud()
    {
        clap::Error::raw(ErrorKind::MissingRequiredArgument, format!("{missing}\n")).exit();
    }
    process::protect_memory();
    // A second installation fails without harm: the provider is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome = match command {
        Err(usage) => run_agent(Err(usage)),
        Ok(AgentCommand::Install(args)) => block_on(install::run(*args)),
        Ok(AgentCommand::Uninstall(args)) => block_on(uninstall::run(args)),
        Ok(AgentCommand::Join(args)) => block_on(run_join(args)),
        Ok(AgentCommand::Run(args)) => run_agent(Ok(*args)),
        Ok(AgentCommand::Pull(args)) => block_on(pull::run(args)),
        Ok(AgentCommand::Upgrade(args)) => block_on(upgrade::run(*args)),
        Ok(AgentCommand::Status(args)) => block_on(status::run(args)),
        Ok(AgentCommand::Completion { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "edgecore-prepull", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        let error = error.downcast().map_or_else(|error| error, |usage: clap::Error| usage.exit());
        let _ = writeln!(std::io::stderr(), "error: {}", with_causes(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// Runs on a single thread: the agent waits nearly all the time, and every thread costs memory.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("cannot start the async runtime")?;
    let outcome = runtime.block_on(work);
    // A thread that hangs on a dead file system must not keep the program from ending.
    runtime.shutdown_background();
    outcome
}

async fn run_join(args: JoinArgs) -> anyhow::Result<ExitCode> {
    for flaw in Proxies::from_env().flaws() {
        writeln!(std::io::stderr(), "{flaw}")?;
    }
    let joined = join::run(args).await?;
    writeln!(std::io::stdout(), "{joined}")?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the program that was chosen for this machine, or this one. A command line or a file that this one doesn't understand
/// may be meant for the other one.
fn run_agent(parsed: Result<RunArgs, clap::Error>) -> anyhow::Result<ExitCode> {
    let logging = parsed.map_err(Into::into).and_then(|args| log::start(&args.log, "").map(|()| args));
    if logging.is_err() {
        log::start(&LogArgs { log_format: LogFormat::Text, log: "info".to_owned() }, "")?;
    }
    let own = logging.and_then(|RunArgs { config, settings, log: _ }| {
        let file = config.as_deref().map(AgentSettings::from_file).transpose()?.unwrap_or_default();
        Ok(settings.or_file(file))
    });
    let Effective { state_dir, metrics_listen, .. } = own.as_ref().map_or_else(
        |_| {
            let arguments = std::env::args_os().filter_map(|argument| argument.into_string().ok());
            AgentSettings::find_for_launch(&arguments.collect::<Vec<_>>(), |name| std::env::var(name).ok())
        },
        Effective::clone,
    );
    block_on(async {
        let check = own.as_ref().ok().map(|settings| async move || check_start(settings).await);
        let launched = launch_chosen(&state_dir, metrics_listen, check).await;
        match launched {
            Launched::Own => match run_until_stopped(own?).await? {
                AgentEnd::Stopped => Ok(ExitCode::SUCCESS),
                AgentEnd::Upgrading => relaunch(),
            },
            Launched::Other(code) => Ok(code),
        }
    })
}

/// Why the agent has ended.
enum AgentEnd {
    /// By a signal.
    Stopped,
    /// Another version will be tried.
    Upgrading,
}

/// Starts the parts of the agent, waits for a signal or for the end of a part, and stops the others.
async fn run_until_stopped(settings: Effective) -> anyhow::Result<AgentEnd> {
    let own = settings.own_bounds();
    let Effective {
        state_dir,
        tunnel_urls,
        enroll_urls,
        runtime_endpoint,
        metrics_listen,
        max_tasks: MaxTasks(max_tasks),
        parallel_pulls,
        download_windows,
        limits,
        makes_room: _,
        keep_unfinished: _,
        fetch,
        peers,
        kubelet_dir,
        providers,
    } = settings;
    let metrics = Arc::new(AgentMetrics::default());
    metrics.status().mark_started(Instant::now());
    let providers = Arc::new(Providers::load(&providers, Stderr::Dropped, Some(&metrics))?);
    check_urls(&tunnel_urls, &enroll_urls)?;
    let clock = node_clock(download_windows)?;
    let identity = Identity::load(&state_dir)?;
    let settings = Arc::new(CloudSettings::load(&state_dir, own));
    let (tunnel_urls, enroll_urls) = fill_in_urls(tunnel_urls, enroll_urls, &state_dir)?;
    let endpoint = runtime_endpoint.unwrap_or_else(RuntimeEndpoint::in_the_usual_places);
    let ledger = Ledger::open(&state_dir)?;
    let node_name = identity.node();
    info!(node = %node_name, %tunnel_urls, runtime = %endpoint, state_dir = %state_dir.display(), version = env!("CARGO_PKG_VERSION"), "edgecore-prepull starts");
    log_surroundings(&providers);

    let shutdown = CancellationToken::new();
    let tasks = TaskTracker::new();
    if let Some(listener) = bind_listener("--metrics-listen", metrics_listen).await? {
        info!(address = %listener.local_addr()?, "metrics and health listen");
        tasks.spawn(http::serve(listener, metrics.clone(), identity.clock().clone(), shutdown.clone()));
    }
    let hub = Arc::new(Hub::new(peers.patience.0, identity.clock().clone()));
    let neighbourhood = Neighbourhood { hub: hub.clone(), identity: identity.clone() };
    let puller = Fetching::over_cri(CriPuller::new(endpoint), fetch).counted_in(metrics.clone());
    let puller = Arc::new(puller.shared_with(neighbourhood).with_clock(identity.clock().clone()));
    let limited = puller.clone();
    tasks.spawn(follow_settings(settings.clone(), shutdown.clone(), move |now| {
        limited.bucket().set_rate(now.max_download_rate);
        limited.set_room(now.room);
    }));
    let mut peer_port = None;
    if let Some(listener) = bind_listener("--peer-listen", peers.listen).await? {
        let address = listener.local_addr()?;
        info!(%address, "the neighbours of the site can read layers");
        peer_port = Some(address.port());
        let server = PeerServer::new(hub.clone(), identity.clone(), puller.store(), metrics.clone());
        let limited = server.clone();
        let apply = move |now: &InForce| limited.upload_bucket().set_rate(now.peer_max_upload_rate);
        tasks.spawn(follow_settings(settings.clone(), shutdown.clone(), apply));
        tasks.spawn(server.serve(listener, shutdown.clone()));
    }
    let peer_address = peers.announced_address(peer_port);
    let upgrades = Arc::new(Upgrades::new(&state_dir, upgrade_obstacles(metrics_listen)));
    let asked = upgrades.clone();
    let config = NodeConfig {
        max_tasks,
        parallel_pulls,
        limits,
        clock,
        providers,
        hub,
        kubelet_dir,
        upgrades,
        settings,
    };
    tasks.spawn(measure_certificate(identity.clone(), metrics.clone(), shutdown.clone()));
    let watched = puller.clone();
    let watching = shutdown.clone().run_until_cancelled_owned(async move { watched.watch_uses().await });
    tasks.spawn(watching);
    let records = RecordWriter::start(ledger).await?;
    let node = NodeAgent::new(puller.clone(), records, config, metrics.clone());
    tasks.spawn(probe_runtime(puller, metrics.clone(), shutdown.clone()));
    tasks.spawn(
        identity.clone().keep_renewed(enroll_urls, shutdown.clone()).instrument(info_span!("renewal")),
    );

    let (events, tunnel_events) = mpsc::channel(EVENTS);
    let (link, outgoing) = TunnelSender::new(MESSAGES);
    let node = tasks.spawn(node.run(tunnel_events, link, shutdown.clone()));
    let dial = Dial::new(dial::TunnelSettings::default(), identity, events, shutdown.clone());
    let dialler = dial.with_metrics(metrics, peer_address).keep_session(tunnel_urls, outgoing);
    let tunnel = tasks.spawn(dialler.instrument(info_span!("tunnel")));
    tasks.close();

    let ended = wait_for_end(&asked, tunnel, node).await;
    shutdown.cancel();
    if timeout(DRAIN, tasks.wait()).await.is_err() {
        warn!("some parts did not stop within {DRAIN:?}");
    }
    ended
}

/// Waits for a signal, for another version to try, or for a part that has ended.
async fn wait_for_end(
    asked: &Upgrades,
    tunnel: JoinHandle<Result<(), BadUrl>>,
    node: JoinHandle<()>,
) -> anyhow::Result<AgentEnd> {
    tokio::select! {
        signal = wait_for_termination() => {
            signal.map(|signal| {
                info!(signal, "stopping; running tasks continue after the next start");
                AgentEnd::Stopped
            })
        }
        () = asked.wait_for_restart() => {
            info!("stopping, so that another version is tried; running tasks continue in it");
            Ok(AgentEnd::Upgrading)
        }
        ended = tunnel => match ended {
            Ok(ended) => ended.map_err(anyhow::Error::from).and(Err(anyhow!("the tunnel ended"))),
            Err(error) => Err(anyhow!("the tunnel died: {error}")),
        },
        ended = node => match ended {
            Ok(()) => Err(anyhow!("the agent ended")),
            Err(error) => Err(anyhow!("the agent died: {error}")),
        },
    }
}

/// Applies the settings in force until `shutdown`.
async fn follow_settings(
    settings: Arc<CloudSettings>,
    shutdown: CancellationToken,
    apply: impl Fn(&InForce),
) {
    let _ = shutdown.run_until_cancelled(settings.follow(apply)).await;
}

/// What keeps tasks from upgrading this agent.
fn upgrade_obstacles(listen: Listen) -> Obstacles {
    let places = InstallPlaces::default();
    Obstacles {
        is_container: find_init(&places) == Init::Container,
        is_packaged: is_packaged(&places),
        is_unasked: listen == Listen::Off,
    }
}

fn log_surroundings(providers: &Providers) {
    Proxies::from_env().flaws().for_each(|flaw| warn!("{flaw}"));
    if !providers.names().is_empty() {
        let providers = providers.names().join(", ");
        info!(providers, "credential providers are asked for images that no secret serves");
    }
}

/// Checks whether the machine lets this program be the agent. What's missing here, such as the address of a VPN that isn't up
/// yet, ends any other version just the same.
async fn check_start(settings: &Effective) -> anyhow::Result<()> {
    let Effective { state_dir, tunnel_urls, enroll_urls, metrics_listen, peers, providers, .. } = settings;
    Providers::load(providers, Stderr::Dropped, None)?;
    check_urls(tunnel_urls, enroll_urls)?;
    Identity::load(state_dir)?;
    fill_in_urls(tunnel_urls.clone(), enroll_urls.clone(), state_dir)?;
    Ledger::open(state_dir)?;
    bind_listener("--metrics-listen", *metrics_listen).await?;
    bind_listener("--peer-listen", peers.listen).await?;
    Ok(())
}

/// Listens on the address of this flag, unless it's off.
async fn bind_listener(flag: &str, to: Listen) -> anyhow::Result<Option<TcpListener>> {
    let Listen::On(address) = to else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    let listener = listener
        .with_context(|| format!("cannot listen on {flag} {address} (give another address, or off)"))?;
    Ok(Some(listener))
}

/// Checks the URLs of the settings at the start. Otherwise we'd notice a list that's too long only when dialling.
fn check_urls(tunnel_urls: &Urls, enroll_urls: &Urls) -> Result<(), BadUrl> {
    for (urls, scheme) in [(tunnel_urls, TUNNEL_SCHEME), (enroll_urls, ENROLL_SCHEME)] {
        if !urls.is_empty() {
            urls.parse_endpoints(scheme)?;
        }
    }
    Ok(())
}

/// The URLs of the settings, or those that `join` stored where the settings have none.
fn fill_in_urls(tunnel: Urls, enroll: Urls, state_dir: &Path) -> Result<(Urls, Urls), IdentityError> {
    if !tunnel.is_empty() && !enroll.is_empty() {
        return Ok((tunnel, enroll));
    }
    let Connection { tunnel_urls, enroll_urls, node_name: _ } = Connection::load(state_dir)?;
    let or = |given: Urls, stored| if given.is_empty() { stored } else { given };
    Ok((or(tunnel, tunnel_urls), or(enroll, enroll_urls)))
}

/// Keeps the end of the certificate in the metrics, over its renewals.
async fn measure_certificate(identity: Identity, metrics: Arc<AgentMetrics>, shutdown: CancellationToken) {
    let mut current = identity.watch();
    let measuring = async {
        loop {
            metrics.set_certificate_end(current.borrow_and_update().not_after);
            // The sender is part of the identity.
            let _ = current.changed().await;
        }
    };
    let _ = shutdown.run_until_cancelled(measuring).await;
}

/// Probes the container runtime at intervals, and logs when it goes or comes back.
async fn probe_runtime(puller: Arc<impl Puller>, metrics: Arc<AgentMetrics>, shutdown: CancellationToken) {
    let mut was_up = None;
    let probing = async {
        loop {
            let answer = timeout(PROBE_DEADLINE, puller.read_version()).await;
            let up = matches!(answer, Ok(Ok(_)));
            metrics.set_runtime_up(up);
            if was_up != Some(up) {
                match answer {
                    Ok(Ok(runtime)) => info!(runtime, "the container runtime answers"),
                    Ok(Err(error)) => {
                        warn!(%error, "the container runtime does not answer; pulls wait for it");
                    }
                    Err(_) => warn!("the container runtime does not answer in time; pulls wait for it"),
                }
                was_up = Some(up);
            }
            sleep(RUNTIME_PROBE).await;
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = probing => {}
    }
}
