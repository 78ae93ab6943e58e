//! Rules for the nodes of a job.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{NodePhase, NodeStatus};
use prepull_api::failure::FailureCode;
use prepull_api::task::{JobUid, NodeName, Task, TaskId, TaskOutcome};
use prepull_engine::prepull::aggregate::FIRST_ATTEMPT;
use prepull_engine::prepull::controller::Dispatch;
use prepull_engine::prepull::rollout::is_rechecking;
use prepull_engine::prepull::validate::WaveStep;

use super::{Check, RECHECK, deadline, is_final};
use crate::api::Api;
use crate::world::millis;

impl Check {
    /// Write, then act: a task is dispatched only if the API server has the node as in progress. The task pulls
    /// what the record of its start names.
    pub(crate) fn dispatched(&self, api: &Api, order: &Dispatch) {
        let (job, node) = (&order.job.uid, &order.node);
        assert!(!self.was_cancelled(job), "{job} was cancelled, and {node} starts");
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
        let task = TaskId { job: job.clone(), attempt: order.attempt };
        assert_eq!(
            record.map(is_rechecking),
            Some(order.only_look),
            "{task} on {node} only looks, or it should"
        );
        self.removes(order);
        let references: Vec<_> = order.plan.images.iter().map(|image| image.pull.to_string()).collect();
        let named = record.into_iter().flat_map(|record| &record.image_status);
        let named: Vec<_> = named.map(|image| image.pulled_image.clone()).collect();
        assert_eq!(references, named, "{task} on {node} does not pull what its record names");
    }

    /// A task is handed to a session: it is what it was before.
    pub(crate) fn sent(&mut self, node: &NodeName, task: &Task) {
        let references: Vec<_> = task.images.iter().map(|image| image.reference.clone()).collect();
        let key = (node.clone(), task.id.clone());
        let first = self.references.entry(key).or_insert_with(|| references.clone());
        assert_eq!(*first, references, "{} on {node} has changed", task.id);
    }

    /// (3) No written report has a node in progress past its deadline, or out of time before its deadline.
    pub(super) fn emitted_report(&mut self, job: &JobUid, report: &ReportBody, now: u64) {
        let accepted = self.accepted(job).cloned();
        for node in &report.node_status {
            let name = &node.node_name;
            let runs = node.phase == NodePhase::InProgress;
            assert!(!runs || !self.is_cancelled(job), "{job} was cancelled, and {name} runs");
            self.emitted.insert((job.clone(), NodeName(name.clone())), node.phase);
            // Its record has the times of its pull. A re-check has a time of its own.
            if is_rechecking(node) {
                let until = self.rechecks.get(job).map_or(0, |since| since + RECHECK);
                let at_work = node.phase == NodePhase::InProgress && accepted.is_some();
                assert!(!at_work || now < until, "(3) {name} of {job} is still being checked, past {until}");
                continue;
            }
            let Some(start) = node.start_time.as_ref().map(|start| millis(start.0)) else {
                assert_ne!(node.phase, NodePhase::InProgress, "{name} of {job} has not started");
                continue;
            };
            if node.phase == NodePhase::InProgress
                && let Some(spec) = &accepted
            {
                let counted = start.max(self.resumed.get(job).copied().unwrap_or(0));
                let deadline = if spec.pause { u64::MAX } else { deadline(spec, counted) };
                assert!(deadline > now, "(3) {name} is in progress in {job}, past its deadline {deadline}");
            }
            // What it has waited for a secret counts, also under an earlier number of the attempt.
            let has_waited = (1..=node.attempt).any(|attempt| {
                let task = TaskId { job: job.clone(), attempt };
                self.postponed.contains(&(NodeName(name.clone()), task))
            });
            let is_out_of_time =
                node.phase == NodePhase::Unknown && node.reason.starts_with("no result within");
            if is_out_of_time && !has_waited {
                let specs = self.in_force_since(job, start, now);
                let earliest = specs.map(|spec| deadline(spec, start)).min().unwrap_or(start);
                assert!(
                    earliest <= now,
                    "(3) {name} is out of time in {job}, and may go on until {earliest}"
                );
            }
        }
    }

    /// Starts in a late write of a killed cloudcore, which the leader does not know: nothing was sent, nor will be.
    /// Where a user had deleted the report, the next leader begins with this older one.
    pub(super) fn unread(&mut self, job: &JobUid, report: &ReportBody) {
        for record in &report.node_status {
            self.nodes.remove(&(job.clone(), NodeName(record.node_name.clone())));
            if let Some(start) = &record.start_time {
                self.unread.insert((job.clone(), NodeName(record.node_name.clone()), millis(start.0)));
            }
        }
    }

    /// The API server has the starts in this report.
    pub(super) fn recorded(&mut self, job: &JobUid, report: &ReportBody) {
        let started = report.node_status.iter().filter(|record| record.phase == NodePhase::InProgress);
        let started = started.map(|record| (job.clone(), NodeName(record.node_name.clone()), record.attempt));
        self.recorded.extend(started);
    }

    pub(crate) fn unsendable(&mut self, node: &NodeName, job: &JobUid, attempt: u32) {
        self.unsendable.insert((node.clone(), TaskId { job: job.clone(), attempt }));
    }

    pub(crate) fn postponed(&mut self, node: &NodeName, job: &JobUid, attempt: u32) {
        self.postponed.insert((node.clone(), TaskId { job: job.clone(), attempt }));
    }

    pub(crate) fn cancelled(&mut self, node: &NodeName, task: &TaskId) {
        self.cancelled.insert((node.clone(), task.clone()));
    }

    /// (8) Only a node that has not started can leave a job.
    pub(super) fn leave(&mut self, api: &Api, job: &JobUid) {
        let first = api.first_attempt(job);
        let follows_nodes = self.accepted(job).is_some_and(|spec| spec.follow_nodes);
        let of_job = self.nodes.keys().filter(|(of, _)| of == job);
        let gone = of_job.filter(|(_, node)| api.record(job, node).is_none());
        for key in gone.cloned().collect::<Vec<_>>() {
            let task = TaskId { job: job.clone(), attempt: first };
            let (attempt, phase) = self.nodes[&key];
            // A name without a Node has failed. With the Node it's pending, which needn't have been written.
            let was_missing = attempt == 0 && phase == NodePhase::Failure && follows_nodes;
            assert!(
                was_missing
                    || attempt <= first && !is_final(phase) && !self.running.contains(&(key.1.clone(), task)),
                "(8) {} has left {job} as {phase:?}/{attempt}",
                key.1
            );
            self.nodes.remove(&key);
        }
    }

    pub(super) fn report(&mut self, api: &Api, job: &JobUid, report: &ReportBody) {
        let first = api.first_attempt(job);
        assert_eq!(report.first_attempt.unwrap_or(FIRST_ATTEMPT), first, "a report of another run of {job}");
        for record in &report.node_status {
            assert!(record.attempt == 0 || record.attempt >= first, "an attempt of an earlier run of {job}");
            let node = NodeName(record.node_name.clone());
            let task = TaskId { job: job.clone(), attempt: record.attempt.max(first) };
            let key = (job.clone(), node.clone());
            let now = (record.attempt, record.phase);
            if let Some(before) = self.nodes.insert(key, now) {
                self.goes_on(job, &node, before, now);
            }
            self.is_chosen(job, &node);
            self.is_removal(record, &node, &task);
            let told = |outcomes: &[TaskOutcome]| {
                let said = self.said.get(&(node.clone(), task.clone()));
                said.is_some_and(|said| outcomes.iter().any(|outcome| said.contains(&(*outcome as u8))))
            };
            match record.phase {
                // It keeps the result that it had.
                NodePhase::Successful
                    if record
                        .recheck
                        .as_ref()
                        .is_some_and(|recheck| !recheck.not_checked_reason.is_empty()) => {}
                NodePhase::Successful => {
                    assert!(told(&[TaskOutcome::Succeeded]), "(4) {node} never said that {task} succeeded");
                }
                // A name that had no Node when the job began.
                NodePhase::Failure
                    if record.attempt == 0 && record.code == Some(FailureCode::NodeNotFound) => {}
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
                NodePhase::Unknown => {
                    let start = (job.clone(), node.clone(), record.attempt);
                    let is_deleted =
                        record.attempt > first && record.reason.starts_with("the Node was deleted");
                    assert!(
                        self.recorded.contains(&start) || is_deleted,
                        "{node} of {job} counts as failed and has not started: {}",
                        record.reason
                    );
                }
                NodePhase::InProgress => {}
            }
        }
    }

    /// A job that names its nodes has no others, even if people add names later.
    fn is_chosen(&self, job: &JobUid, node: &NodeName) {
        let Some(beginning) = self.beginnings.get(job) else { return };
        let names = &beginning.image_pre_pull_template.node_names;
        assert!(names.is_empty() || names.contains(&node.0), "{node} is in {job}, which named {names:?}");
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
        let start_of = |record: &NodeStatus| record.start_time.as_ref().map(|start| millis(start.0));
        let in_progress = api.records(job).filter(|record| record.phase == NodePhase::InProgress);
        // A look takes no link, so all nodes are asked at once.
        let in_progress = in_progress.filter(|record| !is_rechecking(record));
        let mut began: Vec<u64> = in_progress
            .filter_map(|record| Some((record, start_of(record)?)))
            .filter(|(record, start)| !self.has_ended(job, record, *start))
            .map(|(_, start)| start)
            .collect();
        began.sort_unstable();
        for start in &began {
            let held = self.in_force(job, *start).all(|spec| spec.suspend || spec.pause);
            assert!(!held, "a node of {job} started at {start} while the job was suspended");
        }
        for &start in &began {
            let allowed =
                self.in_force(job, start).map(|spec| spec.image_pre_pull_template.concurrency.max(1)).max();
            let allowed = usize::try_from(allowed.unwrap_or(0)).unwrap();
            let waits = |other: u64| {
                let specs = self.in_force_since(job, other, start);
                let earliest = specs.map(|spec| deadline(spec, other)).min().unwrap_or(other);
                other <= start && earliest > start
            };
            let held = began.iter().filter(|other| waits(**other)).count();
            assert!(held <= allowed, "(3) {held} nodes of {job} are in progress, and {allowed} are allowed");
        }
    }

    /// Whether a node that is in progress in the API server has ended nevertheless. One report may have a node's start
    /// before another one has the end of the node that held the slot before.
    fn has_ended(&self, job: &JobUid, record: &NodeStatus, start: u64) -> bool {
        let task = TaskId { job: job.clone(), attempt: record.attempt };
        let key = (NodeName(record.node_name.clone()), task);
        let unread = (job.clone(), key.0.clone(), start);
        self.unread.contains(&unread)
            || self.said.contains_key(&key)
            || self.unsendable.contains(&key)
            || self.cancelled.contains(&key)
    }

    /// No node of a wave starts before those of earlier waves have ended. Only for a job with the same waves from its
    /// start to its end: in its first round, with the nodes and the steps that it began with.
    pub(super) fn waves(&self, api: &Api, job: &JobUid) {
        let since = self.run_since.get(job).copied().unwrap_or(0);
        let specs = || self.in_force_since(job, since, u64::MAX);
        let Some(rollout) = specs().find_map(|spec| spec.rollout.as_ref()) else { return };
        let differs =
            |spec: &ImagePrePullJobSpec| spec.follow_nodes || spec.rollout.as_ref() != Some(rollout);
        if self.has_deleted_nodes || specs().any(differs) {
            return;
        }
        let mut started: Vec<(&NodeStatus, u64)> = api
            .records(job)
            .filter(|record| record.phase != NodePhase::Pending)
            .filter_map(|record| Some((record, millis(record.start_time.as_ref()?.0))))
            .collect();
        if started.iter().any(|(record, _)| record.attempt > api.first_attempt(job)) {
            return;
        }
        started.sort_by_key(|(_, start)| *start);
        // Not all reports need be there. A job that was deleted has no waves any more.
        let status = api.jobs.get(job).and_then(|stored| stored.object.status.as_ref());
        let Some(desired) = status.map(|status| status.summary.desired) else { return };
        let sizes = rollout.steps.iter().map(|step| WaveStep::parse(step).unwrap().nodes(desired) as usize);
        for size in sizes.filter(|size| *size < started.len()) {
            for (late, late_start) in &started {
                let earlier: Vec<_> = started.iter().filter(|(_, other)| other < late_start).collect();
                if earlier.len() < size {
                    continue;
                }
                let runs = |record: &NodeStatus, start: u64| {
                    record.phase == NodePhase::InProgress && !self.has_ended(job, record, start)
                };
                // Of nodes that started at the same moment, any may have belonged to the earlier wave.
                let next = earlier.get(size).map_or(*late_start, |(_, start)| *start);
                let of_wave = earlier.iter().take(size).filter(|(_, start)| *start < next);
                let waits_for = of_wave.into_iter().find(|(record, start)| runs(record, *start));
                if let Some((record, _)) = waits_for {
                    let (late, runs) = (&late.node_name, &record.node_name);
                    panic!("{late} of {job} has started, and {runs} of an earlier wave has not ended");
                }
            }
        }
    }
}
