//! One edge: the agent, its disk, its runtime, and an executor with slow pulls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use edgecore_prepull::tasks::agent::{AgentEffect, AgentEvent, Execution, Now, TaskAgent, TaskRecord};
use edgecore_prepull::tasks::removal::RemovalRecord;
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageOutcome, ImageResult, JobUid, NodeName, TaskId};

use crate::trace::said;
use crate::world::{BASE, World};

/// A write of the ledger that the disk does not have yet.
pub(crate) enum Record {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

/// A task that is being carried out.
pub(crate) struct Exec {
    pub(crate) work: Box<Execution>,
    pub(crate) stop: Option<String>,
    pub(crate) checked: bool,
    /// Whether the choice of the images to remove is on the disk.
    pub(crate) may_remove: bool,
    /// How far the removal of images has come.
    pub(crate) removal: Option<RemovalRecord>,
    /// The image that is being pulled, when its pull ends, and whether it succeeds.
    pub(crate) pulling: Option<(usize, u64, bool)>,
}

pub(crate) struct Edge {
    pub(crate) node: NodeName,
    pub(crate) agent: TaskAgent,
    pub(crate) disk: BTreeMap<TaskId, TaskRecord>,
    pub(crate) writes: VecDeque<Record>,
    pub(crate) execs: BTreeMap<TaskId, Exec>,
    /// The references of complete images.
    pub(crate) images: BTreeSet<String>,
    /// The jobs for which images are pinned, which survives everything.
    pub(crate) pins: BTreeSet<JobUid>,
    pub(crate) conn: Option<u64>,
    /// How far its wall clock is off, in milliseconds.
    pub(crate) skew: u64,
    pub(crate) max_tasks: u32,
    /// Whether its agent knows removals.
    pub(crate) removes: bool,
    /// Tasks that the disk had no room for.
    pub(crate) refused: BTreeSet<TaskId>,
    /// Tasks with a refused last write to disk: their ends are reported from memory.
    pub(crate) unsaved: BTreeSet<TaskId>,
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
            pins: BTreeSet::new(),
            conn: None,
            skew,
            max_tasks,
            removes: true,
            refused: BTreeSet::new(),
            unsaved: BTreeSet::new(),
        }
    }

    /// Restarts the agent after a kill. The caller then gives it
    /// [`edgecore_prepull::tasks::agent::AgentEvent::Loaded`].
    pub(crate) fn restart(&mut self) {
        self.agent = agent(self.max_tasks);
        self.writes.clear();
        self.execs.clear();
        self.unsaved.clear();
        self.conn = None;
    }

    /// Whether the runtime of the edge of this number can pin.
    pub(crate) fn can_pin(at: usize) -> bool {
        !at.is_multiple_of(3)
    }

    /// The cloud unpins the images of these jobs. Running tasks must not pin again.
    pub(crate) fn unpin(&mut self, jobs: &[JobUid]) {
        self.pins.retain(|job| !jobs.contains(job));
        for (_, exec) in self.execs.iter_mut().filter(|(task, _)| jobs.contains(&task.job)) {
            Arc::make_mut(&mut exec.work.terms.download).pin = false;
        }
    }

    pub(crate) fn now(&self, base: Instant, millis: u64) -> Now {
        Now {
            monotonic: base + Duration::from_millis(millis),
            wall: SystemTime::UNIX_EPOCH + Duration::from_millis(BASE + millis + self.skew),
            boot: None,
        }
    }
}

fn agent(max_tasks: u32) -> TaskAgent {
    TaskAgent::new(max_tasks.try_into().unwrap())
}

impl World {
    pub(crate) fn on_edge(&mut self, at: usize, event: AgentEvent) {
        let acked = matches!(event, AgentEvent::ResultAck(_));
        let edge = &mut self.edges[at];
        let now = edge.now(self.base, self.now);
        for effect in edge.agent.handle(event, now) {
            self.perform(at, effect, acked);
        }
    }

    fn perform(&mut self, at: usize, effect: AgentEffect, acked: bool) {
        let edge = &mut self.edges[at];
        match effect {
            AgentEffect::Persist(record) => {
                let same = |write: &Record| matches!(write, Record::Save(other) if other.id() == record.id());
                assert!(!edge.writes.iter().any(same), "two writes of a record at a time");
                edge.writes.push_back(Record::Save(record));
            }
            AgentEffect::Forget(task) => {
                if acked {
                    self.check.forgotten(&self.api, edge, &task, self.now);
                } else {
                    let removed = |write: &Record| matches!(write, Record::Remove(other) if *other == task);
                    let stored = edge.disk.contains_key(&task) && !edge.writes.iter().any(removed);
                    assert!(!stored, "(2) {} forgets {task}, which nobody acknowledged", edge.node);
                    edge.refused.insert(task.clone());
                }
                edge.writes.push_back(Record::Remove(task));
            }
            AgentEffect::Start(work) => {
                let task = work.task.id.clone();
                self.check.started(&self.api, edge, &work, self.now);
                let is_known = edge.removes || work.task.removal.is_none();
                assert!(is_known, "{} is too old to carry out {task}", edge.node);
                let exec = Exec {
                    checked: false,
                    may_remove: false,
                    removal: None,
                    stop: None,
                    pulling: None,
                    work,
                };
                assert!(edge.execs.insert(task.clone(), exec).is_none(), "two executors for {task}");
                self.log(|| format!("n{at}: begins {task}"));
            }
            AgentEffect::Renew(task, terms) => {
                edge.execs.get_mut(&task).expect("an executor to renew").work.terms = terms;
            }
            AgentEffect::MayRemove(task) => {
                edge.execs.get_mut(&task).expect("an executor that may remove").may_remove = true;
            }
            AgentEffect::Stop { task, reason } => {
                edge.execs.get_mut(&task).expect("an executor to stop").stop = Some(reason);
            }
            AgentEffect::Send(message) => {
                self.check.said(edge, &message);
                let conn = edge.conn.and_then(|id| self.conns.get_mut(&id)).expect("sent into the void");
                if !conn.cut {
                    conn.to_cloud.push_back(message.clone());
                }
                self.log(|| format!("n{at} ▶ {}", said(&message)));
            }
        }
    }

    /// Ends the first write of the ledger, which succeeds or fails.
    pub(crate) fn write_record(&mut self, at: usize, works: bool) -> bool {
        let edge = &mut self.edges[at];
        match edge.writes.front() {
            None => return false,
            Some(Record::Save(_)) if !works => {
                let Some(Record::Save(record)) = edge.writes.pop_front() else { return false };
                let task = record.id().clone();
                edge.unsaved.insert(task.clone());
                self.log(|| format!("n{at}: disk full, {task}"));
                self.on_edge(at, AgentEvent::PersistFailed { task, reason: "disk full".to_owned() });
            }
            Some(_) => {
                if let Some(task) = self.write_only(at) {
                    self.on_edge(at, AgentEvent::Persisted(task));
                }
            }
        }
        true
    }

    fn write_only(&mut self, at: usize) -> Option<prepull_api::task::TaskId> {
        let edge = &mut self.edges[at];
        match edge.writes.pop_front()? {
            Record::Save(record) => {
                let task = record.id().clone();
                edge.unsaved.remove(&task);
                edge.disk.insert(task.clone(), *record);
                Some(task)
            }
            Record::Remove(task) => {
                edge.disk.remove(&task);
                None
            }
        }
    }

    /// Kills an edge. Of its writes to the disk that were under way, this many were done.
    pub(crate) fn restart_edge(&mut self, at: usize, written: usize) {
        self.log(|| format!("n{at}: killed"));
        for _ in 0..written {
            self.write_only(at);
        }
        // Perhaps it was upgraded.
        let is_upgraded = self.removes && self.rng.chance(30);
        let edge = &mut self.edges[at];
        edge.removes |= is_upgraded;
        if let Some(conn) = edge.conn.and_then(|id| self.conns.get_mut(&id)) {
            (conn.cut, conn.edge_open) = (true, false);
            conn.to_edge.clear();
            conn.to_cloud.clear();
        }
        edge.restart();
        self.check.stopped_all(&edge.node);
        let records = edge.disk.values().cloned().collect();
        self.bury();
        self.on_edge(at, AgentEvent::Loaded(records));
    }
}

pub(crate) fn image(outcome: ImageOutcome) -> ImageResult {
    let reason = if outcome.is_on_node() { "" } else { "no such image" };
    let code = (!outcome.is_on_node()).then_some(FailureCode::NotFound);
    ImageResult { reason: reason.to_owned(), code, attempts: 1, ..ImageResult::new(outcome) }
}
