//! A node: the agent with everything that it needs around it, over any puller and any store.
//!
//! The loop never waits for anything but its inputs: writes are made by a task of their own, one after the
//! other, and what is to be said to the cloud waits in a queue that is emptied beside the rest.

mod recorder;

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prepull_api::task::{ImageOutcome, TaskId, TaskOutcome};
use prepull_api::wire::{
    CloudMessage, EdgeMessage, Hello, MAX_OPEN_TASKS, OpenTask, Progress, truncate_reason,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::cloud::tunnel::{Link, TunnelEvent};
use crate::config::Limits;
use crate::images::providers::Providers;
use crate::images::puller::Puller;
use crate::metrics::Metrics;
use crate::tasks::agent::{Agent, Effect, Event, Now, TaskEnd, TaskRecord, Work};
use crate::tasks::executor::{Control, Executor, Report};
use crate::tasks::ledger::{LedgerError, Store};
use recorder::{Outcome, Recorder};

/// Reports of all tasks that wait for the loop. It takes one in microseconds; where it is behind, progress is
/// dropped and ends of images wait.
const REPORTS: usize = 64;
/// Messages that wait for the tunnel before no more is read from it: every task may owe a result, an
/// acceptance and an answer to a repeated assignment.
const OUTBOX: usize = 4 * MAX_OPEN_TASKS;
/// The cloud waits for `Hello`. A runtime that takes longer than this to say who it is, is left out.
const HELLO_PATIENCE: Duration = Duration::from_secs(2);

/// What a node does not learn from the cloud.
#[derive(Clone, Debug)]
pub(crate) struct NodeConfig {
    /// Tasks at the same time; more wait.
    pub(crate) max_tasks: NonZeroU32,
    /// Images at the same time, over all tasks.
    pub(crate) parallel_pulls: NonZeroUsize,
    /// What the check items look for.
    pub(crate) limits: Limits,
    /// Asked where the credentials of a task do not do.
    pub(crate) providers: Arc<Providers>,
}

type TaskReport = (TaskId, Report);

/// An edge node's agent at work.
#[derive(Debug)]
pub(crate) struct Node<P> {
    agent: Agent,
    executor: Arc<Executor<P>>,
    puller: Arc<P>,
    recorder: Recorder,
    metrics: Arc<Metrics>,
    outbox: VecDeque<EdgeMessage>,
    controls: HashMap<TaskId, watch::Sender<Control>>,
    tasks: JoinSet<TaskEnd>,
    names: HashMap<Id, TaskId>,
    reports: (mpsc::Sender<TaskReport>, mpsc::Receiver<TaskReport>),
}

impl<P: Puller> Node<P> {
    /// Reads the store, and takes up what is in it.
    pub(crate) async fn start(
        puller: Arc<P>,
        store: impl Store,
        config: NodeConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, LedgerError> {
        let (recorder, records) = Recorder::start(store).await?;
        let NodeConfig { max_tasks, parallel_pulls, limits, providers } = config;
        let executor =
            Executor::new(puller.clone(), parallel_pulls, limits).with_credential_providers(providers);
        let mut node = Self {
            agent: Agent::new(max_tasks),
            executor: Arc::new(executor),
            puller,
            recorder,
            metrics,
            outbox: VecDeque::new(),
            controls: HashMap::new(),
            tasks: JoinSet::new(),
            names: HashMap::new(),
            reports: mpsc::channel(REPORTS),
        };
        if !records.is_empty() {
            info!(tasks = records.len(), "tasks found in the ledger");
        }
        node.on(Event::Loaded(records));
        Ok(node)
    }

    /// Works until `shutdown`, or until the tunnel ends. Tasks that run are dropped and stay in the ledger: they
    /// go on after the next start.
    pub(crate) async fn run(
        mut self,
        mut tunnel: mpsc::Receiver<TunnelEvent>,
        link: Link,
        shutdown: CancellationToken,
    ) {
        loop {
            self.metrics.set_open_tasks(self.agent.len());
            let tick = self.agent.next_tick().map(Instant::from_std);
            let front = self.outbox.front().cloned();
            tokio::select! {
                () = shutdown.cancelled() => break,
                event = tunnel.recv(), if self.outbox.len() < OUTBOX => match event {
                    Some(event) => self.on_tunnel(event),
                    None => break,
                },
                outcome = self.recorder.next() => self.on_recorded(outcome),
                report = self.reports.1.recv() => {
                    if let Some((task, report)) = report {
                        self.on_report(task, report, &link);
                    }
                }
                Some(ended) = self.tasks.join_next_with_id() => self.on_task_ended(ended),
                () = async { tick.map_or_else(|| futures::future::Either::Left(pending()), |tick| futures::future::Either::Right(sleep_until(tick))).await } => self.on(Event::Tick),
                () = say(&link, front) => {
                    self.outbox.pop_front();
                }
            }
        }
        self.tasks.shutdown().await;
        self.recorder.finish().await;
    }

    fn on(&mut self, event: Event) {
        let now = Now { monotonic: Instant::now().into_std(), wall: SystemTime::now() };
        for effect in self.agent.handle(event, now) {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Persist(record) => {
                self.give_up_unbegun(&record);
                self.recorder.save(record);
            }
            Effect::Forget(task) => {
                info!(%task, "result acknowledged");
                self.recorder.remove(task);
            }
            Effect::Start(work) => self.start_task(*work),
            Effect::Renew(task, terms) => {
                if let Some(control) = self.controls.get(&task) {
                    control.send_modify(|control| control.terms = terms);
                }
            }
            Effect::Stop { task, reason } => {
                if let Some(control) = self.controls.get(&task) {
                    info!(%task, reason, "task is being stopped");
                    control.send_modify(|control| control.stop = Some(reason));
                }
            }
            Effect::Send(message) => self.outbox.push_back(message),
        }
    }

    /// A task from before a restart may be cancelled without ever reaching the executor, which gives up what it
    /// has begun itself: what the agent pulled in its earlier life is to go all the same.
    fn give_up_unbegun(&self, record: &TaskRecord) {
        let Some(result) = record.result.as_ref().filter(|result| result.outcome == TaskOutcome::Cancelled)
        else {
            return;
        };
        let images = record.task.images.iter().zip(&result.images);
        let unbegun = images.filter(|(_, end)| end.outcome == ImageOutcome::Stopped && end.attempts == 0);
        let references: Vec<String> = unbegun.map(|(image, _)| image.reference.clone()).collect();
        let executor = self.executor.clone();
        tokio::spawn(async move {
            for reference in references {
                executor.give_up(&reference).await;
            }
        });
    }

    fn start_task(&mut self, work: Work) {
        let id = work.task.id.clone();
        let span = info_span!("task", %id, title = work.task.title);
        span.in_scope(|| {
            let kept = work.done.iter().flatten().count();
            info!(images = work.task.images.len(), kept, "task begins");
        });
        let (control, terms) = watch::channel(Control { terms: work.terms.clone(), stop: None });
        self.controls.insert(id.clone(), control);
        let executor = self.executor.clone();
        let all = self.reports.0.clone();
        let name = id.clone();
        let task = async move {
            let (sender, mut receiver) = mpsc::channel(1);
            let name_reports = async {
                while let Some(report) = receiver.recv().await {
                    // The loop is gone when the agent stops.
                    let _ = all.send((name.clone(), report)).await;
                }
            };
            tokio::join!(executor.run(work, terms, sender), name_reports).0
        };
        let handle = self.tasks.spawn(task.instrument(span));
        self.names.insert(handle.id(), id);
    }

    fn on_task_ended(&mut self, ended: Result<(Id, TaskEnd), JoinError>) {
        let (id, ended) = match ended {
            Ok((id, end)) => (id, Ok(end)),
            Err(error) => (error.id(), Err(error)),
        };
        let Some(task) = self.names.remove(&id) else { return };
        self.controls.remove(&task);
        match ended {
            Ok(end) => {
                info!(%task, outcome = ?end.outcome, reason = end.reason, "task ended");
                self.metrics.count_task(end.outcome);
                self.on(Event::Ended(task, end));
            }
            Err(error) => {
                error!(%task, %error, "the executor died");
                let reason = truncate_reason(&format!("the agent's executor died: {error}"));
                self.on(Event::Crashed { task, reason });
            }
        }
    }

    fn on_report(&mut self, task: TaskId, report: Report, link: &Link) {
        match report {
            Report::Checked(outcome) => self.on(Event::Checked(task, outcome)),
            Report::Progress(images) => {
                // Past the outbox: what does not fit is of the moment, and old in a second.
                let now = Now { monotonic: Instant::now().into_std(), wall: SystemTime::now() };
                for effect in self.agent.handle(Event::Progress(Progress { task, images }), now) {
                    match effect {
                        Effect::Send(message) => link.offer(message),
                        other => self.perform(other),
                    }
                }
            }
            Report::ImageEnded { index, result } => {
                self.metrics.count_image(result.outcome.is_on_node());
                self.on(Event::ImageEnded { task, index, result });
            }
        }
    }

    fn on_recorded(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Saved(task) => self.on(Event::Persisted(task)),
            Outcome::NotSaved(task, error) => {
                let reason = chain(&error);
                warn!(%task, error = reason, "the task's record cannot be written");
                self.on(Event::PersistFailed { task, reason });
            }
            Outcome::NotRemoved(task, error) => {
                // The result is sent, and acknowledged, once more after the next start.
                warn!(%task, error = chain(&error), "the task's record cannot be removed");
            }
        }
    }

    fn on_tunnel(&mut self, event: TunnelEvent) {
        match event {
            TunnelEvent::Connecting(answer) => self.say_hello(answer),
            TunnelEvent::Connected(welcome) => {
                self.metrics.set_connected(true);
                self.executor.pace().set_interval(welcome.progress_interval);
                self.executor.pace().new_listener();
                self.on(Event::Connected);
            }
            TunnelEvent::Disconnected => {
                self.metrics.set_connected(false);
                // What had not been said is said anew on the next session, if it still counts.
                self.outbox.clear();
                self.on(Event::Disconnected);
            }
            TunnelEvent::Message(CloudMessage::Assign(assign)) => {
                info!(task = %assign.task.id, title = assign.task.title, remaining = ?assign.remaining, "task assigned");
                self.on(Event::Assign(assign));
            }
            TunnelEvent::Message(CloudMessage::ResultAck { task }) => self.on(Event::ResultAck(task)),
            TunnelEvent::Message(CloudMessage::Cancel { task, reason }) => {
                info!(%task, reason, "the cloud cancels the task");
                self.on(Event::Cancel { task, reason });
            }
            // The tunnel's own affair.
            TunnelEvent::Message(message @ (CloudMessage::Welcome(_) | CloudMessage::Goaway { .. })) => {
                debug!(?message, "not for the agent");
            }
        }
    }

    fn say_hello(&self, answer: oneshot::Sender<Hello>) {
        let (max_tasks, open) = (self.agent.max_tasks(), self.agent.open_tasks());
        let puller = self.puller.clone();
        let metrics = self.metrics.clone();
        tokio::spawn(async move {
            // The tunnel may have given up meanwhile.
            let _ = answer.send(hello(&*puller, &metrics, max_tasks, open).await);
        });
    }
}

async fn hello(puller: &impl Puller, metrics: &Metrics, max_tasks: NonZeroU32, open: Vec<OpenTask>) -> Hello {
    let (runtime, image_filesystem) =
        tokio::join!(timeout(HELLO_PATIENCE, puller.version()), timeout(HELLO_PATIENCE, puller.filesystem()));
    let runtime = runtime.ok().and_then(Result::ok);
    metrics.set_runtime_up(runtime.is_some());
    Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        os: std::env::consts::OS.to_owned(),
        arch: go_arch(std::env::consts::ARCH).to_owned(),
        runtime,
        image_filesystem: image_filesystem.ok().and_then(Result::ok),
        max_tasks: Some(max_tasks.get()),
        open,
    }
}

/// Go's name of an architecture, which Node objects have, by Rust's.
fn go_arch(arch: &str) -> &str {
    match arch {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "loongarch64" => "loong64",
        other => other,
    }
}

async fn say(link: &Link, message: Option<EdgeMessage>) {
    match message {
        Some(message) => link.send(message).await,
        None => pending().await,
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
