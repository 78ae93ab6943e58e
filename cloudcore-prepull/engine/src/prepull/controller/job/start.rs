//! How a job begins, goes on after a restart, and takes a change of its spec.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{MAX_NODES_IN_REPORT, ReportBody};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, NodeStatus, Summary};
use prepull_api::task::NodeName;
use prepull_api::wire::truncate_reason;

use super::super::{Action, JobObject};
use super::stored::{Known, Spec, fixed_part, spec_hash};
use super::{Job, Nodes, Run, Shards, fresh_record, uid_of};
use crate::prepull::aggregate;
use crate::prepull::plan;
use crate::prepull::rollout::{Rollout, Settings};
use crate::prepull::validate::{self, ValidatedJob};
use crate::shared::reasons;
use crate::shared::writes::{Pace, Writes};

const CHANGED: &str =
    "what is pulled, and on which nodes, cannot change once a job has started: create a new job";
const CHANGED_UNSEEN: &str = "the spec was changed while no cloudcore-prepull ran, so that what the job began with is \
     not known: no further node starts until the change is undone; create a new job instead";

impl Job {
    /// A job that cloudcore sees for the first time in this life. `reports`: those that there are of it.
    /// `report_capacity`: nodes in a further one, at most.
    pub(in crate::prepull::controller) fn load(
        object: JobObject,
        reports: Vec<ReportBody>,
        nodes: &Nodes,
        report_capacity: usize,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) -> Self {
        let mut job = Self {
            name: String::new(),
            uid: uid_of(&object),
            generation: 0,
            tolerate: String::new(),
            pace: validate::Pace::default(),
            phase: JobPhase::Init,
            reason: String::new(),
            ended_as: None,
            refusal: None,
            run: None,
            skipped: Vec::new(),
            skipped_total: 0,
            conditions: Vec::new(),
            node_events: 0,
            report_capacity,
            writes: Writes::default(),
            delete_at: None,
        };
        match object {
            Err(unreadable) => {
                job.name = unreadable.id.name;
                job.generation = unreadable.generation;
                job.refuse(reasons::INVALID_SPEC, &unreadable.error, actions);
            }
            Ok(object) => {
                let object = *object;
                job.name = object.metadata.name.clone().unwrap_or_default();
                job.generation = object.metadata.generation.unwrap_or_default();
                let status = object.status.clone().unwrap_or_default();
                job.conditions.clone_from(&status.conditions);
                if status.start_time.is_some() || !reports.is_empty() {
                    job.resume(&object, status, reports, nodes, now, actions);
                } else if status.phase == JobPhase::Failure
                    && status.observed_generation == object.metadata.generation
                {
                    job.phase = status.phase;
                    job.reason = status.reason;
                } else {
                    job.begin(&object, nodes, now, actions);
                }
            }
        }
        job
    }

    /// The object changed. `false` where only its status did, or its metadata.
    pub(in crate::prepull::controller) fn changed(
        &mut self,
        object: JobObject,
        nodes: &Nodes,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) -> bool {
        let object = match object {
            Ok(object) if object.metadata.generation.unwrap_or_default() != self.generation => *object,
            // Our own write, a label, or a spec that we cannot read and have said so.
            Ok(_) => return false,
            Err(unreadable) if unreadable.generation == self.generation => return false,
            Err(unreadable) => {
                self.generation = unreadable.generation;
                self.keep_going(&unreadable.error, actions);
                return true;
            }
        };
        self.generation = object.metadata.generation.unwrap_or_default();
        self.edited(&object, nodes, now, actions);
        true
    }

    fn edited(&mut self, object: &ImagePrePullJob, nodes: &Nodes, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return self.begin(object, nodes, now, actions) };
        run.diverged = run.spec_hash != spec_hash(&object.spec);
        let job = match validate::validate(object) {
            Ok(job) => job,
            Err(refusal) => return self.keep_going(&refusal.to_string(), actions),
        };
        let same = !run.diverged;
        if same && run.held {
            // The change is undone.
            run.held = false;
            run.started = fixed_part(&object.spec);
            run.plans = plans(&job, run.rollout.records(), nodes);
            run.job = Some(Arc::new(job.clone()));
        }
        self.take_over(&job, now, actions);
        if same {
            self.refusal = None;
            self.writes.touch(Pace::Now);
        } else {
            self.keep_going(CHANGED, actions);
        }
        if same && self.run.as_ref().is_some_and(|run| run.is_over() && self.pace.retry > run.retry) {
            self.again(job, nodes, now, actions);
        }
        let Some(run) = &self.run else { return };
        if self.pace.follow_nodes && !run.is_over() {
            for node in nodes.values() {
                self.node_changed(node);
            }
        }
    }

    /// What may change while the job runs.
    fn take_over(&mut self, job: &ValidatedJob, now: Timestamp, actions: &mut Vec<Action>) {
        let before = std::mem::replace(&mut self.pace, job.pace.clone());
        self.tolerate = job.tolerance.to_string();
        let Some(run) = &mut self.run else { return };
        let new_timeout = run.rollout.settings().timeout != job.timeout;
        run.rollout.configure(settings(job, run.held));
        if run.is_over() {
            return;
        }
        // Their edges keep time as well.
        let told = if new_timeout { run.rollout.reachable() } else { Vec::new() };
        if before.suspend != job.pace.suspend {
            if job.pace.suspend {
                self.event(actions, false, reasons::SUSPENDED, "no further node starts");
            } else {
                run.active_since = now;
                self.event(actions, false, reasons::RESUMED, "nodes start again");
            }
        }
        for node in told {
            self.dispatch(&node, now, actions);
        }
    }

    /// A job that was over takes up the nodes that did not make it.
    fn again(&mut self, job: ValidatedJob, nodes: &Nodes, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        let summary = run.rollout.summary();
        // Nodes in progress: see `resume`.
        if summary.failure + summary.unknown + summary.pending + summary.in_progress == 0 {
            return;
        }
        run.job = Some(Arc::new(job));
        run.rollout.forget_sessions();
        self.retry(nodes, now, actions);
    }

    /// Selects the nodes of a new job and plans for them.
    fn begin(&mut self, object: &ImagePrePullJob, nodes: &Nodes, now: Timestamp, actions: &mut Vec<Action>) {
        let job = match validate::validate(object) {
            Ok(job) => Arc::new(job),
            Err(refusal) => return self.refuse(reasons::INVALID_SPEC, &refusal.to_string(), actions),
        };
        let selection = plan::select(&job, nodes);
        self.skipped_total = u32::try_from(selection.skipped.len()).unwrap_or(u32::MAX);
        self.skipped = selection.skipped;
        let plan = match plan::plan(&job, nodes) {
            Ok(plan) => plan,
            Err(refusal) => {
                let reason = if selection.eligible.is_empty() {
                    reasons::NO_ELIGIBLE_NODES
                } else {
                    reasons::INVALID_SPEC
                };
                return self.refuse(reason, &refusal.to_string(), actions);
            }
        };
        let records: Vec<_> = plan.nodes.iter().map(|(node, _)| fresh_record(node)).collect();
        let note =
            format!("{} images on {} nodes, {} skipped", job.images.len(), records.len(), self.skipped_total);
        self.phase = JobPhase::InProgress;
        self.reason.clear();
        self.refusal = None;
        self.tolerate = job.tolerance.to_string();
        self.pace = job.pace.clone();
        let mut shards = Shards::stored(&[], self.nodes_in_report(&job));
        shards.grow(records.len());
        self.run = Some(Run {
            rollout: Rollout::new(settings(&job, false), records),
            shards,
            job: Some(job),
            plans: plan.nodes.into_iter().collect(),
            start_time: now,
            active_since: now,
            completion_time: None,
            retry: 0,
            spec_hash: spec_hash(&object.spec),
            started: fixed_part(&object.spec),
            diverged: false,
            held: false,
        });
        self.event(actions, false, reasons::STARTED, &note);
        self.writes.touch(Pace::Now);
    }

    /// Goes on with a job that an earlier life of cloudcore began. What its reports say is the truth.
    fn resume(
        &mut self,
        object: &ImagePrePullJob,
        status: ImagePrePullJobStatus,
        reports: Vec<ReportBody>,
        nodes: &Nodes,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let hash = spec_hash(&object.spec);
        let Spec { diverged, known: unchanged, object } = Spec::of(object, &status);
        let job = validate::validate(&object);
        let Known { mut records, reports, nodes: seen } = Known::of(reports);
        let missing = (status.summary.desired as usize) > records.len();
        // Nodes are in progress again: an earlier life of cloudcore had begun a further round, and not written so in
        // the status.
        let again = status.completion_time.is_some()
            && records.iter().any(|record: &NodeStatus| record.phase == NodePhase::InProgress);
        // Where the job cannot be read any more, or is another one, the round is taken as it is.
        let round = again && !(unchanged && job.is_ok());
        let over = status.completion_time.is_some() && !round;
        let mut refusal = None;
        let (mut settings, mut plans) = (Settings::default(), HashMap::new());
        let mut capacity = MAX_NODES_IN_REPORT;
        match &job {
            Ok(job) => {
                self.tolerate = job.tolerance.to_string();
                self.pace = job.pace.clone();
                settings = self::settings(job, !unchanged);
                capacity = self.nodes_in_report(job);
                let asked_again = over && job.pace.retry > status.retry;
                if (!over || asked_again) && unchanged {
                    // Reports that were not made, or were deleted, and nodes that have joined meanwhile.
                    let lost = status.start_time.is_none() || missing;
                    if lost || job.pace.follow_nodes {
                        let selected = plan::select(job, nodes).eligible.into_iter();
                        records.extend(
                            selected.filter(|node| !seen.contains(&node.0)).map(|node| fresh_record(&node)),
                        );
                    }
                    plans = self::plans(job, &records, nodes);
                }
                if !over && diverged {
                    refusal = Some(if unchanged { CHANGED } else { CHANGED_UNSEEN }.to_owned());
                }
            }
            Err(error) => refusal = Some(error.to_string()),
        }
        let mut shards = Shards::stored(&reports, capacity);
        shards.grow(records.len());
        let mut rollout = Rollout::new(settings, records);
        rollout.resume_waves(&status.rollout.clone().unwrap_or_default());
        if over {
            rollout = rollout.closed();
        } else {
            rollout.without(nodes);
        }
        let start_time = status.start_time.map_or(now, |time| time.0);
        let was_suspended =
            status.conditions.iter().any(|c| c.type_ == aggregate::SUSPENDED && c.status == "True");
        self.run = Some(Run {
            job: job.as_ref().ok().filter(|_| !over).cloned().map(Arc::new),
            plans,
            rollout,
            shards,
            start_time,
            active_since: if was_suspended && !self.pace.suspend {
                now
            } else {
                status.active_since.map_or(start_time, |time| time.0)
            },
            completion_time: status.completion_time.filter(|_| over).map(|time| time.0),
            retry: status.retry + u32::from(round),
            spec_hash: if status.spec_hash.is_empty() { hash } else { status.spec_hash },
            started: fixed_part(&object.spec),
            diverged,
            held: !unchanged,
        });
        self.phase = if over { status.phase } else { JobPhase::InProgress };
        self.reason = status.reason;
        self.skipped_total = status.summary.skipped;
        self.skipped = status.skipped_nodes;
        let failed = status.conditions.iter().find(|condition| condition.type_ == aggregate::FAILED);
        self.ended_as = failed
            .filter(|condition| condition.reason == reasons::DEADLINE_EXCEEDED)
            .map(|_| reasons::DEADLINE_EXCEEDED);
        if over {
            // What is stored is what is in memory.
            self.writes = Writes::stored();
            // Where reports are missing what is stored says more than we know.
            let behind =
                status.observed_generation != object.metadata.generation || self.is_ahead_of(&status.summary);
            if behind && !missing {
                self.writes.touch(Pace::Slow);
            }
            if let Some(run) = &self.run
                && let Ok(job) = job
                && unchanged
                && self.pace.retry > run.retry
            {
                self.again(job, nodes, now, actions);
            }
            return;
        }
        self.writes.touch(Pace::Slow);
        if let Some(error) = refusal {
            self.keep_going(&error, actions);
        }
    }

    /// Late results may be in the reports, and not in the status yet. Where reports are missing the status knows more.
    fn is_ahead_of(&self, written: &Summary) -> bool {
        let counts = self.run.as_ref().map(|run| run.rollout.summary());
        counts.is_some_and(|counts| {
            counts.desired == written.desired && *counts != Summary { skipped: 0, ..written.clone() }
        })
    }

    fn nodes_in_report(&self, job: &ValidatedJob) -> usize {
        let images = job.images.iter().map(|image| image.image.as_str());
        aggregate::nodes_in_report(images).min(self.report_capacity)
    }

    /// The job cannot run as it is. An edit of the spec gives it another chance.
    fn refuse(&mut self, reason: &'static str, message: &str, actions: &mut Vec<Action>) {
        self.phase = JobPhase::Failure;
        self.reason = truncate_reason(message);
        self.refusal = Some(self.reason.clone());
        self.event(actions, true, reason, message);
        self.writes.touch(Pace::Now);
    }

    /// A job that has begun was edited in a way that cannot be followed.
    fn keep_going(&mut self, message: &str, actions: &mut Vec<Action>) {
        self.refusal = Some(truncate_reason(message));
        let held = self.run.as_ref().is_some_and(|run| run.held);
        let note = if held { message.to_owned() } else { format!("the job goes on as it was: {message}") };
        self.event(actions, true, reasons::SPEC_CHANGE_IGNORED, &note);
        self.writes.touch(Pace::Now);
    }
}

/// For a job that cannot be read any more: as few nodes as possible.
impl Default for Settings {
    fn default() -> Self {
        Self {
            concurrency: 1,
            tolerance: validate::Ratio::DEFAULT,
            timeout: validate::DEFAULT_TIMEOUT,
            steps: Vec::new(),
            pause: Duration::ZERO,
            hold: true,
        }
    }
}

fn settings(job: &ValidatedJob, held: bool) -> Settings {
    Settings {
        concurrency: job.concurrency.get() as usize,
        tolerance: job.tolerance,
        timeout: job.timeout,
        steps: job.pace.steps.clone(),
        pause: job.pace.pause,
        hold: job.pace.suspend || held,
    }
}

/// What each node pulls. A node that is gone, or for which the overriders have become impossible, has no plan:
/// nothing is sent to it any more.
pub(super) fn plans<'a>(
    job: &ValidatedJob,
    records: impl IntoIterator<Item = &'a NodeStatus>,
    nodes: &Nodes,
) -> HashMap<NodeName, Arc<plan::NodePlan>> {
    let mut shared = plan::Shared::default();
    let plan = |record: &NodeStatus| {
        let name = NodeName(record.node_name.clone());
        let plan = shared.plan_one(job, nodes.get(&name)?).ok()?;
        Some((name, plan))
    };
    records.into_iter().filter_map(plan).collect()
}
