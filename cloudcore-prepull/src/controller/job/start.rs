//! How a job begins, goes on after a restart, and takes a change of its spec.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, NodeStatus};
use prepull_api::task::NodeName;
use prepull_api::wire::bounded_reason;

use super::super::writes::Writes;
use super::super::{Action, JobObject};
use super::{Job, Run, uid_of};
use crate::plan::{self, NodeView};
use crate::rollout::{Rollout, Settings};
use crate::validate::{self, ValidatedJob};

impl Job {
    /// A job that cloudcore sees for the first time in this life.
    pub(in crate::controller) fn load(
        object: JobObject,
        nodes: &BTreeMap<NodeName, NodeView>,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) -> Self {
        let uid = uid_of(&object);
        let mut job = Self {
            name: String::new(),
            uid,
            generation: 0,
            spec: None,
            phase: JobPhase::Init,
            reason: String::new(),
            refusal: None,
            run: None,
            skipped: Vec::new(),
            skipped_total: 0,
            conditions: Vec::new(),
            node_events: 0,
            writes: Writes::default(),
        };
        match object {
            Err(unreadable) => {
                job.name = unreadable.name;
                job.generation = unreadable.generation;
                job.refuse("InvalidSpec", &unreadable.error, actions);
            }
            Ok(object) => {
                let object = *object;
                job.name = object.metadata.name.clone().unwrap_or_default();
                job.generation = object.metadata.generation.unwrap_or_default();
                let status = object.status.clone().unwrap_or_default();
                job.spec = Some(object.spec.clone());
                job.conditions.clone_from(&status.conditions);
                match (&status.start_time, status.phase) {
                    (Some(started), _) => job.resume(&object, status.clone(), started.0, nodes, actions),
                    (None, JobPhase::Failure) if status.observed_generation == object.metadata.generation => {
                        job.phase = status.phase;
                        job.reason = status.reason;
                    }
                    (None, _) => job.begin(&object, nodes, now, actions),
                }
            }
        }
        job
    }

    /// The object changed, or only its status did.
    pub(in crate::controller) fn changed(
        &mut self,
        object: JobObject,
        nodes: &BTreeMap<NodeName, NodeView>,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let object = match object {
            Ok(object) if object.metadata.generation.unwrap_or_default() != self.generation => *object,
            // Our own write, a label, or a spec that we cannot read and have said so.
            Ok(_) => return,
            Err(unreadable) if unreadable.generation == self.generation => return,
            Err(unreadable) => {
                self.generation = unreadable.generation;
                self.keep_going(&unreadable.error, actions);
                return;
            }
        };
        self.generation = object.metadata.generation.unwrap_or_default();
        let before = self.spec.replace(object.spec.clone());
        let Some(run) = &mut self.run else { return self.begin(&object, nodes, now, actions) };
        if run.completion_time.is_some() {
            return self.touch(false);
        }
        match validate::validate(&object) {
            Err(refusal) => self.keep_going(&refusal.to_string(), actions),
            Ok(job) => {
                run.rollout.configure(settings(&job));
                let changed = before.is_some_and(|before| fixed_part(before) != fixed_part(object.spec));
                if changed {
                    self.keep_going(
                        "what is pulled, and on which nodes, cannot change once a job has started: create a new job",
                        actions,
                    );
                } else {
                    self.refusal = None;
                    self.touch(true);
                }
            }
        }
    }

    /// Selects the nodes of a new job and plans for them.
    fn begin(
        &mut self,
        object: &ImagePrePullJob,
        nodes: &BTreeMap<NodeName, NodeView>,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let job = match validate::validate(object) {
            Ok(job) => Arc::new(job),
            Err(refusal) => return self.refuse("InvalidSpec", &refusal.to_string(), actions),
        };
        let selection = plan::select(&job, nodes);
        self.skipped_total = u32::try_from(selection.skipped.len()).unwrap_or(u32::MAX);
        self.skipped = selection.skipped;
        let plan = match plan::plan(&job, nodes) {
            Ok(plan) => plan,
            Err(refusal) => {
                let reason = if selection.eligible.is_empty() { "NoEligibleNodes" } else { "InvalidSpec" };
                return self.refuse(reason, &refusal.to_string(), actions);
            }
        };
        let fresh =
            |(node, _): &(NodeName, _)| NodeStatus { node_name: node.0.clone(), ..NodeStatus::default() };
        let records = plan.nodes.iter().map(fresh).collect::<Vec<_>>();
        let note =
            format!("{} images on {} nodes, {} skipped", job.images.len(), records.len(), self.skipped_total);
        self.phase = JobPhase::InProgress;
        self.reason.clear();
        self.refusal = None;
        self.run = Some(Run {
            rollout: Rollout::new(settings(&job), records),
            job: Some(job),
            plans: plan.nodes.into_iter().collect(),
            start_time: now,
            completion_time: None,
        });
        self.event(actions, false, "Started", &note);
        self.touch(true);
    }

    /// Goes on with a job that an earlier life of cloudcore began.
    fn resume(
        &mut self,
        object: &ImagePrePullJob,
        status: ImagePrePullJobStatus,
        started: Timestamp,
        nodes: &BTreeMap<NodeName, NodeView>,
        actions: &mut Vec<Action>,
    ) {
        let over = matches!(status.phase, JobPhase::Completed | JobPhase::Failure);
        let job = validate::validate(object);
        let settings = job.as_ref().map_or(
            Settings {
                concurrency: 1,
                tolerance: validate::Ratio::DEFAULT,
                timeout: Duration::from_secs(300),
            },
            settings,
        );
        let mut records = status.node_status;
        let mut plans = HashMap::new();
        let mut refusal = None;
        match &job {
            Ok(job) if !over => {
                // The status shows 200 nodes at the most: beyond that the selection is made again.
                if (status.summary.desired as usize) > records.len() {
                    let known: HashSet<String> = records.iter().map(|r| r.node_name.clone()).collect();
                    let missing =
                        plan::select(job, nodes).eligible.into_iter().filter(|node| !known.contains(&node.0));
                    records.extend(
                        missing.map(|node| NodeStatus { node_name: node.0, ..NodeStatus::default() }),
                    );
                }
                for record in &mut records {
                    let name = NodeName(record.node_name.clone());
                    match nodes.get(&name).map(|node| plan::plan_one(job, node)) {
                        Some(Ok(plan)) => _ = plans.insert(name, plan),
                        Some(Err(error)) => refusal = Some(error.to_string()),
                        None if record.phase == NodePhase::Pending => {
                            record.phase = NodePhase::Unknown;
                            "the Node was deleted before it started".clone_into(&mut record.reason);
                        }
                        None => {}
                    }
                }
            }
            Ok(_) => {}
            Err(error) => refusal = Some(error.to_string()),
        }
        self.phase = status.phase;
        self.reason = status.reason;
        self.run = Some(Run {
            job: job.ok().filter(|_| !over).map(Arc::new),
            plans,
            rollout: Rollout::new(settings, records),
            start_time: started,
            completion_time: status.completion_time.map(|time| time.0),
        });
        self.skipped_total = status.summary.skipped;
        self.skipped = status.skipped_nodes;
        if !over {
            self.touch(false);
            if let Some(error) = refusal {
                self.keep_going(&error, actions);
            }
        }
    }

    /// The job cannot run as it is. An edit of the spec gives it another chance.
    fn refuse(&mut self, reason: &'static str, message: &str, actions: &mut Vec<Action>) {
        self.phase = JobPhase::Failure;
        self.reason = bounded_reason(message);
        self.refusal = Some(self.reason.clone());
        self.event(actions, true, reason, message);
        self.touch(true);
    }

    /// A running job was edited in a way that cannot be followed.
    fn keep_going(&mut self, message: &str, actions: &mut Vec<Action>) {
        self.refusal = Some(bounded_reason(message));
        self.event(actions, true, "SpecChangeIgnored", &format!("the job goes on as it was: {message}"));
        self.touch(true);
    }
}

fn settings(job: &ValidatedJob) -> Settings {
    Settings { concurrency: job.concurrency.get() as usize, tolerance: job.tolerance, timeout: job.timeout }
}

/// The spec without what may change while the job runs.
fn fixed_part(mut spec: ImagePrePullJobSpec) -> ImagePrePullJobSpec {
    let template = &mut spec.image_pre_pull_template;
    template.concurrency = 0;
    template.timeout_seconds = 0;
    template.failure_tolerate.clear();
    spec
}
