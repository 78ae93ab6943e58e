//! One edge: the agent, its disk, its runtime, and an executor that takes its time.
//! Everything that touches the agent's constructor is in this file.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use edgecore_prepull::tasks::agent::{Agent, Execution, Now, TaskRecord};
use prepull_api::task::{ImageOutcome, ImageResult, NodeName, TaskId};

/// A write of the ledger on its way to the disk.
pub(crate) enum Record {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

/// A task that is being carried out.
pub(crate) struct Exec {
    pub(crate) work: Box<Execution>,
    pub(crate) stop: Option<String>,
    pub(crate) checked: bool,
    /// The image that is being pulled, until when, and whether that succeeds.
    pub(crate) pulling: Option<(usize, u64, bool)>,
}

pub(crate) struct Edge {
    pub(crate) node: NodeName,
    pub(crate) agent: Agent,
    pub(crate) disk: BTreeMap<TaskId, TaskRecord>,
    pub(crate) writes: VecDeque<Record>,
    pub(crate) execs: BTreeMap<TaskId, Exec>,
    /// References that are whole.
    pub(crate) images: BTreeSet<String>,
    pub(crate) conn: Option<u64>,
    /// How far its wall clock is off, in milliseconds.
    pub(crate) skew: u64,
    pub(crate) max_tasks: u32,
    /// Tasks that it could not store.
    pub(crate) refused: BTreeSet<TaskId>,
}

impl Edge {
    pub(crate) fn new(node: NodeName, max_tasks: u32, skew: u64) -> Self {
        Self {
            node,
            agent: agent(max_tasks),
            disk: BTreeMap::new(),
            writes: VecDeque::new(),
            execs: BTreeMap::new(),
            images: BTreeSet::new(),
            conn: None,
            skew,
            max_tasks,
            refused: BTreeSet::new(),
        }
    }

    /// Killed and started again; [`edgecore_prepull::tasks::agent::AgentEvent::Loaded`] is to follow.
    pub(crate) fn restart(&mut self) {
        self.agent = agent(self.max_tasks);
        self.writes.clear();
        self.execs.clear();
        self.conn = None;
    }

    pub(crate) fn now(&self, base: Instant, millis: u64) -> Now {
        Now {
            monotonic: base + Duration::from_millis(millis),
            wall: SystemTime::UNIX_EPOCH + Duration::from_millis(1_800_000_000_000 + millis + self.skew),
            boot: None,
        }
    }
}

fn agent(max_tasks: u32) -> Agent {
    Agent::new(max_tasks.try_into().unwrap())
}

pub(crate) fn image(outcome: ImageOutcome) -> ImageResult {
    let reason = if outcome.is_on_node() { "" } else { "no such image" };
    ImageResult { outcome, digest: None, id: None, reason: reason.to_owned(), bytes: None, attempts: 1 }
}
