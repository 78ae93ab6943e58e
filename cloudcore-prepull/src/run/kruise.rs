//! Kruise's API in the one task that owns the controller: what both are told, and what each is told alone.

use std::sync::Arc;

use jiff::Timestamp;
use kube::Client;
use prepull_api::wire::{EdgeMessage, Hello};
use prepull_engine::kruise::jobs::{self, Outcome};
use prepull_engine::kruise::node_images::{self, Written, is_of_node_image};
use prepull_engine::kruise::{Action, Input, Kruise};
use prepull_engine::prepull::controller;
use prepull_engine::shared::outcomes::DispatchOutcome;
use prepull_engine::shared::session::SessionEvent;
use tokio::sync::Semaphore;
use tracing::{Instrument, info, info_span};

use super::{Core, caught};
use crate::commands::args::RunArgs;
use crate::edges::dispatch;
use crate::kube_api::kruise_watch;
use crate::kube_api::kruise_writer::Writer;

/// Writes under way. More would wait in the API server, which has its own bounds (400 in all by default).
const WRITES: usize = 64;

/// Kruise's API, where it is served.
pub(super) struct Served {
    engine: Kruise,
    writer: Writer,
    writes: Arc<Semaphore>,
}

impl Served {
    pub(super) fn new(args: &RunArgs, client: Client) -> Self {
        Self {
            engine: Kruise::new(args.kruise_node_selector.clone()),
            writer: Writer::new(client),
            writes: Arc::new(Semaphore::new(WRITES)),
        }
    }

    pub(super) fn next_wakeup(&self) -> Option<Timestamp> {
        self.engine.next_wakeup()
    }
}

impl Core {
    /// Starts the watches of Kruise's objects and of pods.
    pub(super) fn watch_kruise(&self, client: &Client) {
        let inputs = || self.kruise_inputs.clone();
        let jobs = kruise_watch::pull_jobs(client.clone(), inputs());
        let lists = kruise_watch::list_jobs(client.clone(), inputs());
        let pods = kruise_watch::pods(client.clone(), inputs());
        let node_images = kruise_watch::node_images(client.clone(), inputs());
        let span = |kind| info_span!("watch", kind);
        tokio::spawn(self.vital.guard("the watch of ImagePullJobs", jobs).instrument(span("ImagePullJob")));
        tokio::spawn(
            self.vital.guard("the watch of ImageListPullJobs", lists).instrument(span("ImageListPullJob")),
        );
        tokio::spawn(self.vital.guard("the watch of pods", pods).instrument(span("Pod")));
        tokio::spawn(self.vital.guard("the watch of NodeImages", node_images).instrument(span("NodeImage")));
    }

    /// Tells Kruise what concerns it. Returns what is left for the jobs.
    pub(super) fn share(&mut self, input: controller::Input, now: Timestamp) -> Option<controller::Input> {
        use controller::Input as From;
        use node_images::Input as To;
        let Some(served) = &mut self.kruise else { return Some(input) };
        let mut tell = |input| served.engine.handle(Input::Node(input), now);
        match input {
            From::Nodes(nodes) => {
                tell(To::Nodes(nodes.clone()));
                Some(From::Nodes(nodes))
            }
            From::Node(node) => {
                tell(To::Node(node.clone()));
                Some(From::Node(node))
            }
            From::NodeGone(node) => {
                tell(To::NodeGone(node.clone()));
                Some(From::NodeGone(node))
            }
            From::Session(event) => {
                let (ours, theirs) = split(event);
                if let Some(ours) = ours {
                    tell(To::Session(ours));
                }
                theirs.map(From::Session)
            }
            other => Some(other),
        }
    }

    /// What the watches of Kruise's objects tell, and how its writes and dispatches ended.
    pub(super) fn kruise_input(&mut self, input: Input, now: Timestamp) {
        let Some(served) = &mut self.kruise else { return };
        self.metrics.kruise_input(&input);
        served.engine.handle(input, now);
        self.known.kruise |= served.engine.is_ready();
    }

    /// Tells the jobs what places on nodes were taken, or given back.
    pub(super) fn move_places(&mut self) {
        let moves = self.kruise.as_mut().map(|served| served.engine.take_moves()).unwrap_or_default();
        for (node, took) in moves {
            self.controller.place_moved(&node, took);
        }
    }

    /// Lets Kruise's objects go on, on the places that are free.
    pub(super) fn flush_kruise(&mut self, now: Timestamp) {
        loop {
            let freed = self.controller.take_freed();
            let Some(served) = &mut self.kruise else { return };
            for node in freed {
                served.engine.handle(Input::Node(node_images::Input::Free(node)), now);
            }
            let controller = &mut self.controller;
            let actions = served.engine.flush(now, &mut |node| controller.take_place(node));
            // What is cancelled gives its place back, and another task takes it.
            self.move_places();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.act_kruise(action);
            }
        }
    }

    fn act_kruise(&mut self, action: Action) {
        let Some(served) = &self.kruise else { return };
        // Another one's term may have begun, and it finds out by itself what is to be done.
        if !self.leadership.is_leader() {
            return;
        }
        let inputs = self.kruise_inputs.clone();
        match action {
            Action::Send(node, message) => _ = self.sessions.send(&node, message),
            Action::Event(event) => self.events.send_kruise(event),
            Action::Dispatch(order) => {
                let (secrets, sessions, permits) =
                    (self.secrets.clone(), self.sessions.clone(), self.permits.clone());
                let span = info_span!("dispatch", task = order.task.title, node = %order.node);
                let work = async move {
                    // The semaphore is never closed.
                    let _permit = permits.acquire().await;
                    let (node, task) = (order.node.clone(), order.task.id.clone());
                    let dispatched = caught(dispatch::dispatch_node_image(*order, &secrets, &sessions)).await;
                    let outcome = dispatched.unwrap_or(DispatchOutcome::Offline);
                    info!(?outcome, "dispatched");
                    let dispatched = node_images::Input::Dispatched { node, task, outcome };
                    let _ = inputs.send(Input::Node(dispatched)).await;
                };
                self.work.spawn(work.instrument(span));
            }
            Action::NodeImage(node, write) => {
                let (writer, permits) = (served.writer.clone(), served.writes.clone());
                self.work.spawn(async move {
                    let _permit = permits.acquire().await;
                    let written = caught(writer.node_image(&node, write)).await.unwrap_or(Written::Failed);
                    let _ = inputs.send(Input::Node(node_images::Input::Written(node, written))).await;
                });
            }
            Action::Job(action) => {
                let (writer, permits) = (served.writer.clone(), served.writes.clone());
                self.work.spawn(async move {
                    let _permit = permits.acquire().await;
                    let Some(object) = crate::kube_api::kruise_writer::written_object(&action) else {
                        return;
                    };
                    let outcome = caught(writer.job(action)).await.unwrap_or(Outcome::Failed);
                    let _ = inputs.send(Input::Job(jobs::Input::Written { object, outcome })).await;
                });
            }
        }
    }
}

/// What of a session's event is of NodeImages, and what of jobs.
fn split(event: SessionEvent) -> (Option<SessionEvent>, Option<SessionEvent>) {
    match event {
        SessionEvent::Up { node, session, hello } => {
            let (ours, theirs) = hello.open.iter().cloned().partition(|open| is_of_node_image(&open.task));
            let up = |open| SessionEvent::Up {
                node: node.clone(),
                session,
                hello: Hello { open, ..hello.clone() },
            };
            (Some(up(ours)), Some(up(theirs)))
        }
        SessionEvent::Down { node, session } => (
            Some(SessionEvent::Down { node: node.clone(), session }),
            Some(SessionEvent::Down { node, session }),
        ),
        SessionEvent::Message { ref message, .. } => {
            let task = match message {
                EdgeMessage::Hello(_) => None,
                EdgeMessage::Accepted { task } => Some(task),
                EdgeMessage::Progress(progress) => Some(&progress.task),
                EdgeMessage::Result(result) => Some(&result.task),
            };
            if task.is_some_and(is_of_node_image) { (Some(event), None) } else { (None, Some(event)) }
        }
    }
}
