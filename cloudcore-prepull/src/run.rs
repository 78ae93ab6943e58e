//! The shell around the controller: starts what listens and watches, carries inputs in and actions out.
//!
//! ```text
//!  watch ─┐                                    ┌─▶ dispatch (secrets, tunnel) ─┐
//!  tunnel ┼─▶ inputs (bounded) ─▶ Controller ──┼─▶ status_writer ──────────────┼─▶ inputs
//!  time ──┘                 └───▶ Kruise ──────┼─▶ tunnel::registry (send)     │
//!                                 one task     └─▶ events                      │
//! ```

use std::future::Future;
use std::io::Write as _;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::CommandFactory;
use futures::FutureExt as _;
use jiff::Timestamp;
use kube::Client;
use prepull_api::selector::Selector;
use prepull_engine::engine::{Action, Engine, Input, Listed};
use prepull_engine::prepull::controller;
use prepull_engine::shared::outcomes::WriteOutcome;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, info_span};

use crate::commands;
use crate::commands::args::{Cli, ClusterArgs, Command, LogFormat, RunArgs};
use crate::edges::dispatch;
use crate::edges::tunnel::Sessions;
use crate::kube_api::events::Events;
use crate::kube_api::leader::{self, Leadership};
use crate::kube_api::refusal::with_causes;
use crate::kube_api::secrets::Secrets;
use crate::kube_api::status_writer::Writer;
use crate::kube_api::{cluster, kruise_owner, watch};
use crate::run::http::Readiness;
use crate::run::metrics::Metrics;

mod http;
mod kruise;
mod listeners;
pub mod metrics;
mod preflight;
mod recorder;
mod vital;

use self::kruise::KruiseWrites;
use recorder::Recorder;
use vital::Vital;

/// Inputs that wait for the controller. It takes a batch in well below a millisecond; where it cannot keep up
/// the sessions and watches wait, and nothing grows.
const INPUTS: usize = 4096;
/// Inputs of one batch: the writes and decisions that follow are made once for all of them.
const BATCH: usize = 1024;
/// Dispatches under way: each may ask the API server for secrets.
const DISPATCHES: usize = 64;
/// What is under way when the program is told to end may take this long: the results that are being written.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs a command; errors go to stderr, with their causes.
pub fn main(cli: Cli) -> ExitCode {
    // A second install is refused and harmless: the first one is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut stdout = std::io::stdout();
    if let Command::Run(args) = &cli.command
        && let Err(error) = args.election.timing()
    {
        let _ = Cli::command().error(clap::error::ErrorKind::ValueValidation, error).print();
        return ExitCode::from(2);
    }
    let outcome = match cli.command {
        Command::Run(args) => block_on(run(*args)),
        Command::Crds(args) => commands::crds::run(&args, &mut stdout),
        Command::Plan(args) => block_on(async {
            let outcome = commands::plan::run(&args, &mut stdout).await;
            cluster::name_where_unreachable(outcome, args.kubeconfig.as_deref()).await
        }),
        Command::Token { cluster: ClusterArgs { kubeconfig, namespace }, command } => block_on(async {
            let client = cluster::client(kubeconfig.as_deref()).await?;
            let outcome = commands::token::run(command, client, &namespace, &mut stdout).await;
            cluster::name_where_unreachable(outcome, kubeconfig.as_deref()).await
        }),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "cloudcore-prepull", &mut stdout);
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
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

fn log_to_stderr(args: &RunArgs) -> anyhow::Result<()> {
    // What kube's client logs there it returns as well, and then it is logged by whoever knows what it means.
    let filter = format!("kube_client::client::builder=off,{}", args.log.log);
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .with_context(|| format!("--log {} is no filter; try info or debug", args.log.log))?;
    // A log that nobody takes any more is no reason to panic, which telling of it on stderr would be.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let builder = builder.log_internal_errors(false);
    match args.log.log_format {
        LogFormat::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// `cloudcore-prepull run`: health, then the election, then the work; the Lease is given back after it.
async fn run(args: RunArgs) -> anyhow::Result<()> {
    log_to_stderr(&args)?;
    let timing = args.election.timing()?;
    let leadership = timing.map_or_else(Leadership::undisputed, |_| Leadership::standby());
    // A standby that could not lead would find out when it has to.
    listeners::read_authority_files(&args)?;
    let client = cluster::client(args.cluster.kubeconfig.as_deref()).await?;
    let shutdown = CancellationToken::new();
    let metrics = Arc::new(Metrics::default());
    let readiness = Arc::new(Readiness::new(leadership.clone()));

    // Health answers from the start; metrics with it.
    let health = TcpListener::bind(args.metrics_listen)
        .await
        .with_context(|| format!("listen on --metrics-listen {}", args.metrics_listen))?;
    let health_address = health.local_addr()?;
    info!(address = %health_address, "metrics and health listen");
    tokio::spawn(http::serve(health, metrics.clone(), readiness.clone(), shutdown.clone()));

    tokio::spawn({
        let shutdown = shutdown.clone();
        async move {
            termination().await;
            shutdown.cancel();
        }
    });
    if !may_serve(&args, &client, &shutdown).await? {
        return Ok(());
    }
    let namespace = &args.cluster.namespace;
    let Some(term) = leader::lead(client.clone(), namespace, timing, &leadership, &shutdown).await? else {
        return Ok(());
    };
    let outcome = work(args, health_address, client, leadership, metrics, readiness, shutdown).await;
    term.release().await;
    outcome
}

/// Fails where Kruise's API is to be served, and is not ours to serve. `false` at the shutdown.
async fn may_serve(args: &RunArgs, client: &Client, shutdown: &CancellationToken) -> anyhow::Result<bool> {
    if !args.enable_kruise_api {
        return Ok(true);
    }
    let check = Box::pin(kruise_owner::check(client, Timestamp::now()));
    Ok(shutdown.run_until_cancelled(check).await.transpose()?.is_some())
}

/// What the leader does, until the shutdown. Nothing of it writes any more when this returns.
async fn work(
    args: RunArgs,
    health_address: SocketAddr,
    client: Client,
    leadership: Leadership,
    metrics: Arc<Metrics>,
    readiness: Arc<Readiness>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    // A standby may have waited for long.
    if !may_serve(&args, &client, &shutdown).await? {
        return Ok(());
    }
    let kubeconfig = args.cluster.kubeconfig.as_deref();
    let writes = cluster::leaders_client(kubeconfig, leadership.clone()).await?;
    if shutdown.run_until_cancelled(preflight::wait_until_passed(&client, &readiness)).await.is_none() {
        return Ok(());
    }
    let (inputs, mut inbox) = mpsc::channel(INPUTS);
    let events = Events::start(writes.clone());
    let kruise = args.enable_kruise_api.then(|| args.kruise_node_selector.clone());
    let mut core = Core {
        engine: kruise.clone().map_or_else(Engine::default, Engine::with_kruise),
        recorder: args.record.as_deref().map(|file| recorder(file, kruise.as_ref())).transpose()?,
        clock: Clock::start(),
        sessions: Sessions::default(),
        secrets: Secrets::new(client.clone()),
        kruise: KruiseWrites::new(writes.clone()),
        writer: Writer::new(writes, events.clone()),
        events,
        leadership,
        metrics,
        inputs: inputs.clone(),
        permits: Arc::new(Semaphore::new(DISPATCHES)),
        work: JoinSet::new(),
        vital: Vital::default(),
    };

    tokio::spawn(core.secrets.clone().drop_expired_forever());

    // Nodes and reports before jobs, since a job is planned when it is first seen; and all before the tunnel, since
    // an edge with a task of a job that is not known is told to stop.
    let nodes = core.vital.guard("the watch of nodes", watch::nodes(client.clone(), inputs.clone()));
    tokio::spawn(nodes.instrument(info_span!("watch", kind = "Node")));
    core.until(&mut inbox, |listed| listed.nodes, &shutdown).await?;
    let reports = core.writer.read_reports(core.clock.now());
    if let Some(reports) = shutdown.run_until_cancelled(reports).await {
        core.handle(controller::Input::Reports(reports).into(), core.clock.now());
    }
    let jobs = core.vital.guard("the watch of jobs", watch::jobs(client.clone(), inputs.clone()));
    tokio::spawn(jobs.instrument(info_span!("watch", kind = "ImagePrePullJob")));
    core.until(&mut inbox, |listed| listed.jobs, &shutdown).await?;
    if args.enable_kruise_api {
        core.watch_kruise(&client);
        core.until(&mut inbox, |listed| listed.kruise, &shutdown).await?;
    }
    if shutdown.is_cancelled() {
        return Ok(());
    }
    info!("jobs and nodes are known");

    let tunnel = listeners::start(&args, health_address, client, &core, shutdown.clone()).await?;
    readiness.set_serving(true);

    let outcome = core.until(&mut inbox, |_| false, &shutdown).await;
    // Where a vital task has ended, so does the rest.
    shutdown.cancel();

    info!("ending: edges are told to come back, what is being written is waited for");
    readiness.set_serving(false);
    let drained = tokio::time::timeout(DRAIN, async {
        while core.work.join_next().await.is_some() {}
        let _ = tunnel.await;
    })
    .await;
    if drained.is_err() {
        info!("not all was written in time; it is written after the restart");
        core.work.shutdown().await;
    }
    outcome
}

fn recorder(file: &Path, kruise_node_selector: Option<&Selector>) -> anyhow::Result<Recorder> {
    info!(file = %file.display(), "recording what the engine takes in");
    Recorder::open(file, kruise_node_selector.map(ToString::to_string))
}

/// Resolves at SIGTERM or SIGINT.
async fn termination() {
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

/// None where it panics; the panic's message and place are printed by the hook.
async fn caught<T>(work: impl Future<Output = T>) -> Option<T> {
    let outcome = AssertUnwindSafe(work).catch_unwind().await;
    outcome.inspect_err(|_| error!("a task panicked")).ok()
}

/// Wall-clock time that does not jump: the clock of the start, and what a monotonic clock adds.
struct Clock {
    wall: Timestamp,
    monotonic: Instant,
}

impl Clock {
    fn start() -> Self {
        Self { wall: Timestamp::now(), monotonic: Instant::now() }
    }

    fn now(&self) -> Timestamp {
        self.wall.checked_add(self.monotonic.elapsed()).unwrap_or(Timestamp::MAX)
    }
}

/// The one task that owns the engine.
struct Core {
    engine: Engine,
    /// With `--record`.
    recorder: Option<Recorder>,
    kruise: KruiseWrites,
    clock: Clock,
    /// Its client is fenced: see [`crate::kube_api::leader::Fence`].
    writer: Writer,
    leadership: Leadership,
    sessions: Sessions,
    secrets: Secrets,
    events: Events,
    metrics: Arc<Metrics>,
    inputs: mpsc::Sender<Input>,
    permits: Arc<Semaphore>,
    work: JoinSet<()>,
    vital: Vital,
}

impl Core {
    /// Carries inputs in and actions out, until so much is listed. Fails where a vital task has ended.
    async fn until(
        &mut self,
        inbox: &mut mpsc::Receiver<Input>,
        enough: impl Fn(Listed) -> bool,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            let now = self.clock.now();
            let wakeup = self.engine.next_wakeup();
            let wakeup = wakeup.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default());
            let sleep = tokio::time::sleep(wakeup.unwrap_or(Duration::from_secs(3600)));
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                // At the shutdown they end as well.
                ended = self.vital.wait_for_end() => {
                    if shutdown.is_cancelled() { return Ok(()) }
                    error!(%ended, "this replica cannot go on");
                    return Err(ended.into());
                }
                received = inbox.recv_many(&mut batch, BATCH) => if received == 0 { return Ok(()) },
                () = sleep => batch.push(Input::TICK),
                // Reaps what ended; a panic is logged, and its job is picked up by its deadline.
                Some(ended) = self.work.join_next(), if !self.work.is_empty() => {
                    if let Err(error) = ended { error!(%error, "a task died"); }
                    continue;
                }
            }
            let now = self.clock.now();
            for input in batch.drain(..) {
                self.handle(input, now);
            }
            let actions = self.engine.flush(now);
            if let Some(recorder) = &mut self.recorder {
                recorder.flush(&actions, now);
            }
            for action in actions {
                self.act(action);
            }
            self.metrics.set_levels(self.engine.phases(), self.sessions.len());
            if enough(self.engine.listed()) {
                return Ok(());
            }
        }
    }

    fn handle(&mut self, input: Input, now: Timestamp) {
        use controller::Input as Prepull;
        match &input {
            Input::Prepull(input) => {
                self.metrics.count_input(input);
                match input {
                    Prepull::Job(job) | Prepull::Recalled(_, _, Some(job)) => self.writer.note_job(job),
                    Prepull::Jobs(jobs) => jobs.iter().for_each(|job| self.writer.note_job(job)),
                    _ => {}
                }
            }
            Input::Kruise(input) => self.metrics.count_kruise_input(input),
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.input(&input, now);
        }
        self.engine.handle(input, now);
    }

    fn act(&mut self, action: Action) {
        // Another replica's term may have begun, and it finds out by itself what is to be done.
        if !self.leadership.is_leader() {
            return;
        }
        match action {
            Action::Prepull(action) => self.act_for_job(action),
            Action::Kruise(action) => self.act_for_kruise(action),
        }
    }

    fn act_for_job(&mut self, action: controller::Action) {
        use controller::{Action, Input};
        match action {
            // A message that finds no session is not lost: the node's next Hello brings the matter up again.
            Action::Send(node, message) => _ = self.sessions.send(&node, message),
            Action::Event(event) => self.events.send(event),
            Action::Write { job, name, version, content } => {
                let (writer, inputs) = (self.writer.clone(), self.inputs.clone());
                self.work.spawn(async move {
                    // The engine waits for the outcome, and writes nothing more of the object before it.
                    let outcome = caught(writer.write(&job, &name, &content)).await;
                    let outcome = outcome.unwrap_or(WriteOutcome::Failed);
                    let object = content.object();
                    let _ = inputs.send(Input::Written { job, object, version, outcome }.into()).await;
                });
            }
            Action::Delete { job, name } => {
                let writer = self.writer.clone();
                self.work.spawn(async move { writer.delete(&job, &name).await });
            }
            Action::Forget(job) => self.writer.forget(&job),
            Action::Recall { job, name } => {
                let (writer, inputs) = (self.writer.clone(), self.inputs.clone());
                self.work.spawn(async move {
                    let reports = writer.read_reports_of(&job).await;
                    let object = writer.read_job(&job, &name).await;
                    let _ = inputs.send(Input::Recalled(job, reports, object.map(Ok)).into()).await;
                });
            }
            Action::Dispatch(order) => {
                let (secrets, sessions) = (self.secrets.clone(), self.sessions.clone());
                let (permits, inputs) = (self.permits.clone(), self.inputs.clone());
                let span = info_span!("dispatch", job = order.job.name, node = %order.node);
                let work = async move {
                    // The semaphore is never closed.
                    let _permit = permits.acquire().await;
                    let outcome = dispatch::dispatch_job_task(&order, &secrets, &sessions).await;
                    info!(?outcome, images = order.plan.images.len(), "dispatched");
                    let (job, node, attempt) = (order.job.uid.clone(), order.node.clone(), order.attempt);
                    let _ = inputs.send(Input::Dispatched { job, node, attempt, outcome }.into()).await;
                };
                self.work.spawn(work.instrument(span));
            }
        }
    }
}

#[cfg(test)]
mod tests;
