//! The course of a job: starts, deadlines, waves, its end, further rounds, its deletion.

use jiff::Timestamp;
use prepull_api::crd::status::{JobPhase, Summary};
use prepull_api::task::TaskId;

use super::super::parked::{Parked, parks_at};
use super::super::{Action, DELETE_RETRY, cancel};
use super::start::plans;
use super::{Job, Nodes};
use crate::prepull::rollout::{Decision, Verdict};
use crate::shared::effects::Effects;
use crate::shared::reasons;
use crate::shared::writes::{Deferred, Pace};

impl Job {
    /// Expires, starts, and ends the job where it is over.
    pub(in crate::prepull::controller) fn advance(
        &mut self,
        nodes: &Nodes,
        now: Timestamp,
        actions: &mut Vec<Action>,
    ) {
        let deadline = self.active_deadline();
        let Some(run) = self.run.as_mut().filter(|run| !run.is_over()) else {
            return self.delete_if_due(&mut Effects::new(now, actions));
        };
        let waves = run.rollout.waves();
        let out_of_time = deadline.is_some_and(|deadline| deadline <= now);
        let decisions = if out_of_time {
            let seconds = self.pace.active_deadline.unwrap_or_default().as_secs();
            run.rollout
                .expire_all(&format!("stopped: activeDeadlineSeconds ({seconds}) of the job is over"), now)
        } else {
            run.rollout.advance(now)
        };
        let waves_now = run.rollout.waves();
        self.collect();
        for decision in decisions {
            match decision {
                Decision::Start(node) => {
                    if let Some(run) = &mut self.run
                        && let Some(plan) = run.plans.get(&node)
                    {
                        run.rollout.name_images(&node, plan);
                    }
                    let attempt = self.attempt(&node);
                    self.after_write(&node, Deferred::Dispatch(node.clone(), attempt), now, actions);
                }
                Decision::Expire(node) => {
                    let record = self.run.as_ref().and_then(|run| run.rollout.record(&node));
                    let (attempt, reason) = record.map(|r| (r.attempt, r.reason.clone())).unwrap_or_default();
                    actions.push(cancel(&node, TaskId { job: self.uid.clone(), attempt }, &reason));
                    self.node_event(actions, reasons::NODE_UNKNOWN, &format!("{node}: {reason}"));
                }
            }
        }
        if let Some(now) = waves_now.filter(|now| waves.as_ref() != Some(now)) {
            let note = match &now.paused_until {
                Some(until) => {
                    format!("wave {} of {} has ended; the next begins at {}", now.step, now.steps, until.0)
                }
                None => format!("wave {} of {}: up to {} nodes", now.step, now.steps, now.nodes),
            };
            self.event(
                actions,
                false,
                if now.paused_until.is_some() { reasons::WAVE_ENDED } else { reasons::WAVE_STARTED },
                &note,
            );
            self.writes.touch(Pace::Now);
        }
        self.conclude(out_of_time, nodes, now, actions);
    }

    /// When [`Self::advance`] or a write may have something to do although nothing happened.
    pub(in crate::prepull::controller) fn next_wakeup(&self) -> Option<Timestamp> {
        let running = self.run.as_ref().filter(|run| !run.is_over());
        let deadline = running.and_then(|run| run.rollout.next_deadline());
        let active = running.and_then(|_| self.active_deadline());
        [deadline, active, self.next_write(), self.delete_due(), self.park_due()].into_iter().flatten().min()
    }

    fn active_deadline(&self) -> Option<Timestamp> {
        let run = self.run.as_ref().filter(|run| !run.is_over() && !self.pace.suspend)?;
        run.active_since.checked_add(self.pace.active_deadline?).ok()
    }

    fn conclude(&mut self, out_of_time: bool, nodes: &Nodes, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        let summary = run.rollout.summary().clone();
        let bad = summary.failure + summary.unknown;
        let tolerate = &self.tolerate;
        let waves = run.rollout.waves().filter(|waves| waves.nodes < summary.desired);
        let excess = || {
            let nodes = match &waves {
                Some(waves) => format!("the {} nodes of wave {}", waves.nodes, waves.step),
                None => format!("{} nodes", summary.desired),
            };
            format!("{bad} of {nodes} failed, more than failureTolerate {tolerate} allows")
        };
        let seconds = self.pace.active_deadline.unwrap_or_default().as_secs();
        let (phase, reason, note) = match run.rollout.verdict() {
            _ if out_of_time => {
                let note = format!(
                    "activeDeadlineSeconds ({seconds}) is over; {} nodes did not end, {} were not started",
                    summary.unknown, summary.pending
                );
                (JobPhase::Failure, reasons::DEADLINE_EXCEEDED, note)
            }
            Verdict::Running => return self.explain_waiting(&summary),
            Verdict::Draining => {
                let excess = excess();
                if self.reason != excess {
                    self.reason.clone_from(&excess);
                    let note = format!("{excess}; no further node starts");
                    self.event(actions, true, reasons::TOLERANCE_EXCEEDED, &note);
                    self.writes.touch(Pace::Now);
                }
                return;
            }
            Verdict::Completed if bad == 0 => (JobPhase::Completed, reasons::COMPLETED, String::new()),
            Verdict::Completed => (
                JobPhase::Completed,
                reasons::COMPLETED,
                format!("{bad} of {} nodes failed, within failureTolerate {tolerate}", summary.desired),
            ),
            Verdict::Failed if summary.pending > 0 => {
                let note = format!("{}; {} nodes were not started", excess(), summary.pending);
                (JobPhase::Failure, reasons::FAILED, note)
            }
            Verdict::Failed => (JobPhase::Failure, reasons::FAILED, excess()),
        };
        if self.pace.retry > run.retry && bad + summary.pending > 0 && !out_of_time {
            return self.retry(nodes, now, actions);
        }
        run.rollout.close(match reason {
            reasons::DEADLINE_EXCEEDED => "not started: the time of the job was over",
            _ => "not started: more nodes failed than failureTolerate allows",
        });
        run.completion_time = Some(now);
        self.phase = phase;
        self.ended_as = (reason == reasons::DEADLINE_EXCEEDED).then_some(reason);
        self.reason.clone_from(&note);
        let counted = format!(
            "{} successful, {} failed, {} unknown",
            summary.successful, summary.failure, summary.unknown
        );
        let note = if note.is_empty() { counted } else { format!("{note} ({counted})") };
        self.event(actions, phase == JobPhase::Failure, reason, &note);
        self.collect();
        if let Some(run) = &mut self.run {
            run.shards.hurry();
        }
        self.writes.touch(Pace::Now);
    }

    /// What a job waits for, where that is not obvious.
    fn explain_waiting(&mut self, summary: &Summary) {
        let Some(run) = &self.run else { return };
        let offline = run.rollout.waiting_offline();
        let reason = if self.pace.suspend {
            format!("suspended: {} nodes go on, {} wait", summary.in_progress, summary.pending)
        } else if offline > 0 && summary.in_progress == 0 && summary.pending as usize == offline {
            format!("waiting for {offline} nodes that are offline")
        } else {
            String::new()
        };
        if self.reason != reason {
            self.reason = reason;
            self.writes.touch(Pace::Slow);
        }
    }

    /// A further round for the nodes that did not make it.
    pub(super) fn retry(&mut self, nodes: &Nodes, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(run) = &mut self.run else { return };
        let again = run.rollout.retry();
        run.rollout.without(nodes);
        if let Some(job) = &run.job {
            // Also for nodes that were gone, and are there again.
            run.plans = plans(job, run.rollout.records(), nodes);
        }
        run.retry += 1;
        run.completion_time = None;
        run.active_since = now;
        let note = format!("round {} of {}: {again} nodes are tried again", run.retry, self.pace.retry);
        self.phase = JobPhase::InProgress;
        self.reason.clear();
        self.ended_as = None;
        self.delete_at = None;
        self.event(actions, false, reasons::RETRYING, &note);
        self.collect();
        self.writes.touch(Pace::Now);
    }

    /// What is kept of the job once it is over for long.
    pub(in crate::prepull::controller) fn park(&self, now: Timestamp) -> Option<Parked> {
        self.park_due().filter(|due| *due <= now)?;
        Some(Parked {
            name: self.name.clone(),
            generation: self.generation,
            phase: self.phase,
            delete_at: self.delete_due(),
            recalled: false,
        })
    }

    /// When the job ended, once that is written: nobody who watches is to miss it.
    fn ended(&self) -> Option<Timestamp> {
        let run = self.run.as_ref().filter(|run| run.shards.all_written() && self.writes.is_clean())?;
        run.completion_time
    }

    fn park_due(&self) -> Option<Timestamp> {
        self.ended().map(parks_at)
    }

    /// When the job is to be deleted.
    fn delete_due(&self) -> Option<Timestamp> {
        let due = self.ended()?.checked_add(self.pace.ttl?).ok()?;
        Some(self.delete_at.unwrap_or(due).max(due))
    }

    fn delete_if_due(&mut self, effects: &mut Effects<'_, Action>) {
        if self.delete_due().is_some_and(|due| due <= effects.now) {
            self.delete_at = effects.now.checked_add(DELETE_RETRY).ok();
            effects.emit(Action::Delete { job: self.uid.clone(), name: self.name.clone() });
        }
    }
}
