//! The steps of a job's course: starts, deadlines, waves, its end, further rounds, its deletion.

use jiff::Timestamp;
use prepull_api::crd::status::{FailureCount, JobPhase, RolloutStatus};
use prepull_api::failure::FailureCode;
use prepull_api::task::{NodeName, TaskId};

use super::super::parked::{Parked, parks_at};
use super::super::{Action, Effects, cancel_message};
use super::course::{JobEnding, Outlook, Stop};
use super::events::some_of;
use super::{NodeViews, PrepullJob, note_of};
use crate::prepull::aggregate::FIRST_ATTEMPT;
use crate::prepull::rollout::{Rechecked, Rollout, RolloutDecision, RolloutVerdict};
use crate::shared::counted::{counted, counted_len};
use crate::shared::reasons;
use crate::shared::writes::{Deferred, WritePace};

impl PrepullJob {
    /// Ends nodes that are out of time, starts further ones, and ends the job once it is over.
    pub(in crate::prepull::controller) fn advance(&mut self, nodes: &NodeViews, effects: &mut Effects<'_>) {
        self.begin_waiting(nodes, effects);
        if self.begin_next_run(nodes, effects) {
            return;
        }
        if self.is_over() {
            return self.delete_if_due(effects);
        }
        if self.awaits_beginning() {
            return;
        }
        let is_cancelled = self.course.is_cancelled();
        if self.is_held() && !is_cancelled {
            return;
        }
        let deadline = self.course.active_deadline().filter(|_| self.output.has_begun());
        let is_late = deadline.is_some_and(|deadline| deadline <= effects.now);
        let rollout = self.members.rollout_mut();
        // What had ended by itself is judged by that, however late: the leader may have died before it wrote so.
        let stop = match rollout.verdict() {
            // The end of a re-check is that of the pulls before it.
            RolloutVerdict::Running | RolloutVerdict::Draining if is_cancelled => {
                Some(Stop::Cancelled).filter(|_| !self.course.is_rechecking())
            }
            // It has waited for a Ready node, and was cancelled.
            RolloutVerdict::NoneLeft if is_cancelled => Some(Stop::Cancelled),
            RolloutVerdict::Running | RolloutVerdict::Draining if is_late => Some(Stop::OutOfTime),
            _ => None,
        };
        let waves_before = rollout.waves();
        let decisions = if is_cancelled {
            rollout.cancel_all(effects.now)
        } else if stop.is_some() {
            rollout.expire_all(FailureCode::Timeout, &self.course.deadline_reason(), effects.now)
        } else {
            rollout.advance(effects.now)
        };
        let waves = rollout.waves();
        self.collect_changes();
        for decision in decisions {
            self.carry_out(decision, effects);
        }
        if let Some(waves) = waves.filter(|waves| waves_before.as_ref() != Some(waves)) {
            self.announce_wave(&waves, effects);
        }
        self.act_on_outlook(is_late, stop, nodes, effects);
    }

    /// Whether a run has begun and the status doesn't have that yet, and nothing may start or end before it does: the API
    /// server has the end of the run before, and its reports, or the job was cancelled.
    fn awaits_beginning(&self) -> bool {
        let must_wait = self.course.first_attempt() > FIRST_ATTEMPT || self.course.is_cancelled();
        must_wait && self.course.is_running() && !self.output.has_begun()
    }

    fn carry_out(&mut self, decision: RolloutDecision, effects: &mut Effects<'_>) {
        match decision {
            RolloutDecision::Start(node) => self.record_start(&node, effects),
            RolloutDecision::Withdraw(node, start) => {
                self.after_write(&node, Deferred::Withdraw(start), effects);
            }
            RolloutDecision::Redispatch(node) => self.dispatch(&node, effects),
            RolloutDecision::StopRecheck(node) => {
                let attempt = self.members.attempt(&node);
                let task = TaskId { job: self.events.uid().clone(), attempt };
                let is_cancelled = self.course.is_cancelled();
                let reason =
                    if is_cancelled { "the job was cancelled" } else { "the time of the re-check is over" };
                effects.emit(cancel_message(&node, task, reason));
            }
            RolloutDecision::Expire(node) => {
                let record = self.members.rollout().record(&node);
                let Some(record) = record else { return };
                let (attempt, note) = (record.attempt, note_of(record));
                let task = TaskId { job: self.events.uid().clone(), attempt };
                effects.emit(cancel_message(&node, task, &record.reason));
                // One event covers every node that the cancellation stopped.
                if record.code != Some(FailureCode::Cancelled) {
                    self.events.emit_node_warning(reasons::NODE_UNKNOWN, &note, effects);
                }
            }
        }
    }

    /// The task of a node that starts goes out once its start is recorded.
    pub(super) fn record_start(&mut self, node: &NodeName, effects: &mut Effects<'_>) {
        self.members.name_images(node);
        self.collect_changes();
        if let Some(start) = self.members.rollout().start_of(node) {
            self.after_write(node, Deferred::Dispatch(node.clone(), start), effects);
        }
    }

    fn announce_wave(&mut self, waves: &RolloutStatus, effects: &mut Effects<'_>) {
        let RolloutStatus { step, steps, nodes, paused_until } = waves;
        if let Some(until) = paused_until {
            let note = format!("wave {step} of {steps} has ended; the next begins at {}", until.0);
            self.events.emit_normal(reasons::WAVE_ENDED, &note, effects);
        } else {
            let note = format!("wave {step} of {steps}: up to {nodes} nodes");
            self.events.emit_normal(reasons::WAVE_STARTED, &note, effects);
        }
        self.output.touch_status(WritePace::Now);
    }

    /// When [`Self::advance`] or a write may have something to do although nothing happened.
    pub(in crate::prepull::controller) fn next_wakeup(&self) -> Option<Timestamp> {
        let goes_on = !self.awaits_beginning();
        let has_deadlines = self.course.is_running() && !self.is_held() && goes_on;
        let deadline = has_deadlines.then(|| self.members.rollout().next_deadline()).flatten();
        // What is over or out of time before its beginning is written waits for that write.
        let has_begun = self.output.has_begun();
        let is_open =
            matches!(self.members.rollout().verdict(), RolloutVerdict::Running | RolloutVerdict::Draining);
        let deadline = deadline.filter(|_| has_begun || is_open);
        let active = self.course.active_deadline().filter(|_| has_begun);
        let write = self.output.next_write(self.course.end_time().is_some());
        [deadline, active, write, self.delete_due(), self.park_due()].into_iter().flatten().min()
    }

    /// `is_late`: no further round may begin. `stop`: what has stopped nodes, if anything has.
    fn act_on_outlook(
        &mut self,
        is_late: bool,
        stop: Option<Stop>,
        nodes: &NodeViews,
        effects: &mut Effects<'_>,
    ) {
        let rollout = self.members.rollout();
        let summary = rollout.summary();
        // Nodes that do not exist belong to no wave.
        let waves = rollout.waves().filter(|_| rollout.missing_count() == 0);
        let causes = causes_of(rollout);
        match self.course.decide_outlook(rollout.verdict(), summary, waves.as_ref(), stop) {
            Outlook::Running => self.explain_waiting(),
            Outlook::Draining(excess) => {
                // Once: each further failure makes another sentence.
                if self.course.begin_draining() {
                    let note = format!("{excess}; no further node starts");
                    self.events.emit_warning(reasons::TOLERANCE_EXCEEDED, &note, effects);
                    self.output.touch_status(WritePace::Now);
                }
                if self.course.set_reason(format!("{excess}{causes}")) {
                    self.output.touch_status(WritePace::Slow);
                }
            }
            // Without a beginning, the next leader chooses the nodes again: neither reports nor an end may be there by then.
            Outlook::Ended(_) if !self.output.has_begun() => {}
            Outlook::Ended(_)
                if self.course.wants_round()
                    && !is_late
                    && !self.members.rollout().is_lost()
                    && self.members.can_begin_round(nodes) =>
            {
                self.begin_round(nodes, effects);
            }
            Outlook::Ended(ending) => self.end_run(&ending, effects),
        }
    }

    fn end_run(&mut self, ending: &JobEnding, effects: &mut Effects<'_>) {
        if self.course.is_rechecking() {
            self.members.rollout_mut().close_after_recheck();
            self.announce_rechecked(effects);
        } else {
            self.members.rollout_mut().close(ending.why_not_started());
        }
        let rollout = self.members.rollout();
        self.course.end_run(ending, &causes_of(rollout), effects.now);
        let removed = self.removed_text();
        if let Some(removed) = &removed {
            let reason = self.course.reason();
            let separator = if reason.is_empty() { "" } else { "; " };
            let reason = format!("{reason}{separator}{removed}");
            self.course.set_reason(reason);
        }
        let summary = self.members.rollout().summary();
        let mut counted = format!(
            "{} successful, {} failed, {} unknown",
            summary.successful, summary.failure, summary.unknown
        );
        let codes = list_codes(&self.members.rollout().failures(), usize::MAX);
        if !codes.is_empty() {
            counted = format!("{counted}; {codes}");
        }
        let counted = removed.into_iter().fold(counted, |counted, removed| format!("{removed}; {counted}"));
        let note = if ending.note.is_empty() { counted } else { format!("{} ({counted})", ending.note) };
        if ending.phase == JobPhase::Failure && ending.reason != reasons::CANCELLED {
            self.events.emit_warning(ending.reason, &note, effects);
        } else {
            self.events.emit_normal(ending.reason, &note, effects);
        }
        self.collect_changes();
        self.output.shards.hurry();
        self.output.touch_status(WritePace::Now);
    }

    /// What a job that removes has freed, in words.
    fn removed_text(&self) -> Option<String> {
        let dry_run = self.members.accepted_job()?.removal.as_ref()?.dry_run;
        Some(self.removal_status()?.sentence(dry_run))
    }

    fn announce_rechecked(&self, effects: &mut Effects<'_>) {
        let rollout = self.members.rollout();
        let Rechecked { present, missing, not_checked } = rollout.rechecked();
        let counted = format!(
            "images are still there on {}, missing on {missing}, {not_checked} not checked",
            counted(present, "node")
        );
        if missing == 0 {
            self.events.emit_normal(reasons::IMAGES_PRESENT, &counted, effects);
        } else {
            let lacking = some_of(rollout.nodes_lacking_images().into_iter());
            let note =
                format!("{counted}: {lacking}; another round of spec.retry brings back what is missing");
            self.events.emit_warning(reasons::IMAGES_MISSING, &note, effects);
        }
    }

    /// Sets what the job waits for as its reason, where that is not obvious.
    fn explain_waiting(&mut self) {
        if self.course.is_rechecking() {
            return self.explain_recheck();
        }
        let rollout = self.members.rollout();
        let (summary, offline) = (rollout.summary(), rollout.waiting_offline());
        let reason = if let Some(since) = self.course.paused_since() {
            format!(
                "paused since {}: {} at work keep what they have downloaded, {} waiting",
                since.strftime("%Y-%m-%d %H:%M:%S UTC"),
                counted(summary.in_progress, "node"),
                summary.pending
            )
        } else if self.course.policy().suspend {
            format!(
                "suspended: {} at work, {} waiting",
                counted(summary.in_progress, "node"),
                summary.pending
            )
        } else if summary.in_progress == 0 && summary.pending as usize == offline {
            format!("waiting for {}", counted_len(offline, "offline node"))
        } else if let Some((nodes, reason)) = rollout.waiting_for_secrets() {
            format!("{} waiting: {reason}", counted_len(nodes, "node"))
        } else if let Some((nodes, reason)) =
            rollout.waiting_for_windows().filter(|_| summary.in_progress == 0)
        {
            format!("{} waiting; the first {reason}", counted_len(nodes, "node"))
        } else {
            String::new()
        };
        let failed = summary.failure + summary.unknown;
        let reason = if failed > 0 {
            let causes = causes_of(rollout);
            let separator = if reason.is_empty() { "" } else { "; " };
            format!("{} failed so far{causes}{separator}{reason}", counted(failed, "node"))
        } else {
            reason
        };
        if self.course.set_reason(reason) {
            self.output.touch_status(WritePace::Slow);
        }
    }

    fn explain_recheck(&mut self) {
        let (waiting, offline) = self.members.rollout().count_unanswered();
        let away = if offline > 0 { format!(", {offline} of them offline") } else { String::new() };
        let reason = format!("re-check: {} still to answer{away}", counted_len(waiting, "node"));
        if self.course.set_reason(reason) {
            self.output.touch_status(WritePace::Slow);
        }
    }

    pub(super) fn begin_recheck(&mut self, nodes: &NodeViews, effects: &mut Effects<'_>) {
        self.course.begin_recheck(effects.now);
        let until = self.course.recheck_until().unwrap_or(effects.now);
        let asked = self.members.rollout_mut().begin_recheck(until, |node| nodes.contains_key(node));
        self.members.refresh_plans(nodes);
        let number = self.course.rechecks();
        let note = format!("re-check {number}: {} are asked for their images", counted_len(asked, "node"));
        self.events.emit_normal(reasons::RECHECKING, &note, effects);
        self.collect_changes();
        self.output.touch_status(WritePace::Now);
    }

    pub(super) fn begin_round(&mut self, nodes: &NodeViews, effects: &mut Effects<'_>) {
        let allows_missing = self.course.policy().allow_missing_nodes;
        let again =
            self.members.rollout_mut().begin_round(|node| !allows_missing && !nodes.contains_key(node));
        self.members.remove_missing(nodes);
        self.members.refresh_plans(nodes);
        self.course.begin_round();
        let (round, rounds) = (self.course.retry_rounds(), self.course.policy().retry);
        let note = format!("round {round} of {rounds}: another try for {}", counted_len(again, "node"));
        self.events.emit_normal(reasons::RETRYING, &note, effects);
        self.collect_changes();
        self.output.touch_status(WritePace::Now);
    }

    /// What is kept of the job if it has been over for long.
    pub(in crate::prepull::controller) fn park(&self, now: Timestamp) -> Option<Parked> {
        self.park_due().filter(|due| *due <= now && self.next.is_none())?;
        Some(Parked {
            name: self.events.name().to_owned(),
            generation: self.spec.generation(),
            phase: self.course.phase(),
            delete_at: self.delete_due(),
            pins: self.wants_pins(),
            recalled: None,
        })
    }

    /// Whether the nodes must keep the images. They must if the accepted spec is unknown.
    pub(in crate::prepull::controller) fn wants_pins(&self) -> bool {
        self.spec.accepted().map_or(self.course.has_begun(), |spec| spec.pin)
    }

    /// When the job ended, once that is written: no watcher may miss it.
    fn written_end(&self) -> Option<Timestamp> {
        self.course.end_time().filter(|_| self.output.is_settled())
    }

    fn park_due(&self) -> Option<Timestamp> {
        self.written_end().map(parks_at)
    }

    fn delete_due(&self) -> Option<Timestamp> {
        self.course.delete_due(self.written_end()?)
    }

    fn delete_if_due(&mut self, effects: &mut Effects<'_>) {
        if self.delete_due().is_some_and(|due| due <= effects.now) {
            self.course.note_deletion(effects.now);
            let (job, name) = (self.events.uid().clone(), self.events.name().to_owned());
            effects.emit(Action::Delete { job, name, generation: self.spec.generation() });
        }
    }
}

/// The most frequent causes of failures, with their counts; nothing where no node has failed.
fn list_codes(failures: &[FailureCount], most: usize) -> String {
    let mut listed: Vec<_> =
        failures.iter().take(most).map(|FailureCount { code, nodes }| format!("{code} {nodes}")).collect();
    if failures.len() > most {
        listed.push("…".to_owned());
    }
    listed.join(", ")
}

/// What the reason of a job ends with: why most of its nodes have failed, where some have.
fn causes_of(rollout: &Rollout) -> String {
    /// More are in `status.failuresByCode`.
    const LISTED: usize = 3;
    let causes = list_codes(&rollout.failures(), LISTED);
    if causes.is_empty() { causes } else { format!(" ({causes})") }
}

#[cfg(test)]
mod tests {
    use prepull_api::failure::FailureCode;

    use super::*;

    #[test]
    fn the_most_frequent_causes_are_listed() {
        let failures = [(FailureCode::Timeout, 3), (FailureCode::Other, 1)]
            .map(|(code, nodes)| FailureCount { code, nodes });
        assert_eq!(list_codes(&failures, 2), "Timeout 3, Other 1");
        assert_eq!(list_codes(&failures, 1), "Timeout 3, …");
        assert_eq!(list_codes(&[], 1), "");
    }
}
