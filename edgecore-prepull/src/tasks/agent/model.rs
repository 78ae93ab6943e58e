//! Model of the agent in a world of faults: messages are lost and repeated, writes fail, the agent is killed between any
//! two steps. The guarantees of the module are asserted after every effect.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use prepull_api::task::{ImageOutcome, ImageResult, Task, TaskResult};
use prepull_api::wire::{CloudMessage, OpenPhase};
use proptest::prelude::*;

use super::entry::PERSIST_RETRY;
use super::tests::{assign, pulled, task};
use super::*;

const TASKS: usize = 4;
const IMAGES: usize = 3;

#[derive(Clone, Copy, Debug)]
enum ModelStep {
    /// The cloud assigns the task, or assigns it again.
    Assign(usize),
    Cancel(usize),
    /// One message arrives. With `true` it arrives again later.
    ToEdge(bool),
    ToCloud(bool),
    /// The first pending write succeeds.
    Ledger,
    LedgerFails,
    /// The executor of a task ends one more image, or the task.
    Execute(usize),
    Connect,
    Disconnect,
    /// The agent is killed after this many of the pending writes.
    Kill(usize),
    Pass(u64),
}

fn any_step() -> impl Strategy<Value = ModelStep> {
    prop_oneof![
        3 => (0..TASKS).prop_map(ModelStep::Assign),
        1 => (0..TASKS).prop_map(ModelStep::Cancel),
        6 => prop::bool::weighted(0.2).prop_map(ModelStep::ToEdge),
        6 => prop::bool::weighted(0.2).prop_map(ModelStep::ToCloud),
        8 => Just(ModelStep::Ledger),
        1 => Just(ModelStep::LedgerFails),
        8 => (0..TASKS).prop_map(ModelStep::Execute),
        2 => Just(ModelStep::Connect),
        1 => Just(ModelStep::Disconnect),
        1 => (0_usize..3).prop_map(ModelStep::Kill),
        1 => (1_u64..200).prop_map(ModelStep::Pass),
    ]
}

enum ModelWrite {
    Save(Box<TaskRecord>),
    Remove(TaskId),
}

struct FaultyWorld {
    agent: TaskAgent,
    max_tasks: NonZeroU32,
    /// Tasks that are accepted and not started, in the order of their acceptance.
    queue: Vec<TaskId>,
    now: Now,
    connected: bool,
    disk: BTreeMap<TaskId, TaskRecord>,
    writes: VecDeque<ModelWrite>,
    executors: HashMap<TaskId, (Box<Execution>, bool)>,
    to_edge: VecDeque<CloudMessage>,
    to_cloud: VecDeque<EdgeMessage>,
    /// Tasks with `Accepted` sent and no acknowledged result.
    accepted: BTreeSet<TaskId>,
    /// Sent results of tasks that haven't been forgotten.
    sent: HashMap<TaskId, TaskResult>,
    /// Tasks with a failed last write: their results may be sent from memory.
    refused: BTreeSet<TaskId>,
    /// Results that the cloud has.
    results: HashMap<TaskId, TaskResult>,
    wanted: BTreeSet<TaskId>,
}

impl FaultyWorld {
    fn new(max_tasks: u32) -> Self {
        let max_tasks = max_tasks.try_into().unwrap();
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        Self {
            agent: TaskAgent::new(max_tasks),
            max_tasks,
            queue: Vec::new(),
            now: Now { monotonic: Instant::now(), wall, boot: None },
            connected: false,
            disk: BTreeMap::new(),
            writes: VecDeque::new(),
            executors: HashMap::new(),
            to_edge: VecDeque::new(),
            to_cloud: VecDeque::new(),
            accepted: BTreeSet::new(),
            sent: HashMap::new(),
            refused: BTreeSet::new(),
            results: HashMap::new(),
            wanted: BTreeSet::new(),
        }
    }

    fn task(n: usize) -> Task {
        task(&format!("job-{n}"), 1, IMAGES)
    }

    fn feed_event(&mut self, event: AgentEvent) {
        for effect in self.agent.handle(event, self.now) {
            self.check(effect);
        }
        self.check_queue();
    }

    /// Asserts that no place stays free while a task waits, and that no task overtakes one that has waited longer.
    /// Every running task ends, so every wait ends too.
    fn check_queue(&mut self) {
        let entries = self.agent.tasks.iter();
        let waiting = entries.filter(|(_, entry)| matches!(entry.stage(), TaskStage::Queued { .. }));
        let waiting: BTreeSet<_> = waiting.map(|(id, _)| id.clone()).collect();
        let places = self.max_tasks.get() as usize;
        assert!(waiting.is_empty() || self.executors.len() == places, "a free place, and {waiting:?} wait");
        self.queue.retain(|id| waiting.contains(id));
        let new: Vec<_> = waiting.into_iter().filter(|id| !self.queue.contains(id)).collect();
        assert!(new.len() <= 1, "two at once: {new:?}");
        self.queue.extend(new);
    }

    fn check(&mut self, effect: AgentEffect) {
        match effect {
            AgentEffect::Persist(record) => {
                let id = record.id().clone();
                let under_way =
                    |write: &ModelWrite| matches!(write, ModelWrite::Save(other) if *other.id() == id);
                assert!(!self.writes.iter().any(under_way), "one write of a task at a time");
                self.writes.push_back(ModelWrite::Save(record));
            }
            AgentEffect::Forget(id) => {
                self.accepted.remove(&id);
                self.sent.remove(&id);
                self.refused.remove(&id);
                assert!(
                    !self
                        .writes
                        .iter()
                        .any(|write| matches!(write, ModelWrite::Save(other) if *other.id() == id))
                );
                self.writes.push_back(ModelWrite::Remove(id));
            }
            AgentEffect::Start(execution) => {
                let id = execution.task.id.clone();
                let record = self.disk.get(&id).expect("only a task on the disk is started");
                for (known, done) in record.images.iter().zip(&execution.done) {
                    assert!(known.is_none() || known == done, "an image that ended is not pulled again");
                }
                let waits =
                    |other: &&TaskId| matches!(self.agent.tasks[*other].stage(), TaskStage::Queued { .. });
                let ahead = self.queue.iter().take_while(|other| **other != id).find(waits);
                assert_eq!(ahead, None, "{id} starts, and this one has waited longer");
                self.queue.retain(|other| *other != id);
                assert!(self.executors.insert(id, (execution, false)).is_none(), "one executor for a task");
                assert!(
                    self.executors.len() <= self.max_tasks.get() as usize,
                    "more tasks run than max_tasks"
                );
            }
            AgentEffect::MayRemove(id) => assert!(self.executors.contains_key(&id), "one that may remove"),
            AgentEffect::Renew(id, _) => assert!(self.executors.contains_key(&id), "an executor to renew"),
            AgentEffect::Stop { task, .. } => {
                self.executors.get_mut(&task).expect("an executor to stop").1 = true;
            }
            AgentEffect::Send(message) => {
                assert!(self.connected, "sent without a session: {message:?}");
                match &message {
                    EdgeMessage::Accepted { task } => {
                        assert!(self.disk.contains_key(task), "accepted and not on the disk");
                        self.accepted.insert(task.clone());
                    }
                    EdgeMessage::Result(result)
                        if self.accepted.contains(&result.task) || self.disk.contains_key(&result.task) =>
                    {
                        let stored = self.disk.get(&result.task).and_then(|record| record.result.as_ref());
                        let refused = self.refused.contains(&result.task);
                        assert!(stored == Some(result) || refused, "sent and not on the disk: {result:?}");
                        let first = self.sent.entry(result.task.clone()).or_insert_with(|| result.clone());
                        assert_eq!(first, result, "a second outcome");
                    }
                    _ => {}
                }
                self.to_cloud.push_back(message);
            }
        }
    }

    fn step(&mut self, step: ModelStep) {
        match step {
            ModelStep::Assign(n) => {
                let task = Self::task(n);
                self.wanted.insert(task.id.clone());
                if self.connected && !self.results.contains_key(&task.id) {
                    self.to_edge.push_back(CloudMessage::Assign(assign(task)));
                }
            }
            ModelStep::Cancel(n) if self.connected => {
                self.to_edge
                    .push_back(CloudMessage::Cancel { task: Self::task(n).id, reason: "stop".to_owned() });
            }
            ModelStep::Cancel(_) => {}
            ModelStep::ToEdge(again) => self.edge_reads(again),
            ModelStep::ToCloud(again) => self.cloud_reads(again),
            ModelStep::Ledger => self.write(true),
            ModelStep::LedgerFails => self.write(false),
            ModelStep::Execute(n) => self.execute(&Self::task(n).id),
            ModelStep::Connect => self.connect(),
            ModelStep::Disconnect => {
                self.connected = false;
                self.to_edge.clear();
                self.to_cloud.clear();
                self.feed_event(AgentEvent::Disconnected);
            }
            ModelStep::Kill(written) => {
                for _ in 0..written {
                    self.write_only();
                }
                self.writes.clear();
                self.refused.clear();
                // A result that was never on disk is lost: the task continues, and may end differently. The cloud keeps
                // the first result.
                let disk = &self.disk;
                self.sent.retain(|id, _| disk.get(id).is_some_and(|record| record.result.is_some()));
                self.executors.clear();
                self.connected = false;
                self.to_edge.clear();
                self.to_cloud.clear();
                self.agent = TaskAgent::new(self.max_tasks);
                self.queue.clear();
                for task in &self.accepted {
                    assert!(self.disk.contains_key(task), "accepted, and gone after a restart");
                }
                self.feed_event(AgentEvent::Loaded(self.disk.values().cloned().collect()));
            }
            ModelStep::Pass(seconds) => {
                self.now.monotonic += Duration::from_secs(seconds);
                self.now.wall += Duration::from_secs(seconds);
                self.feed_event(AgentEvent::Tick);
            }
        }
    }

    fn edge_reads(&mut self, again: bool) {
        let Some(message) = self.to_edge.pop_front() else { return };
        if again {
            self.to_edge.push_back(message.clone());
        }
        match message {
            CloudMessage::Assign(assign) => self.feed_event(AgentEvent::Assign(assign)),
            CloudMessage::ResultAck { task } => self.feed_event(AgentEvent::ResultAck(task)),
            CloudMessage::Cancel { task, reason } => self.feed_event(AgentEvent::Cancel { task, reason }),
            other => unreachable!("{other:?}"),
        }
    }

    fn cloud_reads(&mut self, again: bool) {
        let Some(message) = self.to_cloud.pop_front() else { return };
        if again {
            self.to_cloud.push_back(message.clone());
        }
        if let EdgeMessage::Result(result) = message {
            self.to_edge.push_back(CloudMessage::ResultAck { task: result.task.clone() });
            self.results.entry(result.task.clone()).or_insert(result);
        }
    }

    fn write_only(&mut self) -> Option<TaskId> {
        match self.writes.pop_front()? {
            ModelWrite::Save(record) => {
                let id = record.id().clone();
                self.disk.insert(id.clone(), *record);
                Some(id)
            }
            ModelWrite::Remove(id) => {
                self.disk.remove(&id);
                None
            }
        }
    }

    fn write(&mut self, works: bool) {
        if works {
            if let Some(id) = self.write_only() {
                self.refused.remove(&id);
                self.feed_event(AgentEvent::Persisted(id));
            }
        } else if let Some(ModelWrite::Save(record)) = self.writes.front() {
            let task = record.id().clone();
            self.writes.pop_front();
            self.refused.insert(task.clone());
            self.feed_event(AgentEvent::PersistFailed { task, reason: "disk full".to_owned() });
        }
    }

    fn execute(&mut self, id: &TaskId) {
        let Some((execution, stopped)) = self.executors.get_mut(id) else { return };
        match execution.done.iter().position(Option::is_none) {
            Some(index) if !*stopped => {
                execution.done[index] = Some(pulled());
                self.feed_event(AgentEvent::ImageEnded { task: id.clone(), index, result: pulled() });
            }
            rest => {
                let (execution, _) = self.executors.remove(id).unwrap();
                let stopped = ImageResult { outcome: ImageOutcome::Stopped, ..pulled() };
                let images =
                    execution.done.into_iter().map(|done| done.unwrap_or_else(|| stopped.clone())).collect();
                let outcome = if rest.is_some() { TaskOutcome::Cancelled } else { TaskOutcome::Succeeded };
                let end = TaskEnd { removal: None, outcome, reason: String::new(), check: None, images };
                self.feed_event(AgentEvent::Ended(id.clone(), end));
            }
        }
    }

    /// Begins a session: the cloud assigns the tasks that it wants and the edge lacks.
    fn connect(&mut self) {
        if self.connected {
            return;
        }
        let open = self.agent.open_tasks();
        self.connected = true;
        self.feed_event(AgentEvent::Connected);
        for n in 0..TASKS {
            let task = Self::task(n);
            let phase = open.iter().find(|open| open.task == task.id).map(|open| open.phase);
            let wanted = self.wanted.contains(&task.id) && !self.results.contains_key(&task.id);
            if wanted && matches!(phase, None | Some(OpenPhase::NeedsKeys)) {
                self.to_edge.push_back(CloudMessage::Assign(assign(task)));
            }
        }
    }

    /// Completes all pending work, and asserts that nothing is left.
    fn finish_all_work(&mut self) {
        self.step(ModelStep::Disconnect);
        self.connect();
        for _ in 0..200 {
            self.step(ModelStep::Ledger);
            self.step(ModelStep::ToEdge(false));
            self.step(ModelStep::ToCloud(false));
            (0..TASKS).for_each(|n| self.step(ModelStep::Execute(n)));
        }
        // One task may be left that the cloud no longer wants: it was refused after a failed write, and then a late
        // `Assign` was accepted. It ends by its deadline.
        self.step(ModelStep::Pass(PERSIST_RETRY.as_secs().max(300)));
        for _ in 0..50 {
            self.step(ModelStep::Ledger);
            self.step(ModelStep::ToEdge(false));
            self.step(ModelStep::ToCloud(false));
        }
        assert!(self.agent.is_empty(), "left in memory: {:?}", self.agent);
        assert!(self.disk.is_empty(), "left on the disk: {:?}", self.disk.keys());
        assert!(self.executors.is_empty());
        for task in &self.wanted {
            assert!(self.results.contains_key(task), "no result of {task}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_accepted_task_has_one_result(
        max_tasks in 1_u32..=3,
        steps in prop::collection::vec(any_step(), 0..120),
    ) {
        let mut world = FaultyWorld::new(max_tasks);
        world.feed_event(AgentEvent::Loaded(Vec::new()));
        for step in steps {
            world.step(step);
        }
        world.finish_all_work();
    }
}
