//! How a job begins, goes on after a restart, and takes a change of its spec.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, NodeStatus, Summary};

use super::super::{Effects, JobObject};
use super::members::{fresh_record, plans};
use super::spec::{Divergence, effective_job, spec_hash};
use super::stored::StoredRecords;
use super::{Course, Job, JobEvents, Members, Nodes, Output, SpecState, uid_of};
use crate::prepull::plan;
use crate::prepull::rollout::{Rollout, Settings};
use crate::prepull::validate::{self, ValidatedJob};
use crate::shared::objects::ObjectId;
use crate::shared::reasons;
use crate::shared::writes::Pace;

const CHANGED: &str =
    "what is pulled, and on which nodes, cannot change once a job has started: create a new job";
const CHANGED_UNSEEN: &str = "the spec was changed while no cloudcore-prepull ran, so that what the job began with is \
     not known: no further node starts until the change is undone; create a new job instead";

impl Job {
    /// A job that is new to this run of cloudcore. `reports`: those that the API server has of it.
    /// `report_capacity`: nodes in a further one, at most.
    pub(in crate::prepull::controller) fn load(
        object: JobObject,
        reports: Vec<ReportBody>,
        nodes: &Nodes,
        report_capacity: usize,
        effects: &mut Effects<'_>,
    ) -> Self {
        let uid = uid_of(&object);
        let (name, generation) = match &object {
            Ok(job) => (job.metadata.name.clone(), job.metadata.generation),
            Err(unreadable) => (Some(unreadable.id.name.clone()), Some(unreadable.generation)),
        };
        let id = ObjectId { namespace: String::new(), name: name.unwrap_or_default(), uid };
        let mut job = Self {
            spec: SpecState::default(),
            course: Course::new(),
            members: Members::none(),
            output: Output::new(report_capacity),
            events: JobEvents::new(id),
        };
        job.spec.set_generation(generation.unwrap_or_default());
        match object {
            Err(unreadable) => job.refuse(reasons::INVALID_SPEC, &unreadable.error, effects),
            Ok(object) => {
                let status = object.status.clone().unwrap_or_default();
                job.output.set_conditions(&status.conditions);
                if status.start_time.is_some() || !reports.is_empty() {
                    job.resume(&object, status, reports, nodes, effects);
                } else if status.phase == JobPhase::Failure
                    && status.observed_generation == object.metadata.generation
                {
                    job.course.refuse(status.phase, status.reason);
                } else {
                    job.begin(&object, nodes, effects);
                }
            }
        }
        job
    }

    /// Takes the object as it is now. Returns `false` where only its status changed, or its metadata.
    pub(in crate::prepull::controller) fn apply_change(
        &mut self,
        object: JobObject,
        nodes: &Nodes,
        effects: &mut Effects<'_>,
    ) -> bool {
        let generation = match &object {
            Ok(job) => job.metadata.generation.unwrap_or_default(),
            Err(unreadable) => unreadable.generation,
        };
        if generation == self.spec.generation() {
            return false;
        }
        self.spec.set_generation(generation);
        match object {
            Ok(object) => self.apply_edit(&object, nodes, effects),
            Err(unreadable) => self.refuse_edit(&unreadable.error, effects),
        }
        true
    }

    fn apply_edit(&mut self, object: &ImagePrePullJob, nodes: &Nodes, effects: &mut Effects<'_>) {
        if !self.course.has_begun() {
            return self.begin(object, nodes, effects);
        }
        let is_same = self.spec.compare(&object.spec);
        let job = match validate::validate(object) {
            Ok(job) => job,
            Err(refusal) => return self.refuse_edit(&refusal.to_string(), effects),
        };
        if is_same && self.spec.is_beginning_unknown() {
            self.spec.adopt(&object.spec);
            self.members.replan(Arc::new(job.clone()), nodes);
        }
        self.configure(&job, effects);
        if is_same {
            self.spec.clear_refusal();
            self.output.touch_status(Pace::Now);
        } else {
            self.refuse_edit(CHANGED, effects);
        }
        if is_same && self.is_over() && self.course.wants_round() {
            self.start_requested_round(job, nodes, effects);
        }
        if self.course.policy().follow_nodes && self.course.is_running() {
            for node in nodes.values() {
                self.add_if_chosen(node);
            }
        }
    }

    /// Takes over what may change while the job runs.
    fn configure(&mut self, job: &ValidatedJob, effects: &mut Effects<'_>) {
        let before = self.course.configure(job);
        let rollout = self.members.rollout_mut();
        let is_new_timeout = rollout.settings().timeout != job.timeout;
        rollout.configure(settings(job, self.spec.is_beginning_unknown()));
        if self.is_over() {
            return;
        }
        // Edges enforce the timeout as well: send them the new one.
        let informed = if is_new_timeout { self.members.rollout().reachable() } else { Vec::new() };
        if before.suspend != job.policy.suspend {
            if job.policy.suspend {
                self.events.emit_normal(reasons::SUSPENDED, "no further node starts", effects);
            } else {
                self.course.restart_active_time(effects.now);
                self.events.emit_normal(reasons::RESUMED, "nodes start again", effects);
            }
        }
        for node in informed {
            self.dispatch(&node, effects);
        }
    }

    /// A job that was over begins another round for the nodes that did not succeed, if there are any.
    fn start_requested_round(&mut self, job: ValidatedJob, nodes: &Nodes, effects: &mut Effects<'_>) {
        let summary = self.members.rollout().summary();
        // Nodes may be in progress in a job that is over: see `resume`.
        if summary.failure + summary.unknown + summary.pending + summary.in_progress == 0 {
            return;
        }
        self.members.set_job(Arc::new(job));
        self.members.rollout_mut().forget_sessions();
        self.begin_round(nodes, effects);
    }

    /// Chooses the nodes of a new job and plans for them.
    fn begin(&mut self, object: &ImagePrePullJob, nodes: &Nodes, effects: &mut Effects<'_>) {
        let job = match validate::validate(object) {
            Ok(job) => Arc::new(job),
            Err(refusal) => return self.refuse(reasons::INVALID_SPEC, &refusal.to_string(), effects),
        };
        let selection = plan::select(&job, nodes);
        let skipped = u32::try_from(selection.skipped.len()).unwrap_or(u32::MAX);
        self.members.set_skipped(selection.skipped, skipped);
        let plan = match plan::plan(&job, nodes) {
            Ok(plan) => plan,
            Err(refusal) => {
                let has_nodes = !selection.eligible.is_empty();
                let reason = if has_nodes { reasons::INVALID_SPEC } else { reasons::NO_ELIGIBLE_NODES };
                return self.refuse(reason, &refusal.to_string(), effects);
            }
        };
        let records: Vec<_> = plan.nodes.iter().map(|(node, _)| fresh_record(node)).collect();
        let note = format!("{} images on {} nodes, {skipped} skipped", job.images.len(), records.len());
        self.course.configure(&job);
        self.course.begin(effects.now);
        self.spec.begin(&object.spec);
        self.output.restore_reports(&[], Some(&job));
        self.output.grow(records.len());
        let rollout = Rollout::new(settings(&job, false), records);
        self.members.begin(Some(job), plan.nodes.into_iter().collect(), rollout);
        self.events.emit_normal(reasons::STARTED, &note, effects);
        self.output.touch_status(Pace::Now);
    }

    /// Goes on with a job that an earlier run of cloudcore began. What its reports say is the truth.
    fn resume(
        &mut self,
        object: &ImagePrePullJob,
        status: ImagePrePullJobStatus,
        reports: Vec<ReportBody>,
        nodes: &Nodes,
        effects: &mut Effects<'_>,
    ) {
        let (effective, divergence) = effective_job(object, &status);
        let is_known = divergence != Divergence::BeginningUnknown;
        let job = validate::validate(&effective);
        let StoredRecords { mut records, reports, nodes: stored_nodes } = StoredRecords::new(reports);
        let has_lost_records = (status.summary.desired as usize) > records.len();
        // Nodes are in progress again: the earlier run had begun a further round, and not written so in the status.
        let has_round = status.completion_time.is_some()
            && records.iter().any(|record: &NodeStatus| record.phase == NodePhase::InProgress);
        // Without a job that can be carried out that round goes on as it is; with one it is begun anew.
        let goes_on_with_round = has_round && !(is_known && job.is_ok());
        let is_over = status.completion_time.is_some() && !goes_on_with_round;
        let mut refusal = None;
        let (mut settings, mut plans) = (Settings::default(), HashMap::new());
        match &job {
            Ok(job) => {
                self.course.configure(job);
                settings = self::settings(job, !is_known);
                let is_asked_again = is_over && job.policy.retry > status.retry;
                if (!is_over || is_asked_again) && is_known {
                    // Reports may not have been made, or were deleted; nodes may have joined meanwhile.
                    let may_be_incomplete = status.start_time.is_none() || has_lost_records;
                    if may_be_incomplete || job.policy.follow_nodes {
                        let chosen = plan::select(job, nodes).eligible.into_iter();
                        let new = chosen.filter(|node| !stored_nodes.contains(&node.0));
                        records.extend(new.map(|node| fresh_record(&node)));
                    }
                    plans = self::plans(job, &records, nodes);
                }
                if !is_over {
                    refusal = match divergence {
                        Divergence::None => None,
                        Divergence::Edited => Some(CHANGED.to_owned()),
                        Divergence::BeginningUnknown => Some(CHANGED_UNSEEN.to_owned()),
                    };
                }
            }
            Err(error) => refusal = Some(error.to_string()),
        }
        self.output.restore_reports(&reports, job.as_ref().ok());
        self.output.grow(records.len());
        let mut rollout = Rollout::new(settings, records);
        rollout.resume_waves(&status.rollout.clone().unwrap_or_default());
        if is_over {
            rollout = rollout.closed();
        }
        let carried_out = job.as_ref().ok().filter(|_| !is_over).cloned().map(Arc::new);
        self.members.begin(carried_out, plans, rollout);
        self.course.restore(&status, is_over, goes_on_with_round, effects.now);
        let hash = if status.spec_hash.is_empty() { spec_hash(&object.spec) } else { status.spec_hash };
        self.spec.restore(hash, &effective.spec, divergence);
        self.members.set_skipped(status.skipped_nodes, status.summary.skipped);
        if !is_over {
            self.members.remove_missing(nodes);
        }
        if is_over {
            let is_behind =
                status.observed_generation != object.metadata.generation || self.is_ahead_of(&status.summary);
            self.output.restore_status();
            // Where reports are missing the stored status says more than is known here.
            if is_behind && !has_lost_records {
                self.output.touch_status(Pace::Slow);
            }
            if let Ok(job) = job
                && is_known
                && self.course.wants_round()
            {
                self.start_requested_round(job, nodes, effects);
            }
            return;
        }
        self.output.touch_status(Pace::Slow);
        if let Some(error) = refusal {
            self.refuse_edit(&error, effects);
        }
    }

    /// Whether the reports hold late results that are not in the status yet. Where reports are missing the status knows
    /// more.
    fn is_ahead_of(&self, written: &Summary) -> bool {
        let counts = self.members.rollout().summary();
        counts.desired == written.desired && *counts != Summary { skipped: 0, ..written.clone() }
    }

    /// The job cannot run as it is. An edit of the spec gives it another chance.
    fn refuse(&mut self, reason: &'static str, message: &str, effects: &mut Effects<'_>) {
        let refusal = self.spec.refuse(message).to_owned();
        self.course.refuse(JobPhase::Failure, refusal);
        self.events.emit_warning(reason, message, effects);
        self.output.touch_status(Pace::Now);
    }

    /// A job that has begun was edited in a way that it cannot follow.
    fn refuse_edit(&mut self, message: &str, effects: &mut Effects<'_>) {
        self.spec.refuse(message);
        let note = if self.spec.is_beginning_unknown() {
            message.to_owned()
        } else {
            format!("the job goes on as it was: {message}")
        };
        self.events.emit_warning(reasons::SPEC_CHANGE_IGNORED, &note, effects);
        self.output.touch_status(Pace::Now);
    }
}

/// For a job whose spec makes no sense any more: as few nodes as possible.
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

fn settings(job: &ValidatedJob, is_beginning_unknown: bool) -> Settings {
    Settings {
        concurrency: job.concurrency.get() as usize,
        tolerance: job.tolerance,
        timeout: job.timeout,
        steps: job.policy.steps.clone(),
        pause: job.policy.pause,
        hold: job.policy.suspend || is_beginning_unknown,
    }
}
