//! The agent put between tunnel, ledger and executor. Generic over what pulls and what stores, so that a
//! simulation runs the very same loop thousands of times in one process.
//!
//! ```text
//!  tunnel ─TunnelEvent─▶ ┐                       ┌─▶ link (tunnel)
//!  executor ──Event────▶ ├─▶ Agent::handle ──────┼─▶ executor
//!  ledger ──Event──────▶ ┘    one task           └─▶ ledger (a thread: it waits for the disk)
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use prepull_api::task::TaskId;
use prepull_api::wire::{CloudMessage, EdgeMessage, Filesystem, Hello, MAX_OPEN_TASKS};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::agent::{Agent, Effect, Event, Now, TaskRecord};
use crate::executor::{Executor, Running};
use crate::ledger::{LedgerError, Store};
use crate::metrics::Metrics;
use crate::puller::Puller;
use crate::tunnel::{Link, TunnelEvent};

/// Messages that wait for the tunnel. All tasks' `Accepted`, `Result` and some seconds of `Progress` fit; beyond
/// it the session is stuck, and what is dropped is told again on the next one.
pub const LINK_DEPTH: usize = 16 * MAX_OPEN_TASKS;
/// Events that wait for the agent: it takes one in microseconds, and whoever tells waits.
const EVENTS: usize = 256;
/// How often the runtime is asked how it is.
const PROBE: Duration = Duration::from_secs(15);

/// What the runtime last said of itself.
#[derive(Clone, Debug, Default)]
pub struct RuntimeInfo {
    /// Name and version.
    pub version: Option<String>,
    /// Where images are kept.
    pub filesystem: Option<Filesystem>,
}

/// Everything that a node consists of.
#[derive(Debug)]
pub struct Node<P, S> {
    /// Carries tasks out.
    pub executor: Executor<P>,
    /// Keeps tasks.
    pub store: S,
    /// Tells the cloud.
    pub link: Link,
    /// What Prometheus sees.
    pub metrics: Arc<Metrics>,
}

enum LedgerOrder {
    Save(Box<TaskRecord>),
    Forget(TaskId),
}

impl<P: Puller, S: Store> Node<P, S> {
    /// Runs until `shutdown`, or until the tunnel's events end. Tasks that are under way then stay in the
    /// ledger.
    ///
    /// # Errors
    /// Where the ledger cannot be read at the start.
    pub async fn run(
        self,
        mut tunnel: mpsc::Receiver<TunnelEvent>,
        shutdown: CancellationToken,
    ) -> Result<(), LedgerError> {
        let Self { executor, mut store, link, metrics } = self;
        let records = store.load()?;
        if !records.is_empty() {
            info!(tasks = records.len(), "the ledger has open tasks");
        }
        let (sender, mut events) = mpsc::channel(EVENTS);
        let ledger = ledger_thread(store, sender.clone());
        let (info_sender, info) = watch::channel(RuntimeInfo::default());
        let probe = tokio::spawn(probe(executor.clone(), info_sender, metrics.clone()));
        let mut core = Core {
            agent: Agent::new(),
            running: HashMap::new(),
            executor,
            link,
            ledger,
            events: sender,
            info,
            metrics,
        };
        core.take(Event::Loaded(records)).await;
        loop {
            let tick = core.agent.next_tick().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                () = shutdown.cancelled() => break,
                event = tunnel.recv() => match event {
                    Some(event) => core.tunnel(event).await,
                    None => break,
                },
                // The sender is held by `core`.
                Some(event) = events.recv() => core.take(event).await,
                () = tokio::time::sleep_until(tick.into()) => core.take(Event::Tick).await,
            }
        }
        probe.abort();
        Ok(())
    }
}

struct Core<P> {
    agent: Agent,
    running: HashMap<TaskId, Running>,
    executor: Executor<P>,
    link: Link,
    ledger: mpsc::Sender<LedgerOrder>,
    events: mpsc::Sender<Event>,
    info: watch::Receiver<RuntimeInfo>,
    metrics: Arc<Metrics>,
}

impl<P: Puller> Core<P> {
    async fn tunnel(&mut self, event: TunnelEvent) {
        match event {
            TunnelEvent::Connecting(answer) => {
                let RuntimeInfo { version, filesystem } = self.info.borrow().clone();
                let hello = Hello {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    os: std::env::consts::OS.to_owned(),
                    arch: go_arch(std::env::consts::ARCH).to_owned(),
                    runtime: version,
                    image_filesystem: filesystem,
                    open: self.agent.open_tasks(),
                };
                // The attempt may be over by now.
                let _ = answer.send(hello);
            }
            TunnelEvent::Connected(welcome) => {
                info!(session = welcome.session, heartbeat = ?welcome.heartbeat, "connected to the cloud");
                self.metrics.connected(true);
                self.take(Event::Connected).await;
            }
            TunnelEvent::Disconnected => {
                self.metrics.connected(false);
                self.take(Event::Disconnected).await;
            }
            TunnelEvent::Message(message) => match message {
                CloudMessage::Assign(assign) => {
                    info!(task = %assign.task.id, title = assign.task.title, images = assign.task.images.len(), "task assigned");
                    self.take(Event::Assign(assign)).await;
                }
                CloudMessage::ResultAck { task } => self.take(Event::ResultAck(task)).await,
                CloudMessage::Cancel { task, reason } => {
                    info!(%task, reason, "task cancelled by the cloud");
                    self.take(Event::Cancel { task, reason }).await;
                }
                // The tunnel deals with both.
                CloudMessage::Welcome(_) | CloudMessage::Goaway { .. } => {}
            },
        }
    }

    async fn take(&mut self, event: Event) {
        match &event {
            Event::ImageEnded { result, .. } => self.metrics.image_ended(result.outcome.is_there()),
            Event::Ended(task, end) => {
                self.metrics.task_ended(end.outcome);
                self.running.remove(task);
            }
            Event::Crashed { task, reason } => {
                error!(%task, reason, "the executor of a task died");
                self.running.remove(task);
            }
            Event::PersistFailed { task, reason } => warn!(%task, reason, "task record not written"),
            _ => {}
        }
        let now = Now { monotonic: Instant::now(), wall: SystemTime::now() };
        for effect in self.agent.handle(event, now) {
            self.carry_out(effect).await;
        }
        self.metrics.open_tasks(self.agent.len());
    }

    async fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Persist(record) => _ = self.ledger.send(LedgerOrder::Save(record)).await,
            Effect::Forget(task) => _ = self.ledger.send(LedgerOrder::Forget(task)).await,
            Effect::Start(work) => {
                let task = work.task.id.clone();
                self.running.insert(task, self.executor.start(*work, self.events.clone()));
            }
            Effect::Renew(task, terms) => {
                if let Some(running) = self.running.get(&task) {
                    running.renew(terms);
                }
            }
            Effect::Stop { task, reason } => {
                if let Some(running) = self.running.get_mut(&task) {
                    running.stop(reason);
                }
            }
            // Never waits: the tunnel may itself be waiting for this task to take an event.
            Effect::Send(message) => {
                if let EdgeMessage::Result(result) = &message {
                    debug!(task = %result.task, outcome = ?result.outcome, "result sent");
                }
                self.link.offer(message);
            }
        }
    }
}

/// The disk is waited for on a thread of its own, in the order of the orders.
fn ledger_thread<S: Store>(mut store: S, events: mpsc::Sender<Event>) -> mpsc::Sender<LedgerOrder> {
    // At most one save and one removal per task are under way.
    let (sender, mut orders) = mpsc::channel(2 * MAX_OPEN_TASKS);
    tokio::task::spawn_blocking(move || {
        while let Some(order) = orders.blocking_recv() {
            let event = match order {
                LedgerOrder::Save(record) => {
                    let task = record.id().clone();
                    match store.save(&record) {
                        Ok(()) => Event::Persisted(task),
                        Err(error) => Event::PersistFailed { task, reason: error.to_string() },
                    }
                }
                LedgerOrder::Forget(task) => {
                    if let Err(error) = store.remove(&task) {
                        // It comes up again after a restart, and its result is acknowledged again.
                        warn!(%task, %error, "task record not removed");
                    }
                    continue;
                }
            };
            if events.blocking_send(event).is_err() {
                return;
            }
        }
    });
    sender
}

async fn probe<P: Puller>(executor: Executor<P>, info: watch::Sender<RuntimeInfo>, metrics: Arc<Metrics>) {
    let mut was_up = None;
    loop {
        let version = executor.puller().version().await;
        metrics.runtime_up(version.is_ok());
        match (&version, was_up) {
            (Ok(version), None | Some(false)) => info!(runtime = version, "the container runtime answers"),
            (Err(error), None | Some(true)) => warn!(%error, "the container runtime does not answer"),
            _ => {}
        }
        was_up = Some(version.is_ok());
        let filesystem = executor.puller().filesystem().await.ok();
        info.send_replace(RuntimeInfo { version: version.ok(), filesystem });
        tokio::time::sleep(PROBE).await;
    }
}

/// Go's name of an architecture, as Node objects have it.
fn go_arch(arch: &str) -> &str {
    match arch {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}
