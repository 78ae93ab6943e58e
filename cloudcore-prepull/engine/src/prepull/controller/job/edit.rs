//! Edits of a job's spec. The job follows an edit, or continues with the accepted spec.

use std::sync::Arc;

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};

use super::super::{Effects, JobObject};
use super::start::rollout_settings;
use super::stored::RoundRequest;
use super::{NodeViews, PrepullJob, spec};
use crate::prepull::validate::{self, RunPolicy, ValidatedJob};
use crate::shared::reasons;
use crate::shared::writes::WritePace;

const CHANGED: &str = "what is pulled, or on which nodes, has changed, and takes effect in a new run once this one has ended: undo the change to prevent that, or create a new job";
const CHANGED_AFTER_END: &str = "what is pulled, or on which nodes, has changed: a new run begins";
const CHANGED_EARLIER: &str = "what is pulled, or on which nodes, was changed under an earlier version, which did not follow that: change it again, or create a new job";
const CHANGED_AND_CANCELLED: &str =
    "what is pulled, or on which nodes, has changed, and a cancelled job begins no new run: create a new job";
const CHANGED_UNSEEN: &str = "the spec was changed, and what the job began with is not known";
const CANCEL_UNDONE: &str = "spec.cancel cannot be taken back: create a new job";
const CANCELLED: &str = "spec.cancel is true, so no further round and no re-check begins: create a new job";
const HELD: &str = "no node starts or is given up until the change is undone";

/// A change of the spec that can be followed, at least in part.
pub(super) struct JobEdit {
    /// What is carried out from now on.
    pub(super) spec: ImagePrePullJobSpec,
    job: ValidatedJob,
    /// Why the job doesn't follow the whole spec, if it doesn't.
    refusal: Option<EditRefusal>,
}

/// Why a job doesn't follow a change of its spec, or not yet.
#[derive(Clone, Debug)]
struct EditRefusal {
    message: String,
    /// Whether the present spec is not carried out because of that.
    is_other: bool,
}

impl EditRefusal {
    fn of_whole_spec(message: impl Into<String>) -> Self {
        Self { message: message.into(), is_other: true }
    }
}

impl PrepullJob {
    /// Takes the object as it is now. Returns `false` where its spec is not newer than the known one.
    pub(in crate::prepull::controller) fn apply_change(
        &mut self,
        object: &JobObject,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) -> bool {
        let generation = super::generation_of(object);
        // A job is read by its name as well, and then the watch may be behind.
        if generation <= self.spec.generation() {
            return false;
        }
        self.spec.set_generation(generation);
        if self.course.has_begun() {
            self.apply_edit(object, Some(WritePace::Now), nodes, effects);
        } else {
            self.begin_run(object, nodes, effects);
        }
        true
    }

    /// Follows the spec of a job that has begun, as far as possible. `news`: how soon the status must show it; `None`
    /// if it does already.
    pub(super) fn apply_edit(
        &mut self,
        object: &JobObject,
        news: Option<WritePace>,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) {
        self.next = self.read_next(object);
        if self.is_over() && self.next.is_some() {
            // The new run takes over the whole spec. It begins once the end of this run is written; that end doesn't
            // cover the present spec.
            self.spec.refuse(CHANGED_AFTER_END);
            return;
        }
        match self.read_edit(object) {
            Ok(edit) => self.take_edit(edit, news, nodes, effects),
            Err(refusal) => {
                if object.as_ref().is_ok_and(|object| object.spec.cancel) {
                    self.cancel_as_it_is();
                }
                self.refuse_edit(&EditRefusal::of_whole_spec(refusal), news, effects);
            }
        }
    }

    /// Begins no further run for an edit that an earlier version has refused in the status: it must not begin by
    /// itself.
    pub(super) fn ignore_next(&mut self) {
        if self.next.take().is_some() {
            self.spec.refuse(CHANGED_EARLIER);
            self.spec.ends_as_asked();
        }
    }

    /// Cancels a job that can't follow the rest of its spec.
    fn cancel_as_it_is(&mut self) {
        self.course.cancel();
        if let Some(accepted) = self.spec.accepted().cloned() {
            self.spec.accept(ImagePrePullJobSpec { cancel: true, ..accepted });
        }
    }

    /// The object for the end of this run, if its spec differs from the one that the run began with, or asks for a round or a
    /// re-check that must wait.
    fn read_next(&self, object: &JobObject) -> Option<Box<ImagePrePullJob>> {
        let object = object.as_ref().ok()?;
        let is_cancelled = object.spec.cancel || self.course.is_cancelled();
        let waits = if self.spec.may_have_begun_with(&object.spec) {
            self.asks_for_later(&object.spec)
        } else {
            !self.is_held()
        };
        if is_cancelled || !waits {
            return None;
        }
        validate::validate(object).ok()?;
        Some(Box::new(ImagePrePullJob { status: None, ..(**object).clone() }))
    }

    pub(super) fn read_edit(&self, object: &JobObject) -> Result<JobEdit, String> {
        let object = object.as_ref().map_err(|unreadable| unreadable.error.clone())?;
        let validated = |spec| {
            let job = ImagePrePullJob { metadata: object.metadata.clone(), spec, status: None };
            validate::validate(&job).map(|valid| (job.spec, valid)).map_err(|refusal| refusal.to_string())
        };
        let mut asked = object.spec.clone();
        asked.cancel |= self.course.is_cancelled();
        let after_cancel = self
            .refuse_after_cancel(&object.spec)
            .map(|message| EditRefusal { message: message.to_owned(), is_other: false });
        if let Some(accepted) = self.spec.accepted().filter(|_| asked.cancel && self.is_over()) {
            asked.retry = asked.retry.min(accepted.retry);
            asked.recheck = asked.recheck.min(accepted.recheck);
        }
        let refusal = if self.spec.may_have_begun_with(&asked) {
            let valid = match validated(asked.clone()) {
                Ok(_) if self.asks_for_later(&asked) => {
                    (asked.retry, asked.recheck) = self.rounds_for_now(&asked);
                    validated(asked.clone())
                }
                valid => valid,
            };
            match valid {
                Ok((spec, job)) => return Ok(JobEdit { spec, job, refusal: after_cancel }),
                Err(refusal) => refusal,
            }
        } else {
            match validated(object.spec.clone()) {
                Err(refusal) => refusal,
                Ok(_) if self.spec.accepted().is_none() => CHANGED_UNSEEN.to_owned(),
                Ok(_) if asked.cancel => CHANGED_AND_CANCELLED.to_owned(),
                Ok(_) => CHANGED.to_owned(),
            }
        };
        let Some(accepted) = self.spec.accepted() else { return Err(refusal) };
        // What can be followed is: a job is suspended although its secrets make no sense.
        (asked.retry, asked.recheck) = self.rounds_for_now(&asked);
        let mut spec = spec::merge_edit(accepted, &asked);
        if self.is_over() {
            // A further round must wait until the job can follow the whole spec.
            (spec.retry, spec.recheck) = (accepted.retry, accepted.recheck);
        }
        let (spec, job) = validated(spec)?;
        Ok(JobEdit { spec, job, refusal: Some(EditRefusal::of_whole_spec(refusal)) })
    }

    /// What a job that was cancelled, or is by this spec, cannot follow of it.
    fn refuse_after_cancel(&self, asked: &ImagePrePullJobSpec) -> Option<&'static str> {
        if self.course.is_cancelled() && !asked.cancel {
            return Some(CANCEL_UNDONE);
        }
        let asks = self.raised_request(asked) != RoundRequest::Nothing || self.asks_for_later(asked);
        (asked.cancel && asks).then_some(CANCELLED)
    }

    fn take_edit(
        &mut self,
        edit: JobEdit,
        news: Option<WritePace>,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) {
        let JobEdit { spec, job, refusal } = edit;
        let asked = self.asks_again(&spec);
        let was_held = self.is_held();
        self.spec.accept(spec);
        if was_held {
            self.find_lost_nodes(&job, nodes);
            self.members.replan(Arc::new(job.clone()), nodes);
        }
        self.apply_settings(&job, was_held, effects);
        if let Some(refusal) = refusal {
            self.refuse_edit(&refusal, news, effects);
        } else {
            self.members.take_secrets(&job, nodes);
            self.spec.clear_refusal();
            if let Some(pace) = news {
                self.output.touch_status(pace);
            }
        }
        match asked {
            RoundRequest::Nothing => {}
            RoundRequest::Retry => self.start_requested_round(job, nodes, effects),
            RoundRequest::Recheck => self.start_requested_recheck(job, nodes, effects),
        }
        if self.takes_nodes() {
            for node in nodes.values() {
                self.add_if_chosen(node);
            }
        }
    }

    /// What this spec asks a job for that is over: `retry` or `recheck` was raised since. What was left of them at the
    /// end does not count. A job that is cancelled is asked for nothing.
    pub(super) fn asks_again(&self, spec: &ImagePrePullJobSpec) -> RoundRequest {
        if spec.cancel { RoundRequest::Nothing } else { self.raised_request(spec) }
    }

    /// What this spec asks for, cancelled or not. Where both are raised at once there is no re-check: the person wants to
    /// download.
    fn raised_request(&self, spec: &ImagePrePullJobSpec) -> RoundRequest {
        let (retry, recheck) = self.rounds_in_force();
        match self.is_over() {
            true if spec.retry > retry => RoundRequest::Retry,
            true if spec.recheck > recheck => RoundRequest::Recheck,
            _ => RoundRequest::Nothing,
        }
    }

    /// The values of `retry` and `recheck` that ask for nothing more.
    fn rounds_in_force(&self) -> (i64, i64) {
        let begun = (i64::from(self.course.retry_rounds()), i64::from(self.course.rechecks()));
        let accepted = self.spec.accepted().map_or(begun, |accepted| (accepted.retry, accepted.recheck));
        (accepted.0.max(begun.0), accepted.1.max(begun.1))
    }

    /// `retry` and `recheck` without what waits for the end: a re-check, and a round that's asked for during a re-check.
    fn rounds_for_now(&self, spec: &ImagePrePullJobSpec) -> (i64, i64) {
        let (retry, recheck) = self.rounds_in_force();
        let most = |waits: bool, asked: i64, in_force| if waits { asked.min(in_force) } else { asked };
        (
            most(self.course.is_rechecking(), spec.retry, retry),
            most(self.course.is_running(), spec.recheck, recheck),
        )
    }

    fn asks_for_later(&self, spec: &ImagePrePullJobSpec) -> bool {
        self.rounds_for_now(spec) != (spec.retry, spec.recheck)
    }

    /// Once the run is over, begins the round or the re-check that its last edit has asked for. Returns whether one begins.
    pub(in crate::prepull::controller) fn begin_what_waited(
        &mut self,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) -> bool {
        let waits = |next: &mut Box<ImagePrePullJob>| self.spec.may_have_begun_with(&next.spec);
        let Some(object) = self.next.take_if(|next| self.course.end_time().is_some() && waits(next)) else {
            return false;
        };
        self.apply_edit(&Ok(object), None, nodes, effects);
        !self.is_over()
    }

    /// Takes over the fields that may change while the job runs. `is_unknown`: notify the edges in any case.
    fn apply_settings(&mut self, job: &ValidatedJob, is_unknown: bool, effects: &mut Effects<'_>) {
        let before = self.course.replace_policy(job);
        self.course.note_pause(before.paused, effects.now);
        let rollout = self.members.rollout_mut();
        let is_new_timeout = rollout.settings().timeout != job.timeout;
        rollout.configure(rollout_settings(job, &self.course));
        let is_new_download = self.members.take_download(job);
        if self.is_over() || self.course.is_cancelled() {
            return;
        }
        let holds = |policy: &RunPolicy| (policy.suspend, policy.paused);
        if holds(&before) != holds(&job.policy) {
            let (reason, note) = match holds(&job.policy) {
                (_, true) => {
                    (reasons::SUSPENDED, "no further node starts, and those at work stop downloading")
                }
                (true, false) => (reasons::SUSPENDED, "no further node starts"),
                (false, false) => (reasons::RESUMED, "nodes start again"),
            };
            if before.suspend && !job.policy.suspend {
                self.course.restart_active_time(effects.now);
            }
            self.events.emit_normal(reason, note, effects);
        }
        if is_new_timeout || is_new_download || is_unknown {
            // Edges enforce the timeout as well, and they download: send them the new terms.
            for node in self.members.rollout_mut().change_settings() {
                self.dispatch(&node, effects);
            }
        }
    }

    /// A job that was over begins another round for the nodes that did not succeed, and for those that may join.
    fn start_requested_round(&mut self, job: ValidatedJob, nodes: &NodeViews, effects: &mut Effects<'_>) {
        self.members.set_job(Arc::new(job));
        if self.course.policy().follow_nodes {
            for node in nodes.values() {
                self.members.add_if_chosen(node);
            }
            self.output.shards.grow(self.members.rollout().len());
        }
        // Nodes may be in progress in a job that is over: see `resume`.
        if self.members.rollout().summary().in_progress == 0 && !self.members.can_begin_round(nodes) {
            return;
        }
        self.members.rollout_mut().forget_sessions();
        self.course.restart_active_time(effects.now);
        self.begin_round(nodes, effects);
    }

    /// A job that was over asks the successful nodes which images they still have.
    fn start_requested_recheck(&mut self, job: ValidatedJob, nodes: &NodeViews, effects: &mut Effects<'_>) {
        self.members.set_job(Arc::new(job));
        if self.members.rollout().summary().in_progress == 0 && !self.members.can_begin_recheck(nodes) {
            return;
        }
        self.members.rollout_mut().forget_sessions();
        self.begin_recheck(nodes, effects);
    }

    /// A job that has begun was edited in a way that it cannot follow.
    fn refuse_edit(&mut self, refusal: &EditRefusal, news: Option<WritePace>, effects: &mut Effects<'_>) {
        let EditRefusal { message, is_other } = refusal;
        let (refusal, note) = if self.course.is_cancelled() {
            (message.clone(), format!("the job is cancelled, and does not follow the change: {message}"))
        } else if self.is_held() {
            let held = format!("{message}: {HELD}");
            (held.clone(), held)
        } else {
            (message.clone(), format!("the job goes on as it was: {message}"))
        };
        self.spec.refuse(&refusal);
        if !is_other {
            self.spec.ends_as_asked();
        }
        if let Some(pace) = news {
            self.events.emit_warning(reasons::SPEC_CHANGE_IGNORED, &note, effects);
            self.output.touch_status(pace);
        }
    }
}
