//! One process of cloudcore: the controller, and what the program around it does, one step at a time. Everything that
//! depends on the controller's interface is in this file.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::{Assign, EdgeMessage, Key};
use prepull_engine::prepull::controller::{Content, Controller, Dispatch, Input, JobObject, Object};
use prepull_engine::shared::node_view::NodeView;
use prepull_engine::shared::outcomes::DispatchOutcome;
use prepull_engine::shared::session::SessionEvent;

/// How far cloudcore has started: what it reads next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boot {
    Nodes,
    Reports,
    Jobs,
    Up,
}

/// A write that is under way.
pub(crate) struct Write {
    pub(crate) job: JobUid,
    pub(crate) version: u64,
    /// The version of the object that it replaces.
    pub(crate) expected: Option<u64>,
    pub(crate) content: Content,
    /// The value of [`Cloud::stirred`] when the write began.
    pub(crate) stirred: u64,
}

pub(crate) enum Watched {
    Job(JobObject),
    JobGone(JobUid),
    Node(NodeView),
    NodeGone(NodeName),
}

pub(crate) struct Cloud {
    pub(crate) controller: Controller,
    pub(crate) boot: Boot,
    pub(crate) inputs: VecDeque<Input>,
    /// Events that the watches have not delivered yet: of jobs, and of nodes.
    pub(crate) watches: [VecDeque<Watched>; 2],
    pub(crate) writes: Vec<Write>,
    pub(crate) deletes: Vec<JobUid>,
    /// The dispatches under way, and when each began.
    pub(crate) dispatches: Vec<(Dispatch, u64)>,
    /// The versions of objects that the writer knows.
    pub(crate) versions: HashMap<(JobUid, Object), u64>,
    /// The current connection of each node, as the registry of sessions has it.
    pub(crate) registry: BTreeMap<NodeName, u64>,
    pub(crate) sessions: u64,
    /// What this process has written last of each object, if it knows that the write succeeded.
    pub(crate) wrote: HashMap<(JobUid, Object), (Content, u64)>,
    /// How many inputs may have changed something, perhaps only to change it back: a repeated write is then no fault.
    pub(crate) stirred: u64,
}

impl Cloud {
    /// `report`: the most nodes in a report, if a job is to have several reports.
    pub(crate) fn new(report: Option<usize>) -> Self {
        Self {
            controller: report.map_or_else(Controller::default, Controller::with_report_capacity),
            boot: Boot::Nodes,
            inputs: VecDeque::new(),
            watches: [VecDeque::new(), VecDeque::new()],
            writes: Vec::new(),
            deletes: Vec::new(),
            dispatches: Vec::new(),
            versions: HashMap::new(),
            registry: BTreeMap::new(),
            sessions: 0,
            wrote: HashMap::new(),
            stirred: 0,
        }
    }

    pub(crate) fn stir(&mut self, input: &Input, news: bool) {
        let still = match input {
            Input::Tick | Input::Written { .. } => true,
            Input::Job(_) => !news,
            Input::Session(SessionEvent::Message { message, .. }) => {
                matches!(message, EdgeMessage::Accepted { .. })
            }
            Input::Dispatched { outcome, .. } => matches!(outcome, DispatchOutcome::Sent(_)),
            _ => false,
        };
        self.stirred += u64::from(!still);
    }

    pub(crate) fn watched(&mut self, event: Watched) {
        // A watch begins with the list.
        match event {
            Watched::Job(_) | Watched::JobGone(_) if self.boot == Boot::Up => {
                self.watches[0].push_back(event);
            }
            Watched::Node(_) | Watched::NodeGone(_) if self.boot != Boot::Nodes => {
                self.watches[1].push_back(event);
            }
            _ => {}
        }
    }

    /// Delivers one event of a watch. Returns whether there was one.
    pub(crate) fn read_watch(&mut self, kind: usize) -> bool {
        let Some(event) = self.watches[kind].pop_front() else { return false };
        self.inputs.push_back(match event {
            Watched::Job(job) => Input::Job(job),
            Watched::JobGone(uid) => Input::JobGone(uid),
            Watched::Node(node) => Input::Node(node),
            Watched::NodeGone(name) => Input::NodeGone(name),
        });
        true
    }
}

/// The jobs in an input: UID, version, generation, spec.
pub(crate) fn jobs(input: &Input) -> Vec<(JobUid, u64, i64, ImagePrePullJobSpec)> {
    let spec = |object: &JobObject| {
        let job = object.as_ref().ok()?;
        let uid = JobUid(job.metadata.uid.clone()?);
        let version = job.metadata.resource_version.as_ref()?.parse().ok()?;
        Some((uid, version, job.metadata.generation?, job.spec.clone()))
    };
    match input {
        Input::Job(job) | Input::Recalled(_, _, Some(job)) => spec(job).into_iter().collect(),
        Input::Jobs(jobs) => jobs.iter().filter_map(spec).collect(),
        _ => Vec::new(),
    }
}

/// Builds the message for a task, as the dispatcher does once it has all secrets.
pub(crate) fn assign(order: &Dispatch, remaining: Duration) -> Assign {
    cloudcore_prepull::edges::dispatch::build_assign(order, std::iter::repeat(Key::anonymous()), remaining)
}
