//! The API server, the nodes, and what is in flight between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use prepull_api::crd::kruise::{
    ImageListPullJob, ImagePullJob, ImagePullJobSpec, ImageTagSpec, NodeImage, NodeImageSpec,
};
use prepull_api::selector::Selector;
use prepull_api::task::{JobUid, NodeName, PullPolicy, TaskId};
use prepull_api::wire::CloudMessage;
use prepull_engine::engine;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::kruise::jobs::{self, JobWrite, WriteTarget};
use prepull_engine::kruise::node_images::{
    self, CompactNodeImage, NodeImageWrite, TagDispatch, WrittenNodeImage,
};
use prepull_engine::kruise::{Action, Input, Kruise};
use prepull_engine::shared::objects::{ObjectId, Unreadable};
use prepull_engine::shared::outcomes::WriteOutcome;
use prepull_engine::shared::reasons;

use serde::{Deserialize, Serialize};

use crate::edge::Edge;
use crate::rng::Rng;

/// Work that the cloud has begun and not seen the end of.
pub(crate) enum Pending {
    NodeImage(NodeName, NodeImageWrite),
    /// The API server has made the write, and its answer is on its way.
    Answer(NodeName, WrittenNodeImage),
    Job(JobWrite),
    /// The same for the write of a job.
    JobAnswer(WriteTarget, WriteOutcome),
    Dispatch(Box<TagDispatch>),
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) now: Timestamp,
    pub(crate) cloud: Option<Kruise>,
    /// How many task slots of each node are taken.
    pub(crate) slots: BTreeMap<NodeName, i64>,
    pub(crate) pending: Vec<Pending>,
    /// The events that the watch has not delivered yet.
    pub(crate) watch: VecDeque<engine::Input>,
    pub(crate) version: u64,
    pub(crate) uid: u64,
    pub(crate) session: u64,
    pub(crate) nodes: BTreeMap<NodeName, NodeView>,
    pub(crate) node_images: BTreeMap<String, NodeImage>,
    pub(crate) pull_jobs: BTreeMap<String, ImagePullJob>,
    pub(crate) list_jobs: BTreeMap<String, ImageListPullJob>,
    /// The names of objects with a field of the wrong type.
    pub(crate) unreadable: BTreeSet<String>,
    pub(crate) edges: BTreeMap<NodeName, Edge>,
    /// The image that each task was dispatched for, and its tag at that time.
    pub(crate) dispatched: BTreeMap<TaskId, (String, ImageTagSpec)>,
    /// Whether faults happen.
    pub(crate) calm: bool,
    pub(crate) writes: usize,
    traced: bool,
    pub(crate) trace: Vec<String>,
}

/// The one job that is not in the namespace of all others.
pub(crate) const FOREIGN: &str = "job-3";

pub(crate) const NODES: [&str; 4] = ["edge-0", "edge-1", "edge-2", "edge-3"];

impl World {
    pub(crate) fn new(seed: u64, traced: bool) -> Self {
        let mut world = Self {
            rng: Rng::new(seed),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            cloud: None,
            slots: BTreeMap::new(),
            pending: Vec::new(),
            watch: VecDeque::new(),
            version: 0,
            uid: 0,
            session: 0,
            nodes: BTreeMap::new(),
            node_images: BTreeMap::new(),
            pull_jobs: BTreeMap::new(),
            list_jobs: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            edges: NODES.iter().map(|name| (NodeName::from(*name), Edge::default())).collect(),
            dispatched: BTreeMap::new(),
            calm: false,
            writes: 0,
            traced,
            trace: Vec::new(),
        };
        for name in NODES {
            world.nodes.insert(name.into(), view(name));
        }
        world.start();
        world
    }

    pub(crate) fn log(&mut self, what: impl FnOnce() -> String) {
        if self.traced {
            self.trace.push(format!("{:>7} {}", self.now.as_second() - 1_800_000_000, what()));
        }
    }

    pub(crate) fn new_version(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    /// An object has another spec.
    pub(crate) fn edited(&mut self, metadata: &mut ObjectMeta) {
        metadata.resource_version = Some(self.new_version());
        *metadata.generation.get_or_insert(0) += 1;
    }

    pub(crate) fn new_uid(&mut self) -> String {
        self.uid += 1;
        format!("uid-{}", self.uid)
    }

    /// Kills cloudcore: what it has begun is lost.
    pub(crate) fn kill(&mut self) {
        self.log(|| "cloudcore is killed".to_owned());
        self.cloud = None;
        self.pending.clear();
        self.watch.clear();
        self.slots.clear();
        self.edges.values_mut().for_each(Edge::cut);
    }

    /// Starts cloudcore, which lists what exists.
    pub(crate) fn start(&mut self) {
        self.log(|| "cloudcore starts".to_owned());
        self.cloud = Some(Kruise::new(Selector::default()));
        let nodes = self.nodes.values().cloned().collect();
        self.input(FleetEvent::Nodes(nodes));
        let jobs = self.pull_jobs.values().map(|job| self.read(job)).collect();
        self.input(Input::Job(jobs::Input::PullJobs(jobs)));
        let lists = self.list_jobs.values().map(|list| self.read(list)).collect();
        self.input(Input::Job(jobs::Input::ListJobs(lists)));
        self.input(Input::Job(jobs::Input::Pods(Vec::new())));
        let images = self.node_images.values().map(|object| self.compact(object)).collect();
        self.input(Input::Node(node_images::Input::NodeImages(images)));
    }

    /// The cloud takes an input in, and reconciles.
    pub(crate) fn input(&mut self, input: impl Into<engine::Input>) {
        let Some(cloud) = &mut self.cloud else { return };
        match input.into() {
            engine::Input::Fleet(event) => cloud.note_fleet_event(event, self.now),
            engine::Input::Kruise(input) => cloud.handle(input, self.now),
            other => panic!("of another engine: {other:?}"),
        }
        self.flush();
    }

    pub(crate) fn flush(&mut self) {
        for turn in 0.. {
            assert!(turn < 50, "the engine does not come to rest");
            let Some(cloud) = &mut self.cloud else { return };
            let slot_changes = cloud.take_slot_changes();
            let mut freed = Vec::new();
            for (node, taken) in slot_changes {
                let slots = self.slots.entry(node.clone()).or_default();
                *slots += if taken { 1 } else { -1 };
                assert!(*slots >= 0, "a slot of {node} was freed twice");
                if !taken {
                    freed.push(node);
                }
            }
            let has_freed = !freed.is_empty();
            for node in freed {
                cloud.handle(Input::Node(node_images::Input::SlotFreed(node)), self.now);
            }
            let slots = &mut self.slots;
            let actions = cloud.flush(self.now, &mut |node: &NodeName| {
                let taken = slots.entry(node.clone()).or_default();
                let is_free = *taken < 1;
                *taken += i64::from(is_free);
                is_free
            });
            if actions.is_empty() && !has_freed {
                return;
            }
            for action in actions {
                match action {
                    Action::Dispatch(dispatch) => {
                        self.check_secrets(&dispatch);
                        self.record_dispatch(&dispatch);
                        self.pending.push(Pending::Dispatch(dispatch));
                    }
                    Action::NodeImage(node, write) => self.pending.push(Pending::NodeImage(node, write)),
                    Action::Job(write) => self.pending.push(Pending::Job(write)),
                    Action::Send(node, message) => self.send(&node, message),
                    Action::Event(event) => {
                        self.log(|| format!("event {} {}: {}", event.object, event.reason, event.note));
                        assert_ne!(event.reason, reasons::NAME_TAKEN, "nobody has the names of children");
                    }
                }
            }
        }
    }

    fn record_dispatch(&mut self, dispatch: &TagDispatch) {
        let Some((image, tag)) = dispatch.task.images[0].image.rsplit_once(':') else { return };
        let spec = self.node_images.get(&dispatch.node.0).and_then(|object| object.spec.images.get(image));
        if let Some(tag) = spec.and_then(|image| image.tags.iter().find(|known| known.tag == tag)) {
            // If a user has changed the tag since, it differs from the dispatch.
            let image_task = &dispatch.task.images[0];
            let limits = tag.pull_policy.clone().unwrap_or_default();
            let seconds = u64::try_from(limits.timeout_seconds.unwrap_or(600)).unwrap();
            let retries = u32::try_from(limits.backoff_limit.unwrap_or(3)).unwrap();
            let always = tag.image_pull_policy.as_deref() == Some("Always");
            if image_task.timeout != Some(Duration::from_secs(seconds))
                || image_task.retries != retries
                || (image_task.policy == PullPolicy::Always) != always
            {
                return;
            }
            let tag = ImageTagSpec { version: i64::from(dispatch.task.id.attempt) - 1, ..tag.clone() };
            self.dispatched.insert(dispatch.task.id.clone(), (image.to_owned(), tag));
        }
    }

    fn send(&mut self, node: &NodeName, message: CloudMessage) {
        if let CloudMessage::ResultAck { task } = &message {
            self.check_ack(node, task);
        }
        self.log(|| format!("to {node}: {message:?}"));
        if let Some(edge) = self.edges.get_mut(node).filter(|edge| edge.session.is_some()) {
            edge.downward.push_back(message);
        }
    }

    /// An object as the watch delivers it.
    fn compact(&self, object: &NodeImage) -> Result<Box<CompactNodeImage>, Unreadable> {
        self.read(object).map(|object| Box::new((*object).into()))
    }

    fn read<K: ResourceExt + Clone + Serialize>(&self, object: &K) -> Result<Box<K>, Unreadable> {
        let name = object.name_any();
        if !self.unreadable.contains(&name) {
            return Ok(Box::new(object.clone()));
        }
        let (namespace, uid) = (object.namespace().unwrap_or_default(), object.uid().unwrap_or_default());
        let generation = object.meta().generation.unwrap_or_default();
        let error = "spec: a field of the wrong type".to_owned();
        let object = serde_json::to_value(object).unwrap();
        let time = |field: &str| Option::deserialize(&object["status"][field]).unwrap();
        Err(Unreadable {
            id: ObjectId { namespace, name, uid: JobUid(uid) },
            generation,
            error,
            start_time: time("startTime"),
            completion_time: time("completionTime"),
        })
    }

    pub(crate) fn node_image_changed(&mut self, name: &str) {
        let input = match self.node_images.get(name) {
            Some(object) => node_images::Input::NodeImage(self.compact(object)),
            None => return,
        };
        self.watch.push_back(Input::Node(input).into());
    }

    /// Changes a NodeImage that's there.
    fn replace(&mut self, name: &str, change: impl FnOnce(&mut NodeImage)) {
        let version = self.new_version();
        let object = self.node_images.get_mut(name).unwrap();
        change(object);
        object.metadata.resource_version = Some(version);
    }

    pub(crate) fn delete_node_image(&mut self, name: &str) {
        if let Some(object) = self.node_images.remove(name) {
            self.unreadable.remove(name);
            let uid = object.uid().unwrap_or_default();
            let gone = node_images::Input::NodeImageGone { name: name.into(), uid };
            self.watch.push_back(Input::Node(gone).into());
        }
    }

    pub(crate) fn job_changed(&mut self, name: &str, gone: Option<String>) {
        let input = match (gone, self.pull_jobs.get(name)) {
            (Some(uid), _) => jobs::Input::PullJobGone(prepull_api::task::JobUid(uid)),
            (None, Some(job)) => jobs::Input::PullJob(self.read(job)),
            (None, None) => return,
        };
        self.watch.push_back(Input::Job(input).into());
    }

    pub(crate) fn list_changed(&mut self, name: &str, gone: Option<String>) {
        let input = match (gone, self.list_jobs.get(name)) {
            (Some(uid), _) => jobs::Input::ListJobGone(prepull_api::task::JobUid(uid)),
            (None, Some(list)) => jobs::Input::ListJob(self.read(list)),
            (None, None) => return,
        };
        self.watch.push_back(Input::Job(input).into());
    }

    /// Makes a write of a NodeImage as the API server does.
    pub(crate) fn write_node_image(&mut self, node: &NodeName, write: NodeImageWrite) -> WrittenNodeImage {
        self.writes += 1;
        let name = node.0.clone();
        let current = |world: &Self| {
            let object = world.node_images.get(&name).cloned();
            object.map(|object| Box::new(object.into()))
        };
        let (uid, version) = match &write {
            NodeImageWrite::Create(_) => (None, None),
            NodeImageWrite::Delete { uid } => (Some(uid.clone()), None),
            NodeImageWrite::Labels { uid, version, .. }
            | NodeImageWrite::Spec { uid, version, .. }
            | NodeImageWrite::Status { uid, version, .. } => (Some(uid.clone()), Some(version.clone())),
        };
        if self.unreadable.contains(&name) && !matches!(write, NodeImageWrite::Delete { .. }) {
            // So is the answer.
            return WrittenNodeImage::Failed;
        }
        let known = self.node_images.get(&name);
        let fits = match &uid {
            None => known.is_none(),
            Some(_) => known.is_some_and(|known| {
                known.uid() == uid && (version.is_none() || known.resource_version() == version)
            }),
        };
        if !fits {
            return WrittenNodeImage::Refused(current(self));
        }
        match write {
            NodeImageWrite::Create(labels) => {
                let mut object = NodeImage::new(&name, NodeImageSpec::default());
                object.metadata.uid = Some(self.new_uid());
                object.metadata.labels = Some((*labels).clone());
                object.metadata.resource_version = Some(self.new_version());
                self.node_images.insert(name.clone(), object);
            }
            NodeImageWrite::Delete { .. } => self.delete_node_image(&name),
            NodeImageWrite::Labels { labels, .. } => {
                self.replace(&name, |object| object.metadata.labels = Some((*labels).clone()));
            }
            NodeImageWrite::Spec { spec, .. } => self.replace(&name, |object| object.spec = *spec),
            NodeImageWrite::Status { status, .. } => {
                self.replace(&name, |object| object.status = Some(*status));
            }
        }
        self.node_image_changed(&name);
        WrittenNodeImage::Done(current(self))
    }

    /// Makes a job's write as the API server does.
    pub(crate) fn write_job(&mut self, write: JobWrite) -> WriteOutcome {
        self.writes += 1;
        let version = self.new_version();
        match write {
            JobWrite::PullJobStatus(id, generation, status) => match self.pull_jobs.get_mut(&id.name) {
                Some(job) if job.uid().as_ref() == Some(&id.uid.0) => {
                    if job.metadata.generation != Some(generation) {
                        return WriteOutcome::Failed;
                    }
                    job.status = Some(*status);
                    job.metadata.resource_version = Some(version);
                    self.job_changed(&id.name, None);
                    WriteOutcome::Done
                }
                _ => WriteOutcome::Gone,
            },
            JobWrite::ListJobStatus(id, generation, status) => match self.list_jobs.get_mut(&id.name) {
                Some(job) if job.uid().as_ref() == Some(&id.uid.0) => {
                    if job.metadata.generation != Some(generation) {
                        return WriteOutcome::Failed;
                    }
                    job.status = Some(*status);
                    job.metadata.resource_version = Some(version);
                    self.list_changed(&id.name, None);
                    WriteOutcome::Done
                }
                _ => WriteOutcome::Gone,
            },
            JobWrite::DeleteChild { child: id, .. } => {
                self.delete_job(&id.name, Some(&id.uid.0));
                WriteOutcome::Done
            }
            JobWrite::DeletePullJob(id, generation) => {
                let found = self.pull_jobs.get(&id.name);
                if found.is_some_and(|job| job.metadata.generation == Some(generation)) {
                    self.delete_job(&id.name, Some(&id.uid.0));
                }
                WriteOutcome::Done
            }
            JobWrite::DeleteListJob(id, generation) => {
                let found = self.list_jobs.get(&id.name);
                if found.is_some_and(|list| list.metadata.generation == Some(generation)) {
                    self.delete_list(&id.name, Some(&id.uid.0));
                }
                WriteOutcome::Done
            }
            JobWrite::CreateChild { list, name, spec } => {
                if let Some(found) = self.pull_jobs.get(&name) {
                    // Of a list that was deleted, and made again: it is about to be collected.
                    let ours = found.owner_references().iter().any(|owner| owner.uid == list.uid.0);
                    let leaves = found.owner_references().iter().any(|owner| owner.name == list.name);
                    return match (ours, leaves) {
                        (true, _) => WriteOutcome::Done,
                        (false, true) => WriteOutcome::Failed,
                        (false, false) => WriteOutcome::Gone,
                    };
                }
                let mut child = ImagePullJob::new(&name, spec.into());
                child.metadata.owner_references = Some(vec![OwnerReference {
                    api_version: "apps.kruise.io/v1beta1".to_owned(),
                    kind: "ImageListPullJob".to_owned(),
                    name: list.name,
                    uid: list.uid.0,
                    controller: Some(true),
                    block_owner_deletion: None,
                }]);
                self.create_job(child);
                WriteOutcome::Done
            }
            JobWrite::UpdateChild { child, version: replaces, spec, .. } => {
                match self.pull_jobs.get_mut(&child.name) {
                    Some(job) if job.uid().as_ref() == Some(&child.uid.0) => {
                        if replaces.is_some() && job.metadata.resource_version != replaces {
                            return WriteOutcome::Failed;
                        }
                        let spec = ImagePullJobSpec::from(spec);
                        check_update(job, &spec);
                        job.spec = spec;
                        self.unreadable.remove(&child.name);
                        job.metadata.resource_version = Some(version);
                        *job.metadata.generation.get_or_insert(0) += 1;
                        self.job_changed(&child.name, None);
                        WriteOutcome::Done
                    }
                    _ => WriteOutcome::Gone,
                }
            }
        }
    }

    pub(crate) fn create_job(&mut self, mut job: ImagePullJob) {
        let name = job.name_any();
        job.metadata.uid = Some(self.new_uid());
        job.metadata.namespace = Some(if name == FOREIGN { "bank" } else { "shop" }.to_owned());
        self.edited(&mut job.metadata);
        self.pull_jobs.insert(name.clone(), job);
        self.job_changed(&name, None);
    }

    pub(crate) fn delete_job(&mut self, name: &str, uid: Option<&str>) {
        let found = self.pull_jobs.get(name).and_then(ResourceExt::uid);
        if let Some(found) = found.filter(|found| uid.is_none_or(|uid| uid == found)) {
            self.pull_jobs.remove(name);
            self.unreadable.remove(name);
            self.job_changed(name, Some(found));
        }
    }

    /// The garbage collector: deletes the children of lists that are gone.
    pub(crate) fn collect_orphans(&mut self) {
        let lists: Vec<_> = self.list_jobs.values().filter_map(ResourceExt::uid).collect();
        let is_orphan =
            |job: &ImagePullJob| job.owner_references().iter().any(|owner| !lists.contains(&owner.uid));
        let orphans: Vec<_> =
            self.pull_jobs.values().filter(|job| is_orphan(job)).map(ResourceExt::name_any).collect();
        for orphan in orphans {
            self.delete_job(&orphan, None);
        }
    }

    /// Deletes a list. Its children stay until [`Self::collect_orphans`].
    pub(crate) fn delete_list(&mut self, name: &str, uid: Option<&str>) {
        let found = self.list_jobs.get(name).and_then(ResourceExt::uid);
        let Some(found) = found.filter(|found| uid.is_none_or(|uid| uid == found)) else { return };
        self.list_jobs.remove(name);
        self.unreadable.remove(name);
        self.list_changed(name, Some(found));
    }

    pub(crate) fn advance_time(&mut self, time: Duration) {
        self.now = self.now.checked_add(time).unwrap();
        self.flush();
    }
}

/// A child that has ended has done what its spec asks for: another one does other work.
fn check_update(child: &ImagePullJob, spec: &ImagePullJobSpec) {
    let has_ended = child.status.as_ref().is_some_and(|status| status.completion_time.is_some());
    let work = |spec: &ImagePullJobSpec| {
        (spec.image.clone(), spec.template.selector.clone(), spec.template.image_pull_policy.clone())
    };
    assert!(!has_ended || work(&child.spec) == work(spec), "an ended child has the spec {spec:?}");
}

pub(crate) fn view(name: &str) -> NodeView {
    NodeView {
        name: name.into(),
        labels: BTreeMap::from([("name".to_owned(), name.to_owned())]),
        ready: true,
    }
}
