//! What must hold after every step. The numbers are those of the invariants in docs/architecture.md.

use std::collections::{BTreeMap, BTreeSet};

use edgecore_prepull::tasks::agent::Execution;
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{
    ImagePrePullJobStatus, JobPhase, MAX_NODES_IN_STATUS, NodePhase, NodeStatus, Summary, Tristate,
};
use prepull_api::task::{JobUid, NodeName, PullPolicy, TaskId, TaskOutcome};
use prepull_api::wire::EdgeMessage;
use prepull_engine::prepull::controller::{Content, Dispatch, PARK_AFTER};
use prepull_engine::prepull::rollout::REPORT_GRACE;
use prepull_engine::prepull::validate::Ratio;

use crate::api::Api;
use crate::edge::{Edge, Record};
use crate::world::millis;

/// A spec as the controller was told of it.
struct Delivered {
    at: u64,
    generation: i64,
    spec: ImagePrePullJobSpec,
}

#[derive(Default)]
pub(crate) struct Check {
    duplicates: bool,
    delivered: BTreeMap<JobUid, Vec<Delivered>>,
    /// The last that the API server was told of each node by whoever led then.
    nodes: BTreeMap<(JobUid, NodeName), (u32, NodePhase)>,
    /// Jobs that are over, in which round.
    over: BTreeMap<JobUid, u32>,
    /// Unknown nodes that turned out to have succeeded.
    late: BTreeMap<JobUid, u32>,
    /// Results that agents have sent.
    said: BTreeMap<(NodeName, TaskId), BTreeSet<u8>>,
    unsendable: BTreeSet<(NodeName, TaskId)>,
    /// Tasks that edges were told to stop, whether or not they have heard.
    cancelled: BTreeSet<(NodeName, TaskId)>,
    /// When a task found no session last.
    returned: BTreeMap<(NodeName, TaskId), u64>,
    /// Tasks that are being carried out.
    running: BTreeSet<(NodeName, TaskId)>,
}

/// In milliseconds.
const GRACE: u64 = REPORT_GRACE.as_secs() * 1_000;

const PARKED: u64 = PARK_AFTER.as_secs() * 1_000;

fn is_final(phase: NodePhase) -> bool {
    matches!(phase, NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown)
}

fn timeout(spec: &ImagePrePullJobSpec) -> u64 {
    u64::try_from(spec.image_pre_pull_template.timeout_seconds).unwrap() * 1000
}

pub(crate) fn is_bad(spec: &ImagePrePullJobSpec) -> bool {
    Ratio::parse(&spec.image_pre_pull_template.failure_tolerate).is_err()
}

impl Check {
    pub(crate) fn new(duplicates: bool) -> Self {
        Self { duplicates, ..Self::default() }
    }

    pub(crate) fn delivered(
        &mut self,
        job: &JobUid,
        generation: i64,
        spec: ImagePrePullJobSpec,
        at: u64,
    ) -> bool {
        let known = self.delivered.entry(job.clone()).or_default();
        let new = known.last().is_none_or(|last| last.generation != generation);
        if new {
            known.push(Delivered { at, generation, spec });
        }
        new
    }

    /// The specs that may have been in force at a moment: several where it changed in that very one.
    fn in_force(&self, job: &JobUid, at: u64) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        self.in_force_since(job, at, at)
    }

    fn in_force_since(
        &self,
        job: &JobUid,
        since: u64,
        at: u64,
    ) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        let known = self.delivered.get(job).map(Vec::as_slice).unwrap_or_default();
        let before = known.iter().rposition(|delivered| delivered.at < since);
        let until = known.iter().rposition(|delivered| delivered.at <= at).map_or(0, |last| last + 1);
        known.get(before.unwrap_or(0)..until).unwrap_or_default().iter().map(|delivered| &delivered.spec)
    }

    // ---- what the controller does

    /// Write, then act: a task is sent when the API server says that the node has it.
    pub(crate) fn dispatched(api: &Api, order: &Dispatch) {
        let (job, node) = (&order.job.uid, &order.node);
        if !api.jobs.contains_key(job) {
            return;
        }
        let record = api.record(job, node);
        assert!(
            record.is_some_and(|r| r.phase == NodePhase::InProgress && r.attempt == order.attempt),
            "{job}/{} is dispatched to {node}, and the API server says {:?}",
            order.attempt,
            record.map(|r| (r.phase, r.attempt)),
        );
    }

    /// (3) Time has gone beyond the deadline, and the controller has looked: the node is not in progress.
    pub(crate) fn emitted(&self, job: &JobUid, content: &Content, now: u64) {
        let Content::Report(report) = content else { return };
        let Some(spec) = self.delivered.get(job).and_then(|known| known.last()) else { return };
        for node in report.node_status.iter().filter(|node| node.phase == NodePhase::InProgress) {
            let start = millis(node.start_time.as_ref().expect("a node in progress has begun").0);
            let deadline = start + timeout(&spec.spec) + GRACE;
            assert!(
                deadline > now,
                "{} is in progress in {job}, past its deadline {deadline}",
                node.node_name
            );
        }
    }

    pub(crate) fn expires(&self, api: &Api, job: &JobUid, now: u64) {
        let Some(stored) = api.jobs.get(job) else { return };
        let ended = stored.object.status.as_ref().and_then(|status| status.completion_time.as_ref());
        let ended = millis(ended.expect("deleted, and its end is not written").0);
        let ttl =
            |spec: &ImagePrePullJobSpec| spec.ttl_seconds_after_finished.map(|ttl| ttl.unsigned_abs() * 1000);
        let due = |spec| ttl(spec).is_some_and(|ttl| ended + ttl <= now);
        assert!(self.in_force(job, now).any(due), "{job} is deleted before its time");
    }

    pub(crate) fn unsendable(&mut self, node: &NodeName, job: &JobUid, attempt: u32) {
        self.unsendable.insert((node.clone(), TaskId { job: job.clone(), attempt }));
    }

    pub(crate) fn cancelled(&mut self, node: &NodeName, task: &TaskId) {
        self.cancelled.insert((node.clone(), task.clone()));
    }

    pub(crate) fn unreached(&mut self, node: &NodeName, job: &JobUid, attempt: u32, now: u64) {
        self.returned.insert((node.clone(), TaskId { job: job.clone(), attempt }), now);
    }

    // ---- what the API server takes

    /// `unread`: of an earlier life, and the leader has read the object before. The leader will replace it.
    pub(crate) fn landed(&mut self, api: &Api, job: &JobUid, content: &Content, unread: bool, _now: u64) {
        match content {
            Content::Report(report) => {
                add_up(&report.summary, report.node_status.iter());
                // Of a job that is gone it is collected, and may be made again by an earlier life.
                if !unread && api.jobs.contains_key(job) {
                    self.leave(api, job);
                    self.report(job, report);
                }
                self.concurrency(api, job);
            }
            Content::Status(status) => {
                assert!(status.node_status.len() <= MAX_NODES_IN_STATUS, "(8)");
                let Summary { desired, pending, in_progress, successful, failure, unknown, skipped: _ } =
                    status.summary;
                assert_eq!(pending + in_progress + successful + failure + unknown, desired, "(8) {job}");
                if !unread {
                    self.status(job, status);
                }
            }
        }
    }

    /// Nodes that are in no report any more were deleted before they had begun.
    fn leave(&mut self, api: &Api, job: &JobUid) {
        let of_job = self.nodes.keys().filter(|(of, _)| of == job);
        let gone = of_job.filter(|(_, node)| api.record(job, node).is_none());
        for key in gone.cloned().collect::<Vec<_>>() {
            let task = TaskId { job: job.clone(), attempt: 1 };
            let (attempt, phase) = self.nodes[&key];
            assert!(
                attempt <= 1 && !is_final(phase) && !self.running.contains(&(key.1.clone(), task)),
                "(8) {} has left {job} as {phase:?}/{attempt}",
                key.1
            );
            self.nodes.remove(&key);
        }
    }

    fn report(&mut self, job: &JobUid, report: &ReportBody) {
        for record in &report.node_status {
            let node = NodeName(record.node_name.clone());
            let task = TaskId { job: job.clone(), attempt: record.attempt.max(1) };
            let key = (job.clone(), node.clone());
            let now = (record.attempt, record.phase);
            if let Some(before) = self.nodes.insert(key, now) {
                self.goes_on(job, &node, before, now);
            }
            let told = |outcomes: &[TaskOutcome]| {
                let said = self.said.get(&(node.clone(), task.clone()));
                said.is_some_and(|said| outcomes.iter().any(|outcome| said.contains(&(*outcome as u8))))
            };
            match record.phase {
                NodePhase::Successful => {
                    assert!(told(&[TaskOutcome::Succeeded]), "(4) {node} never said that {task} succeeded");
                }
                NodePhase::Failure => assert!(
                    self.unsendable.contains(&(node.clone(), task.clone()))
                        || told(&[
                            TaskOutcome::Failed,
                            TaskOutcome::DeadlineExceeded,
                            TaskOutcome::Cancelled
                        ]),
                    "(4) {node} never said that {task} failed"
                ),
                NodePhase::Pending => assert!(
                    !self.running.contains(&(node.clone(), task.clone())),
                    "(3) {node} works on {task}, and has no slot"
                ),
                NodePhase::InProgress | NodePhase::Unknown => {}
            }
        }
    }

    /// (8) A node never goes back within an attempt.
    fn goes_on(&mut self, job: &JobUid, node: &NodeName, before: (u32, NodePhase), now: (u32, NodePhase)) {
        let fine = match now.0.cmp(&before.0) {
            std::cmp::Ordering::Less => false,
            // What lay between need not have been written.
            std::cmp::Ordering::Greater => true,
            // Not begun: a Node that was deleted, and a further round.
            std::cmp::Ordering::Equal if now.0 == 0 => true,
            std::cmp::Ordering::Equal => match (before.1, now.1) {
                (NodePhase::Unknown, NodePhase::Successful | NodePhase::Failure) => true,
                (before, now) => !is_final(before) || before == now,
            },
        };
        assert!(fine, "(8) {node} of {job} went from {before:?} to {now:?}");
        if before.1 == NodePhase::Unknown && now == (before.0, NodePhase::Successful) {
            *self.late.entry(job.clone()).or_default() += 1;
        }
    }

    /// (3) When a node began, no more were in progress than the job allowed then.
    fn concurrency(&self, api: &Api, job: &JobUid) {
        // That a node gave its slot back need not be written where another report says who has it now.
        let ended = |record: &NodeStatus, start: u64| {
            let task = TaskId { job: job.clone(), attempt: record.attempt };
            let key = (NodeName(record.node_name.clone()), task);
            let returned = self.returned.get(&key).is_some_and(|at| *at >= start);
            self.said.contains_key(&key)
                || self.unsendable.contains(&key)
                || self.cancelled.contains(&key)
                || returned && !self.running.contains(&key)
        };
        let mut began: Vec<u64> = api
            .records(job)
            .filter(|record| record.phase == NodePhase::InProgress)
            .map(|record| {
                (record, millis(record.start_time.as_ref().expect("a node in progress has begun").0))
            })
            .filter(|(record, start)| !ended(record, *start))
            .map(|(_, start)| start)
            .collect();
        began.sort_unstable();
        for start in &began {
            let held = self.in_force(job, *start).all(|spec| spec.suspend);
            assert!(!held, "a node of {job} has begun at {start} while the job was suspended");
        }
        for &start in &began {
            let allowed =
                self.in_force(job, start).map(|spec| spec.image_pre_pull_template.concurrency).max();
            let allowed = usize::try_from(allowed.unwrap_or(0)).unwrap();
            let waits = |other: u64| {
                let shortest = self.in_force_since(job, other, start).map(timeout).min().unwrap_or(0);
                other <= start && other + shortest + GRACE > start
            };
            let held = began.iter().filter(|other| waits(**other)).count();
            assert!(held <= allowed, "(3) {held} nodes of {job} are in progress, {allowed} may be");
        }
    }

    fn status(&mut self, job: &JobUid, status: &ImagePrePullJobStatus) {
        let Some(spec) = self.delivered.get(job).and_then(|known| known.last()) else { return };
        if status.start_time.is_none() && is_bad(&spec.spec) {
            assert_eq!(status.phase, JobPhase::Failure, "(7) {job} is no valid job");
        }
        let Some(ended) = &status.completion_time else {
            if let Some(round) = self.over.remove(job) {
                assert!(status.retry > round, "(8) {job} was over and goes on without a retry");
            }
            return;
        };
        let before = self.over.insert(job.clone(), status.retry);
        assert_eq!(status.summary.in_progress, 0, "{job} is over and nodes are in progress");
        if before == Some(status.retry) {
            return;
        }
        let bad = status.summary.failure + status.summary.unknown;
        let late = self.late.get(job).copied().unwrap_or_default();
        let mut rules = self.in_force(job, millis(ended.0));
        let exceeded = |spec: &ImagePrePullJobSpec, bad| {
            let tolerance = Ratio::parse(&spec.image_pre_pull_template.failure_tolerate);
            tolerance.is_ok_and(|tolerance| tolerance.exceeded_by(bad, status.summary.desired))
        };
        match status.phase {
            JobPhase::Completed => {
                assert_eq!(status.summary.pending, 0, "{job} is Completed and nodes wait");
                assert!(rules.any(|spec| !exceeded(spec, bad)), "{job} is Completed with {bad} bad nodes");
            }
            JobPhase::Failure => assert!(
                rules.any(|spec| {
                    status.summary.desired == 0
                        || spec.active_deadline_seconds.is_some()
                        || spec.rollout.is_some()
                        || exceeded(spec, bad + late)
                }),
                "{job} is a Failure with {bad} bad nodes"
            ),
            JobPhase::Init | JobPhase::InProgress => panic!("{job} has an end and is {:?}", status.phase),
        }
    }

    // ---- what the edges do

    /// (3), (4) A task is carried out on its node, in its slot.
    pub(crate) fn started(&mut self, api: &Api, edge: &Edge, work: &Execution, _now: u64) {
        let (task, node) = (&work.task.id, &edge.node);
        let stored = edge.disk.get(task);
        assert!(stored.is_some(), "{node} begins {task}, which is not on its disk");
        for (known, done) in stored.iter().flat_map(|stored| &stored.images).zip(&work.done) {
            assert!(known.is_none() || known == done, "(1) {node} forgets what has ended of {task}");
        }
        self.running.insert((node.clone(), task.clone()));
        if !api.jobs.contains_key(&task.job) {
            return;
        }
        let record = api.record(&task.job, node);
        let record = record.unwrap_or_else(|| panic!("(4) {node} begins {task}, and is not in the job"));
        let current = record.attempt > task.attempt
            || record.attempt == task.attempt && record.phase != NodePhase::Pending;
        assert!(current, "(3) {node} begins {task}; API server: {:?}/{}", record.phase, record.attempt);
    }

    pub(crate) fn stopped(&mut self, node: &NodeName, task: &TaskId) {
        self.running.remove(&(node.clone(), task.clone()));
    }

    pub(crate) fn stopped_all(&mut self, node: &NodeName) {
        self.running.retain(|(running, _)| running != node);
    }

    /// (1) The image is fetched from the registry.
    pub(crate) fn pulls(&self, api: &Api, edge: &Edge, work: &Execution, index: usize) {
        let (task, image) = (&work.task, &work.task.images[index]);
        let whole = edge.images.contains(&image.reference);
        if !whole {
            return;
        }
        let (id, node) = (&task.id, &edge.node);
        assert!(image.policy == PullPolicy::Always, "(1) {node} pulls {} again", image.reference);
        // A repeated Assign of a forgotten task is a new one for the edge.
        if self.duplicates {
            return;
        }
        let known = edge.disk.get(id).and_then(|record| record.images.get(index).cloned().flatten());
        assert!(known.is_none(), "(1) {node} pulls image {index} of {id} again, which is in its ledger");
        let record =
            api.record(&id.job, node).filter(|record| record.attempt == id.attempt && id.attempt > 1);
        let there = record.and_then(|record| record.image_status.get(index));
        assert!(
            there.is_none_or(|there| there.status != Tristate::True),
            "(1) {node} pulls image {index} of {id} again, which an earlier attempt brought"
        );
    }

    pub(crate) fn said(&mut self, edge: &Edge, message: &EdgeMessage) {
        match message {
            EdgeMessage::Hello(_) | EdgeMessage::Progress(_) => {}
            EdgeMessage::Accepted { task } => {
                assert!(edge.disk.contains_key(task), "{} accepts {task}, not on its disk", edge.node);
            }
            EdgeMessage::Result(result) => {
                let stored = edge.disk.get(&result.task).and_then(|record| record.result.as_ref());
                let removed = |write: &Record| matches!(write, Record::Remove(task) if *task == result.task);
                let known = edge.disk.contains_key(&result.task) && !edge.writes.iter().any(removed);
                let refusal = !known && result.outcome != TaskOutcome::Succeeded;
                assert!(
                    stored == Some(result) || refusal,
                    "(2) {} says that {} ended, and that is not on its disk",
                    edge.node,
                    result.task
                );
                let key = (edge.node.clone(), result.task.clone());
                self.said.entry(key).or_default().insert(result.outcome as u8);
            }
        }
    }

    /// (2) The edge forgets a result.
    pub(crate) fn forgotten(&self, api: &Api, edge: &Edge, task: &TaskId, now: u64) {
        let Some(stored) = api.jobs.get(&task.job) else { return };
        let ended = stored.object.status.as_ref().and_then(|status| status.completion_time.as_ref());
        // What comes later still concerns nobody.
        if ended.is_some_and(|ended| millis(ended.0) + PARKED <= now) {
            return;
        }
        let node = &edge.node;
        let Some(record) = api.record(&task.job, node) else {
            panic!("(2) {node} forgets {task}, and the API server knows nothing of the node")
        };
        let result = edge.disk.get(task).and_then(|stored| stored.result.as_ref());
        let (attempt, phase) = (record.attempt.max(1), record.phase);
        assert!(
            attempt > task.attempt || (attempt == task.attempt && is_final(phase)),
            "(2) {node} forgets {task}, and the API server says {phase:?}/{attempt}"
        );
        if attempt == task.attempt
            && result.is_some_and(|result| result.outcome == TaskOutcome::Succeeded)
            && !edge.refused.contains(task)
            && !self.unsendable.contains(&(node.clone(), task.clone()))
            && !self.duplicates
        {
            assert_eq!(phase, NodePhase::Successful, "(2) {node} forgets that {task} succeeded");
        }
    }

    // ---- when all is quiet

    /// No edge works on what nobody wants.
    pub(crate) fn wanted(&self, api: &Api, edge: &Edge, task: &TaskId) {
        let record = api.jobs.get(&task.job).and_then(|_| api.record(&task.job, &edge.node));
        let wanted = record.is_some_and(|r| r.phase == NodePhase::InProgress && r.attempt == task.attempt);
        assert!(
            wanted || self.duplicates,
            "{} works on {task}, which nobody waits for: {:?}",
            edge.node,
            record.map(|r| (r.phase, r.attempt))
        );
    }

    /// Every node that has a slot has its task.
    pub(crate) fn works(&self, api: &Api, job: &JobUid, edge: &Edge, now: u64) {
        let Some(record) = api.record(job, &edge.node).filter(|record| record.phase == NodePhase::InProgress)
        else {
            return;
        };
        let start = millis(record.start_time.as_ref().expect("a node in progress has begun").0);
        let timeout = self.delivered.get(job).and_then(|known| known.last()).map(|last| timeout(&last.spec));
        let task = TaskId { job: job.clone(), attempt: record.attempt };
        assert!(
            start + timeout.unwrap_or(0) <= now
                || edge.agent.open_tasks().iter().any(|open| open.task == task),
            "{} is to work on {task} and knows nothing of it",
            edge.node
        );
    }

    /// Every job has ended, and its status agrees with its reports.
    pub(crate) fn settled(api: &Api) {
        for (uid, stored) in &api.jobs {
            let status = stored.object.status.clone().unwrap_or_default();
            let over = matches!(status.phase, JobPhase::Completed | JobPhase::Failure);
            assert!(over, "{uid} does not end: {:?} {:?} {}", status.phase, status.summary, status.reason);
            assert_eq!(status.observed_generation, stored.object.metadata.generation, "{uid}");
            if status.start_time.is_none() {
                continue;
            }
            let mut names: Vec<_> = api.records(uid).map(|record| &record.node_name).collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "(8) a node of {uid} is in two reports");
            add_up(&Summary { skipped: 0, ..status.summary }, api.records(uid));
            for shown in &status.node_status {
                let record = api.record(uid, &NodeName(shown.node_name.clone()));
                assert_eq!(record.map(|r| (r.phase, r.attempt)), Some((shown.phase, shown.attempt)), "{uid}");
            }
        }
    }
}

fn add_up<'a>(summary: &Summary, nodes: impl Iterator<Item = &'a NodeStatus>) {
    let mut counted = Summary { skipped: summary.skipped, ..Summary::default() };
    for node in nodes {
        counted.desired += 1;
        *match node.phase {
            NodePhase::Pending => &mut counted.pending,
            NodePhase::InProgress => &mut counted.in_progress,
            NodePhase::Successful => &mut counted.successful,
            NodePhase::Failure => &mut counted.failure,
            NodePhase::Unknown => &mut counted.unknown,
        } += 1;
    }
    assert_eq!(*summary, counted, "(8) the summary does not add up");
}
