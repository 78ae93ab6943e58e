//! Starts of nodes, and their withdrawal before they are recorded.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::NodePhase;
use prepull_api::failure::FailureCode;

use super::{AssignStage, Rollout, RolloutDecision, RolloutSettings, RolloutVerdict};

impl Rollout {
    /// The moment at which [`Self::advance`] has something to do although nothing happened.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let deadline = self.deadlines.next_due();
        // A re-check leaves the waves where they were.
        let may_go_on = self.recheck_until.is_none() && self.verdict() == RolloutVerdict::Running;
        let wave = self.waves.paused_until(self.settings.pause).filter(|_| may_go_on);
        let postponed = self.postponed.first().map(|(at, _)| *at);
        let opening = self.shut.first().map(|(at, _)| *at);
        let recheck = self.recheck_until.filter(|_| !self.rechecking.is_empty());
        deadline.into_iter().chain(recheck).chain(wave).chain(postponed).chain(opening).min()
    }

    /// Ends the nodes that are out of time, and starts as many as the concurrency and the tolerance allow.
    pub fn advance(&mut self, now: Timestamp) -> Vec<RolloutDecision> {
        let mut decisions = Vec::new();
        while let Some(at) = self.deadlines.pop_due(now) {
            let timeout = self.settings.timeout.as_secs();
            let (code, state) = match self.members[at].online {
                Some(_) => (FailureCode::NoResult, "connected and silent"),
                None => (FailureCode::Offline, "offline"),
            };
            let reason = format!("no result within timeoutSeconds ({timeout}): the node is {state}");
            decisions.push(self.expire(at, code, &reason, now));
        }
        decisions.extend(self.end_late_rechecks(now));
        decisions.extend(self.end_postponements(now));
        self.open_windows(now);
        if self.verdict() == RolloutVerdict::Running && self.recheck_until.is_none() {
            let present = self.present_counts();
            let RolloutSettings { steps, pause, .. } = &self.settings;
            self.waves.advance(steps, *pause, &present, now);
        }
        // What the settings, a failure or a deletion forbids by now, and was not recorded yet, has not begun.
        while !self.may_go_on()
            && let Some(at) = self.recording.last().copied()
        {
            decisions.extend(self.withdraw_start(at));
        }
        while self.may_start()
            && let Some(at) = self.startable.first().copied()
        {
            // A look downloads nothing, so no window matters.
            if self.rechecking.contains(&at) || !self.waits_for_window(at, now) {
                self.start(at, now);
                decisions.push(RolloutDecision::Start(self.node_name(at)));
            }
        }
        decisions
    }

    pub(super) fn start(&mut self, at: usize, now: Timestamp) {
        let member = &mut self.members[at];
        member.record.attempt = member.record.attempt.max(self.first_attempt);
        // A look takes its time from the re-check, and leaves the record of the pull as it is.
        if !self.rechecking.contains(&at) {
            member.record.start_time = Some(Time(now));
        }
        member.flight = AssignStage::Recording;
        self.recording.insert(at);
        self.starts += 1;
        // An earlier start counts as written until the API server has its withdrawal.
        (member.start, member.is_stamped) = (self.starts, self.withdrawn.remove(&at));
        self.set_phase(at, NodePhase::InProgress, String::new());
        if !self.rechecking.contains(&at) {
            self.record_clock(at);
        }
    }

    pub(super) fn may_start(&self) -> bool {
        // A look downloads nothing, so neither a suspension nor a limit matters.
        if self.recheck_until.is_some() {
            return true;
        }
        let limit = self.waves.start_limit(&self.settings.steps, self.present_counts().desired);
        let started = self.started_count() as usize + self.withdrawn.len();
        self.may_go_on() && self.slots_taken() < self.settings.concurrency && started < limit as usize
    }

    /// Whether this many nodes may be in progress now, and this many may have started.
    fn may_go_on(&self) -> bool {
        if self.recheck_until.is_some() {
            return true;
        }
        let limit = self.waves.start_limit(&self.settings.steps, self.present_counts().desired);
        !self.settings.hold
            && !self.waves.is_paused()
            && self.verdict() == RolloutVerdict::Running
            && self.slots_taken() <= self.settings.concurrency
            && self.started_count() <= limit
    }

    fn slots_taken(&self) -> usize {
        self.in_progress.len() + self.withdrawn.len()
    }
}
