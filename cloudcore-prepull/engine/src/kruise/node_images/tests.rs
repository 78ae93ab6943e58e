#![allow(clippy::unwrap_used)]
//! Stories of one node, `edge-1`, and its NodeImage. The API server is played here: it takes each write at once, with
//! a version that rises.

mod edits;
mod tasks;
mod writes;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use prepull_api::crd::kruise::{
    ImageTagPullPolicy, ImageTagSpec, ImageTagStatus, NodeImage, NodeImageSpec, NodeImageStatus,
};
use prepull_api::task::{
    Bytes, ImageOutcome, ImagePhase, ImageProgress, ImageResult, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::{Hello, OpenPhase, OpenTask, Progress};

use super::super::Standing;
use super::*;
use crate::shared::session::SessionId;

pub(super) const UID: &str = "0f7c3a51-8a5c-4a3e-9d0b-111111111111";

/// The node, the API server, and the time.
pub(super) struct World {
    images: NodeImages,
    pub(super) now: Timestamp,
    /// As the API server has it.
    pub(super) object: Option<NodeImage>,
    versions: u64,
    session: u64,
    /// Places on the node.
    pub(super) places: i64,
    pub(super) jobs: RefCell<HashMap<JobUid, Liveness>>,
    /// All that was to be done, but for writes.
    pub(super) done: Vec<Action>,
    pub(super) writes: Vec<Write>,
    /// Whether the API server answers.
    pub(super) api: bool,
}

pub(super) fn node() -> NodeName {
    NodeName::from("edge-1")
}

pub(super) fn view(labels: &[(&str, &str)]) -> NodeView {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    NodeView { name: node(), labels, ready: true }
}

impl World {
    /// A Ready edge node without a NodeImage.
    pub(super) fn bare() -> Self {
        let mut world = Self {
            images: NodeImages::new(Selector::parse("edge").unwrap()),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            object: None,
            versions: 0,
            session: 0,
            places: 1,
            jobs: RefCell::default(),
            done: Vec::new(),
            writes: Vec::new(),
            api: true,
        };
        world.images.handle(Input::NodeImages(Vec::new()), world.now);
        world
    }

    /// A node with an empty NodeImage, online.
    pub(super) fn new() -> Self {
        let mut world = Self::bare();
        world.tell(Input::Nodes(vec![view(&[("edge", "")])]));
        world.up(&[]);
        // The first status has been written, and another may follow at once.
        world.pass(Duration::from_secs(1));
        world.writes.clear();
        world.done.clear();
        world
    }

    /// Another cloudcore, which has been told what the API server has, and has not done anything yet.
    pub(super) fn restarted(&self) -> Self {
        let mut world = Self::bare();
        (world.versions, world.now) = (self.versions, self.now);
        world.object.clone_from(&self.object);
        let objects = world.object.clone().map(|object| Ok(Box::new(object)));
        world.images.handle(Input::NodeImages(objects.into_iter().collect()), world.now);
        world.images.handle(Input::Nodes(vec![view(&[("edge", "")])]), world.now);
        world
    }

    pub(super) fn tell(&mut self, input: Input) {
        self.images.handle(input, self.now);
        self.settle();
    }

    pub(super) fn ask(&mut self, wish: &Arc<Wish>, again: bool) {
        self.images.ask(&node(), wish.clone(), again);
        self.settle();
    }

    pub(super) fn pass(&mut self, time: Duration) {
        // In steps, so that what is due in between happens then.
        let end = self.now.checked_add(time).unwrap();
        while let Some(next) = self.images.next_wakeup().filter(|next| *next <= end) {
            self.now = self.now.max(next);
            self.settle();
        }
        self.now = end;
        self.settle();
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..20 {
            let moves = self.images.take_moves();
            let has_moved = !moves.is_empty();
            for (node, took) in moves {
                self.places += if took { -1 } else { 1 };
                if !took {
                    self.images.handle(Input::Free(node), self.now);
                }
            }
            let (jobs, places) = (&self.jobs, RefCell::new(&mut self.places));
            let liveness = |job: &JobUid| jobs.borrow().get(job).copied().unwrap_or(Liveness::Gone);
            let mut take = |_: &NodeName| {
                let mut places = places.borrow_mut();
                let free = **places > 0;
                **places -= i64::from(free);
                free
            };
            let actions = self.images.flush(self.now, &liveness, &mut take);
            if actions.is_empty() && !has_moved {
                return;
            }
            for action in actions {
                match action {
                    Action::Write(_, write) => {
                        let written = self.write(write.clone());
                        self.writes.push(write);
                        self.images.handle(Input::Written(node(), written), self.now);
                    }
                    Action::Dispatch(order) => {
                        let outcome = DispatchOutcome::Sent(SessionId(self.session));
                        let task = order.task.id.clone();
                        self.done.push(Action::Dispatch(order));
                        self.images.handle(Input::Dispatched { node: node(), task, outcome }, self.now);
                    }
                    other => self.done.push(other),
                }
            }
        }
        panic!("it does not come to rest: {:?} {:?}", self.writes, self.done);
    }

    fn write(&mut self, write: Write) -> Written {
        if !self.api {
            return Written::Failed;
        }
        self.versions += 1;
        let version = Some(self.versions.to_string());
        match write {
            Write::Create(labels) => {
                let metadata = ObjectMeta {
                    name: Some(node().0),
                    uid: Some(UID.to_owned()),
                    labels: Some((*labels).clone()),
                    resource_version: version,
                    ..ObjectMeta::default()
                };
                self.object = Some(NodeImage { metadata, spec: NodeImageSpec::default(), status: None });
            }
            Write::Delete { .. } => self.object = None,
            Write::Spec { version: expected, labels, spec, .. } => {
                let object = self.object.as_mut().unwrap();
                if object.metadata.resource_version.as_ref() != Some(&expected) {
                    return Written::Refused(Some(Box::new(object.clone())));
                }
                object.metadata.resource_version = version;
                object.metadata.labels = Some((*labels).clone());
                object.spec = *spec;
            }
            Write::Status { version: expected, status, .. } => {
                let object = self.object.as_mut().unwrap();
                if object.metadata.resource_version.as_ref() != Some(&expected) {
                    return Written::Refused(Some(Box::new(object.clone())));
                }
                object.metadata.resource_version = version;
                object.status = Some(*status);
            }
        }
        Written::Done(self.object.clone().map(Box::new))
    }

    /// Somebody edits the NodeImage by hand; the watch tells of it.
    pub(super) fn edit(&mut self, edit: impl FnOnce(&mut NodeImageSpec)) {
        self.edit_unseen(edit);
        let object = self.object.clone().map(Box::new).unwrap();
        self.tell(Input::NodeImage(Ok(object)));
    }

    /// The watch has not told of it yet.
    pub(super) fn edit_unseen(&mut self, edit: impl FnOnce(&mut NodeImageSpec)) {
        self.versions += 1;
        let object = self.object.as_mut().unwrap();
        edit(&mut object.spec);
        object.metadata.resource_version = Some(self.versions.to_string());
    }

    pub(super) fn up(&mut self, open: &[(TaskId, OpenPhase)]) {
        self.session += 1;
        let open = open.iter().map(|(task, phase)| OpenTask { task: task.clone(), phase: *phase }).collect();
        let hello = Hello { open, ..Hello::default() };
        self.tell(Input::Session(SessionEvent::Up { node: node(), session: SessionId(self.session), hello }));
    }

    pub(super) fn down(&mut self) {
        self.tell(Input::Session(SessionEvent::Down { node: node(), session: SessionId(self.session) }));
    }

    pub(super) fn say(&mut self, message: EdgeMessage) {
        let session = SessionId(self.session);
        self.tell(Input::Session(SessionEvent::Message { node: node(), session, message }));
    }

    pub(super) fn ends(&mut self, task: &TaskId, image: ImageResult) {
        let outcome = match image.outcome {
            ImageOutcome::Pulled | ImageOutcome::Present => TaskOutcome::Succeeded,
            ImageOutcome::Failed => TaskOutcome::Failed,
            ImageOutcome::Stopped => TaskOutcome::Cancelled,
        };
        self.say(EdgeMessage::Result(TaskResult {
            task: task.clone(),
            outcome,
            reason: String::new(),
            check: None,
            images: vec![image],
            took: Duration::from_secs(1),
        }));
        // What ends soon after is told with it.
        self.pass(Duration::from_secs(1));
    }

    pub(super) fn advances(&mut self, task: &TaskId, done: u64, total: u64) {
        let image = ImageProgress {
            index: 0,
            phase: ImagePhase::Pulling,
            bytes: Some(Bytes { done, total }),
            attempts: 1,
            reason: String::new(),
        };
        self.say(EdgeMessage::Progress(Progress { task: task.clone(), images: vec![image] }));
    }

    /// The tasks that were sent, since this was asked last.
    pub(super) fn sent(&mut self) -> Vec<Order> {
        let (sent, rest) =
            std::mem::take(&mut self.done).into_iter().partition(|a| matches!(a, Action::Dispatch(_)));
        self.done = rest;
        let order = |action| if let Action::Dispatch(order) = action { Some(*order) } else { None };
        Vec::into_iter(sent).filter_map(order).collect()
    }

    /// What was acknowledged and cancelled, in the order of it, since this was asked last.
    pub(super) fn said(&mut self) -> Vec<CloudMessage> {
        let (said, rest) =
            std::mem::take(&mut self.done).into_iter().partition(|a| matches!(a, Action::Send(..)));
        self.done = rest;
        let message = |action| if let Action::Send(_, message) = action { Some(message) } else { None };
        Vec::into_iter(said).filter_map(message).collect()
    }

    /// The standings that were told, since this was asked last.
    pub(super) fn standings(&mut self) -> Vec<(String, Standing)> {
        let (told, rest) = std::mem::take(&mut self.done)
            .into_iter()
            .partition(|action| matches!(action, Action::News(News::Standing { .. })));
        self.done = rest;
        let standing = |action| match action {
            Action::News(News::Standing { job, standing, .. }) => Some((job.0, standing)),
            _ => None,
        };
        Vec::into_iter(told).filter_map(standing).collect()
    }

    pub(super) fn status(&self) -> NodeImageStatus {
        self.object.as_ref().unwrap().status.clone().unwrap()
    }

    pub(super) fn tag(&self, image: &str, tag: &str) -> Option<ImageTagStatus> {
        super::edit::find(&self.status(), image, tag).cloned()
    }

    pub(super) fn spec_tag(&self, image: &str, tag: &str) -> Option<ImageTagSpec> {
        let spec = &self.object.as_ref().unwrap().spec;
        spec.images.get(image)?.tags.iter().find(|known| known.tag == tag).cloned()
    }

    /// How many writes there were of spec and of status, since this was asked last.
    pub(super) fn counts(&mut self) -> (usize, usize) {
        let writes = std::mem::take(&mut self.writes);
        let specs = writes.iter().filter(|write| matches!(write, Write::Spec { .. })).count();
        let statuses = writes.iter().filter(|write| matches!(write, Write::Status { .. })).count();
        (specs, statuses)
    }
}

/// By hand: one tag, kept for 300 s after it ended.
pub(super) fn by_hand(spec: &mut NodeImageSpec, image: &str, tag: &str) {
    let limits =
        ImageTagPullPolicy { ttl_seconds_after_finished: Some(300), ..ImageTagPullPolicy::default() };
    let tag = ImageTagSpec { tag: tag.to_owned(), pull_policy: Some(limits), ..ImageTagSpec::default() };
    spec.images.entry(image.to_owned()).or_default().tags.push(tag);
}

/// What the job wants: nginx:1.25.
pub(super) fn wish(job: &str) -> Wish {
    Wish {
        owner: ObjectReference {
            api_version: Some("apps.kruise.io/v1beta1".to_owned()),
            kind: Some("ImagePullJob".to_owned()),
            namespace: Some("shop".to_owned()),
            name: Some(job.to_owned()),
            uid: Some(job.to_owned()),
            ..ObjectReference::default()
        },
        image: "nginx".to_owned(),
        tag: "1.25".to_owned(),
        limits: ImageTagPullPolicy {
            ttl_seconds_after_finished: Some(600),
            timeout_seconds: Some(600),
            backoff_limit: Some(3),
            active_deadline_seconds: None,
        },
        image_pull_policy: None,
        secrets: Vec::new(),
        sandbox: None,
    }
}

pub(super) fn pulled() -> ImageResult {
    ImageResult {
        outcome: ImageOutcome::Pulled,
        digest: Some("sha256:aa".to_owned()),
        id: Some("sha256:bb".to_owned()),
        reason: String::new(),
        bytes: None,
        attempts: 1,
    }
}

pub(super) fn failed(reason: &str) -> ImageResult {
    ImageResult {
        outcome: ImageOutcome::Failed,
        digest: None,
        id: None,
        reason: reason.to_owned(),
        bytes: None,
        attempts: 1,
    }
}
