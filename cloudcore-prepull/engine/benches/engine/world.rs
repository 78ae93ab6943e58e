//! A simulated cluster: an API server that accepts every write, and edges that pull every task they get. Time is
//! simulated as well, so a job of minutes takes only as long as the engine computes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use prepull_api::crd::kruise::{ImagePullJob, NodeImage, NodeImageSpec};
use prepull_api::selector::Selector;
use prepull_api::sites::PeerDoor;
use prepull_api::task::{ImageOutcome, ImageResult, JobUid, NodeName, TaskId, TaskOutcome, TaskResult};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use prepull_engine::engine::{Action, Engine, Input};
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::fleet::session::{SessionEvent, SessionId};
use prepull_engine::kruise;
use prepull_engine::kruise::jobs::{self, JobWrite, WriteTarget};
use prepull_engine::kruise::node_images::{
    self, CompactNodeImage, NodeImageWrite, SharedParts, WrittenNodeImage,
};
use prepull_engine::prepull::controller::{self, Content};
use prepull_engine::recording::{RecordingEntry, count_actions};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use prepull_engine::sites::{Directions, SITE_LABEL, SiteSettings};
use serde_json::json;

/// The API server answers a write after this long.
const WRITE: SignedDuration = SignedDuration::from_millis(5);
/// A task is handed to its session after this long: its secrets are read.
const DISPATCH: SignedDuration = SignedDuration::from_millis(2);
/// Inputs per flush, as in the program.
const BATCH: usize = 1024;
/// Every node has one of these labels `lot`, so that a job can select a tenth of the fleet.
pub(crate) const LOTS: usize = 10;

/// How long the n-th pull takes.
pub(crate) type PullTime = fn(usize) -> SignedDuration;

/// What was counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EngineFigures {
    /// Inputs that the engine took in.
    pub(crate) inputs: usize,
    /// Tasks that were dispatched.
    pub(crate) tasks: usize,
    /// Writes that it asked for.
    pub(crate) writes: usize,
    /// Time that the engine took, in all.
    pub(crate) busy: Duration,
    /// The longest that it took for one batch.
    pub(crate) longest: Duration,
    /// The longest of a flush alone, in processor time, which a busy machine changes little.
    pub(crate) longest_flush: Duration,
}

/// See the module.
pub(crate) struct World {
    engine: Engine,
    /// The time that the engine is given.
    pub(crate) now: Timestamp,
    due: BTreeMap<(Timestamp, usize), Input>,
    arrivals: usize,
    pull_time: PullTime,
    jobs: HashMap<String, serde_json::Value>,
    pull_jobs: HashMap<String, ImagePullJob>,
    /// As JSON, so that the simulated API server's memory doesn't hide the engine's.
    node_images: HashMap<NodeName, Vec<u8>>,
    parts: SharedParts,
    versions: usize,
    /// Sites that the nodes are spread over. `None`: they have no site.
    sites: Option<usize>,
    /// Sources that nodes were sent.
    directions: Vec<Directions>,
    /// Jobs that have ended, by their status.
    pub(crate) ended: HashSet<String>,
    /// What was counted.
    pub(crate) figures: EngineFigures,
    /// The recording, where one is wanted.
    pub(crate) recording: Option<Vec<u8>>,
}

/// The name of the n-th node.
pub(crate) fn name(index: usize) -> NodeName {
    NodeName(format!("edge-{index:06}"))
}

impl World {
    /// A fleet of connected, Ready edge nodes without any job. With `kruise`, jobs can use Kruise's API.
    pub(crate) fn new(nodes: usize, kruise: bool, pull_time: PullTime, recording: bool) -> Self {
        let mut world = Self::without_nodes(engine(kruise), pull_time);
        world.recording = recording.then(Vec::new);
        let begin = RecordingEntry::Begin {
            version: "made up".to_owned(),
            kruise_node_selector: kruise.then(|| prepull_api::crd::EDGE_LABEL.to_owned()),
            sites: SiteSettings::default(),
        };
        world.record(&begin);
        world.connect_nodes(nodes, kruise);
        world
    }

    /// The same for jobs that share, with the nodes spread over sites.
    pub(crate) fn of_sites(nodes: usize, sites: usize, pull_time: PullTime) -> Self {
        let settings = SiteSettings { share_by_default: true, ..SiteSettings::default() };
        let mut world = Self::without_nodes(engine(false).with_sites(settings), pull_time);
        world.sites = Some(sites);
        world.connect_nodes(nodes, false);
        world
    }

    fn without_nodes(engine: Engine, pull_time: PullTime) -> Self {
        Self {
            engine,
            now: "2026-01-01T00:00:00Z".parse().expect("a time"),
            due: BTreeMap::new(),
            arrivals: 0,
            pull_time,
            jobs: HashMap::new(),
            pull_jobs: HashMap::new(),
            node_images: HashMap::new(),
            parts: SharedParts::default(),
            versions: 0,
            sites: None,
            directions: Vec::new(),
            ended: HashSet::new(),
            figures: EngineFigures::default(),
            recording: None,
        }
    }

    fn connect_nodes(&mut self, nodes: usize, kruise: bool) {
        use controller::Input as Prepull;
        let sites = self.sites;
        let view = |index: usize| {
            let mut labels = BTreeMap::from([
                (prepull_api::crd::EDGE_LABEL.to_owned(), String::new()),
                ("lot".to_owned(), (index % LOTS).to_string()),
            ]);
            labels.extend(sites.map(|sites| (SITE_LABEL.to_owned(), format!("site-{}", index % sites))));
            NodeView { name: name(index), labels, ready: true }
        };
        let peer = sites.map(|_| PeerDoor { addresses: vec!["10.0.0.1:10006".to_owned()], streams: true });
        self.happens(FleetEvent::Nodes((0..nodes).map(view).collect()).into());
        self.happens(Prepull::Jobs(Vec::new()).into());
        if kruise {
            self.happens(kruise::Input::Node(node_images::Input::NodeImages(Vec::new())).into());
            self.happens(kruise::Input::Job(jobs::Input::Pods(Vec::new())).into());
            self.happens(kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into());
            self.happens(kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into());
        }
        for index in 0..nodes {
            let hello = Hello { peer: peer.clone(), ..Hello::default() };
            let (node, session) = (name(index), SessionId(index as u64 + 1));
            self.happens(
                FleetEvent::Session(SessionEvent::Up { node, session, hello: Box::new(hello) }).into(),
            );
        }
        self.settle();
    }

    /// A user creates an ImagePrePullJob for all nodes, or for one lot.
    pub(crate) fn make_job(&mut self, job: &str, lot: Option<usize>) {
        let labels = match lot {
            Some(lot) => json!({"lot": lot.to_string()}),
            None => json!({prepull_api::crd::EDGE_LABEL: ""}),
        };
        let object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2",
            "kind": "ImagePrePullJob",
            "metadata": {"name": job, "uid": job, "generation": 1, "creationTimestamp": self.now.to_string()},
            "spec": {"imagePrePullTemplate": {
                "images": ["registry.example/shop/web:v1"],
                "labelSelector": {"matchLabels": labels},
                "concurrency": 1_000_000,
                "timeoutSeconds": 36_000,
            }},
        });
        self.jobs.insert(job.to_owned(), object);
        self.job_changed(job);
    }

    /// Creates an ImagePrePullJob for one node that pins its image.
    pub(crate) fn make_pinned_job(&mut self, job: &str, node: &NodeName) {
        let object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2",
            "kind": "ImagePrePullJob",
            "metadata": {"name": job, "uid": job, "generation": 1, "creationTimestamp": self.now.to_string()},
            "spec": {
                "pin": true,
                "imagePrePullTemplate": {"images": ["registry.example/shop/web:v1"], "nodeNames": [node]},
            },
        });
        self.jobs.insert(job.to_owned(), object);
        self.job_changed(job);
    }

    /// The time of an empty batch, with the program's queries after each batch.
    pub(crate) fn idle_batch(&mut self) -> Duration {
        let began = clock();
        self.engine.handle(Input::Tick, self.now);
        let actions = self.engine.flush(self.now);
        let asked = (self.engine.next_wakeup(), self.engine.running_jobs().count(), self.engine.phases());
        let took = began.elapsed();
        assert!(actions.is_empty(), "{actions:?} {asked:?}");
        took
    }

    /// Deletes jobs with images that every edge may have pinned. Returns the time that takes and the number of unpin
    /// messages.
    pub(crate) fn delete_pinned_jobs(&mut self, jobs: &[String]) -> (Duration, usize) {
        let nodes = self.engine.nodes().count();
        for index in 0..nodes {
            let hello = Hello { pins: Some(vec![JobUid(jobs[0].clone())]), ..Hello::default() };
            let up = SessionEvent::Up {
                node: name(index),
                session: SessionId((nodes + index + 1) as u64),
                hello: Box::new(hello),
            };
            self.happens(FleetEvent::Session(up).into());
        }
        self.settle();
        let began = clock();
        for job in jobs {
            self.engine.handle(controller::Input::JobGone(JobUid(job.clone())).into(), self.now);
        }
        let actions = self.engine.flush(self.now);
        let took = began.elapsed();
        let is_unpin = |action: &&Action| {
            matches!(action, Action::Prepull(controller::Action::Send(_, CloudMessage::Unpin { .. })))
        };
        (took, actions.iter().filter(is_unpin).count())
    }

    fn job_changed(&mut self, job: &str) {
        let object = serde_json::from_value(self.jobs[job].clone()).expect("a job");
        self.happens(controller::Input::Job(Ok(Box::new(object))).into());
    }

    /// A user creates an ImagePullJob for all nodes, or for one lot.
    pub(crate) fn make_pull_job(&mut self, job: &str, lot: Option<usize>) {
        let selector = match lot {
            Some(lot) => json!({"matchLabels": {"lot": lot.to_string()}}),
            None => json!({"matchLabels": {prepull_api::crd::EDGE_LABEL: ""}}),
        };
        let object: ImagePullJob = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1alpha1",
            "kind": "ImagePullJob",
            "metadata": {
                "name": job, "namespace": "shop", "uid": job, "resourceVersion": "1",
                "creationTimestamp": self.now.to_string(),
            },
            "spec": {
                "image": format!("registry.example/shop/{job}:v1"),
                "selector": selector,
                "parallelism": 1_000_000,
                "completionPolicy": {"type": "Always"},
            },
        }))
        .expect("an ImagePullJob");
        self.pull_jobs.insert(job.to_owned(), object);
        self.pull_job_changed(job);
    }

    fn pull_job_changed(&mut self, job: &str) {
        let object = Box::new(self.pull_jobs[job].clone());
        self.happens(kruise::Input::Job(jobs::Input::PullJob(Ok(object))).into());
    }

    /// Lets time pass until this many jobs have ended.
    ///
    /// # Panics
    /// When nothing is left to happen, or a day has passed.
    pub(crate) fn run_until_ended(&mut self, jobs: usize) {
        let limit = self.now + SignedDuration::from_hours(24);
        while self.ended.len() < jobs {
            assert!(self.step() && self.now < limit, "{} of {jobs} jobs have ended", self.ended.len());
        }
    }

    /// Another leader takes over: its engine lists what the API server has, and the edges connect to it.
    pub(crate) fn restart(&mut self) {
        use kruise::Input;
        self.settle();
        let nodes = self.node_images.len();
        self.engine = engine(true);
        self.connect_nodes(nodes, false);
        let mut parts = SharedParts::default();
        let compact = |stored: &Vec<u8>| Box::new(CompactNodeImage::new(read_node_image(stored), &mut parts));
        let objects = self.node_images.values().map(compact).map(Ok).collect();
        self.happens(Input::Node(node_images::Input::NodeImages(objects)).into());
        self.happens(Input::Job(jobs::Input::Pods(Vec::new())).into());
        let pull_jobs = self.pull_jobs.values().map(|job| Ok(Box::new(job.clone()))).collect();
        self.happens(Input::Job(jobs::Input::PullJobs(pull_jobs)).into());
        self.happens(Input::Job(jobs::Input::ListJobs(Vec::new())).into());
        self.settle();
    }

    /// Bytes that the made-up API server keeps of NodeImages.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.node_images.values().map(Vec::capacity).sum()
    }

    /// Forgets the engine.
    pub(crate) fn drop_engine(&mut self) {
        self.engine = Engine::default();
    }

    /// Lets everything happen within this time.
    pub(crate) fn run_for(&mut self, time: SignedDuration) {
        let end = self.now + time;
        while self.next().is_some_and(|next| next <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Sources that nodes were sent since the last call.
    pub(crate) fn take_directions(&mut self) -> Vec<Directions> {
        std::mem::take(&mut self.directions)
    }

    /// Bytes that the tracker of sites counts as its own.
    pub(crate) fn site_bytes(&self) -> usize {
        self.engine.site_bytes()
    }

    /// Lets everything happen that is under way.
    pub(crate) fn settle(&mut self) {
        while !self.due.is_empty() {
            self.step();
        }
    }

    fn next(&self) -> Option<Timestamp> {
        let due = self.due.keys().next().map(|(at, _)| *at);
        [due, self.engine.next_wakeup()].into_iter().flatten().min()
    }

    /// One batch: what is due next, and what the engine wants done about it. `false`: nothing is left to happen.
    pub(crate) fn step(&mut self) -> bool {
        let Some(next) = self.next() else { return false };
        self.now = self.now.max(next);
        let mut batch = Vec::new();
        while let Some(entry) = self.due.first_entry().filter(|entry| entry.key().0 <= self.now)
            && batch.len() < BATCH
        {
            batch.push(entry.remove());
        }
        if batch.is_empty() {
            batch.push(Input::Tick);
        }
        self.figures.inputs += batch.len();
        if self.recording.is_some() {
            let at = self.now.to_string();
            for input in &batch {
                self.record(&RecordingEntry::Input { at: at.clone(), input });
            }
        }
        let began = clock();
        for input in batch {
            self.engine.handle(input, self.now);
        }
        let flushed = cpu_time();
        let actions = self.engine.flush(self.now);
        self.figures.longest_flush = self.figures.longest_flush.max(cpu_time().saturating_sub(flushed));
        let took = began.elapsed();
        self.figures.busy += took;
        self.figures.longest = self.figures.longest.max(took);
        self.record(&RecordingEntry::Flush { at: self.now.to_string(), actions: count_actions(&actions) });
        for action in actions {
            match action {
                Action::Prepull(action) => self.carry_out(action),
                Action::Kruise(action) => self.carry_out_kruise(action),
                Action::Direct(directions) => self.directions.push(directions),
                // There are no objects of this kind.
                Action::Settings(_) => {}
            }
        }
        true
    }

    fn record(&mut self, entry: &RecordingEntry<&Input>) {
        if let Some(recording) = &mut self.recording {
            recording.extend(entry.to_line().expect("an entry"));
        }
    }

    /// Something happens now.
    pub(crate) fn happens(&mut self, input: Input) {
        self.happens_after(SignedDuration::ZERO, input);
    }

    /// Something happens in a while.
    pub(crate) fn happens_after(&mut self, wait: SignedDuration, input: Input) {
        self.arrivals += 1;
        self.due.insert((self.now + wait, self.arrivals), input);
    }

    fn carry_out(&mut self, action: controller::Action) {
        use controller::{Action as Do, Input};
        match action {
            Do::Write { job, name, version, content, .. } => {
                self.figures.writes += 1;
                let object = content.object();
                if let Content::Status(status) = content {
                    if status.completion_time.is_some() {
                        self.ended.insert(name.clone());
                    }
                    let known = self.jobs.get_mut(&name).expect("a job that was made");
                    known["status"] = serde_json::to_value(status).expect("a status");
                    self.job_changed(&name);
                }
                let outcome = WriteOutcome::Done;
                let written = Input::Written { job, object, version, outcome, stored: None };
                self.happens_after(WRITE, written.into());
            }
            Do::Dispatch(order) => {
                let (node, uid, attempt) = (order.node, order.job.uid.clone(), order.attempt);
                let task = TaskId { job: uid.clone(), attempt };
                self.send_task(&node, task, order.plan.images.len());
                let outcome = DispatchOutcome::Sent(session(&node));
                let dispatched = Input::Dispatched { job: uid, node, attempt, outcome, keys: None };
                self.happens_after(DISPATCH, dispatched.into());
            }
            Do::Recall { .. } => unreachable!("no job is parked within an hour"),
            Do::Send(..) | Do::Event(_) | Do::Delete { .. } | Do::Forget(_) => {}
        }
    }

    fn carry_out_kruise(&mut self, action: kruise::Action) {
        use kruise::Input;
        match action {
            kruise::Action::Dispatch(order) => {
                let (node, task) = (order.node.clone(), order.task.id.clone());
                self.send_task(&node, task.clone(), order.task.images.len());
                let outcome = DispatchOutcome::Sent(session(&node));
                let dispatched = node_images::Input::Dispatched { node, task, outcome, keys: None };
                self.happens_after(DISPATCH, Input::Node(dispatched).into());
            }
            kruise::Action::NodeImage(node, write) => {
                self.figures.writes += 1;
                let object = self.write_node_image(&node, write);
                if let Some(object) = object.clone() {
                    let object = Box::new(CompactNodeImage::new(object, &mut self.parts));
                    self.happens(Input::Node(node_images::Input::NodeImage(Ok(object))).into());
                }
                let object = object.map(|object| Box::new(CompactNodeImage::new(object, &mut self.parts)));
                let written = node_images::Input::Written(node, WrittenNodeImage::Done(object));
                self.happens_after(WRITE, Input::Node(written).into());
            }
            kruise::Action::Job(JobWrite::PullJobStatus(id, _, status)) => {
                self.figures.writes += 1;
                if status.completion_time.is_some() {
                    self.ended.insert(id.name.clone());
                }
                let known = self.pull_jobs.get_mut(&id.name).expect("a job that was made");
                known.status = Some(*status);
                self.pull_job_changed(&id.name);
                let target = WriteTarget::PullJob(id.uid);
                let written = jobs::Input::Written { target, outcome: WriteOutcome::Done };
                self.happens_after(WRITE, Input::Job(written).into());
            }
            kruise::Action::Job(other) => unreachable!("{other:?} of a job without TTL and list"),
            kruise::Action::Send(..) | kruise::Action::Event(_) => {}
        }
    }

    fn write_node_image(&mut self, node: &NodeName, write: NodeImageWrite) -> Option<NodeImage> {
        self.versions += 1;
        let mut object = match &write {
            NodeImageWrite::Create(_) => NodeImage::new(&node.0, NodeImageSpec::default()),
            _ => read_node_image(&self.node_images.remove(node)?),
        };
        object.metadata.uid.get_or_insert_with(|| format!("ni-{node}"));
        object.metadata.resource_version = Some(self.versions.to_string());
        match write {
            NodeImageWrite::Create(labels) | NodeImageWrite::Labels { labels, .. } => {
                object.metadata.labels = Some((*labels).clone());
            }
            NodeImageWrite::Delete { .. } => return None,
            NodeImageWrite::Spec { spec, .. } => object.spec = *spec,
            NodeImageWrite::Status { status, .. } => object.status = Some(*status),
        }
        let mut stored = serde_json::to_vec(&object).expect("JSON");
        stored.shrink_to_fit();
        self.node_images.insert(node.clone(), stored);
        Some(object)
    }

    /// Sends the edge's messages about a task that succeeds.
    fn send_task(&mut self, node: &NodeName, task: TaskId, images: usize) {
        let pull = (self.pull_time)(self.figures.tasks);
        self.figures.tasks += 1;
        let result = TaskResult {
            images: vec![
                ImageResult {
                    digest: Some(format!("sha256:{:064x}", 7)),
                    attempts: 1,
                    ..ImageResult::new(ImageOutcome::Pulled)
                };
                images
            ],
            took: Duration::from_secs(1),
            ..TaskResult::new(task.clone(), TaskOutcome::Succeeded)
        };
        for (wait, message) in [
            (DISPATCH * 2, EdgeMessage::Accepted { task }),
            (DISPATCH * 2 + pull, EdgeMessage::Result(result)),
        ] {
            let event = SessionEvent::Message { node: node.clone(), session: session(node), message };
            self.happens_after(wait, FleetEvent::Session(event).into());
        }
    }
}

fn engine(kruise: bool) -> Engine {
    let selector = || Selector::parse(prepull_api::crd::EDGE_LABEL).expect("a selector");
    if kruise { Engine::with_kruise(selector()) } else { Engine::default() }
}

fn read_node_image(stored: &[u8]) -> NodeImage {
    serde_json::from_slice(stored).expect("a NodeImage")
}

/// The session of a node.
pub(crate) fn session(node: &NodeName) -> SessionId {
    let index: u64 = node.0.trim_start_matches("edge-").parse().expect("a node of this world");
    SessionId(index + 1)
}

/// Processor time of this thread.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time")
}

#[expect(clippy::disallowed_methods, reason = "measures what the engine takes; the engine does not see it")]
fn clock() -> Instant {
    Instant::now()
}
