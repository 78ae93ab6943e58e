//! The course of a job: its phase, its times and rounds, its end and its deletion.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, RecheckStatus, RolloutStatus, Summary};

use super::super::DELETE_RETRY;
use crate::prepull::aggregate::{self, Rounds};
use crate::prepull::rollout::{RECHECK_TIME, Rechecked, RolloutVerdict};
use crate::prepull::validate::{RunPolicy, ValidatedJob};
use crate::shared::counted::counted;
use crate::shared::reasons;

#[derive(Debug, Default)]
pub(super) struct Course {
    phase: JobPhase,
    /// One sentence for a person: what the job waits for, or why it failed.
    reason: String,
    /// The reason of the condition Failed, where it is not the usual one.
    failed_as: Option<&'static str>,
    /// `failed_as` and `reason` from before the re-check that runs, if the job had failed: what a cancelled one leaves. Another
    /// leader doesn't know it, and goes by the nodes.
    failed_before: Option<(Option<&'static str>, String)>,
    policy: RunPolicy,
    /// `failureTolerate` as the spec has it, for messages.
    tolerance: String,
    /// Number of the first attempt in this run of the job.
    first_attempt: u32,
    /// `None` before the job has begun.
    times: Option<JobTimes>,
    /// Rounds of `spec.retry` that have begun.
    rounds: u32,
    /// Re-checks of `spec.recheck` that have begun.
    rechecks: u32,
    /// The times of the last re-check that this run of cloudcore knows of.
    recheck: Option<RecheckTimes>,
    /// Whether too many nodes have failed in this round, and the others may end.
    is_draining: bool,
    /// Since when the job is paused, if it is.
    paused: Option<Timestamp>,
    /// When its last pause ended.
    resumed: Option<Timestamp>,
    /// When a deletion that had no effect is asked for again.
    delete_again_at: Option<Timestamp>,
    /// The status with which the job has ended or is held, where reports of it are lost and the status doesn't show all
    /// nodes: it has counted them.
    lost_reports_status: Option<Box<ImagePrePullJobStatus>>,
    /// Whether the run has had nodes that no record is left of.
    has_lost_records: bool,
}

#[derive(Clone, Copy, Debug)]
struct JobTimes {
    started: Timestamp,
    /// From when activeDeadlineSeconds counts.
    active_since: Timestamp,
    ended: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug)]
struct RecheckTimes {
    started: Timestamp,
    ended: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) enum Outlook {
    /// Nodes pull, or wait to begin.
    Running,
    /// Too many nodes have failed, for this reason; those that pull may finish.
    Draining(String),
    Ended(JobEnding),
}

/// What stops the nodes of a job that have not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// `activeDeadlineSeconds` have passed.
    OutOfTime,
    /// `spec.cancel` is true.
    Cancelled,
}

#[derive(Debug)]
pub(super) struct JobEnding {
    pub(super) phase: JobPhase,
    /// The reason of the event.
    pub(super) reason: &'static str,
    /// One sentence, or nothing where every node succeeded.
    pub(super) note: String,
}

/// The reason of the condition Failed for a job that has not failed by its tolerance.
fn unusual_failure(reason: &str) -> Option<&'static str> {
    [reasons::DEADLINE_EXCEEDED, reasons::CANCELLED, reasons::NOT_STARTED]
        .into_iter()
        .find(|known| *known == reason)
}

impl JobEnding {
    /// Why the nodes that never started did not.
    pub(super) fn why_not_started(&self) -> &'static str {
        match self.reason {
            reasons::DEADLINE_EXCEEDED => "not started: the time of the job was over",
            reasons::CANCELLED => "not started: the job was cancelled",
            _ => "not started: more nodes failed than failureTolerate allows",
        }
    }
}

impl Course {
    /// The course of a run that counts attempts from this number.
    pub(super) fn counting_from(first_attempt: u32) -> Self {
        Self { first_attempt, ..Self::default() }
    }

    /// The job is over, and its status knows of more nodes than the records. It does until a round or a re-check begins.
    pub(super) fn keep_status(&mut self, status: &ImagePrePullJobStatus) {
        self.lost_reports_status = Some(Box::new(status.clone()));
        self.has_lost_records = true;
    }

    pub(super) fn has_lost_records(&self) -> bool {
        self.has_lost_records
    }

    pub(super) fn take_lost_reports_status(&mut self) -> Option<Box<ImagePrePullJobStatus>> {
        self.lost_reports_status.take()
    }

    pub(super) fn lost_reports_status(&self) -> Option<&ImagePrePullJobStatus> {
        self.lost_reports_status.as_deref()
    }

    pub(super) fn first_attempt(&self) -> u32 {
        self.first_attempt
    }

    /// Number of the first attempt in the next run: no node has made it in this one. `last`: the highest number that is known
    /// of a node; where reports are lost, the rounds say more.
    pub(super) fn next_first_attempt(&self, last: u32) -> u32 {
        self.first_attempt.saturating_add(self.all_rounds().total()).max(last).saturating_add(1)
    }

    pub(super) fn phase(&self) -> JobPhase {
        self.phase
    }

    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    pub(super) fn failed_as(&self) -> Option<&'static str> {
        self.failed_as
    }

    pub(super) fn policy(&self) -> &RunPolicy {
        &self.policy
    }

    pub(super) fn retry_rounds(&self) -> u32 {
        self.rounds
    }

    /// All rounds that have begun.
    pub(super) fn all_rounds(&self) -> Rounds {
        Rounds { retry: self.rounds, recheck: self.rechecks, rechecking: self.is_last_a_recheck() }
    }

    pub(super) fn rechecks(&self) -> u32 {
        self.rechecks
    }

    pub(super) fn is_rechecking(&self) -> bool {
        self.is_running() && self.is_last_a_recheck()
    }

    /// The re-check that ended with the job counts as well: nothing has begun since.
    fn is_last_a_recheck(&self) -> bool {
        self.recheck.is_some_and(|times| times.ended.is_none() || times.ended == self.end_time())
    }

    /// When the re-check that runs is over.
    pub(super) fn recheck_until(&self) -> Option<Timestamp> {
        let times = self.recheck.filter(|_| self.is_rechecking())?;
        times.started.checked_add(RECHECK_TIME).ok()
    }

    pub(super) fn recheck_status(&self, found: Rechecked) -> Option<RecheckStatus> {
        let Rechecked { present, missing, not_checked } = found;
        (self.rechecks > 0).then(|| RecheckStatus {
            rounds: self.rechecks,
            start_time: self.recheck.map(|times| Time(times.started)),
            completion_time: self.recheck.and_then(|times| times.ended).map(Time),
            present,
            missing,
            not_checked,
        })
    }

    pub(super) fn start_time(&self) -> Option<Timestamp> {
        self.times.map(|times| times.started)
    }

    pub(super) fn active_since(&self) -> Option<Timestamp> {
        self.times.map(|times| times.active_since)
    }

    pub(super) fn end_time(&self) -> Option<Timestamp> {
        self.times?.ended
    }

    /// Whether nodes were chosen, at any time.
    pub(super) fn has_begun(&self) -> bool {
        self.times.is_some()
    }

    /// Whether nodes are pulling, or are still to begin.
    pub(super) fn is_running(&self) -> bool {
        self.times.is_some_and(|times| times.ended.is_none())
    }

    /// Whether the job was cancelled, at any time. That is for good.
    pub(super) fn is_cancelled(&self) -> bool {
        self.policy.cancel || self.ended_as_cancelled()
    }

    pub(super) fn ended_as_cancelled(&self) -> bool {
        self.failed_as == Some(reasons::CANCELLED)
    }

    /// Cancels the job, even if the rest of its spec is invalid.
    pub(super) fn cancel(&mut self) {
        self.policy.cancel = true;
    }

    /// Takes over the run policy of the spec. Returns the previous one.
    pub(super) fn replace_policy(&mut self, job: &ValidatedJob) -> RunPolicy {
        self.tolerance = job.tolerance.to_string();
        std::mem::replace(&mut self.policy, job.policy.clone())
    }

    /// The job has never begun, and is over for this reason, or waits to begin.
    pub(super) fn set_unstarted(&mut self, phase: JobPhase, reason: String) {
        (self.phase, self.reason) = (phase, reason);
    }

    pub(super) fn begin_run(&mut self, now: Timestamp) {
        self.phase = JobPhase::InProgress;
        self.reason.clear();
        (self.rounds, self.rechecks, self.recheck) = (0, 0, None);
        self.note_pause(false, now);
        self.times = Some(JobTimes { started: now, active_since: now, ended: None });
    }

    /// Notes that a pause has begun or ended, if it has. `was`: whether the job was paused before.
    pub(super) fn note_pause(&mut self, was: bool, now: Timestamp) {
        match (was, self.policy.paused) {
            (false, true) => self.paused = Some(now),
            (true, false) => (self.paused, self.resumed) = (None, Some(now)),
            (true, true) | (false, false) => {}
        }
    }

    /// Since when the job is paused, if it is.
    pub(super) fn paused_since(&self) -> Option<Timestamp> {
        self.paused
    }

    /// When its last pause ended.
    pub(super) fn resumed_at(&self) -> Option<Timestamp> {
        self.resumed
    }

    /// The job began before this run of cloudcore. `is_over`: and it ended. `rounds`: those that have begun; the status may
    /// not count the last one.
    pub(super) fn restore(
        &mut self,
        status: &ImagePrePullJobStatus,
        is_over: bool,
        rounds: Rounds,
        now: Timestamp,
    ) {
        let started = status.start_time.as_ref().map_or(now, |time| time.0);
        self.times = Some(JobTimes {
            started,
            // The job had ended by its status: a user has asked for another round.
            active_since: if status.completion_time.is_some() && !is_over {
                now
            } else {
                status.active_since.as_ref().map_or(started, |time| time.0)
            },
            ended: status.completion_time.as_ref().filter(|_| is_over).map(|time| time.0),
        });
        (self.rounds, self.rechecks) = (rounds.retry, rounds.recheck);
        let stored = status.recheck.as_ref().filter(|stored| stored.rounds == rounds.recheck);
        let recheck = stored.and_then(|stored| {
            let ended = stored.completion_time.as_ref().map(|time| time.0);
            Some(RecheckTimes { started: stored.start_time.as_ref()?.0, ended })
        });
        // The status may be behind the reports, and what began after a re-check has ended it.
        self.recheck = if rounds.rechecking && !is_over {
            recheck.filter(|times| times.ended.is_none()).or(Some(RecheckTimes { started: now, ended: None }))
        } else {
            let known = recheck.unwrap_or(RecheckTimes { started: now, ended: None });
            let ended = RecheckTimes { ended: known.ended.or(Some(now)), ..known };
            (rounds.recheck > 0).then_some(ended)
        };
        let paused = status.conditions.iter().find(|condition| condition.type_ == aggregate::PAUSED);
        let changed = paused.map(|condition| (condition.status == "True", condition.last_transition_time.0));
        self.paused = self.policy.paused.then(|| changed.filter(|(is, _)| *is).map_or(now, |(_, at)| at));
        // A pause that only the condition shows ends now.
        self.resumed = changed.filter(|_| !self.policy.paused).map(|(is, at)| if is { now } else { at });
        self.phase = if is_over { status.phase } else { JobPhase::InProgress };
        without_refusal(&status.reason).clone_into(&mut self.reason);
        // A refused edit makes Failed unknown, and leaves the reason to Progressing.
        let types = [aggregate::FAILED, aggregate::PROGRESSING];
        let mut ends = status.conditions.iter().filter(|condition| types.contains(&condition.type_.as_str()));
        self.failed_as = ends.find_map(|condition| unusual_failure(&condition.reason));
    }

    /// When activeDeadlineSeconds have passed. They do not pass while the job is suspended, and a re-check has a time of its
    /// own.
    pub(super) fn active_deadline(&self) -> Option<Timestamp> {
        if self.is_rechecking() {
            return None;
        }
        let times = self.times.filter(|times| times.ended.is_none() && !self.policy.suspend)?;
        times.active_since.checked_add(self.policy.active_deadline?).ok()
    }

    pub(super) fn restart_active_time(&mut self, now: Timestamp) {
        if let Some(times) = &mut self.times {
            times.active_since = now;
        }
    }

    /// Why nodes are stopped when activeDeadlineSeconds have passed.
    pub(super) fn deadline_reason(&self) -> String {
        format!("stopped: activeDeadlineSeconds ({}) of the job is over", self.active_deadline_seconds())
    }

    fn active_deadline_seconds(&self) -> u64 {
        self.policy.active_deadline.unwrap_or_default().as_secs()
    }

    pub(super) fn decide_outlook(
        &self,
        verdict: RolloutVerdict,
        summary: &Summary,
        waves: Option<&RolloutStatus>,
        stop: Option<Stop>,
    ) -> Outlook {
        let (bad, tolerance) = (summary.failure + summary.unknown, &self.tolerance);
        let excess = || {
            let nodes = match waves.filter(|waves| waves.nodes < summary.desired) {
                Some(waves) => format!("the {} nodes of wave {}", waves.nodes, waves.step),
                None => format!("{} nodes", summary.desired),
            };
            format!("{bad} of {nodes} failed, more than failureTolerate {tolerance} allows")
        };
        let failure = |reason, note| Outlook::Ended(JobEnding { phase: JobPhase::Failure, reason, note });
        let completed =
            |note| Outlook::Ended(JobEnding { phase: JobPhase::Completed, reason: reasons::COMPLETED, note });
        let unfinished =
            || format!("{} did not end, {} not started", counted(summary.unknown, "node"), summary.pending);
        match stop {
            Some(Stop::OutOfTime) => {
                let seconds = self.active_deadline_seconds();
                let note = format!("activeDeadlineSeconds ({seconds}) is over; {}", unfinished());
                return failure(reasons::DEADLINE_EXCEEDED, note);
            }
            Some(Stop::Cancelled) => {
                return failure(reasons::CANCELLED, format!("cancelled; {}", unfinished()));
            }
            None => {}
        }
        let is_open = matches!(verdict, RolloutVerdict::Running | RolloutVerdict::Draining);
        if let Some((failed_as, reason)) =
            self.failed_before.as_ref().filter(|_| self.policy.cancel && !is_open)
        {
            return failure(failed_as.unwrap_or(reasons::FAILED), reason.clone());
        }
        match verdict {
            RolloutVerdict::Running => Outlook::Running,
            RolloutVerdict::Draining => Outlook::Draining(excess()),
            RolloutVerdict::Completed if bad == 0 => completed(String::new()),
            RolloutVerdict::Completed => completed(format!(
                "{bad} of {} nodes failed, within failureTolerate {tolerance}",
                summary.desired
            )),
            RolloutVerdict::NotAllStarted => failure(
                reasons::NOT_STARTED,
                format!("{} not started before the re-check", counted(summary.pending, "node")),
            ),
            RolloutVerdict::NoneLeft => {
                failure(reasons::NOT_STARTED, "every node was deleted before it started".to_owned())
            }
            RolloutVerdict::Failed if summary.pending > 0 => failure(
                reasons::FAILED,
                format!("{}; {} not started", excess(), counted(summary.pending, "node")),
            ),
            RolloutVerdict::Failed => failure(reasons::FAILED, excess()),
        }
    }

    /// Too many nodes have failed. Returns whether that is new.
    pub(super) fn begin_draining(&mut self) -> bool {
        !std::mem::replace(&mut self.is_draining, true)
    }

    /// Sets the reason: what the job waits for, or why it is about to fail. Returns whether that is new.
    pub(super) fn set_reason(&mut self, reason: String) -> bool {
        let is_new = self.reason != reason;
        self.reason = reason;
        is_new
    }

    /// `causes`: those of the failed nodes, if any.
    pub(super) fn end_run(&mut self, ending: &JobEnding, causes: &str, now: Timestamp) {
        if let Some(times) = &mut self.times {
            times.ended = Some(now);
        }
        if let Some(times) = &mut self.recheck {
            times.ended.get_or_insert(now);
        }
        self.phase = ending.phase;
        self.failed_as = unusual_failure(ending.reason);
        // What a cancelled re-check leaves has the causes in it.
        let has_causes = self.failed_before.take().is_some() && self.policy.cancel;
        self.reason = format!("{}{}", ending.note, if has_causes { "" } else { causes });
    }

    /// Whether the spec asks for more rounds than have begun.
    pub(super) fn wants_round(&self) -> bool {
        // What was asked for before a re-check must not follow it by itself: that only looks.
        self.policy.retry > self.rounds && !self.is_rechecking() && !self.is_cancelled()
    }

    pub(super) fn begin_round(&mut self) {
        self.rounds += 1;
        self.go_on();
    }

    pub(super) fn begin_recheck(&mut self, now: Timestamp) {
        let had_failed = self.phase == JobPhase::Failure;
        let before = had_failed.then(|| (self.failed_as, std::mem::take(&mut self.reason)));
        self.rechecks += 1;
        self.go_on();
        self.failed_before = before;
        self.recheck = Some(RecheckTimes { started: now, ended: None });
    }

    fn go_on(&mut self) {
        if let Some(times) = &mut self.times {
            times.ended = None;
        }
        self.phase = JobPhase::InProgress;
        self.reason.clear();
        self.failed_as = None;
        self.failed_before = None;
        self.is_draining = false;
        self.delete_again_at = None;
        self.lost_reports_status = None;
    }

    /// When to delete the job, by ttlSecondsAfterFinished.
    pub(super) fn delete_due(&self, ended: Timestamp) -> Option<Timestamp> {
        let due = ended.checked_add(self.policy.ttl?).ok()?;
        Some(self.delete_again_at.unwrap_or(due).max(due))
    }

    pub(super) fn note_deletion(&mut self, now: Timestamp) {
        self.delete_again_at = now.checked_add(DELETE_RETRY).ok();
    }
}

/// What stands in `status.reason` before the refusal of an edit.
const REFUSED_EDIT: &str = "edit refused: ";

/// The text of `status.reason`: the job's own reason, and why its last edit was refused, if it was.
pub(super) fn reason_with_refusal(reason: &str, refusal: Option<&str>) -> String {
    match (reason, refusal) {
        (_, None) => reason.to_owned(),
        ("", Some(refusal)) => format!("{REFUSED_EDIT}{refusal}"),
        (_, Some(refusal)) => format!("{reason}; {REFUSED_EDIT}{refusal}"),
    }
}

fn without_refusal(reason: &str) -> &str {
    reason.split_once(REFUSED_EDIT).map_or(reason, |(before, _)| before.trim_end_matches("; "))
}
