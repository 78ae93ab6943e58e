//! Both engines and the tracker of sites behind one door, on the same nodes: inputs are routed to whom they concern, and a node works on no
//! more tasks of both than it takes.

use std::collections::HashSet;

use jiff::Timestamp;
use prepull_api::crd::status::{JobPhase, Summary};
use prepull_api::selector::Selector;
use prepull_api::sites::Blobs;
use prepull_api::task::NodeName;
use prepull_api::wire::{EdgeMessage, Hello};
use serde::{Deserialize, Serialize};

use crate::kruise::node_images::{self, is_of_node_image};
use crate::kruise::{self, Kruise};
use crate::prepull::controller::{self, Controller};
use crate::shared::node_view::NodeView;
use crate::shared::session::SessionEvent;
use crate::sites::{Directions, NOT_SHARED, Shared, SiteSettings, Sites};

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Input {
    /// To ImagePrePullJobs, or to nodes and sessions, which concern both engines.
    Prepull(controller::Input),
    /// To one of Kruise's objects.
    Kruise(kruise::Input),
}

impl Input {
    /// Nothing but that time has passed.
    pub const TICK: Self = Self::Prepull(controller::Input::Tick);
}

impl From<controller::Input> for Input {
    fn from(input: controller::Input) -> Self {
        Self::Prepull(input)
    }
}

impl From<kruise::Input> for Input {
    fn from(input: kruise::Input) -> Self {
        Self::Kruise(input)
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// For an ImagePrePullJob.
    Prepull(controller::Action),
    /// For one of Kruise's objects.
    Kruise(kruise::Action),
    /// Tell a node where to get blobs from.
    Direct(Directions),
}

impl Action {
    /// What kind of action this is, in one word: what a recording keeps of it.
    pub fn kind(&self) -> &'static str {
        use controller::Action as Prepull;
        use kruise::Action as Kruise;
        match self {
            Self::Prepull(Prepull::Dispatch(_)) | Self::Kruise(Kruise::Dispatch(_)) => "dispatch",
            Self::Prepull(Prepull::Send(..)) | Self::Kruise(Kruise::Send(..)) => "send",
            Self::Prepull(Prepull::Event(_)) | Self::Kruise(Kruise::Event(_)) => "event",
            Self::Prepull(Prepull::Write { .. }) => "write",
            Self::Prepull(Prepull::Delete { .. }) => "delete",
            Self::Prepull(Prepull::Forget(_)) => "forget",
            Self::Prepull(Prepull::Recall { .. }) => "recall",
            Self::Kruise(Kruise::NodeImage(..)) => "writeNodeImage",
            Self::Kruise(Kruise::Job(_)) => "writeKruiseJob",
            Self::Direct(_) => "direct",
        }
    }
}

/// Which of the first lists have arrived. Before that an engine does not know all that there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// The Nodes.
    pub nodes: bool,
    /// The ImagePrePullJobs.
    pub jobs: bool,
    /// Kruise's objects and the pods; never where Kruise's API is not served.
    pub kruise: bool,
}

/// The engines of both APIs. Inputs go in by [`Self::handle`], actions come out of [`Self::flush`].
#[derive(Debug, Default)]
pub struct Engine {
    prepull: Controller,
    kruise: Option<Kruise>,
    sites: Sites,
    listed: Listed,
}

impl Engine {
    /// An engine that serves Kruise's API as well, with a NodeImage for each node that the selector selects.
    pub fn with_kruise(selector: Selector) -> Self {
        Self { kruise: Some(Kruise::new(selector)), ..Self::default() }
    }

    /// Groups nodes into sites like this.
    #[must_use]
    pub fn with_sites(mut self, settings: SiteSettings) -> Self {
        self.sites = Sites::new(settings);
        self
    }

    /// Takes in what happened. What follows from it comes out of [`Self::flush`], so that a burst of inputs makes one
    /// write.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::Prepull(controller::Input::Session(SessionEvent::Message {
                node,
                message: EdgeMessage::Blobs(blobs),
                ..
            })) => self.note_blobs(&node, blobs, now),
            Input::Prepull(input) => {
                self.tell_sites(&input, now);
                self.listed.nodes |= matches!(input, controller::Input::Nodes(_));
                self.listed.jobs |= matches!(input, controller::Input::Jobs(_));
                if let Some(input) = self.share_with_kruise(input, now) {
                    self.prepull.handle(input, now);
                }
            }
            Input::Kruise(input) => {
                if let Some(kruise) = &mut self.kruise {
                    kruise.handle(input, now);
                    self.listed.kruise |= kruise.is_ready();
                }
            }
        }
    }

    /// Lets every object go on as far as it can, and returns what is to be done, in this order.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        // A slot that a NodeImage gave back may serve a job; what the jobs leave, the NodeImages may take.
        self.move_slots();
        let mut actions: Vec<_> = self.prepull.flush(now).into_iter().map(Action::Prepull).collect();
        loop {
            let freed = self.prepull.take_freed();
            let Some(kruise) = &mut self.kruise else { break };
            for node in freed {
                kruise.handle(kruise::Input::Node(node_images::Input::SlotFreed(node)), now);
            }
            let prepull = &mut self.prepull;
            let more = kruise.flush(now, &mut |node| prepull.take_place(node));
            // What is cancelled gives its slot back, and another task takes it.
            self.move_slots();
            if more.is_empty() {
                break;
            }
            actions.extend(more.into_iter().map(Action::Kruise));
        }
        actions.extend(self.sites.flush(now).into_iter().map(Action::Direct));
        actions
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let kruise = self.kruise.as_ref().and_then(Kruise::next_wakeup);
        [self.prepull.next_wakeup(), kruise, self.sites.next_wakeup()].into_iter().flatten().min()
    }

    /// Which of the first lists have arrived.
    pub fn listed(&self) -> Listed {
        self.listed
    }

    /// All Nodes, by their names.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeView> {
        self.prepull.nodes()
    }

    /// The ImagePrePullJobs that run, each by its name with the counts of its nodes, for the metrics.
    pub fn running_jobs(&self) -> impl Iterator<Item = (&str, &Summary)> {
        self.prepull.running_jobs()
    }

    /// The phases of all ImagePrePullJobs, for the metrics.
    pub fn phases(&self) -> impl Iterator<Item = JobPhase> {
        self.prepull.phases()
    }

    /// Tells the tracker of sites what concerns it.
    fn tell_sites(&mut self, input: &controller::Input, now: Timestamp) {
        use controller::Input as Prepull;
        match input {
            Prepull::Nodes(nodes) => {
                let listed: HashSet<&NodeName> = nodes.iter().map(|node| &node.name).collect();
                let gone: Vec<NodeName> = self
                    .prepull
                    .nodes()
                    .map(|node| &node.name)
                    .filter(|name| !listed.contains(name))
                    .cloned()
                    .collect();
                for node in gone {
                    self.sites.set_labels(&node, None, now);
                }
                for node in nodes {
                    self.sites.set_labels(&node.name, Some(&node.labels), now);
                }
            }
            Prepull::Node(node) => self.sites.set_labels(&node.name, Some(&node.labels), now),
            Prepull::NodeGone(node) => self.sites.set_labels(node, None, now),
            // Those of a session that another one has replaced may come after the other one's.
            Prepull::Session(SessionEvent::Up { node, session, hello })
                if self.prepull.session(node).is_none_or(|current| current <= *session) =>
            {
                self.sites.connect(node, hello, now);
            }
            Prepull::Session(SessionEvent::Down { node, session })
                if self.prepull.session(node) == Some(*session) =>
            {
                self.sites.disconnect(node, now);
            }
            _ => {}
        }
    }

    /// A node tells of the blobs of a task. Only for a task that it is to carry out is anything shared: its images are what
    /// entitles it.
    fn note_blobs(&mut self, node: &NodeName, blobs: Blobs, now: Timestamp) {
        let by_default = self.sites.settings().share_by_default;
        let task = &blobs.task;
        let images = if is_of_node_image(task) {
            let kruise = self.kruise.as_ref().filter(|_| by_default);
            kruise
                .and_then(|kruise| kruise.images_of(node, task))
                .map(|images| Shared { images, max_rate: None })
        } else {
            self.prepull.images_shared_by(node, task, by_default)
        };
        match images {
            Some(shared) => self.sites.note(node, &shared, blobs, now),
            None => self.sites.refuse(node, blobs, NOT_SHARED),
        }
    }

    /// Tells Kruise's engine what concerns it. Returns what is left for the other one.
    fn share_with_kruise(&mut self, input: controller::Input, now: Timestamp) -> Option<controller::Input> {
        use controller::Input as Prepull;
        use node_images::Input as Kruise;
        let Some(kruise) = &mut self.kruise else { return Some(input) };
        let mut tell = |input| kruise.handle(kruise::Input::Node(input), now);
        match input {
            Prepull::Session(event) => {
                let (of_node_images, of_jobs) = split(event);
                if let Some(event) = of_node_images {
                    tell(Kruise::Session(event));
                }
                return of_jobs.map(Prepull::Session);
            }
            Prepull::Nodes(ref nodes) => tell(Kruise::Nodes(nodes.clone())),
            Prepull::Node(ref node) => tell(Kruise::Node(node.clone())),
            Prepull::NodeGone(ref node) => tell(Kruise::NodeGone(node.clone())),
            _ => {}
        }
        Some(input)
    }

    /// Tells the jobs which slots of nodes the NodeImages have taken or given back.
    fn move_slots(&mut self) {
        let moves = self.kruise.as_mut().map(Kruise::take_slot_changes).unwrap_or_default();
        for (node, taken) in moves {
            self.prepull.place_moved(&node, taken);
        }
    }
}

/// What of a session's event concerns tasks of NodeImages, and what those of jobs.
fn split(event: SessionEvent) -> (Option<SessionEvent>, Option<SessionEvent>) {
    match event {
        SessionEvent::Up { node, session, hello } => {
            let (of_node_images, of_jobs) =
                hello.open.iter().cloned().partition(|open| is_of_node_image(&open.task));
            let up = |open| SessionEvent::Up {
                node: node.clone(),
                session,
                hello: Box::new(Hello { open, ..(*hello).clone() }),
            };
            (Some(up(of_node_images)), Some(up(of_jobs)))
        }
        SessionEvent::Down { node, session } => (
            Some(SessionEvent::Down { node: node.clone(), session }),
            Some(SessionEvent::Down { node, session }),
        ),
        SessionEvent::Message { ref message, .. } => {
            let task = match message {
                EdgeMessage::Hello(_) | EdgeMessage::Trusts { .. } | EdgeMessage::State(_) => None,
                EdgeMessage::Accepted { task } => Some(task),
                EdgeMessage::Progress(progress) => Some(&progress.task),
                EdgeMessage::Result(result) => Some(&result.task),
                // For the tracker of sites, which got it before.
                EdgeMessage::Blobs(blobs) => Some(&blobs.task),
            };
            if task.is_some_and(is_of_node_image) { (Some(event), None) } else { (None, Some(event)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use prepull_api::crd::EDGE_LABEL;
    use prepull_api::crd::kruise::{NodeImage, NodeImageSpec};
    use prepull_api::task::{JobUid, NodeName, TaskId, TaskOutcome, TaskResult};
    use prepull_api::wire::{OpenPhase, OpenTask, Progress};
    use serde_json::json;

    use super::*;
    use crate::kruise::jobs;
    use crate::shared::outcomes::WriteOutcome;
    use crate::shared::session::SessionId;

    #[test]
    fn each_api_says_when_its_first_lists_have_arrived() {
        use controller::Input as Prepull;
        let now = Timestamp::UNIX_EPOCH;
        let mut engine = Engine::with_kruise(Selector::parse("edge").unwrap());
        let mut without = Engine::default();
        let mut listed = |input: fn() -> Input| {
            engine.handle(input(), now);
            without.handle(input(), now);
            assert_eq!(without.listed(), Listed { kruise: false, ..engine.listed() });
            engine.listed()
        };
        let nodes = Listed { nodes: true, ..Listed::default() };
        let jobs = Listed { jobs: true, ..nodes };
        assert_eq!(listed(|| Input::TICK), Listed::default());
        assert_eq!(listed(|| Prepull::Nodes(Vec::new()).into()), nodes);
        assert_eq!(listed(|| Prepull::Jobs(Vec::new()).into()), jobs);
        for input in [
            || kruise::Input::Node(node_images::Input::NodeImages(Vec::new())).into(),
            || kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
            || kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
        ] {
            assert_eq!(listed(input), jobs);
        }
        let last = || kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into();
        assert_eq!(listed(last), Listed { kruise: true, ..jobs });
    }

    #[test]
    fn a_node_image_comes_and_goes_with_its_node() {
        use controller::Input as Prepull;
        use node_images::{Write, Written};
        let mut engine = Engine::with_kruise(Selector::parse("edge").unwrap());
        let mut now = Timestamp::UNIX_EPOCH;
        // What is written when the engine has taken these in.
        let mut give = |inputs: Vec<Input>| {
            for input in inputs {
                engine.handle(input, now);
            }
            let mut actions = engine.flush(now);
            while actions.is_empty()
                && let Some(at) = engine.next_wakeup()
            {
                now = now.max(at);
                actions = engine.flush(now);
            }
            assert!(actions.iter().all(|action| action.kind() == "writeNodeImage"), "{actions:?}");
            let write = |action| match action {
                Action::Kruise(kruise::Action::NodeImage(_, write)) => Some(write),
                _ => None,
            };
            actions.into_iter().filter_map(write).collect::<Vec<_>>()
        };
        let node = || NodeView {
            name: NodeName::from("edge-1"),
            labels: [("edge".to_owned(), String::new())].into(),
            ready: true,
        };
        let of_node = |input| kruise::Input::Node(input).into();
        let written = |written| of_node(node_images::Input::Written(node().name, written));
        let lists = vec![
            kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
            kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
            kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into(),
        ];
        assert_eq!(give(lists), []);
        assert_eq!(give(vec![Prepull::Nodes(vec![node()]).into()]), [], "not before all is listed");
        let listed = of_node(node_images::Input::NodeImages(Vec::new()));
        assert!(matches!(give(vec![listed])[..], [Write::Create(_)]));
        let mut object = NodeImage::new("edge-1", NodeImageSpec::default());
        object.metadata.uid = Some("uid".to_owned());
        object.metadata.resource_version = Some("1".to_owned());
        object.metadata.labels = Some(node().labels);
        let done = written(Written::Done(Some(Box::new(object))));
        assert!(matches!(give(vec![done])[..], [Write::Status { .. }]));
        let gone = || Prepull::NodeGone(node().name).into();
        let back = Prepull::Node(node()).into();
        assert!(matches!(give(vec![written(Written::Failed), gone(), back])[..], [Write::Status { .. }]));
        assert!(matches!(give(vec![written(Written::Failed), gone()])[..], [Write::Delete { .. }]));
    }

    #[test]
    fn a_node_that_pulls_for_one_api_is_busy_for_the_other_until_it_has_ended() {
        use controller::Input as Prepull;
        let mut now = Timestamp::UNIX_EPOCH;
        let (node, session) = (NodeName::from("edge-1"), SessionId(1));
        let mut engine = Engine::with_kruise(Selector::parse(EDGE_LABEL).unwrap());
        let labels = BTreeMap::from([(EDGE_LABEL.to_owned(), String::new())]);
        let tag = json!({ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 300 } });
        let image = serde_json::from_value(json!({
            "metadata": { "name": "edge-1", "uid": "0f7c3a51-8a5c-4a3e-9d0b-111111111111",
                "resourceVersion": "1", "labels": labels },
            "spec": { "images": { "a": { "tags": [tag] } } },
        }));
        let job = serde_json::from_value(json!({
            "metadata": { "name": "job", "uid": "job", "generation": 1 },
            "spec": { "imagePrePullTemplate": { "images": ["b:1"], "labelSelector": { "matchLabels": labels } } },
        }));
        let of_node = |input| kruise::Input::Node(input).into();
        for input in [
            Prepull::Nodes(vec![NodeView { name: node.clone(), labels, ready: true }]).into(),
            Prepull::Reports(Vec::new()).into(),
            Prepull::Jobs(Vec::new()).into(),
            of_node(node_images::Input::NodeImages(vec![Ok(Box::new(image.unwrap()))])),
            kruise::Input::Job(jobs::Input::Pods(Vec::new())).into(),
            kruise::Input::Job(jobs::Input::PullJobs(Vec::new())).into(),
            kruise::Input::Job(jobs::Input::ListJobs(Vec::new())).into(),
            Prepull::Session(SessionEvent::Up { node: node.clone(), session, hello: Box::default() }).into(),
        ] {
            engine.handle(input, now);
        }
        // What is sent to the node within ten seconds, when each write is made at once.
        let mut sent = |input: Input| {
            engine.handle(input, now);
            let mut sent = Vec::new();
            for _ in 0..10 {
                for action in engine.flush(now) {
                    match action {
                        Action::Prepull(controller::Action::Write { job, version, content, .. }) => {
                            let (object, outcome) = (content.object(), WriteOutcome::Done);
                            engine.handle(Prepull::Written { job, object, version, outcome }.into(), now);
                        }
                        Action::Prepull(controller::Action::Dispatch(order)) => {
                            sent.push(TaskId { job: order.job.uid.clone(), attempt: order.attempt });
                        }
                        Action::Kruise(kruise::Action::Dispatch(order)) => sent.push(order.task.id.clone()),
                        _ => {}
                    }
                }
                now += Duration::from_secs(1);
            }
            sent
        };
        let of_node_image = sent(Input::TICK);
        assert!(matches!(&of_node_image[..], [task] if is_of_node_image(task)), "{of_node_image:?}");
        assert_eq!(sent(Prepull::Job(Ok(Box::new(job.unwrap()))).into()), []);
        let result = TaskResult {
            task: of_node_image[0].clone(),
            outcome: TaskOutcome::Succeeded,
            reason: String::new(),
            check: None,
            images: Vec::new(),
            took: Duration::ZERO,
        };
        let message = EdgeMessage::Result(result);
        let of_job = sent(Prepull::Session(SessionEvent::Message { node, session, message }).into());
        assert_eq!(of_job, [TaskId { job: JobUid("job".to_owned()), attempt: 1 }]);
    }

    #[test]
    fn what_a_session_says_goes_to_the_engine_that_has_its_task() {
        let task = |job: &str| TaskId { job: JobUid(job.to_owned()), attempt: 1 };
        let of_job = task("0f7c3a51-8a5c-4a3e-9d0b-111111111111");
        let of_node_image = task("0f7c3a51-8a5c-4a3e-9d0b-111111111111.0011223344556677");
        let (node, session) = (NodeName::from("edge-1"), SessionId(1));
        let result = |task: &TaskId| TaskResult {
            task: task.clone(),
            outcome: TaskOutcome::Succeeded,
            reason: String::new(),
            check: None,
            images: Vec::new(),
            took: Duration::ZERO,
        };
        for (task, is_of_node_image) in [(&of_job, false), (&of_node_image, true)] {
            for message in [
                EdgeMessage::Accepted { task: task.clone() },
                EdgeMessage::Progress(Progress {
                    task: task.clone(),
                    images: Vec::new(),
                    waits: String::new(),
                }),
                EdgeMessage::Result(result(task)),
            ] {
                let (of_node_images, of_jobs) =
                    split(SessionEvent::Message { node: node.clone(), session, message });
                assert_eq!(
                    (of_node_images.is_some(), of_jobs.is_some()),
                    (is_of_node_image, !is_of_node_image)
                );
            }
        }
        let open = |task: &TaskId| OpenTask { task: task.clone(), phase: OpenPhase::Running, limited: false };
        let hello = Hello { open: vec![open(&of_job), open(&of_node_image)], ..Hello::default() };
        let hello = Box::new(hello);
        let (first, second) = split(SessionEvent::Up { node: node.clone(), session, hello });
        let tasks = |event: Option<SessionEvent>| match event {
            Some(SessionEvent::Up { hello, .. }) => hello.open.into_iter().map(|open| open.task).collect(),
            _ => Vec::new(),
        };
        assert_eq!((tasks(first), tasks(second)), (vec![of_node_image], vec![of_job]));
        let (first, second) = split(SessionEvent::Down { node, session });
        assert!(first.is_some() && second.is_some());
    }
}
