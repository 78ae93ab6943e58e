//! The one task that owns the engine: inputs go in, actions are carried out.

use std::collections::HashSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::edges::sites::SiteList;
use prepull_api::failure::FailureCode;
use prepull_api::selector::Selector;
use prepull_api::task::{NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, EdgeMessage, truncate_reason};
use prepull_engine::engine::{Action, Engine, FirstLists, Input};
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::fleet::session::SessionEvent;
use prepull_engine::prepull::controller;
use prepull_engine::settings;
use prepull_engine::shared::outcomes::WriteOutcome;
use prepull_engine::sites::SiteSettings;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, info_span, warn};

use crate::edges::dispatch;
use crate::edges::roster::Roster;
use crate::edges::tunnel::Sessions;
use crate::kube_api::events::Events;
use crate::kube_api::kruise_writer;
use crate::kube_api::leader::Leadership;
use crate::kube_api::recall::Recalls;
use crate::kube_api::secrets::Secrets;
use crate::kube_api::settings_writer::SettingsWriter;
use crate::kube_api::status_writer::{StatusWriter, WrittenObject};
use crate::run::clock::Clock;
use crate::run::http::edges::ControllerQuestion;
use crate::run::metrics::Metrics;
use crate::run::recorder::Recorder;
use crate::run::sites::{self, SiteLog};
use crate::run::traces::{EndedTask, Traces};
use crate::run::vital::Vital;

/// Inputs of one batch: the writes and decisions that follow are made once for all of them.
const BATCH: usize = 1024;

/// Interval of counting what sites do: some milliseconds for thousands of them, and Prometheus asks less often.
const SITES_PERIOD: Duration = Duration::from_secs(5);

/// The one task that owns the engine.
pub(super) struct Core {
    pub(super) engine: Engine,
    /// With `--record`.
    pub(super) recorder: Option<Recorder>,
    pub(super) kruise_writer: kruise_writer::KruiseWriter,
    pub(super) clock: Clock,
    /// Its client is fenced: see [`crate::kube_api::leader::Fence`].
    pub(super) writer: StatusWriter,
    pub(super) settings_writer: SettingsWriter,
    pub(super) recalls: Recalls,
    pub(super) leadership: Leadership,
    pub(super) sessions: Sessions,
    pub(super) roster: Roster,
    /// The nodes that get NodeImages, with Kruise's API.
    pub(super) kruise_nodes: Option<Selector>,
    /// Which nodes are neighbours, and whether they share layers for jobs that do not say so, and for NodeImages.
    pub(super) sites: SiteSettings,
    pub(super) secrets: Secrets,
    pub(super) events: Events,
    pub(super) metrics: Arc<Metrics>,
    /// With `--otlp-endpoint`.
    pub(super) traces: Option<Traces>,
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) needs_pods: watch::Sender<bool>,
    pub(super) asked: mpsc::Receiver<ControllerQuestion>,
    /// Since when this replica serves edges.
    pub(super) known_since: Timestamp,
    pub(super) work: JoinSet<()>,
    pub(super) vital: Vital,
    pub(super) site_log: SiteLog,
}

impl Core {
    /// Follows objects until the shutdown. `what` names the task where it ends before.
    pub(super) fn watch<W>(
        &self,
        what: &'static str,
        kind: &'static str,
        watching: W,
        shutdown: &CancellationToken,
    ) where
        W: Future<Output: Send + 'static> + Send + 'static,
    {
        let watching = self.vital.guard(what, watching).instrument(info_span!("watch", kind));
        tokio::spawn(shutdown.clone().run_until_cancelled_owned(watching));
    }

    /// Carries inputs in and actions out, until so much is listed. Fails where a vital task has ended.
    pub(super) async fn run_until(
        &mut self,
        inbox: &mut mpsc::Receiver<Input>,
        enough: impl Fn(FirstLists) -> bool,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut sites_due = tokio::time::interval(SITES_PERIOD);
        sites_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
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
                // Some milliseconds for 10,000 nodes; each client waits for the answer before its next question.
                Some(ask) = self.asked.recv() => {
                    self.answer_question(ask, now);
                    continue;
                }
                _ = sites_due.tick() => {
                    let (reports, bytes) = (self.engine.site_reports(now), self.engine.site_bytes());
                    if !reports.is_empty() {
                        self.site_log.warn_of_label();
                    }
                    self.metrics.set_sites(&reports, bytes, self.sites.memory);
                    continue;
                }
                received = inbox.recv_many(&mut batch, BATCH) => if received == 0 { return Ok(()) },
                () = sleep => batch.push(Input::Tick),
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
            let needs_pods = self.engine.needs_pods();
            self.needs_pods.send_if_modified(|needed| std::mem::replace(needed, needs_pods) != needs_pods);
            if let Some(recorder) = &mut self.recorder {
                recorder.note_flush(&actions, now);
            }
            for action in actions {
                self.carry_out(action);
            }
            for event in self.engine.take_site_events() {
                self.metrics.count_site_event(event.kind);
                self.site_log.log(&event, now);
            }
            self.metrics.set_job_nodes(self.engine.running_jobs());
            self.metrics.set_levels(self.engine.phases(), self.sessions.len());
            if enough(self.engine.listed()) {
                return Ok(());
            }
        }
    }

    /// Waits until everything is written, and the listeners have ended. They and the writes wait for room in the inbox, so what
    /// comes in is dropped: the next leader asks for it again.
    pub(super) async fn drain(&mut self, inbox: &mut mpsc::Receiver<Input>, listeners: &mut JoinSet<()>) {
        let ended = async {
            while self.work.join_next().await.is_some() {}
            while listeners.join_next().await.is_some() {}
        };
        let dropping = async {
            while inbox.recv().await.is_some() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = ended => {}
            () = dropping => {}
        }
    }

    pub(super) fn handle(&mut self, input: Input, now: Timestamp) {
        self.metrics.count_input(&input);
        if let Input::Fleet(event) = &input {
            self.note_event(event, now);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.note_input(&input, now);
        }
        self.engine.handle(input, now);
    }

    /// Notes what the tunnel and the log need of an event.
    fn note_event(&self, event: &FleetEvent, now: Timestamp) {
        match event {
            FleetEvent::Nodes(nodes) => {
                let names: HashSet<_> = nodes.iter().map(|node| &node.name).collect();
                self.sessions.directory().keep_nodes(|node| names.contains(node));
                self.roster.set_nodes(nodes.iter().map(|node| (node.name.clone(), self.is_edge(node))));
            }
            FleetEvent::Node(node) => {
                self.sessions.directory().note_node(&node.name, true);
                self.roster.set_node(&node.name, Some(self.is_edge(node)));
            }
            FleetEvent::NodeGone(node) => {
                self.sessions.directory().note_node(node, false);
                self.roster.set_node(node, None);
            }
            FleetEvent::Session(SessionEvent::Message {
                node, message: EdgeMessage::Result(result), ..
            }) => {
                log_result(&self.sessions, node, result);
                self.trace(node, result, now);
            }
            FleetEvent::Session(_) => {}
        }
    }

    /// Passes on a task that has ended, for its trace. A repeated result is of a task that has ended already.
    fn trace(&self, node: &NodeName, result: &TaskResult, arrived: Timestamp) {
        let Some(traces) = &self.traces else { return };
        if let Some(known) = self.engine.task_in_hand(node, &result.task) {
            traces.take_task(&EndedTask { node, known, result, arrived });
        }
    }

    /// Answers a question. A person who has gone doesn't hear it.
    fn answer_question(&self, ask: ControllerQuestion, now: Timestamp) {
        match ask {
            ControllerQuestion::Edges(query, answer) => {
                let recorded = |node: &NodeName| self.roster.recorded(node);
                let (nodes, is_edge) = (self.engine.nodes(), |node: &NodeView| self.is_edge(node));
                let (directory, label) = (self.sessions.directory(), &self.sites.label);
                let times = (self.known_since, now);
                let listed = directory.list(nodes, is_edge, recorded, &query, times, label);
                let _ = answer.send(listed);
            }
            ControllerQuestion::Sites(query, answer) => {
                let items = match &query.site {
                    Some(site) => sites::describe_one(self.engine.site_report(site, now)),
                    None => sites::describe_all(self.engine.site_reports(now)),
                };
                let known_since = Time(self.known_since);
                let _ = answer.send(SiteList { items, known_since, site_label: self.sites.label.clone() });
            }
        }
    }

    /// The number of Nodes that may each have a session.
    pub(super) fn count_edges(&self) -> usize {
        self.engine.nodes().filter(|node| self.is_edge(node)).count()
    }

    /// Whether a Node may get tasks, and so may join with a token for the fleet.
    fn is_edge(&self, node: &NodeView) -> bool {
        node.is_edge() || self.kruise_nodes.as_ref().is_some_and(|selector| selector.matches(&node.labels))
    }

    fn carry_out(&mut self, action: Action) {
        // Another replica's term may have begun, and it finds out by itself what is to be done.
        if !self.leadership.is_leader() {
            return;
        }
        match action {
            Action::Prepull(action) => self.act_for_job(action),
            Action::Kruise(action) => self.act_for_kruise(action),
            Action::Settings(settings::Action::Configure(node, settings)) => {
                if self.sessions.may_log(&node) {
                    info!(%node, "sends the settings of the node");
                }
                // What is lost with a session is said again in the next one.
                _ = self.sessions.send(&node, CloudMessage::Settings(settings));
            }
            Action::Settings(settings::Action::WriteStatus(id, status)) => {
                let writer = self.settings_writer.clone();
                self.work.spawn(async move { writer.write(&id, &status).await });
            }
            // So it is here.
            Action::Direct(directions) => {
                if let Some((node, message)) = self.sessions.tickets().issue(directions, SystemTime::now()) {
                    let _ = self.sessions.send(&node, message);
                }
            }
        }
    }

    fn act_for_job(&mut self, action: controller::Action) {
        use controller::{Action, Input};
        match action {
            // A message that finds no session is not lost: the node's next Hello brings the matter up again.
            Action::Send(node, message) => _ = self.sessions.send(&node, message),
            Action::Event(event) => self.events.send(event),
            Action::Write { job, name, version, replaces, content } => {
                let (writer, inputs) = (self.writer.clone(), self.inputs.clone());
                let (metrics, began) = (self.metrics.clone(), Instant::now());
                self.work.spawn(async move {
                    // The engine waits for the outcome, and writes nothing more of the object before it.
                    let written = catch_panic(writer.write(&job, &name, replaces.as_deref(), &content)).await;
                    let WrittenObject { outcome, stored, edited } =
                        written.unwrap_or_else(|| WrittenObject::nothing(WriteOutcome::Failed));
                    metrics.measure_write(outcome, began.elapsed());
                    let object = content.object();
                    let _ =
                        inputs.send(Input::Written { job, object, version, outcome, stored }.into()).await;
                    if let Some(edited) = edited {
                        let _ = inputs.send(Input::Job(edited).into()).await;
                    }
                });
            }
            Action::Delete { job, name, generation } => {
                let writer = self.writer.clone();
                self.work.spawn(async move { writer.delete(&job, &name, generation).await });
            }
            Action::Forget(job) => self.writer.forget(&job),
            Action::Recall { job, name } => {
                let (recalls, inputs) = (self.recalls.clone(), self.inputs.clone());
                self.work.spawn(async move {
                    let (object, reports) = recalls.read_with_reports(&job, &name).await;
                    let _ = inputs.send(Input::Recalled(job, reports, object).into()).await;
                });
            }
            Action::Dispatch(order) => {
                let (secrets, sessions) = (self.secrets.clone(), self.sessions.clone());
                let (inputs, share) = (self.inputs.clone(), self.sites.share_by_default);
                let span = info_span!("dispatch", job = order.job.name, node = %order.node);
                let work = async move {
                    let (outcome, keys) =
                        dispatch::dispatch_job_task(&order, &secrets, &sessions, share).await;
                    if sessions.may_log(&order.node) {
                        info!(?outcome, images = order.plan.images.len(), "dispatched");
                    }
                    let (job, node, attempt) = (order.job.uid.clone(), order.node.clone(), order.attempt);
                    let _ = inputs.send(Input::Dispatched { job, node, attempt, outcome, keys }.into()).await;
                };
                self.work.spawn(work.instrument(span));
            }
        }
    }
}

/// Logs how a task ended on its node, with the fields that the agent's log has.
fn log_result(sessions: &Sessions, node: &NodeName, result: &TaskResult) {
    if !sessions.may_log(node) {
        return;
    }
    let TaskResult { task, outcome, reason, images, took, .. } = result;
    let seconds = took.as_secs_f64();
    if *outcome == TaskOutcome::Succeeded {
        let bytes = images.iter().filter_map(|image| image.bytes);
        let bytes = bytes.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.done));
        info!(%node, %task, ?outcome, images = images.len(), bytes, seconds, "task ended");
    } else {
        let failed = images.iter().find(|image| !image.outcome.is_on_node());
        let code = failed.and_then(|image| image.code).map(FailureCode::as_str);
        let reason = truncate_reason(reason);
        warn!(%node, %task, ?outcome, code, reason, images = images.len(), seconds, "task ended");
    }
}

/// None where it panics; the panic's message and place are printed by the hook.
pub(super) async fn catch_panic<T>(work: impl Future<Output = T>) -> Option<T> {
    let outcome = AssertUnwindSafe(work).catch_unwind().await;
    outcome.inspect_err(|_| error!("a task panicked")).ok()
}

#[cfg(test)]
mod tests;
