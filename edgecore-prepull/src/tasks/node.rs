//! The node: agent, executors, ledger and tunnel around one event loop, generic over puller and store.
//!
//! The loop only waits for its inputs: a separate task makes the writes, one after the other, and messages to the cloud
//! wait in an outbox that's emptied in parallel.

mod hello;
mod recorder;
mod settings;
mod state;

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;

use prepull_api::task::{ImageOutcome, JobUid, TaskId, TaskOutcome};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_OPEN_TASKS, TaskProgress, truncate_reason};
use prepull_program::errors::with_causes;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, debug, error, info, info_span, warn};

use self::hello::describe_node;
pub(crate) use self::recorder::RecordWriter;
use self::recorder::WriteOutcome;
use self::state::report_state;
use crate::boot::BootTime;
use crate::cloud::tunnel::{TunnelEvent, TunnelSender};
use crate::config::CheckLimits;
use crate::images::kubelet::KubeletRecords;
use crate::images::providers::Providers;
use crate::images::puller::{JobsToUnpin, Puller};
use crate::images::site::Hub;
use crate::metrics::AgentMetrics;
use crate::settings::CloudSettings;
use crate::status::TaskStatus;
use crate::tasks::agent::{
    AgentEffect, AgentEvent, Execution, NodeWindows, Now, TaskAgent, TaskEnd, TaskRecord,
};
use crate::tasks::executor::{Executor, TaskControl, TaskUpdate};
use crate::upgrade::Upgrades;

/// Capacity for updates of all tasks to the loop, which handles one in microseconds. If it falls behind, progress is
/// dropped, and results of images wait.
const UPDATES: usize = 64;
/// Outgoing messages before the loop stops reading from the tunnel. Each task may have a result, an acceptance and an
/// answer to a repeated assignment.
const OUTBOX: usize = 4 * MAX_OPEN_TASKS;

/// Settings of a node.
#[derive(Clone, Debug)]
pub(crate) struct NodeConfig {
    /// Largest number of tasks that run at the same time; more wait.
    pub(crate) max_tasks: NonZeroU32,
    /// Largest number of images that are pulled at the same time, over all tasks.
    pub(crate) parallel_pulls: NonZeroUsize,
    /// Limits of the check items.
    pub(crate) limits: CheckLimits,
    /// The node's own time zone and windows.
    pub(crate) clock: NodeWindows,
    /// Credential providers, which are asked if a task's credentials are missing or refused.
    pub(crate) providers: Arc<Providers>,
    /// Sharing of layers within the site.
    pub(crate) hub: Arc<Hub>,
    /// Root directory of the kubelet, with its records of pulls.
    pub(crate) kubelet_dir: PathBuf,
    /// Upgrades of this program that tasks ask for.
    pub(crate) upgrades: Arc<Upgrades>,
    /// The settings of the node that the cloud may change.
    pub(crate) settings: Arc<CloudSettings>,
}

/// A node with its agent, its executors and its ledger.
#[derive(Debug)]
pub(crate) struct NodeAgent<P> {
    agent: TaskAgent,
    executor: Arc<Executor<P>>,
    puller: Arc<P>,
    recorder: RecordWriter,
    metrics: Arc<AgentMetrics>,
    /// Messages that wait for the tunnel.
    outbox: VecDeque<EdgeMessage>,
    /// Controls of the running executions.
    controls: HashMap<TaskId, watch::Sender<TaskControl>>,
    executions: JoinSet<TaskEnd>,
    /// Task of each running execution.
    tasks_by_execution: HashMap<Id, TaskId>,
    updates: (mpsc::Sender<NamedUpdate>, mpsc::Receiver<NamedUpdate>),
    /// Reports changes of the node during a session.
    reporting: Option<AbortOnDropHandle<()>>,
    hub: Arc<Hub>,
    settings: Arc<CloudSettings>,
    /// Writes the settings that came last.
    storing: Option<AbortOnDropHandle<()>>,
    /// Reports the shared blobs of the node during a session.
    sharing: Option<AbortOnDropHandle<()>>,
}

type NamedUpdate = (TaskId, TaskUpdate);

impl<P: Puller> NodeAgent<P> {
    /// A node with the tasks of these records, which the recorder has loaded.
    pub(crate) fn new(
        puller: Arc<P>,
        (recorder, records): (RecordWriter, Vec<TaskRecord>),
        config: NodeConfig,
        metrics: Arc<AgentMetrics>,
    ) -> Self {
        let NodeConfig {
            max_tasks,
            parallel_pulls,
            limits,
            clock,
            providers,
            hub,
            kubelet_dir,
            upgrades,
            settings,
        } = config;
        let clock = NodeWindows { cloud_windows: settings.of_cloud().windows, ..clock };
        let executor = Executor::new(puller.clone(), parallel_pulls, limits)
            .with_credential_providers(providers)
            .with_kubelet_records(KubeletRecords::in_root_dir(&kubelet_dir))
            .counted_in(metrics.clone())
            .with_upgrades(upgrades)
            .with_clock(hub.clock().clone());
        let mut node = Self {
            agent: TaskAgent::new(max_tasks).with_clock(clock),
            executor: Arc::new(executor),
            puller,
            recorder,
            metrics,
            outbox: VecDeque::new(),
            controls: HashMap::new(),
            executions: JoinSet::new(),
            tasks_by_execution: HashMap::new(),
            updates: mpsc::channel(UPDATES),
            reporting: None,
            hub,
            settings,
            storing: None,
            sharing: None,
        };
        node.show_settings();
        for record in records.iter().filter(|record| record.result.is_none()) {
            node.executor.hold(&record.task);
        }
        if !records.is_empty() {
            info!(tasks = records.len(), "the ledger has tasks from before the restart");
        }
        node.handle(AgentEvent::Loaded(records));
        node
    }

    /// Runs until `shutdown`, or until the tunnel ends. Running executions are dropped; their tasks stay in the ledger
    /// and continue after the next start.
    pub(crate) async fn run(
        mut self,
        mut tunnel: mpsc::Receiver<TunnelEvent>,
        link: TunnelSender,
        shutdown: CancellationToken,
    ) {
        let (executor, settings) = (self.executor.clone(), self.settings.clone());
        let kept = move || settings.in_force().keep_unfinished;
        let _tidying = AbortOnDropHandle::new(tokio::spawn(async move { executor.keep_tidy(kept).await }));
        loop {
            self.metrics.set_open_tasks(self.agent.len());
            self.metrics.status().set_tasks(self.agent.records().map(describe_task).collect());
            let tick = self.agent.next_tick().map(Instant::from_std);
            let front = self.outbox.front().cloned();
            tokio::select! {
                () = shutdown.cancelled() => break,
                event = tunnel.recv(), if self.outbox.len() < OUTBOX => match event {
                    Some(event) => self.on_tunnel_event(event, &link),
                    None => break,
                },
                outcome = self.recorder.next_outcome() => self.on_write_outcome(outcome),
                update = self.updates.1.recv() => {
                    if let Some((task, update)) = update {
                        self.on_update(task, update, &link);
                    }
                }
                Some(ended) = self.executions.join_next_with_id() => {
                    // Handle its updates about images first: its end doesn't include how long each image took.
                    while let Ok((task, update)) = self.updates.1.try_recv() {
                        self.on_update(task, update, &link);
                    }
                    self.on_execution_ended(ended);
                }
                () = sleep_until_tick(tick) => self.handle(AgentEvent::Tick),
                () = send(&link, front) => {
                    self.outbox.pop_front();
                }
            }
        }
        self.executions.shutdown().await;
        self.recorder.finish().await;
    }

    fn handle(&mut self, event: AgentEvent) {
        for effect in self.agent.handle(event, self.now()) {
            self.perform(effect);
        }
    }

    fn now(&self) -> Now {
        Now { monotonic: Instant::now().into_std(), wall: self.hub.clock().wall(), boot: BootTime::now() }
    }

    fn perform(&mut self, effect: AgentEffect) {
        match effect {
            AgentEffect::Persist(record) => {
                match record.result {
                    None => self.executor.hold(&record.task),
                    Some(_) => self.executor.let_go(record.id()),
                }
                self.give_up_untouched(&record);
                self.recorder.save(record);
            }
            AgentEffect::Forget(task) => {
                info!(%task, "task removed from the ledger");
                self.executor.let_go(&task);
                self.recorder.remove(task);
            }
            AgentEffect::Start(execution) => self.start_execution(*execution),
            AgentEffect::Renew(task, terms) => {
                if let Some(control) = self.controls.get(&task) {
                    control.send_modify(|control| control.terms = terms);
                }
            }
            AgentEffect::MayRemove(task) => {
                if let Some(control) = self.controls.get(&task) {
                    control.send_modify(|control| control.may_remove = true);
                }
            }
            AgentEffect::Stop { task, reason } => {
                if let Some(control) = self.controls.get(&task) {
                    info!(%task, reason, "stopping task");
                    control.send_modify(|control| control.stop = Some(reason));
                }
            }
            AgentEffect::Send(message) => self.outbox.push_back(message),
        }
    }

    /// Gives up the images of a cancelled task that no executor has touched since the restart: otherwise content from
    /// before it would stay. An executor gives up its own pulls.
    fn give_up_untouched(&self, record: &TaskRecord) {
        let Some(result) = record.result.as_ref().filter(|result| result.outcome == TaskOutcome::Cancelled)
        else {
            return;
        };
        let images = record.task.images.iter().zip(&result.images);
        let untouched = images.filter(|(_, end)| end.outcome == ImageOutcome::Stopped && end.attempts == 0);
        let references: Vec<String> = untouched.map(|(image, _)| image.reference.clone()).collect();
        let executor = self.executor.clone();
        let task = record.id().clone();
        tokio::spawn(async move {
            for reference in references {
                executor.give_up(&task, &reference).await;
            }
        });
    }

    fn start_execution(&mut self, execution: Execution) {
        let id = execution.task.id.clone();
        let span = info_span!("task", %id, title = execution.task.title);
        span.in_scope(|| {
            let done = execution.done.iter().flatten().count();
            info!(images = execution.task.images.len(), done, "task started");
        });
        let (control, receiver) =
            watch::channel(TaskControl { terms: execution.terms.clone(), may_remove: false, stop: None });
        self.controls.insert(id.clone(), control);
        self.metrics.status().begin_task(&execution.task);
        let executor = self.executor.clone();
        let named_updates = self.updates.0.clone();
        let name = id.clone();
        let run = async move {
            let (sender, mut updates) = mpsc::channel(1);
            let add_name = async {
                while let Some(update) = updates.recv().await {
                    // The loop is gone when the agent stops.
                    let _ = named_updates.send((name.clone(), update)).await;
                }
            };
            tokio::join!(executor.run(execution, receiver, sender), add_name).0
        };
        let handle = self.executions.spawn(run.instrument(span));
        self.tasks_by_execution.insert(handle.id(), id);
    }

    fn on_execution_ended(&mut self, ended: Result<(Id, TaskEnd), JoinError>) {
        let (id, ended) = match ended {
            Ok((id, end)) => (id, Ok(end)),
            Err(error) => (error.id(), Err(error)),
        };
        let Some(task) = self.tasks_by_execution.remove(&id) else { return };
        self.controls.remove(&task);
        self.metrics.status().end_task(&task);
        match ended {
            Ok(end) => {
                if end.outcome == TaskOutcome::Succeeded {
                    info!(%task, outcome = ?end.outcome, "task ended");
                } else {
                    warn!(%task, outcome = ?end.outcome, reason = end.reason, "task ended");
                }
                self.metrics.count_task(end.outcome);
                self.handle(AgentEvent::Ended(task, end));
            }
            Err(error) => {
                error!(%task, %error, "the executor died");
                let reason = truncate_reason(&format!("the agent's executor died: {error}"));
                self.handle(AgentEvent::Crashed { task, reason });
            }
        }
    }

    fn on_update(&mut self, task: TaskId, update: TaskUpdate, link: &TunnelSender) {
        match update {
            TaskUpdate::Checked(outcome) => self.handle(AgentEvent::Checked(task, outcome)),
            TaskUpdate::Progress { images, waits } => {
                let now = Instant::now().into_std();
                self.metrics.status().note_progress(&task, &images, &waits, now);
                // Progress bypasses the outbox, and is dropped if the link is full: it's outdated a second later.
                let progress = AgentEvent::Progress(TaskProgress { task, images, waits });
                for effect in self.agent.handle(progress, self.now()) {
                    match effect {
                        AgentEffect::Send(message) => link.try_send(message),
                        other => self.perform(other),
                    }
                }
            }
            TaskUpdate::Removal(record) => self.handle(AgentEvent::Removal(task, record)),
            TaskUpdate::ImageEnded { index, result } => {
                self.metrics.count_image(&result);
                self.handle(AgentEvent::ImageEnded { task, index, result: *result });
            }
        }
    }

    fn on_write_outcome(&mut self, outcome: WriteOutcome) {
        match outcome {
            WriteOutcome::Saved(task) => self.handle(AgentEvent::Persisted(task)),
            WriteOutcome::SaveFailed(task, error) => {
                let reason = with_causes(&error);
                warn!(%task, error = reason, "cannot write the record of the task");
                self.handle(AgentEvent::PersistFailed { task, reason });
            }
            WriteOutcome::RemoveFailed(task, error) => {
                // After the next start, the result is sent and acknowledged once more.
                warn!(%task, error = with_causes(&error), "cannot remove the record of the task");
            }
        }
    }

    fn on_tunnel_event(&mut self, event: TunnelEvent, link: &TunnelSender) {
        match event {
            TunnelEvent::Connecting(answer) => self.send_hello(answer),
            TunnelEvent::Connected(welcome) => {
                // First, because it sets the time, which everything else uses.
                self.hub.begin_session(&welcome);
                self.metrics.set_connected(true);
                self.metrics.count_session();
                self.puller.set_progress_wanted(true);
                self.executor.pace().set_interval(welcome.progress_interval);
                self.executor.pace().begin_session();
                let reporting = welcome
                    .state_interval
                    .map(|every| report_state(self.puller.clone(), link.clone(), every));
                self.reporting = reporting.map(|reporting| AbortOnDropHandle::new(tokio::spawn(reporting)));
                let sharing = welcome.tickets.is_some().then(|| self.hub.clone().keep_telling(link.clone()));
                self.sharing = sharing.map(|sharing| AbortOnDropHandle::new(tokio::spawn(sharing)));
                self.handle(AgentEvent::Connected);
            }
            TunnelEvent::Disconnected => {
                self.metrics.set_connected(false);
                self.puller.set_progress_wanted(false);
                self.reporting = None;
                self.sharing = None;
                self.hub.end_session();
                // In the next session the agent sends what's still relevant.
                self.outbox.clear();
                self.handle(AgentEvent::Disconnected);
            }
            TunnelEvent::Message(CloudMessage::Assign(assign)) => {
                info!(task = %assign.task.id, title = assign.task.title, remaining = ?assign.remaining, "task assigned");
                self.hub.repeat_wants(&assign.task.id);
                self.handle(AgentEvent::Assign(assign));
            }
            TunnelEvent::Message(CloudMessage::ResultAck { task }) => {
                self.handle(AgentEvent::ResultAck(task));
            }
            TunnelEvent::Message(CloudMessage::Cancel { task, reason }) => {
                info!(%task, reason, "the cloud cancels the task");
                self.handle(AgentEvent::Cancel { task, reason });
            }
            TunnelEvent::Message(CloudMessage::Settings(settings)) => self.configure(settings, link),
            TunnelEvent::Message(CloudMessage::Unpin { jobs }) => self.unpin(jobs),
            TunnelEvent::Message(CloudMessage::Sources(sources)) => self.hub.apply_sources(sources),
            // The tunnel handles these itself.
            TunnelEvent::Message(
                message @ (CloudMessage::Welcome(_)
                | CloudMessage::Trust(_)
                | CloudMessage::Goaway { .. }
                | CloudMessage::Other),
            ) => {
                debug!(?message, "message is not for the agent");
            }
        }
    }

    /// Pins that can't be removed now are in the next `Hello`, and the cloud asks again.
    fn unpin(&self, jobs: Arc<[JobUid]>) {
        // Before the pins themselves: a running task must not set them again.
        for (_, control) in self.controls.iter().filter(|(task, _)| jobs.contains(&task.job)) {
            control.send_modify(|control| Arc::make_mut(&mut control.terms.download).pin = false);
        }
        let puller = self.puller.clone();
        tokio::spawn(async move {
            match puller.unpin(JobsToUnpin::Jobs(&jobs)).await {
                Ok(()) => info!(jobs = jobs.len(), "unpinned the images of jobs that are over"),
                Err(error) => {
                    warn!(%error, "cannot unpin the images of jobs that are over; they stay pinned until the next session");
                }
            }
        });
    }

    fn send_hello(&self, answer: oneshot::Sender<Hello>) {
        let clock = self.agent.clock();
        let known = Hello {
            max_tasks: Some(self.agent.max_tasks().get()),
            open: self.agent.open_tasks(),
            time_zone: clock.time_zone.clone(),
            windows: clock.reported_windows(),
            settings: Some(self.settings.of_cloud()),
            ..Hello::default()
        };
        let puller = self.puller.clone();
        let metrics = self.metrics.clone();
        tokio::spawn(async move {
            // The tunnel may have abandoned the attempt.
            let _ = answer.send(describe_node(&*puller, &metrics, known).await);
        });
    }
}

/// A task of the ledger for a person.
pub(crate) fn describe_task((record, state): (&TaskRecord, &'static str)) -> (TaskId, TaskStatus) {
    let ended = match &record.result {
        Some(result) => result.images.len(),
        None => record.images.iter().flatten().count(),
    };
    let status = TaskStatus {
        title: record.task.title.clone(),
        state: state.to_owned(),
        images: record.task.images.len(),
        ended,
        ..TaskStatus::default()
    };
    (record.id().clone(), status)
}

async fn sleep_until_tick(tick: Option<Instant>) {
    match tick {
        Some(tick) => sleep_until(tick).await,
        None => pending().await,
    }
}

async fn send(link: &TunnelSender, message: Option<EdgeMessage>) {
    match message {
        Some(message) => link.send(message).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests;
