//! The shell around the engine: starts what listens and watches, carries inputs in and actions out.
//!
//! ```text
//!  watch ─┐                                ┌─▶ dispatch (secrets, tunnel) ─┐
//!  tunnel ┼─▶ inputs (bounded) ─▶ Engine ──┼─▶ status_writer ──────────────┼─▶ inputs
//!  time ──┘              one task          ├─▶ tunnel::registry (send)     │
//!                                          └─▶ events                      │
//! ```

use std::future::Future;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::CommandFactory;
use jiff::Timestamp;
use kube::Client;
use prepull_api::selector::Selector;
use prepull_engine::engine::Engine;
use prepull_engine::sites::SiteSettings;
use prepull_program::errors::with_causes;
use prepull_program::log::{self, LogFormat};
use prepull_program::process;
use prepull_program::signals::wait_for_termination;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::commands;
use crate::commands::args::{Cli, CloudcoreCommand, ClusterArgs, RunArgs};
use crate::edges::roster::Roster;
use crate::edges::tunnel::{Sessions, end_sessions};
use crate::kube_api::consents::watch_for_consents;
use crate::kube_api::events::Events;
use crate::kube_api::leader::{self, Leadership};
use crate::kube_api::leader_label::{LeaderLabel, own_pod};
use crate::kube_api::recall::Recalls;
use crate::kube_api::secrets::Secrets;
use crate::kube_api::settings_writer::SettingsWriter;
use crate::kube_api::status_writer::StatusWriter;
use crate::kube_api::{cluster, kruise_writer, watch};
use crate::run::http::edges::{self, EdgesDesk};
use crate::run::http::{CertificateFiles, Protection, Readiness};
use crate::run::metrics::Metrics;

mod clock;
mod core;
mod http;
mod kruise;
mod listeners;
pub mod metrics;
mod open_files;
mod preflight;
mod recorder;
mod rotation;
mod sites;
pub(crate) mod traces;
mod vital;

use self::clock::Clock;
use self::core::Core;
use self::kruise::KruiseGate;
use self::sites::SiteLog;
use preflight::Preflight;
use recorder::{RecordFile, Recorder};
use traces::Traces;
use vital::Vital;

/// Inputs that wait for the engine. It takes a batch in well below a millisecond; where it cannot keep up
/// the sessions and watches wait, and nothing grows.
const INPUTS: usize = 4096;
/// kube's client returns what it would log here, and the caller knows what it means. kube would also log a whole
/// answer that it cannot parse, which may be a Secret.
const LOG_DEFAULTS: &str = "kube_client::client=off";
/// At the shutdown, work in progress may take this long: results that are being written.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs a command; errors go to stderr, with their causes.
pub fn main(cli: Cli) -> ExitCode {
    process::protect_memory();
    // A second install is refused and harmless: the first one is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut stdout = std::io::stdout();
    if let CloudcoreCommand::Run(args) = &cli.command
        && let Err(error) = args.election.timing()
    {
        let _ = Cli::command().error(clap::error::ErrorKind::ValueValidation, error).print();
        return ExitCode::from(2);
    }
    let is_log_json =
        matches!(&cli.command, CloudcoreCommand::Run(args) if args.log.log_format == LogFormat::Json);
    let outcome = match cli.command {
        CloudcoreCommand::Run(args) => block_on(run(*args)),
        CloudcoreCommand::Crds(args) => commands::crds::run(&args, &mut stdout),
        CloudcoreCommand::Plan(args) => block_on(async {
            let connect = async |kubeconfig: Option<&std::path::Path>| cluster::client(kubeconfig).await;
            let outcome = prepull_plan::run(&args, connect, &mut stdout).await;
            cluster::name_where_unreachable(outcome, args.kubeconfig.as_deref()).await
        }),
        CloudcoreCommand::Token { cluster, command } => with_cluster(cluster, async |client, namespace| {
            commands::token::run(command, client, namespace, &mut stdout, &mut std::io::stderr()).await
        }),
        CloudcoreCommand::Ca { cluster, command } => with_cluster(cluster, async |client, namespace| {
            commands::ca::run(command, client, namespace, &mut stdout).await
        }),
        CloudcoreCommand::Node { cluster, command } => with_cluster(cluster, async |client, namespace| {
            commands::node::run(command, client, namespace, &mut stdout).await
        }),
        CloudcoreCommand::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "cloudcore-prepull", &mut stdout);
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // Collectors of a JSON log see only log lines. Before the log has started we can only print.
        Err(error) if is_log_json && tracing::dispatcher::has_been_set() => {
            error!(error = with_causes(error.as_ref()), "cloudcore-prepull cannot go on, and exits");
            ExitCode::FAILURE
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(work)
}

/// Runs a command with a client of the cluster, in the namespace of cloudcore-prepull.
fn with_cluster(
    ClusterArgs { kubeconfig, namespace }: ClusterArgs,
    command: impl AsyncFnOnce(Client, &str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    block_on(async {
        let client = cluster::client(kubeconfig.as_deref()).await?;
        let outcome = command(client, &namespace).await;
        cluster::name_where_unreachable(outcome, kubeconfig.as_deref()).await
    })
}

/// What the endpoint of health and metrics shows, and where; and the list of the edges.
struct HealthService {
    address: SocketAddr,
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    label: LeaderLabel,
    desk: Arc<EdgesDesk>,
}

impl HealthService {
    async fn listen(
        args: &RunArgs,
        client: &Client,
        leadership: Leadership,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let files = args.metrics_cert.clone().zip(args.metrics_key.clone());
        let files = files.map(|(certificate, key)| CertificateFiles { certificate, key });
        let protection = args
            .metrics_secure
            .then(|| Protection::new(files, client.clone(), shutdown.clone()))
            .transpose()?;
        let listener = TcpListener::bind(args.metrics_listen)
            .await
            .with_context(|| format!("cannot listen on --metrics-listen {}", args.metrics_listen))?;
        let address = listener.local_addr()?;
        info!(%address, "metrics and health listen");
        let metrics = Arc::new(Metrics::default());
        let label = LeaderLabel::start(client.clone(), &args.cluster.namespace, own_pod());
        let desk = Arc::new(EdgesDesk::new(leadership.clone(), args.edges_from.clone()));
        if let Some(address) = args.edges_listen {
            let listener = TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen on --edges-listen {address}"))?;
            info!(address = %listener.local_addr()?, "the list of edges listens");
            tokio::spawn(edges::serve(listener, desk.clone(), shutdown.clone()));
        }
        let readiness = Arc::new(Readiness::new(leadership, label.clone()));
        tokio::spawn(http::serve(listener, metrics.clone(), readiness.clone(), protection, shutdown.clone()));
        Ok(Self { address, metrics, readiness, label, desk })
    }
}

/// `cloudcore-prepull run`: health, then the election, then the work; the Lease is given back after it.
async fn run(args: RunArgs) -> anyhow::Result<()> {
    log::start(&args.log, LOG_DEFAULTS)?;
    args.check_advertised(own_pod().is_some())?;
    process::raise_open_files();
    let timing = args.election.timing()?;
    let leadership = timing.map_or_else(Leadership::undisputed, |_| Leadership::standby());
    // A standby that could not lead would find out when it has to.
    let clusters_cas = cluster::api_server_cas(args.cluster.kubeconfig.as_deref()).await?;
    if let Some(cas) = listeners::read_ca_files(&args)? {
        cas.check_not_of(&clusters_cas)?;
    }
    let mut record_file = args.record.as_deref().map(RecordFile::open).transpose()?;
    let client = cluster::client(args.cluster.kubeconfig.as_deref()).await?;
    let shutdown = CancellationToken::new();
    // Health answers from the start; metrics with it.
    let health = HealthService::listen(&args, &client, leadership.clone(), &shutdown).await?;

    tokio::spawn({
        let shutdown = shutdown.clone();
        async move {
            match wait_for_termination().await {
                Ok(_) => shutdown.cancel(),
                Err(error) => error!(%error, "no signals can be received; end the program with SIGKILL"),
            }
        }
    });
    let namespace = &args.cluster.namespace;
    let preflight = Preflight::new(client.clone(), namespace, health.readiness.clone());
    let lead = leader::wait_to_lead(client.clone(), namespace, timing, &leadership, &shutdown);
    let Some(term) = preflight.stand_by_until(lead).await? else {
        return Ok(());
    };
    // As after a failover: what runs is found again by what the API server and the edges say.
    let outcome = loop {
        let part = shutdown.child_token();
        let kruise = KruiseGate::open(&args, &client, &health.readiness, &part).await;
        let outcome = match part.run_until_cancelled(preflight.wait_until_passed()).await {
            Some(()) => {
                let work = run_as_leader(
                    &args,
                    &mut record_file,
                    &health,
                    client.clone(),
                    leadership.clone(),
                    &kruise,
                    part.clone(),
                );
                let looking = preflight.stop_on_older_definitions(part);
                let looking = async {
                    looking.await;
                    std::future::pending().await
                };
                tokio::select! { outcome = work => outcome, never = looking => never }
            }
            None => Ok(()),
        };
        let goes_on = kruise.has_changed() || preflight.has_stopped();
        if outcome.is_err() || shutdown.is_cancelled() || !goes_on {
            break outcome;
        }
    };
    // Where a vital task has ended, so does the rest.
    shutdown.cancel();
    term.release().await;
    outcome
}

/// Begins the recording of a leader, with `--record`.
fn begin_recording(
    args: &RunArgs,
    record_file: &mut Option<RecordFile>,
    kruise: Option<&Selector>,
    sites: &SiteSettings,
) -> anyhow::Result<Option<Recorder>> {
    let file = match (record_file.take(), &args.record) {
        // Not the first start of the work: what is served matters more than its recording.
        (None, Some(path)) => RecordFile::open(path)
            .inspect_err(|error| error!(error = with_causes(error.as_ref()), "the recording ends"))
            .ok(),
        (opened, _) => opened,
    };
    file.map(|file| Recorder::begin(file, kruise.map(ToString::to_string), sites.clone())).transpose()
}

/// Begins to send traces, with `--otlp-endpoint`.
fn start_traces(args: &RunArgs, metrics: &Arc<Metrics>) -> anyhow::Result<Option<Traces>> {
    let endpoint = args.otlp_endpoint.as_ref();
    endpoint.map(|endpoint| Traces::start(endpoint, Arc::clone(metrics))).transpose()
}

/// What the leader does, until the shutdown. Nothing of it writes any more when this returns.
async fn run_as_leader(
    args: &RunArgs,
    record_file: &mut Option<RecordFile>,
    HealthService { address: health_address, metrics, readiness, label, desk }: &HealthService,
    client: Client,
    leadership: Leadership,
    kruise: &KruiseGate,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let kubeconfig = args.cluster.kubeconfig.as_deref();
    let writes = cluster::leaders_client(kubeconfig, leadership.clone()).await?;
    let (inputs, mut inbox) = mpsc::channel(INPUTS);
    let (asks, asked) = mpsc::channel(edges::ASKS);
    let events = Events::start(writes.clone());
    let kruise = kruise.is_open().then(|| args.kruise_node_selector.clone());
    let sites = SiteSettings { memory: args.site_memory, ..args.sites.settings() };
    let mut core = Core {
        engine: kruise.clone().map_or_else(Engine::default, Engine::with_kruise).with_sites(sites.clone()),
        recorder: begin_recording(args, record_file, kruise.as_ref(), &sites)?,
        clock: Clock::start(),
        sessions: Sessions::default(),
        roster: Roster::in_cluster(writes.clone(), &args.cluster.namespace, events.clone(), metrics.roster()),
        kruise_nodes: kruise.clone(),
        site_log: SiteLog::new(&sites),
        sites,
        secrets: Secrets::new(client.clone(), args.consent.require_secret_consent),
        kruise_writer: kruise_writer::KruiseWriter::new(writes.clone()),
        writer: StatusWriter::new(writes.clone(), events.clone()),
        settings_writer: SettingsWriter::new(writes.clone()),
        recalls: Recalls::new(client.clone()),
        events,
        leadership,
        metrics: metrics.clone(),
        traces: start_traces(args, metrics)?,
        inputs: inputs.clone(),
        needs_pods: tokio::sync::watch::Sender::default(),
        asked,
        known_since: Timestamp::now(),
        work: JoinSet::new(),
        vital: Vital::default(),
    };

    tokio::spawn(shutdown.clone().run_until_cancelled_owned(clock::warn_when_set()));
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(core.secrets.clone().drop_expired_forever()));
    let consents = watch_for_consents(core.secrets.clone(), inputs.clone());
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(consents));

    // Nodes before jobs, since a job is planned when it is first seen; and all before the tunnel, since an edge with a task
    // of a job that we don't know would have to stop.
    let watch_nodes = watch::nodes(client.clone(), inputs.clone());
    core.watch("the watch of nodes", "Node", watch_nodes, &shutdown);
    core.run_until(&mut inbox, |listed| listed.nodes, &shutdown).await?;
    let watch_jobs = watch::jobs(client.clone(), core.events.clone(), inputs.clone());
    core.watch("the watch of jobs", "ImagePrePullJob", watch_jobs, &shutdown);
    core.run_until(&mut inbox, |listed| listed.jobs, &shutdown).await?;
    // After the jobs: only the reports of known ones are missed.
    let watch_reports = watch::reports(client.clone(), inputs.clone());
    core.watch("the watch of reports", "ImagePrePullReport", watch_reports, &shutdown);
    // Nothing waits for these: without the right to read them, from a role of an earlier release, jobs go on.
    let watch_settings = watch::settings(client.clone(), inputs.clone());
    core.watch("the watch of settings", "ImagePrePullSettings", watch_settings, &shutdown);
    if kruise.is_some() {
        core.watch_kruise(&client, &shutdown);
        core.run_until(&mut inbox, |listed| listed.kruise, &shutdown).await?;
    }
    // Before the first handshake, so that who was revoked stays out after a failover.
    if shutdown.run_until_cancelled(core.roster.load()).await.is_none() || shutdown.is_cancelled() {
        return Ok(());
    }
    let watch_roster = core.roster.clone().watch(client.clone(), args.cluster.namespace.clone());
    core.watch("the watch of the nodes' records", "ConfigMap", watch_roster, &shutdown);
    let ending = end_sessions(core.roster.clone(), core.sessions.clone());
    let ending = core.vital.guard("the end of revoked sessions", ending);
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(ending));
    open_files::check_limit(core.count_edges());
    info!("jobs and nodes are known");

    let starting = Box::pin(listeners::start(args, client, writes.clone(), &core, shutdown.clone()));
    let Some(listeners) = shutdown.run_until_cancelled(starting).await else { return Ok(()) };
    let mut listeners = listeners?;
    listeners.write_ports(args, *health_address)?;
    readiness.set_serving(true);
    core.known_since = Timestamp::now();
    desk.open(asks);
    label.show(writes);

    let outcome = core.run_until(&mut inbox, |_| false, &shutdown).await;
    shutdown.cancel();

    info!("ending: edges are told to come back, what is being written is waited for");
    readiness.set_serving(false);
    desk.close();
    metrics.clear_work(args.site_memory);
    let drain = tokio::time::timeout(DRAIN, core.drain(&mut inbox, &mut listeners.tasks));
    let (drained, ()) = tokio::join!(drain, label.hide());
    if drained.is_err() {
        info!("not all was written in time; it is written after the restart");
        core.work.shutdown().await;
        listeners.tasks.shutdown().await;
    }
    outcome
}
