//! Rules for the edges: starts, pulls, messages, and what they may forget.

use edgecore_prepull::tasks::agent::Execution;
use prepull_api::crd::status::{NodePhase, Tristate};
use prepull_api::task::{JobUid, NodeName, PullPolicy, TaskId, TaskOutcome};
use prepull_api::wire::EdgeMessage;
use prepull_engine::prepull::rollout::is_rechecking;

use super::{Check, PARKED, RECHECK, is_final, timeout};
use crate::api::Api;
use crate::edge::{Edge, Record};
use crate::world::millis;

impl Check {
    /// (3), (4) A node carries out a task only if the task is its own and the node has a slot for it.
    pub(crate) fn started(&mut self, api: &Api, edge: &Edge, work: &Execution, _now: u64) {
        let (task, node) = (&work.task.id, &edge.node);
        let stored = edge.disk.get(task);
        assert!(stored.is_some(), "{node} starts {task}, which is not on its disk");
        for (known, done) in stored.iter().flat_map(|stored| &stored.images).zip(&work.done) {
            assert!(known.is_none() || known == done, "(1) {node} has lost the results of images of {task}");
        }
        self.running.insert((node.clone(), task.clone()));
        if !api.jobs.contains_key(&task.job) {
            return;
        }
        let first = api.first_attempt(&task.job);
        // Its run is over, and it is cancelled.
        if task.attempt < first {
            return;
        }
        let record = api.record(&task.job, node);
        let record = record.unwrap_or_else(|| panic!("(4) {node} starts {task}, and is not in the job"));
        let current = record.attempt > task.attempt
            || record.attempt == task.attempt && record.phase != NodePhase::Pending;
        assert!(
            current,
            "(3) {node} starts {task}, and the API server has it as {:?}/{}",
            record.phase, record.attempt
        );
    }

    pub(crate) fn stopped(&mut self, node: &NodeName, task: &TaskId) {
        self.running.remove(&(node.clone(), task.clone()));
    }

    pub(crate) fn stopped_all(&mut self, node: &NodeName) {
        self.running.retain(|(running, _)| running != node);
    }

    /// (1) An image is pulled from the registry only if it is not complete, or if the job asks for that.
    pub(crate) fn pulls(&self, api: &Api, edge: &Edge, work: &Execution, index: usize) {
        let (task, image) = (&work.task, &work.task.images[index]);
        assert!(task.removal.is_none(), "{} pulls for {}, which removes", edge.node, task.id);
        assert_ne!(
            image.policy,
            PullPolicy::Never,
            "{} pulls {}, and should only look",
            edge.node,
            image.reference
        );
        let whole = edge.images.contains(&image.reference);
        if !whole {
            return;
        }
        let (id, node) = (&task.id, &edge.node);
        assert!(image.policy == PullPolicy::Always, "(1) {node} pulls {} again", image.reference);
        // If an Assign is repeated after the edge has forgotten the task, the edge takes it for a new one.
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
            "(1) {node} pulls image {index} of {id} again, which an earlier attempt has pulled"
        );
    }

    pub(crate) fn said(&mut self, edge: &Edge, message: &EdgeMessage) {
        match message {
            EdgeMessage::Hello(_)
            | EdgeMessage::Progress(_)
            | EdgeMessage::Trusts { .. }
            | EdgeMessage::State(_)
            | EdgeMessage::Blobs(_)
            | EdgeMessage::Configured { .. }
            | EdgeMessage::Other => {}
            EdgeMessage::Accepted { task } => {
                assert!(edge.disk.contains_key(task), "{} accepts {task}, not on its disk", edge.node);
            }
            EdgeMessage::Result(result) => {
                let stored = edge.disk.get(&result.task).and_then(|record| record.result.as_ref());
                let removed = |write: &Record| matches!(write, Record::Remove(task) if *task == result.task);
                let known = edge.disk.contains_key(&result.task) && !edge.writes.iter().any(removed);
                let refusal = !known && result.outcome != TaskOutcome::Succeeded;
                assert!(
                    stored == Some(result) || refusal || edge.unsaved.contains(&result.task),
                    "(2) {} says that {} ended, and that is not on its disk",
                    edge.node,
                    result.task
                );
                let key = (edge.node.clone(), result.task.clone());
                if let Some(removal) = &result.removal {
                    self.removals.entry(key.clone()).or_default().push(removal.clone());
                }
                self.said.entry(key).or_default().insert(result.outcome as u8);
            }
        }
    }

    /// (2) The edge forgets a result.
    pub(crate) fn forgotten(&self, api: &Api, edge: &Edge, task: &TaskId, now: u64) {
        let Some(stored) = api.jobs.get(&task.job) else { return };
        let ended = stored.object.status.as_ref().and_then(|status| status.completion_time.as_ref());
        // A result that arrives this late is acknowledged without being written.
        if ended.is_some_and(|ended| millis(ended.0) + PARKED <= now) {
            return;
        }
        let node = &edge.node;
        let first = api.first_attempt(&task.job);
        // The run that it was of is over.
        if task.attempt < first {
            return;
        }
        let Some(record) = api.record(&task.job, node) else {
            panic!("(2) {node} forgets {task}, and the API server knows nothing of the node")
        };
        let result = edge.disk.get(task).and_then(|stored| stored.result.as_ref());
        let (attempt, phase) = (record.attempt.max(first), record.phase);
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

    /// No edge works on a task that the cloud does not wait for.
    pub(crate) fn wanted(&self, api: &Api, edge: &Edge, task: &TaskId) {
        let record = api.jobs.get(&task.job).and_then(|_| api.record(&task.job, &edge.node));
        let wanted = record.is_some_and(|r| r.phase == NodePhase::InProgress && r.attempt == task.attempt);
        assert!(
            wanted || self.duplicates,
            "{} works on {task}, which the cloud does not wait for: {:?}",
            edge.node,
            record.map(|r| (r.phase, r.attempt))
        );
    }

    /// Every edge with a node in progress has the task.
    pub(crate) fn works(&self, api: &Api, job: &JobUid, edge: &Edge, now: u64) {
        let Some(record) = api.record(job, &edge.node).filter(|record| record.phase == NodePhase::InProgress)
        else {
            return;
        };
        let until = if is_rechecking(record) {
            self.rechecks.get(job).map_or(0, |since| since + RECHECK)
        } else {
            let start = millis(record.start_time.as_ref().expect("a node in progress has a start time").0);
            start + self.accepted(job).map_or(0, timeout)
        };
        let task = TaskId { job: job.clone(), attempt: record.attempt };
        // That this agent is too old for it need not be written yet.
        let is_too_old = self.too_old.contains(&(edge.node.clone(), task.clone()));
        assert!(
            until <= now || is_too_old || edge.agent.open_tasks().iter().any(|open| open.task == task),
            "{} should work on {task} and does not have it",
            edge.node
        );
    }
}
