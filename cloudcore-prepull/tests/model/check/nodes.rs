//! How the nodes of a job may fare.

use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{NodePhase, NodeStatus};
use prepull_api::task::{JobUid, NodeName, TaskId, TaskOutcome};
use prepull_engine::prepull::controller::{Content, Dispatch};

use super::{Check, GRACE, is_final, timeout};
use crate::api::Api;
use crate::world::millis;

impl Check {
    /// Write, then act: a task is dispatched only if the API server has the node as in progress.
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

    /// (3) No report that is written says that a node is in progress whose deadline has passed.
    pub(crate) fn emitted(&self, job: &JobUid, content: &Content, now: u64) {
        let Content::Report(report) = content else { return };
        let Some(spec) = self.delivered.get(job).and_then(|known| known.last()) else { return };
        for node in report.node_status.iter().filter(|node| node.phase == NodePhase::InProgress) {
            let start = millis(node.start_time.as_ref().expect("a node in progress has a start time").0);
            let deadline = start + timeout(&spec.spec) + GRACE;
            assert!(
                deadline > now,
                "{} is in progress in {job}, past its deadline {deadline}",
                node.node_name
            );
        }
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

    /// (8) Only a node that has not started can leave a job.
    pub(super) fn leave(&mut self, api: &Api, job: &JobUid) {
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

    pub(super) fn report(&mut self, job: &JobUid, report: &ReportBody) {
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

    /// (8) Within an attempt a node never goes back to an earlier phase.
    fn goes_on(&mut self, job: &JobUid, node: &NodeName, before: (u32, NodePhase), now: (u32, NodePhase)) {
        let fine = match now.0.cmp(&before.0) {
            std::cmp::Ordering::Less => false,
            // The phases in between need not have been written.
            std::cmp::Ordering::Greater => true,
            // The node had not started: its Node was deleted, and a further round began.
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

    /// (3) When a node started, no more nodes were in progress than the job allowed at that time.
    pub(super) fn concurrency(&self, api: &Api, job: &JobUid) {
        // One report may say that a node has started before another one says that the node has ended whose slot it took.
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
                (record, millis(record.start_time.as_ref().expect("a node in progress has a start time").0))
            })
            .filter(|(record, start)| !ended(record, *start))
            .map(|(_, start)| start)
            .collect();
        began.sort_unstable();
        for start in &began {
            let held = self.in_force(job, *start).all(|spec| spec.suspend);
            assert!(!held, "a node of {job} started at {start} while the job was suspended");
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
            assert!(held <= allowed, "(3) {held} nodes of {job} are in progress, and {allowed} are allowed");
        }
    }
}
