//! Kruise's objects: their watches, and the actions that the engine asks for.

use kube::Client;
use prepull_engine::kruise::jobs;
use prepull_engine::kruise::node_images::{self, Written};
use prepull_engine::kruise::{Action, Input};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use tracing::{Instrument, info, info_span};

use super::core::{Core, caught};
use crate::edges::dispatch::dispatch_node_image_task;
use crate::kube_api::kruise_watch;

impl Core {
    /// Starts the watches of Kruise's objects and of pods.
    pub(super) fn watch_kruise(&self, client: &Client) {
        let inputs = || self.inputs.clone();
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

    /// Carries out an action for one of Kruise's objects.
    pub(super) fn act_for_kruise(&mut self, action: Action) {
        let inputs = self.inputs.clone();
        match action {
            Action::Send(node, message) => _ = self.sessions.send(&node, message),
            Action::Event(event) => self.events.send(event),
            Action::Dispatch(dispatch) => {
                let (secrets, sessions) = (self.secrets.clone(), self.sessions.clone());
                let span = info_span!("dispatch", task = dispatch.task.title, node = %dispatch.node);
                let work = async move {
                    let (node, task) = (dispatch.node.clone(), dispatch.task.id.clone());
                    let dispatched = caught(dispatch_node_image_task(*dispatch, &secrets, &sessions)).await;
                    let outcome = dispatched.unwrap_or(DispatchOutcome::Offline);
                    info!(?outcome, "dispatched");
                    let dispatched = node_images::Input::Dispatched { node, task, outcome };
                    let _ = inputs.send(Input::Node(dispatched).into()).await;
                };
                self.work.spawn(work.instrument(span));
            }
            Action::NodeImage(node, write) => {
                let writer = self.kruise_writer.clone();
                self.work.spawn(async move {
                    let written =
                        caught(writer.write_node_image(&node, write)).await.unwrap_or(Written::Failed);
                    let _ = inputs.send(Input::Node(node_images::Input::Written(node, written)).into()).await;
                });
            }
            Action::Job(write) => {
                let writer = self.kruise_writer.clone();
                self.work.spawn(async move {
                    let target = write.target();
                    let outcome = caught(writer.write_job(write)).await.unwrap_or(WriteOutcome::Failed);
                    let _ = inputs.send(Input::Job(jobs::Input::Written { target, outcome }).into()).await;
                });
            }
        }
    }
}
