#![allow(clippy::unwrap_used)]
//! One node, `edge-1`, and its NodeImage. The API server is simulated: it makes each write at once, with a version that
//! rises.

mod namespaces;
mod sessions;
mod spec_edits;
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
    ByteProgress, ImageOutcome, ImagePhase, ImageProgress, ImageResult, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::{Hello, OpenPhase, OpenTask, TaskProgress};

use super::*;
use crate::fleet::session::SessionId;
use crate::kruise::{NodeImageUpdate, TagKey, TagState};
use crate::shared::outcomes::DispatchOutcome;

pub(super) const UID: &str = "0f7c3a51-8a5c-4a3e-9d0b-111111111111";

/// The node, the API server, and the time.
pub(super) struct World {
    images: NodeImageTracker,
    pub(super) now: Timestamp,
    /// As the API server has it.
    pub(super) object: Option<NodeImage>,
    versions: u64,
    /// How many NodeImages there have been.
    created: u64,
    session: u64,
    /// Free task slots of the node.
    pub(super) slots: i64,
    pub(super) jobs: RefCell<HashMap<JobUid, Liveness>>,
    /// What the jobs have requested last.
    requests: HashMap<JobUid, Arc<TagRequest>>,
    /// All actions but writes.
    pub(super) done: Vec<Action>,
    pub(super) writes: Vec<NodeImageWrite>,
    /// Whether the API server is available.
    pub(super) api: bool,
    /// The specs and labels that an admission policy refuses.
    pub(super) refuses: fn(&NodeImageSpec, &BTreeMap<String, String>) -> bool,
    /// The specs that etcd finds too large.
    pub(super) is_too_large: fn(&NodeImageSpec) -> bool,
    /// The label that a policy sets in a write, by the version of the object.
    pub(super) sets_label: fn(u64) -> Option<String>,
    /// Why the secrets cannot be read, if they cannot.
    pub(super) secrets: Option<&'static str>,
    /// How the next dispatch ends, if it is not just sent.
    pub(super) next_outcome: Option<DispatchOutcome>,
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
            images: NodeImageTracker::new(Selector::parse("edge").unwrap()),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            object: None,
            versions: 0,
            created: 0,
            session: 0,
            slots: 1,
            jobs: RefCell::default(),
            requests: HashMap::new(),
            done: Vec::new(),
            writes: Vec::new(),
            api: true,
            refuses: |_, _| false,
            is_too_large: |_| false,
            sets_label: |_| None,
            secrets: None,
            next_outcome: None,
        };
        world.images.handle(Input::NodeImages(Vec::new()), world.now);
        world
    }

    /// A node with an empty NodeImage, online.
    pub(super) fn new() -> Self {
        let mut world = Self::bare();
        world.hear(FleetEvent::Nodes(vec![view(&[("edge", "")])]));
        world.connect(&[]);
        // The first status has been written, and another may follow at once.
        world.pass(Duration::from_secs(1));
        world.writes.clear();
        world.done.clear();
        world
    }

    /// Another cloudcore, which has listed what the API server has, and has not reconciled yet.
    pub(super) fn restarted(&self) -> Self {
        let mut world = Self::bare();
        (world.versions, world.created, world.now) = (self.versions, self.created, self.now);
        world.object.clone_from(&self.object);
        let objects = world.object.clone().map(|object| Ok(Box::new(object.into())));
        world.images.handle(Input::NodeImages(objects.into_iter().collect()), world.now);
        world.images.note_fleet_event(FleetEvent::Nodes(vec![view(&[("edge", "")])]), world.now);
        world
    }

    pub(super) fn hear(&mut self, event: FleetEvent) {
        self.images.note_fleet_event(event, self.now);
        self.settle();
    }

    pub(super) fn input(&mut self, input: Input) {
        self.images.handle(input, self.now);
        self.settle();
    }

    /// These jobs run.
    pub(super) fn run_jobs(&mut self, jobs: &[&str]) {
        let running = jobs.iter().map(|job| (JobUid((*job).to_owned()), Liveness::Active));
        self.jobs.borrow_mut().extend(running);
    }

    pub(super) fn request(&mut self, request: &Arc<TagRequest>, new_round: bool) {
        let job = JobUid(request.owner.uid.clone().unwrap());
        self.requests.insert(job, request.clone());
        self.images.request_tag(&node(), request.clone(), new_round);
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
            let moves = self.images.take_slot_changes();
            let has_moved = !moves.is_empty();
            for (node, took) in moves {
                self.slots += if took { -1 } else { 1 };
                if !took {
                    self.images.handle(Input::SlotFreed(node), self.now);
                }
            }
            let (jobs, slots) = (&self.jobs, &mut self.slots);
            let liveness = |job: &JobUid| jobs.borrow().get(job).copied().unwrap_or(Liveness::Deleted);
            let request_of =
                |job: &JobUid| self.requests.get(job).filter(|_| liveness(job) == Liveness::Active).cloned();
            let mut take = |_: &NodeName| {
                let is_free = *slots > 0;
                *slots -= i64::from(is_free);
                is_free
            };
            let actions = self.images.flush(self.now, &liveness, &request_of, &mut take);
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
                    Action::Dispatch(dispatch) => {
                        let sent = DispatchOutcome::Sent(SessionId(self.session));
                        let postponed = |reason: &str| DispatchOutcome::Postponed(reason.to_owned());
                        let usual = self.secrets.map_or(sent, postponed);
                        let outcome = self.next_outcome.take().unwrap_or(usual);
                        let task = dispatch.task.id.clone();
                        self.done.push(Action::Dispatch(dispatch));
                        self.images
                            .handle(Input::Dispatched { node: node(), task, outcome, keys: None }, self.now);
                    }
                    other => self.done.push(other),
                }
            }
        }
        panic!("it does not come to rest: {:?} {:?}", self.writes, self.done);
    }

    fn write(&mut self, write: NodeImageWrite) -> WrittenNodeImage {
        if !self.api {
            return WrittenNodeImage::Failed;
        }
        self.versions += 1;
        let version = Some(self.versions.to_string());
        match write {
            NodeImageWrite::Create(labels) => {
                self.created += 1;
                let uid = if self.created == 1 { UID.to_owned() } else { format!("{UID}-{}", self.created) };
                let metadata = ObjectMeta {
                    name: Some(node().0),
                    uid: Some(uid),
                    labels: Some((*labels).clone()),
                    resource_version: version,
                    ..ObjectMeta::default()
                };
                self.object = Some(NodeImage { metadata, spec: NodeImageSpec::default(), status: None });
            }
            NodeImageWrite::Delete { .. } => self.object = None,
            NodeImageWrite::Labels { version, labels, .. } => {
                return self.replace(&version, |object| object.metadata.labels = Some((*labels).clone()));
            }
            NodeImageWrite::Spec { version, spec, .. } => {
                return self.replace(&version, |object| object.spec = *spec);
            }
            NodeImageWrite::Status { version, status, .. } => {
                return self.replace(&version, |object| object.status = Some(*status));
            }
        }
        WrittenNodeImage::Done(self.object.clone().map(|object| Box::new(object.into())))
    }

    /// Changes this version of the object, as far as the policies let it.
    fn replace(&mut self, expected: &str, change: impl FnOnce(&mut NodeImage)) -> WrittenNodeImage {
        let object = self.object.as_mut().unwrap();
        if object.metadata.resource_version.as_deref() != Some(expected) {
            return WrittenNodeImage::Refused(Some(Box::new(object.clone().into())));
        }
        let mut new = object.clone();
        change(&mut new);
        // Policies don't see the status.
        if new.status == object.status {
            let labels = new.metadata.labels.get_or_insert_default();
            if (self.refuses)(&new.spec, labels) {
                return WrittenNodeImage::Failed;
            }
            if (self.is_too_large)(&new.spec) {
                return WrittenNodeImage::TooLarge;
            }
            labels.extend((self.sets_label)(self.versions).map(|value| ("policy".to_owned(), value)));
        }
        if new != *object {
            new.metadata.resource_version = Some(self.versions.to_string());
            *object = new;
        }
        WrittenNodeImage::Done(Some(Box::new(object.clone().into())))
    }

    /// Edits the NodeImage by hand, and has the watch deliver it.
    pub(super) fn edit(&mut self, edit: impl FnOnce(&mut NodeImageSpec)) {
        self.edit_unseen(edit);
        let object = self.object.clone().unwrap();
        self.input(Input::NodeImage(Ok(Box::new(object.into()))));
    }

    /// Edits the NodeImage by hand; the watch has not delivered it yet.
    pub(super) fn edit_unseen(&mut self, edit: impl FnOnce(&mut NodeImageSpec)) {
        self.versions += 1;
        let object = self.object.as_mut().unwrap();
        edit(&mut object.spec);
        object.metadata.resource_version = Some(self.versions.to_string());
    }

    pub(super) fn connect(&mut self, open: &[(TaskId, OpenPhase)]) {
        self.session += 1;
        let open = open
            .iter()
            .map(|(task, phase)| OpenTask { task: task.clone(), phase: *phase, limited: false })
            .collect();
        let hello = Hello { open, ..Hello::default() };
        self.hear(FleetEvent::Session(SessionEvent::Up {
            node: node(),
            session: SessionId(self.session),
            hello: Box::new(hello),
        }));
    }

    pub(super) fn disconnect(&mut self) {
        self.hear(FleetEvent::Session(SessionEvent::Down { node: node(), session: SessionId(self.session) }));
    }

    pub(super) fn receive(&mut self, message: EdgeMessage) {
        let session = SessionId(self.session);
        self.hear(FleetEvent::Session(SessionEvent::Message { node: node(), session, message }));
    }

    pub(super) fn end_task(&mut self, task: &TaskId, image: ImageResult) {
        let outcome = match image.outcome {
            ImageOutcome::Pulled | ImageOutcome::Present => TaskOutcome::Succeeded,
            ImageOutcome::Failed | ImageOutcome::Other => TaskOutcome::Failed,
            ImageOutcome::Stopped => TaskOutcome::Cancelled,
        };
        self.receive(EdgeMessage::Result(TaskResult {
            images: vec![image],
            took: Duration::from_secs(1),
            ..TaskResult::new(task.clone(), outcome)
        }));
        // The status is written after a gap, together with other tags that end in it.
        self.pass(Duration::from_secs(1));
    }

    pub(super) fn report_progress(&mut self, task: &TaskId, done: u64, total: u64) {
        let image = ImageProgress {
            bytes: Some(ByteProgress { done, total }),
            attempts: 1,
            ..ImageProgress::new(0, ImagePhase::Pulling)
        };
        self.receive(EdgeMessage::Progress(TaskProgress {
            task: task.clone(),
            images: vec![image],
            waits: String::new(),
        }));
    }

    /// The node reports what it waits for; empty if it goes on.
    pub(super) fn report_waits(&mut self, task: &TaskId, waits: &str) {
        let (task, waits) = (task.clone(), waits.to_owned());
        self.receive(EdgeMessage::Progress(TaskProgress { task, images: Vec::new(), waits }));
    }

    /// Takes the tasks that were dispatched since the last call.
    pub(super) fn take_dispatched(&mut self) -> Vec<TagDispatch> {
        let (sent, rest) =
            std::mem::take(&mut self.done).into_iter().partition(|a| matches!(a, Action::Dispatch(_)));
        self.done = rest;
        let dispatch = |action| if let Action::Dispatch(dispatch) = action { Some(*dispatch) } else { None };
        Vec::into_iter(sent).filter_map(dispatch).collect()
    }

    /// What was acknowledged and cancelled, in the dispatch of it, since this was asked last.
    pub(super) fn take_sent(&mut self) -> Vec<CloudMessage> {
        let (said, rest) =
            std::mem::take(&mut self.done).into_iter().partition(|a| matches!(a, Action::Send(..)));
        self.done = rest;
        let message = |action| if let Action::Send(_, message) = action { Some(message) } else { None };
        Vec::into_iter(said).filter_map(message).collect()
    }

    /// The tag states reported since the last call.
    pub(super) fn take_tag_states(&mut self) -> Vec<(String, TagState)> {
        let (told, rest) = std::mem::take(&mut self.done)
            .into_iter()
            .partition(|action| matches!(action, Action::NotifyJobs(NodeImageUpdate::Tag { .. })));
        self.done = rest;
        let state = |action| match action {
            Action::NotifyJobs(NodeImageUpdate::Tag { job, state, .. }) => Some((job.0, state)),
            _ => None,
        };
        Vec::into_iter(told).filter_map(state).collect()
    }

    pub(super) fn status(&self) -> NodeImageStatus {
        self.object.as_ref().unwrap().status.clone().unwrap()
    }

    pub(super) fn tag(&self, image: &str, tag: &str) -> Option<ImageTagStatus> {
        super::status::find_tag_status(&self.status(), image, tag).cloned()
    }

    pub(super) fn spec_tag(&self, image: &str, tag: &str) -> Option<ImageTagSpec> {
        let spec = &self.object.as_ref().unwrap().spec;
        spec.images.get(image)?.tags.iter().find(|known| known.tag == tag).cloned()
    }

    /// Takes how many writes of spec or labels and of status there were since the last call.
    pub(super) fn take_write_counts(&mut self) -> (usize, usize) {
        let writes = std::mem::take(&mut self.writes);
        let is_of_object = |write: &&NodeImageWrite| {
            matches!(write, NodeImageWrite::Spec { .. } | NodeImageWrite::Labels { .. })
        };
        let specs = writes.iter().filter(is_of_object).count();
        let statuses = writes.iter().filter(|write| matches!(write, NodeImageWrite::Status { .. })).count();
        (specs, statuses)
    }
}

/// Adds a tag as a person would, with a time to live of 300 s.
pub(super) fn add_manual_tag(spec: &mut NodeImageSpec, image: &str, tag: &str) {
    let limits =
        ImageTagPullPolicy { ttl_seconds_after_finished: Some(300), ..ImageTagPullPolicy::default() };
    let tag = ImageTagSpec { tag: tag.to_owned(), pull_policy: Some(limits), ..ImageTagSpec::default() };
    spec.images.entry(image.to_owned()).or_default().tags.push(tag);
}

/// Adds `a:1` by hand, with a deadline in seconds.
pub(super) fn add_tag_with_deadline(spec: &mut NodeImageSpec, seconds: i64) {
    add_manual_tag(spec, "a", "1");
    let limits = spec.images.get_mut("a").unwrap().tags[0].pull_policy.as_mut().unwrap();
    limits.active_deadline_seconds = Some(seconds);
}

/// The request of a job for nginx:1.25.
pub(super) fn request(job: &str) -> TagRequest {
    TagRequest {
        owner: ObjectReference {
            api_version: Some("apps.kruise.io/v1beta1".to_owned()),
            kind: Some("ImagePullJob".to_owned()),
            namespace: Some("shop".to_owned()),
            name: Some(job.to_owned()),
            uid: Some(job.to_owned()),
            ..ObjectReference::default()
        },
        key: TagKey::new("nginx", "1.25"),
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
        digest: Some("sha256:aa".to_owned()),
        id: Some("sha256:bb".to_owned()),
        attempts: 1,
        ..ImageResult::new(ImageOutcome::Pulled)
    }
}

pub(super) fn failed(reason: &str) -> ImageResult {
    ImageResult { reason: reason.to_owned(), attempts: 1, ..ImageResult::new(ImageOutcome::Failed) }
}
