//! One life of cloudcore: the controller, and in place of its shell what the shell does, a step at a time.
//! Everything that touches the controller's interface is in this file.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::{Assign, EdgeMessage, Key};
use prepull_engine::prepull::controller::{Content, Controller, Dispatch, Input, JobObject, Object};
use prepull_engine::shared::node_view::NodeView;
use prepull_engine::shared::outcomes::DispatchOutcome;
use prepull_engine::shared::session::SessionEvent;

/// How far the start is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boot {
    Nodes,
    Reports,
    Jobs,
    Up,
}

/// A write on its way.
pub(crate) struct Write {
    pub(crate) job: JobUid,
    pub(crate) version: u64,
    /// The version of the object that it replaces.
    pub(crate) expected: Option<u64>,
    pub(crate) content: Content,
    /// As [`Cloud::stirred`] was when it was made.
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
    /// By kind, in order: jobs, nodes.
    pub(crate) watches: [VecDeque<Watched>; 2],
    pub(crate) writes: Vec<Write>,
    pub(crate) deletes: Vec<JobUid>,
    /// With the moment when each began.
    pub(crate) dispatches: Vec<(Dispatch, u64)>,
    /// The writer's memory.
    pub(crate) versions: HashMap<(JobUid, Object), u64>,
    /// The registry: the connection of each node.
    pub(crate) registry: BTreeMap<NodeName, u64>,
    pub(crate) sessions: u64,
    /// What this life knows that it wrote last of each object.
    pub(crate) wrote: HashMap<(JobUid, Object), (Content, u64)>,
    /// Counts what may have changed something, and changed it back.
    pub(crate) stirred: u64,
}

impl Cloud {
    /// `report`: nodes in a report, where those of a whole job shall not fit into one.
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
        // Before the list there is no watch.
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

    /// Hands on one event of a watch.
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

/// The jobs that an input tells the controller of: UID, version, generation, spec.
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

/// What the dispatcher makes of an order, all secrets given.
pub(crate) fn assign(order: &Dispatch, remaining: Duration) -> Assign {
    cloudcore_prepull::edges::dispatch::build_assign(order, std::iter::repeat(Key::anonymous()), remaining)
}
