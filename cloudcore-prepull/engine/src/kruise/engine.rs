//! The two halves put together: jobs, and the NodeImages that they write into. Pure.

use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::selector::Selector;
use prepull_api::task::{NodeName, TaskId};
use prepull_api::wire::CloudMessage;
use serde::{Deserialize, Serialize};

use super::jobs::{self, KruiseJobs};
use super::node_images::{self, NodeImageTracker, NodeImageWrite, TagDispatch};
use crate::fleet::event::FleetEvent;
use crate::shared::events::ObjectEvent;

/// An input of either half.
#[derive(Debug, Serialize, Deserialize)]
pub enum Input {
    /// About nodes and NodeImages.
    Node(node_images::Input),
    /// About jobs and pods.
    Job(jobs::Input),
}

/// What the engine asks its shell to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Resolve the credentials, and send the task.
    Dispatch(Box<TagDispatch>),
    /// Send a message to a node if it has a session.
    Send(NodeName, CloudMessage),
    /// Write a NodeImage.
    NodeImage(NodeName, NodeImageWrite),
    /// Write a job, or a child of a list.
    Job(jobs::JobWrite),
    /// Publish a Kubernetes event.
    Event(ObjectEvent),
}

/// Which kinds have been listed since the start.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "one for each kind")]
struct ListedKinds {
    nodes: bool,
    node_images: bool,
    pull_jobs: bool,
    list_jobs: bool,
}

impl ListedKinds {
    fn all(self) -> bool {
        let Self { nodes, node_images, pull_jobs, list_jobs } = self;
        nodes && node_images && pull_jobs && list_jobs
    }
}

/// The engine of Kruise's API.
#[derive(Debug)]
pub struct Kruise {
    node_images: NodeImageTracker,
    jobs: KruiseJobs,
    listed: ListedKinds,
    /// Whether each node that should have a NodeImage has had one since the start, or its creation has failed. Jobs do
    /// not begin before: they would take some of the nodes, or none, for all.
    has_created_all: bool,
}

/// How often the halves may answer each other in one flush. A request for a tag makes a write, and no update follows
/// before the write has ended, so that two rounds suffice; anything more waits for the next flush.
const ROUNDS: usize = 4;

impl Kruise {
    /// An engine that creates NodeImages for the nodes that the selector selects.
    pub fn new(selector: Selector) -> Self {
        Self {
            node_images: NodeImageTracker::new(selector),
            jobs: KruiseJobs::default(),
            listed: ListedKinds::default(),
            has_created_all: false,
        }
    }

    /// Takes in what happened to nodes, or to a session and tasks of NodeImages.
    pub fn note_fleet_event(&mut self, event: FleetEvent, now: Timestamp) {
        self.listed.nodes |= matches!(event, FleetEvent::Nodes(_));
        self.node_images.note_fleet_event(event, now);
    }

    /// Takes an input in. The actions that follow from it come out of [`Self::flush`].
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match &input {
            Input::Node(node_images::Input::NodeImages(_)) => self.listed.node_images = true,
            Input::Job(jobs::Input::PullJobs(_)) => self.listed.pull_jobs = true,
            Input::Job(jobs::Input::ListJobs(_)) => self.listed.list_jobs = true,
            _ => {}
        }
        match input {
            Input::Node(input) => self.node_images.handle(input, now),
            Input::Job(input) => self.jobs.handle(input, now),
        }
    }

    /// The reference of the image of a task, if the node has the task.
    pub fn image_of(&self, node: &NodeName, task: &TaskId) -> Option<String> {
        self.node_images.image_of(node, task)
    }

    /// What entitles the node to the layers of the task. `None`: it has no such task, or an earlier leader sent its keys.
    pub(crate) fn entitlement(&self, node: &NodeName, task: &TaskId) -> Option<Arc<str>> {
        self.node_images.entitlement(node, task)
    }

    /// Whether a job selects its nodes by pods, which are watched only then: most clusters have more pods than anything
    /// else.
    pub fn needs_pods(&self) -> bool {
        self.jobs.needs_pods()
    }

    /// Whether every kind but pods has been listed. Before that there are no actions.
    pub fn is_ready(&self) -> bool {
        self.listed.all()
    }

    /// Reconciles every object that an input or the time has changed. `take_slot` takes a task slot of a node, if one
    /// is free.
    pub fn flush(&mut self, now: Timestamp, take_slot: &mut dyn FnMut(&NodeName) -> bool) -> Vec<Action> {
        let mut actions = Vec::new();
        if !self.is_ready() {
            return actions;
        }
        for _ in 0..ROUNDS {
            let jobs = &self.jobs;
            let (liveness, request_of) = (|job: &_| jobs.liveness(job), |job: &_| jobs.request_of(job));
            for action in self.node_images.flush(now, &liveness, &request_of, take_slot) {
                match action {
                    node_images::Action::NotifyJobs(update) => {
                        self.jobs.handle(jobs::Input::NodeImage(update), now);
                    }
                    node_images::Action::Dispatch(dispatch) => actions.push(Action::Dispatch(dispatch)),
                    node_images::Action::Send(node, message) => actions.push(Action::Send(node, message)),
                    node_images::Action::Write(node, write) => actions.push(Action::NodeImage(node, write)),
                    node_images::Action::Event(event) => actions.push(Action::Event(event)),
                }
            }
            self.has_created_all = self.has_created_all || self.node_images.has_created_all();
            if !self.has_created_all {
                break;
            }
            let mut has_changed = false;
            for action in self.jobs.flush(now) {
                match action {
                    jobs::Action::RequestTag { node, request, new_round } => {
                        self.node_images.request_tag(&node, request, new_round);
                        has_changed = true;
                    }
                    jobs::Action::LivenessChanged(job) => {
                        self.node_images.handle(node_images::Input::LivenessChanged(job), now);
                        has_changed = true;
                    }
                    jobs::Action::Event(event) => actions.push(Action::Event(event)),
                    jobs::Action::Write(write) => actions.push(Action::Job(write)),
                }
            }
            if !has_changed {
                break;
            }
        }
        actions
    }

    /// The task slots that nodes have taken (`true`) or freed since the last call.
    pub fn take_slot_changes(&mut self) -> Vec<(NodeName, bool)> {
        self.node_images.take_slot_changes()
    }

    /// When [`Self::flush`] must run next even without an input.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        if !self.is_ready() {
            return None;
        }
        [self.node_images.next_wakeup(), self.jobs.next_wakeup()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use node_images::{NodeImageWrite, WrittenNodeImage};
    use prepull_api::crd::kruise::{NodeImage, NodeImageSpec, NodeImageStatus};
    use serde_json::json;

    use super::*;
    use crate::fleet::node_view::NodeView;
    use crate::fleet::session::{SessionEvent, SessionId};
    use crate::shared::outcomes::DispatchOutcome;

    /// The node's NodeImage has been written.
    fn written(version: &str, spec: NodeImageSpec) -> Input {
        let mut object = NodeImage::new("edge-1", spec);
        object.metadata.uid = Some("uid".to_owned());
        object.metadata.resource_version = Some(version.to_owned());
        object.status = Some(NodeImageStatus::default());
        let written = WrittenNodeImage::Done(Some(Box::new(object.into())));
        Input::Node(node_images::Input::Written("edge-1".into(), written))
    }

    #[test]
    fn a_jobs_tag_reaches_the_node() {
        let (now, node, session) = (Timestamp::UNIX_EPOCH, NodeName::from("edge-1"), SessionId(1));
        let mut kruise = Kruise::new(Selector::default());
        let view = NodeView { name: node.clone(), labels: [].into(), ready: true };
        kruise.note_fleet_event(FleetEvent::Nodes(vec![view]), now);
        let up = SessionEvent::Up { node: node.clone(), session, hello: Box::default() };
        kruise.note_fleet_event(FleetEvent::Session(up), now);
        let job = json!({
            "metadata": {"namespace": "team", "name": "job", "uid": "job"}, "spec": {"image": "nginx:1"},
        });
        let job = Ok(serde_json::from_value(job).unwrap());
        for input in [
            Input::Node(node_images::Input::NodeImages(Vec::new())),
            Input::Job(jobs::Input::PullJobs(Vec::new())),
            Input::Job(jobs::Input::ListJobs(Vec::new())),
            Input::Job(jobs::Input::PullJob(job)),
        ] {
            kruise.handle(input, now);
        }
        let flush = |kruise: &mut Kruise| kruise.flush(now, &mut |_| true);
        let actions = flush(&mut kruise);
        // Without its NodeImage the job would end at once, on no node.
        assert!(matches!(actions[..], [Action::NodeImage(_, NodeImageWrite::Create(_))]), "{actions:?}");
        kruise.handle(written("1", NodeImageSpec::default()), now);
        let spec = flush(&mut kruise).into_iter().find_map(|action| match action {
            Action::NodeImage(_, NodeImageWrite::Spec { spec, .. }) => Some(*spec),
            _ => None,
        });
        kruise.handle(written("2", spec.unwrap()), now);
        let dispatch = flush(&mut kruise).into_iter().find_map(|action| match action {
            Action::Dispatch(dispatch) => Some(dispatch),
            _ => None,
        });
        let task = dispatch.unwrap().task.id;
        assert_eq!(kruise.image_of(&node, &task), None, "it isn't sent yet");
        let (outcome, keys) = (DispatchOutcome::Sent(session), None);
        let sent = node_images::Input::Dispatched { node: node.clone(), task: task.clone(), outcome, keys };
        kruise.handle(Input::Node(sent), now);
        assert_eq!(kruise.image_of(&node, &task).as_deref(), Some("docker.io/library/nginx:1"));
    }
}
