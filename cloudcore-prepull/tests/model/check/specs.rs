//! The spec in force at each time. A running job follows the edits of some fields. The others, its fixed part, stay as
//! they were when its run began, and it begins a further run with the new ones once it is over. An edit that makes the
//! job impossible to carry out changes nothing.

use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};
use prepull_api::task::JobUid;
use prepull_engine::prepull::validate::validate;

use super::Check;

/// A spec that the controller received, and what it changed.
pub(super) struct Delivered {
    pub(super) at: u64,
    pub(super) generation: i64,
    /// The spec in force from then on; `None` if no spec of the job was valid so far, or if this one is invalid and
    /// the one before is unknown. Then the job is held.
    pub(super) accepted: Option<ImagePrePullJobSpec>,
}

/// Whether a job with this spec can be carried out.
pub(crate) fn is_valid(spec: &ImagePrePullJobSpec) -> bool {
    validate(&ImagePrePullJob { spec: spec.clone(), ..ImagePrePullJob::default() }).is_ok()
}

/// The spec with the fixed part of the one that the job began with.
pub(crate) fn follow(beginning: &ImagePrePullJobSpec, edited: &ImagePrePullJobSpec) -> ImagePrePullJobSpec {
    let mut spec = edited.clone();
    let now = &edited.image_pre_pull_template;
    spec.image_pre_pull_overriders.clone_from(&beginning.image_pre_pull_overriders);
    spec.image_pre_pull_template = beginning.image_pre_pull_template.clone();
    let template = &mut spec.image_pre_pull_template;
    (template.concurrency, template.timeout_seconds) = (now.concurrency, now.timeout_seconds);
    template.failure_tolerate.clone_from(&now.failure_tolerate);
    // What is about pulling is for the next run.
    if template.remove.is_some() {
        (spec.pin, spec.recheck) = (beginning.pin, beginning.recheck);
        spec.download.clone_from(&beginning.download);
    }
    spec
}

/// Whether a run that began with the one goes on under the other.
pub(crate) fn is_same_run(beginning: &ImagePrePullJobSpec, spec: &ImagePrePullJobSpec) -> bool {
    without_secrets(&follow(beginning, spec)) == without_secrets(spec)
}

/// The spec without its secrets, which may change at any time.
fn without_secrets(spec: &ImagePrePullJobSpec) -> ImagePrePullJobSpec {
    let mut spec = spec.clone();
    let template = &mut spec.image_pre_pull_template;
    template.image_secrets = None;
    template.registry_secrets.clear();
    template.image_sources.iter_mut().for_each(|source| source.image_secret = None);
    spec.image_pre_pull_overriders.retain_mut(|entry| {
        let overriders = &mut entry.image_pre_pull_overrider.overriders;
        overriders.secret_overriders.clear();
        !overriders.image_overriders.is_empty()
    });
    spec
}

impl Check {
    /// The watch delivers a job. `spec`: none if it cannot be read. `loaded`: the status in the API server, if the
    /// controller knows nothing else of the job. Returns whether the generation is new.
    pub(crate) fn delivered(
        &mut self,
        job: &JobUid,
        generation: i64,
        spec: Option<ImagePrePullJobSpec>,
        loaded: Option<&ImagePrePullJobStatus>,
        at: u64,
    ) -> bool {
        if let Some(status) = loaded {
            self.take_over(job, status, at);
        }
        self.asked.insert((job.clone(), generation), spec.clone());
        let known = self.delivered.entry(job.clone()).or_default();
        let is_new = known.last().is_none_or(|last| last.generation != generation);
        if !is_new && loaded.is_none() {
            return false;
        }
        let before = match loaded {
            None => known.last(),
            Some(status) => stored(known, status, self.beginnings.get(job)),
        };
        let before = before.and_then(|before| before.accepted.clone());
        // A job that could not begin has nothing to cancel, and begins with the next valid spec.
        let has_begun = self.beginnings.contains_key(job);
        let was_cancelled = has_begun && before.as_ref().is_some_and(|before| before.cancel);
        let is_asked = |spec: &ImagePrePullJobSpec| spec.cancel && (has_begun || is_valid(spec));
        let is_cancelled = was_cancelled || spec.as_ref().is_some_and(is_asked);
        let spec = spec.map(|spec| ImagePrePullJobSpec { cancel: is_cancelled, ..spec });
        self.next.remove(job);
        let edited = spec.and_then(|spec| match self.beginnings.get(job) {
            Some(beginning) if is_same_run(beginning, &spec) && is_valid(&spec) => Some(spec),
            Some(beginning) => {
                let is_over = self.ended.contains(job);
                // What is held must be corrected first.
                if is_valid(&spec) && !is_cancelled && (is_over || before.is_some()) {
                    self.next.insert(job.clone(), spec.clone());
                    if is_over {
                        return None;
                    }
                }
                let mut followed = follow(before.as_ref().unwrap_or(beginning), &spec);
                // A further round must wait until the job can follow the whole spec.
                if is_over {
                    followed.retry = before.as_ref().map_or(followed.retry, |before| before.retry);
                    followed.recheck = before.as_ref().map_or(followed.recheck, |before| before.recheck);
                }
                Some(followed).filter(is_valid)
            }
            // An earlier leader refused it, and this one waits for an edit.
            None if loaded.is_some_and(|status| is_refused(status, generation)) => {
                Some(spec).filter(is_valid)
            }
            None => is_valid(&spec).then(|| self.beginnings.entry(job.clone()).or_insert(spec).clone()),
        });
        // It is followed even if the rest of the spec is invalid, and after it there is nothing to ask of an ended
        // job.
        let mut accepted = edited.or_else(|| before.clone());
        if let Some(accepted) = accepted.as_mut().filter(|_| !is_cancelled) {
            accepted.cancel = false;
        }
        if let Some(accepted) = accepted.as_mut().filter(|_| is_cancelled) {
            accepted.cancel = true;
            if !was_cancelled && loaded.is_none() {
                self.just_cancelled.insert(job.clone());
            }
            if let Some(before) = before.as_ref().filter(|_| self.ended.contains(job)) {
                accepted.retry = accepted.retry.min(before.retry);
                accepted.recheck = accepted.recheck.min(before.recheck);
            }
        }
        // In a job that is held as well.
        if is_cancelled && accepted.is_none() {
            self.cancelled_while_held.insert(job.clone());
        } else {
            self.cancelled_while_held.remove(job);
        }
        let (was, is) = (before.unwrap_or_default(), accepted.clone().unwrap_or_default());
        known.push(Delivered { at, generation, accepted });
        let holds = |spec: &ImagePrePullJobSpec| spec.suspend || spec.pause;
        if holds(&was) && !holds(&is) || is.retry > was.retry {
            self.count_active_time(job, at);
        }
        if was.pause && !is.pause {
            self.resumed.insert(job.clone(), at);
        }
        if is_new {
            self.exceeded.remove(job);
        }
        is_new
    }

    /// The leader knows that the job was cancelled.
    pub(super) fn is_cancelled(&self, job: &JobUid) -> bool {
        self.accepted(job).is_some_and(|spec| spec.cancel) || self.cancelled_while_held.contains(job)
    }

    /// The leader knew so before the inputs of this flush.
    pub(super) fn was_cancelled(&self, job: &JobUid) -> bool {
        self.is_cancelled(job) && !self.just_cancelled.contains(job)
    }

    /// What is in force now.
    pub(super) fn accepted(&self, job: &JobUid) -> Option<&ImagePrePullJobSpec> {
        self.delivered.get(job)?.last()?.accepted.as_ref()
    }

    /// The specs that may have been in force at a moment: more than one if an edit arrived at that very moment.
    pub(super) fn in_force(&self, job: &JobUid, at: u64) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        self.in_force_since(job, at, at)
    }

    pub(super) fn in_force_since(
        &self,
        job: &JobUid,
        since: u64,
        at: u64,
    ) -> impl Iterator<Item = &ImagePrePullJobSpec> {
        let known = self.delivered.get(job).map(Vec::as_slice).unwrap_or_default();
        let before = known.iter().rposition(|delivered| delivered.at < since);
        let until = known.iter().rposition(|delivered| delivered.at <= at).map_or(0, |last| last + 1);
        known.get(before.unwrap_or(0)..until).unwrap_or_default().iter().flat_map(|known| &known.accepted)
    }
}

/// Whether the job could not begin with this generation, by its status.
fn is_refused(status: &ImagePrePullJobStatus, generation: i64) -> bool {
    let is_known = status.observed_generation == Some(generation);
    is_known && status.start_time.is_none() && status.phase == JobPhase::Failure
}

/// The last spec that an earlier leader received and has written: a status has a generation, and the spec in force
/// then. `beginning`: the spec that the status's run began with. A further run may have begun for the leader alone.
fn stored<'a>(
    known: &'a [Delivered],
    status: &ImagePrePullJobStatus,
    beginning: Option<&ImagePrePullJobSpec>,
) -> Option<&'a Delivered> {
    let observed = status.observed_generation.filter(|_| !status.started_spec.is_empty())?;
    let is_of_run = |known: &Delivered| match (&known.accepted, beginning) {
        (Some(accepted), Some(beginning)) => is_same_run(beginning, accepted),
        _ => true,
    };
    known.iter().rfind(|known| known.generation <= observed && is_of_run(known))
}
