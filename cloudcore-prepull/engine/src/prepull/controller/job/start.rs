//! The start of a job, and its continuation after a restart.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::report::{ImagePrePullReport, ReportBody};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodeStatus, Summary};
use prepull_api::task::NodeName;
use prepull_api::wire::truncate_reason;

use super::super::{Effects, JobObject, StatusOrReport, rest_of};
use super::members::{fresh_record, missing_record, plan_nodes};
use super::stored::{Resumed, RoundRequest, StoredRecords, known_rounds};
use super::{
    Course, JobEvents, JobOutput, Members, NodeViews, PrepullJob, SpecState, WaitingJob, generation_of, spec,
    uid_of,
};
use crate::prepull::aggregate::FIRST_ATTEMPT;
use crate::prepull::controller::parked::is_end_unknown;
use crate::prepull::download::WindowRule;
use crate::prepull::plan;
use crate::prepull::rollout::{REMOVAL_GRACE, REPORT_GRACE, Rollout, RolloutSettings, is_missing};
use crate::prepull::validate::{self, ValidatedJob};
use crate::shared::counted::counted_len;
use crate::shared::objects::ObjectId;
use crate::shared::reasons;
use crate::shared::writes::WritePace;

impl PrepullJob {
    /// A job that was held knows its spec again: the nodes that reports are lost of can be chosen.
    pub(super) fn find_lost_nodes(&mut self, job: &ValidatedJob, nodes: &NodeViews) {
        let Some(status) = self.course.take_lost_reports_status() else { return };
        let known = self.members.rollout().records().map(|record| record.node_name.clone()).collect();
        for record in lost_records(job, &status, known, nodes) {
            self.members.rollout_mut().add(record);
        }
        self.output.shards.grow(self.members.rollout().len());
    }

    /// A job that is new to this run of cloudcore. `reports`: those that the API server has of it.
    /// `report_capacity`: nodes in a further one, at most.
    pub(in crate::prepull::controller) fn load(
        object: &JobObject,
        reports: Vec<ImagePrePullReport>,
        nodes: &NodeViews,
        report_capacity: usize,
        effects: &mut Effects<'_>,
    ) -> Self {
        let rest = rest_of(object);
        let name = rest.metadata.name.clone().unwrap_or_default();
        let mut job = Self {
            waiting: None,
            next: None,
            spec: SpecState::default(),
            course: Course::default(),
            members: Members::without_nodes(),
            output: JobOutput::new(report_capacity),
            events: JobEvents::new(ObjectId { namespace: String::new(), name, uid: uid_of(object) }),
        };
        job.spec.set_generation(generation_of(object));
        let status = rest.status.clone().unwrap_or_default();
        job.output.set_conditions(&status.conditions);
        job.output.note_version(StatusOrReport::Status, rest.metadata.resource_version.clone());
        for report in &reports {
            let version = report.metadata.resource_version.clone();
            job.output.note_version(StatusOrReport::Report(report.body.index), version);
        }
        let reports = reports.into_iter().map(|report| report.body);
        let is_of_run = |report: &ReportBody| report.first_attempt == status.first_attempt;
        let (reports, earlier): (Vec<_>, Vec<_>) = reports.partition(is_of_run);
        job.output.set_earlier_reports(earlier.iter().map(|report| report.index).collect());
        job.course = Course::counting_from(status.first_attempt.unwrap_or(FIRST_ATTEMPT));
        if status.start_time.is_some() {
            job.resume(object, status, reports, nodes, effects);
        } else if status.phase == JobPhase::Failure && status.observed_generation == rest.metadata.generation
        {
            job.course.set_unstarted(status.phase, status.reason);
        } else {
            job.begin_run(object, nodes, effects);
        }
        job
    }

    /// Chooses the nodes of a new job and plans for them.
    pub(super) fn begin_run(&mut self, object: &JobObject, nodes: &NodeViews, effects: &mut Effects<'_>) {
        self.waiting = None;
        let object = match object {
            Ok(object) => object,
            Err(unreadable) => return self.refuse(reasons::INVALID_SPEC, &unreadable.error, effects),
        };
        let job = match validate::validate(object) {
            Ok(job) => Arc::new(job),
            Err(refusal) => return self.refuse(reasons::INVALID_SPEC, &refusal.to_string(), effects),
        };
        let mut selection = plan::select_nodes(&job, nodes);
        let waits = selection.waits_for_ready();
        let plan = match plan::plan_job(&job, nodes) {
            Ok(plan) => plan.nodes,
            // It begins with no node, and ends.
            Err(_) if waits && job.policy.cancel => Vec::new(),
            Err(refusal) if waits => {
                self.members.skip_all(selection.skipped);
                return self.wait_for_ready(object, job, &refusal.message, effects);
            }
            Err(refusal) => {
                let has_nodes = !selection.eligible.is_empty();
                let reason = if has_nodes { reasons::INVALID_SPEC } else { reasons::NO_ELIGIBLE_NODES };
                self.members.skip_all(selection.skipped);
                return self.refuse(reason, &refusal.to_string(), effects);
            }
        };
        let allows_missing = job.policy.allow_missing_nodes || plan.is_empty();
        let missing = if allows_missing { Vec::new() } else { selection.take_missing() };
        let (images, chosen, skipped) = (job.images.len(), plan.len(), selection.skipped.len());
        let (images, chosen) = (counted_len(images, "image"), counted_len(chosen, "node"));
        let mut note = match &job.removal {
            Some(_) => format!("removal from {chosen}, {skipped} skipped"),
            None if job.upgrade.is_some() => format!("upgrade of {chosen}, {skipped} skipped"),
            None => format!("{images} on {chosen}, {skipped} skipped"),
        };
        if !missing.is_empty() {
            note = format!("{note}, {} not found", missing.len());
        }
        let records = plan.iter().map(|(node, _)| fresh_record(node));
        let records: Vec<_> = records.chain(missing.iter().map(missing_record)).collect();
        self.course.replace_policy(&job);
        self.course.begin_run(effects.now);
        self.spec.begin(&object.spec);
        self.output.begin_reports_of_run(records.len(), &job);
        let rollout = Rollout::new(rollout_settings(&job, &self.course), records)
            .counting_from(self.course.first_attempt());
        self.members.set_nodes(Some(job), plan.into_iter().collect(), rollout);
        if !self.course.is_cancelled() {
            self.events.emit_normal(reasons::STARTED, &note, effects);
            self.events.emit_left_out(&selection.skipped, &missing, effects);
        }
        self.members.skip_all(selection.skipped);
        self.output.mark_beginning();
    }

    /// The job has not begun, since none of its nodes is Ready.
    fn wait_for_ready(
        &mut self,
        object: &ImagePrePullJob,
        job: Arc<ValidatedJob>,
        why: &str,
        effects: &mut Effects<'_>,
    ) {
        let object = Box::new(ImagePrePullJob { status: None, ..object.clone() });
        self.waiting = Some(WaitingJob { object, job });
        self.spec.clear_refusal();
        let reason = truncate_reason(&format!("waits for a Ready node: {why}"));
        self.events.emit_warning(reasons::NO_ELIGIBLE_NODES, &reason, effects);
        self.course.set_unstarted(JobPhase::Init, reason);
        self.output.touch_status(WritePace::Now);
    }

    /// Begins a job that has waited, once a node of it is Ready, or refuses it once there is none to wait for.
    pub(super) fn begin_waiting(&mut self, nodes: &NodeViews, effects: &mut Effects<'_>) {
        let goes_on_waiting =
            |waiting: &WaitingJob| plan::select_nodes(&waiting.job, nodes).waits_for_ready();
        if let Some(waiting) = self.waiting.take_if(|waiting| !goes_on_waiting(waiting)) {
            self.begin_run(&Ok(waiting.object), nodes, effects);
        }
    }

    /// Begins the next run of a job that is over, once all of this one is written: then nothing waits for a write, and none
    /// is under way.
    pub(super) fn begin_next_run(&mut self, nodes: &NodeViews, effects: &mut Effects<'_>) -> bool {
        if !self.is_over() || !self.output.is_settled() {
            return false;
        }
        let Some(object) = self.next.take() else { return false };
        let last = self.members.rollout().last_attempt();
        self.course = Course::counting_from(self.course.next_first_attempt(last));
        self.members = Members::without_nodes();
        self.output.end_run();
        self.begin_run(&Ok(object), nodes, effects);
        true
    }

    /// Continues a job that an earlier run of cloudcore began: with the accepted spec, and then with the edits since.
    /// Its reports are the truth.
    fn resume(
        &mut self,
        object: &JobObject,
        status: ImagePrePullJobStatus,
        reports: Vec<ReportBody>,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) {
        let is_seen = status.observed_generation == rest_of(object).metadata.generation;
        let mut stored = StoredRecords::new(reports);
        let before = accepted_before(object, &status, is_seen, &stored.records);
        self.spec.restore(status.spec_hash.clone(), before.as_ref().map(|(spec, _)| spec.clone()));
        let job = before.map(|(_, job)| job);
        let lacks_records = |records: usize| (status.summary.desired as usize) > records;
        let has_lost_records = lacks_records(stored.records.len());
        // The end is a time of the status; with it `asks_again` knows that the job was over.
        if let Some(job) = &job {
            self.course.replace_policy(job);
        }
        let has_ended = status.completion_time.is_some();
        let may_begin_next_run = !is_seen || is_end_unknown(&status);
        let known = known_rounds(&status);
        self.course.restore(&status, has_ended, known, effects.now);
        let asked = self.read_edit(object).map_or(RoundRequest::Nothing, |edit| self.asks_again(&edit.spec));
        let is_asked_again = asked != RoundRequest::Nothing;
        let Resumed { rounds, is_over } = stored.resume(known, has_ended, asked);
        if rounds.rechecking {
            stored.begin_recheck(rounds.recheck, |record| node_exists(record, nodes));
        } else if !is_over {
            stored.begin_round(rounds.retry, |record| !is_missing(record) || node_exists(record, nodes));
        }
        let StoredRecords { mut records, reports, nodes: mut stored_nodes, outdated, .. } = stored;
        let goes_on = !is_over || is_asked_again;
        if has_lost_records && !goes_on {
            // The status shows results, and all nodes unless the job is large.
            let shown = status.node_status.iter();
            records.extend(shown.filter(|node| stored_nodes.insert(node.node_name.clone())).cloned());
        }
        if (!goes_on || job.is_none()) && lacks_records(records.len()) {
            self.course.keep_status(&status);
        }
        let mut plans = HashMap::new();
        if let Some(job) = job.as_ref().filter(|_| goes_on) {
            // Reports may be missing, and nodes may have joined since.
            let may_join = job.policy.follow_nodes && !rounds.rechecking && asked != RoundRequest::Recheck;
            if has_lost_records {
                records.extend(lost_records(job, &status, stored_nodes, nodes));
            } else if may_join {
                let chosen = plan::select_nodes(job, nodes).eligible.into_iter();
                let new = chosen.filter(|node| !stored_nodes.contains(&node.0));
                records.extend(new.map(|node| fresh_record(&node)));
            }
            plans = self::plan_nodes(job, &records, nodes);
        }
        self.output.restore_reports(&reports, job.as_ref());
        self.output.shards.grow(records.len());
        self.output.shards.rewrite(|index| outdated.contains(&index));
        let settings =
            job.as_ref().map_or_else(RolloutSettings::default, |job| rollout_settings(job, &self.course));
        let rollout = if is_over { Rollout::for_ended_job } else { Rollout::new };
        let mut rollout = rollout(settings, records).counting_from(self.course.first_attempt());
        rollout.resume_waves(&status.rollout.clone().unwrap_or_default());
        if rounds.retry > status.retry && !rounds.rechecking {
            rollout.restart_waves();
        }
        self.members.set_nodes(job.filter(|_| !is_over).map(Arc::new), plans, rollout);
        self.course.restore(&status, is_over, rounds, effects.now);
        if let Some(until) = self.course.recheck_until() {
            self.members.rollout_mut().resume_recheck(until);
        }
        self.members.resume_skipped(status.skipped_nodes, status.summary.skipped);
        if is_over {
            if self.is_ahead_of(&status.summary) {
                self.output.touch_status(WritePace::Slow);
            }
            self.apply_edit(object, Some(WritePace::Slow).filter(|_| !is_seen), nodes, effects);
            if !may_begin_next_run {
                self.ignore_next();
            }
        } else {
            self.members.remove_missing(nodes);
            self.output.touch_status(WritePace::Slow);
            let news = Some(WritePace::Now).filter(|_| !is_seen || self.is_held());
            self.apply_edit(object, news, nodes, effects);
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
        self.course.set_unstarted(JobPhase::Failure, refusal);
        self.events.emit_warning(reason, message, effects);
        self.output.touch_status(WritePace::Now);
    }
}

fn node_exists(record: &NodeStatus, nodes: &NodeViews) -> bool {
    nodes.contains_key(&NodeName(record.node_name.clone()))
}

/// The record of a chosen node without a report.
pub(super) fn chosen_again(shown: &NodeStatus) -> NodeStatus {
    let node = NodeName(shown.node_name.clone());
    if is_missing(shown) { missing_record(&node) } else { fresh_record(&node) }
}

/// The records of a job that goes on, beside those of the nodes that are known, where reports are lost. What the status
/// shows was chosen, whether or not it would be now.
fn lost_records(
    job: &ValidatedJob,
    status: &ImagePrePullJobStatus,
    mut known: HashSet<String>,
    nodes: &NodeViews,
) -> Vec<NodeStatus> {
    let shown = status.node_status.iter().filter(|node| known.insert(node.node_name.clone()));
    let mut records: Vec<_> = shown.map(chosen_again).collect();
    let mut chosen = plan::select_nodes(job, nodes);
    // A node that left the job is among the skipped ones.
    let left: HashSet<_> = status.skipped_nodes.iter().map(|node| &node.node_name).collect();
    let missing = chosen.take_missing().into_iter();
    let missing = missing.filter(|node| !job.policy.allow_missing_nodes && !left.contains(&node.0));
    records.extend(chosen.eligible.iter().filter(|node| !known.contains(&node.0)).map(fresh_record));
    records.extend(missing.filter(|node| !known.contains(&node.0)).map(|node| missing_record(&node)));
    records
}

/// What an earlier run of cloudcore carried out, if that is known and makes sense.
fn accepted_before(
    object: &JobObject,
    status: &ImagePrePullJobStatus,
    is_seen: bool,
    records: &[NodeStatus],
) -> Option<(ImagePrePullJobSpec, ValidatedJob)> {
    let now = object.as_ref().ok().map(|object| &object.spec);
    let chosen = records.iter().map(|record| record.node_name.clone());
    let spec = spec::accepted_before(status, now, is_seen, chosen)?;
    let job = ImagePrePullJob { metadata: rest_of(object).metadata.clone(), spec, status: None };
    let validated = validate::validate(&job).ok()?;
    Some((job.spec, validated))
}

/// For a job with an unknown accepted spec: nothing starts.
impl Default for RolloutSettings {
    fn default() -> Self {
        Self {
            concurrency: 1,
            tolerance: validate::Ratio::DEFAULT,
            timeout: validate::DEFAULT_TIMEOUT,
            grace: REPORT_GRACE,
            steps: Vec::new(),
            pause: Duration::ZERO,
            hold: true,
            windows: WindowRule::default(),
        }
    }
}

pub(super) fn rollout_settings(job: &ValidatedJob, course: &Course) -> RolloutSettings {
    RolloutSettings {
        concurrency: job.concurrency.get() as usize,
        tolerance: job.tolerance,
        timeout: job.timeout,
        grace: if job.removal.is_some() { REMOVAL_GRACE } else { REPORT_GRACE },
        steps: job.policy.steps.clone(),
        pause: job.policy.pause,
        hold: job.policy.suspend || job.policy.cancel,
        windows: WindowRule::from_job(job).resumed_at(course.resumed_at()),
    }
}
