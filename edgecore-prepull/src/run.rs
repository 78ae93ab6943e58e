//! The program: reads the settings, wires the parts together, stops them in order.

use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::CommandFactory;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, info, info_span, warn};

use crate::cloud::endpoint::{ENROLL_SCHEME, TUNNEL_SCHEME, Urls, with_causes};
use crate::cloud::identity::{Connection, Identity};
use crate::cloud::join;
use crate::cloud::join::JoinArgs;
use crate::cloud::tunnel::{Link, dial};
use crate::commands::args::{Cli, Command, RunArgs};
use crate::commands::pull;
use crate::config::{Effective, Listen, MaxTasks, Settings};
use crate::images::providers::{Providers, Stderr};
use crate::images::puller::Puller;
use crate::images::puller::cri::CriPuller;
use crate::images::runtime::RuntimeEndpoint;
use crate::metrics::{self, Metrics};
use crate::signals::termination;
use crate::tasks::ledger::Ledger;
use crate::tasks::node::{Node, NodeConfig};

mod logging;

/// Events of the tunnel that wait for the node: it takes them in microseconds, and the tunnel stops reading
/// while it cannot.
const EVENTS: usize = 16;
/// Messages between the node and the tunnel. Results wait in the node, beyond this progress is dropped.
const MESSAGES: usize = 16;
/// How often the runtime is asked whether it is there, for /readyz.
const RUNTIME_PROBE: Duration = Duration::from_secs(10);
/// A runtime that takes longer to say its version is not ready.
const PROBE_PATIENCE: Duration = Duration::from_secs(5);
/// For the farewell to the cloud and the last write; systemd kills after 90 s.
const DRAIN: Duration = Duration::from_secs(10);
/// Threads for files: one writes the ledger, one may hang on a dead file system.
const BLOCKING_THREADS: usize = 4;

/// Runs a command; errors go to stderr, with their causes.
pub fn main(cli: Cli) -> ExitCode {
    // A second install is refused and harmless: the first one is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome = match cli.command {
        Command::Join(args) => block_on(join(args)),
        Command::Run(args) => run(*args),
        Command::Pull(args) => block_on(pull::run(args)),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "edgecore-prepull", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {}", with_causes(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// One thread does it: the agent waits, nearly always, and every thread costs memory.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("start the runtime")?;
    let outcome = runtime.block_on(work);
    // A thread that hangs on a dead file system must not keep the program.
    runtime.shutdown_background();
    outcome
}

async fn join(args: JoinArgs) -> anyhow::Result<ExitCode> {
    let join::Joined { node, not_after, state_dir } = join::run(args).await?;
    let until = humantime::format_rfc3339_seconds(not_after);
    writeln!(
        std::io::stdout(),
        "joined as {node}; the certificate in {} is valid until {until}",
        state_dir.display()
    )?;
    Ok(ExitCode::SUCCESS)
}

fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let RunArgs { config, settings, log } = args;
    logging::init(&log)?;
    let file = config.as_deref().map(Settings::from_file).transpose()?.unwrap_or_default();
    block_on(serve(settings.over(file)))
}

async fn serve(settings: Effective) -> anyhow::Result<ExitCode> {
    let Effective {
        state_dir,
        tunnel_urls,
        enroll_urls,
        runtime_endpoint,
        metrics_listen,
        max_tasks: MaxTasks(max_tasks),
        parallel_pulls,
        limits,
        providers,
    } = settings;
    let metrics = Arc::new(Metrics::default());
    let providers = Arc::new(Providers::load(&providers, Stderr::Dropped, Some(&metrics))?);
    // Too many would be found out when they are dialled only.
    for (urls, scheme) in [(&tunnel_urls, TUNNEL_SCHEME), (&enroll_urls, ENROLL_SCHEME)] {
        if !urls.is_empty() {
            urls.endpoints(scheme)?;
        }
    }
    let identity = Identity::load(&state_dir)?;
    let (tunnel_urls, enroll_urls) = if tunnel_urls.is_empty() || enroll_urls.is_empty() {
        let Connection { tunnel_urls: tunnel, enroll_urls: enroll, node_name: _ } =
            Connection::load(&state_dir)?;
        let or = |given: Urls, stored| if given.is_empty() { stored } else { given };
        (or(tunnel_urls, tunnel), or(enroll_urls, enroll))
    } else {
        (tunnel_urls, enroll_urls)
    };
    let endpoint = runtime_endpoint.map_or_else(RuntimeEndpoint::discover, Ok)?;
    let ledger = Ledger::open(&state_dir)?;
    let node_name = identity.node();
    info!(node = %node_name, %tunnel_urls, runtime = %endpoint, state_dir = %state_dir.display(), version = env!("CARGO_PKG_VERSION"), "edgecore-prepull starts");

    let shutdown = CancellationToken::new();
    let tasks = TaskTracker::new();
    if !providers.names().is_empty() {
        info!(
            providers = providers.names().join(", "),
            "credential providers are asked where secrets do not do"
        );
    }
    if let Listen::On(address) = metrics_listen {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("listen on --metrics-listen {address}"))?;
        info!(address = %listener.local_addr()?, "metrics and health listen");
        tasks.spawn(metrics::serve(listener, metrics.clone(), shutdown.clone()));
    }
    let puller = Arc::new(CriPuller::new(endpoint));
    let config = NodeConfig { max_tasks, parallel_pulls, limits, providers };
    let node = Node::start(puller.clone(), ledger, config, metrics.clone()).await?;
    tasks.spawn(probe(puller, metrics.clone(), shutdown.clone()));
    tasks.spawn(
        identity.clone().keep_renewed(enroll_urls, shutdown.clone()).instrument(info_span!("renewal")),
    );

    let (events, tunnel_events) = mpsc::channel(EVENTS);
    let (link, outgoing) = Link::new(MESSAGES);
    let node = tasks.spawn(node.run(tunnel_events, link, shutdown.clone()));
    let dialling = dial::Settings { metrics: Some(metrics), ..dial::Settings::default() };
    let dialler = dial::run_with(dialling, identity, tunnel_urls, events, outgoing, shutdown.clone());
    let tunnel = tasks.spawn(dialler.instrument(info_span!("tunnel")));
    tasks.close();

    let ended = tokio::select! {
        signal = termination() => signal.map(|signal| info!(signal, "stopping; tasks that run go on after the next start")),
        ended = tunnel => match ended {
            Ok(ended) => ended.map_err(anyhow::Error::from).and(Err(anyhow!("the tunnel ended"))),
            Err(error) => Err(anyhow!("the tunnel died: {error}")),
        },
        ended = node => match ended {
            Ok(()) => Err(anyhow!("the agent ended")),
            Err(error) => Err(anyhow!("the agent died: {error}")),
        },
    };
    shutdown.cancel();
    if timeout(DRAIN, tasks.wait()).await.is_err() {
        warn!("not everything has stopped within {DRAIN:?}");
    }
    ended.map(|()| ExitCode::SUCCESS)
}

/// Asks the runtime now and then whether it is there.
async fn probe(puller: Arc<CriPuller>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut was_up = None;
    let probing = async {
        loop {
            let answer = timeout(PROBE_PATIENCE, puller.version()).await;
            let up = matches!(answer, Ok(Ok(_)));
            metrics.runtime_up(up);
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
