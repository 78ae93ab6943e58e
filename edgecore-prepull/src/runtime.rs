//! The shell: settings, identity, and the parts of a node put together.

use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::CommandFactory;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::args::{Cli, Command, RunArgs};
use crate::config::{Effective, Listen, Settings};
use crate::executor::Executor;
use crate::identity::{Connection, Identity};
use crate::ledger::Ledger;
use crate::metrics::{self, Metrics};
use crate::node::{LINK_DEPTH, Node};
use crate::puller::cri::CriPuller;
use crate::puller::socket::RuntimeEndpoint;
use crate::tunnel::{Link, dial};
use crate::{join, logging, pull_command};

/// The tunnel's events that wait for the agent.
const TUNNEL_EVENTS: usize = 64;
/// The work is waiting: for the network, for the runtime, for the disk. Two threads keep the memory small.
const WORKERS: usize = 2;

/// Runs a command; errors go to stderr, with their causes.
pub fn main(cli: Cli) -> ExitCode {
    // A second install is refused and harmless: the first one is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome = match cli.command {
        Command::Join(args) => block_on(async {
            let joined = join::run(args).await?;
            writeln!(std::io::stdout(), "{joined}").context("write to stdout")?;
            Ok(ExitCode::SUCCESS)
        }),
        Command::Run(args) => block_on(run(*args)),
        Command::Pull(args) => block_on(pull_command::run(args)),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "edgecore-prepull", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {error:#}");
        ExitCode::FAILURE
    })
}

fn block_on(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let outcome = runtime.block_on(work);
    // The ledger's thread has written what it was told; a pull that hangs is not waited for.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    outcome
}

/// The socket that is given, or the one that is found.
pub(crate) fn endpoint(given: Option<&str>) -> anyhow::Result<RuntimeEndpoint> {
    match given {
        Some(text) => text.parse().context("--runtime-endpoint"),
        None => Ok(RuntimeEndpoint::discover()?),
    }
}

/// `edgecore-prepull run`.
async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let RunArgs { config, settings, log } = args;
    logging::init(&log)?;
    let file = config.as_deref().map(Settings::from_file).transpose()?.unwrap_or_default();
    let Effective {
        state_dir,
        tunnel_url,
        enroll_url,
        runtime_endpoint,
        metrics_listen,
        parallel_pulls,
        limits,
    } = settings.over(file);

    let ledger = Ledger::open(&state_dir)?;
    let identity = Identity::load(&state_dir)?;
    let connection = Connection::load(&state_dir)?;
    let tunnel_url = tunnel_url.unwrap_or(connection.tunnel_url);
    let enroll_url = enroll_url.unwrap_or(connection.enroll_url);
    let endpoint = endpoint(runtime_endpoint.as_deref())?;
    info!(
        node = %identity.node(),
        version = env!("CARGO_PKG_VERSION"),
        tunnel = tunnel_url,
        runtime = %endpoint,
        state_dir = %state_dir.display(),
        "edgecore-prepull starts"
    );

    let shutdown = CancellationToken::new();
    let metrics = Arc::new(Metrics::default());
    if let Listen::On(address) = metrics_listen {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("listen on --metrics-listen {address}; another address, or off, may be given")
        })?;
        info!(address = %listener.local_addr()?, "metrics and health listen");
        tokio::spawn(metrics::serve(listener, metrics.clone(), shutdown.clone()));
    }

    let (link, outgoing) = Link::new(LINK_DEPTH);
    let (sender, events) = mpsc::channel(TUNNEL_EVENTS);
    tokio::spawn(identity.clone().keep_renewed(enroll_url, shutdown.clone()));
    let tunnel = tokio::spawn(dial::run(identity, tunnel_url, sender, outgoing, shutdown.clone()));
    tokio::spawn({
        let shutdown = shutdown.clone();
        async move {
            termination().await;
            info!("ending: open tasks stay in the ledger and go on after the next start");
            shutdown.cancel();
        }
    });

    let executor = Executor::new(CriPuller::new(endpoint), limits, parallel_pulls);
    Node { executor, store: ledger, link, metrics }.run(events, shutdown.clone()).await?;
    shutdown.cancel();
    tunnel.await.context("the tunnel's task died")??;
    Ok(ExitCode::SUCCESS)
}

/// Resolves at SIGTERM or SIGINT.
pub(crate) async fn termination() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        }
        (Err(error), _) | (_, Err(error)) => {
            error!(%error, "no signals can be received; end the program with SIGKILL");
            std::future::pending::<()>().await;
        }
    }
}
