//! Download windows of nodes: how their time is counted, and which nodes wait for a window to start.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::{NodeClock, NodePhase};
use prepull_api::task::NodeName;
use prepull_window::{HORIZON, Openings};

use super::{Member, Rollout, Touched};
use crate::shared::pacing::{Moment, OWN_WINDOWS};

impl Rollout {
    /// The node's edge reports the clock that its time is counted by. It may not extend the time of a running task:
    /// while a node is in progress, a change that lengthens it doesn't count.
    pub fn set_clock(&mut self, node: &NodeName, clock: &NodeClock) {
        let Some(&at) = self.index.get(node) else { return };
        let known = self.clock_in_force(at);
        self.members[at].clock = clock.clone();
        if self.settings.windows.relevant(&known) == self.settings.windows.relevant(clock) {
            return;
        }
        let began = self.members[at].record.start_time.as_ref().map(|start| start.0);
        let lengthens = |began| self.end_by(at, clock, began) > self.end_by(at, &known, began);
        if !self.is_counted(at) || !began.is_some_and(lengthens) {
            self.recompute_times(at);
        }
    }

    /// The clock that the node's time is counted by: in progress, the one that it has begun with, or a shortening one
    /// since.
    fn clock_in_force(&self, at: usize) -> NodeClock {
        let Member { record, clock, .. } = &self.members[at];
        if self.is_counted(at) { record.clock.clone().unwrap_or_default() } else { clock.clone() }
    }

    /// The windows of the job are others, or the clock of the node is: its deadline, or its start, is another one.
    pub(super) fn recompute_times(&mut self, at: usize) {
        self.members[at].opens = None;
        if self.members[at].record.phase == NodePhase::InProgress {
            self.record_clock(at);
        }
        self.index_member(at);
    }

    /// Keeps in the record of a node in progress what its deadline is computed by.
    pub(super) fn record_clock(&mut self, at: usize) {
        let member = &mut self.members[at];
        let clock = self.settings.windows.relevant(&member.clock);
        if member.record.clock != clock {
            member.record.clock = clock;
            self.touched.push(Touched { at, phase: false });
        }
    }

    fn openings(&self, at: usize) -> Openings {
        let name = &self.members[at].record.node_name;
        self.settings.windows.openings(name, &self.clock_in_force(at))
    }

    /// When the time of a node is over that began at this moment.
    pub(super) fn end_of_time(&self, at: usize, started: Timestamp) -> Timestamp {
        self.end_by(at, &self.clock_in_force(at), started)
    }

    fn end_by(&self, at: usize, clock: &NodeClock, started: Timestamp) -> Timestamp {
        let (rule, node) = (&self.settings.windows, &self.members[at].record.node_name);
        let started = rule.counted_from(started);
        let open = self.time_of(at);
        let latest = rule.openings_of_job(node, clock).after_open_time(started, open).later_by(OWN_WINDOWS);
        rule.openings(node, clock).after_open_time_until(started, open, latest)
    }

    /// How much of the time is left to a node that began at this moment.
    pub(super) fn time_left(&self, at: usize, started: Timestamp, now: Timestamp) -> Duration {
        if self.end_of_time(at, started) <= now {
            return Duration::ZERO;
        }
        let started = self.settings.windows.counted_from(started);
        self.time_of(at).saturating_sub(self.openings(at).open_between(started, now))
    }

    /// Whether the node has to wait for its window. It is startable again when that opens.
    pub(super) fn waits_for_window(&mut self, at: usize, now: Timestamp) -> bool {
        let openings = self.openings(at);
        let Some(reason) = openings.explain_wait(now) else { return false };
        // If none opens, we still look again later: a newer version may have newer time zones.
        let opens = openings.next_open(now).unwrap_or(now.later_by(HORIZON));
        self.members[at].opens = Some((opens, reason));
        self.shut.insert((opens, at));
        self.index_and_touch(at);
        true
    }

    /// A node that has left, or is offline, has another reason than its window.
    fn index_and_touch(&mut self, at: usize) {
        let before = self.members[at].record.reason.clone();
        self.index_member(at);
        if self.members[at].record.reason != before {
            self.touched.push(Touched { at, phase: false });
        }
    }

    pub(super) fn open_windows(&mut self, now: Timestamp) {
        while let Some(&(opens, at)) = self.shut.first().filter(|(opens, _)| *opens <= now) {
            self.shut.remove(&(opens, at));
            if self.members[at].opens.take_if(|waits| waits.0 == opens).is_some() {
                self.index_and_touch(at);
            }
        }
    }

    /// The number of pending nodes that wait for their windows, and the reason of the one with the earliest opening.
    pub fn waiting_for_windows(&self) -> Option<(usize, &str)> {
        let mut waits = self.shut.iter().filter_map(|(opens, at)| {
            let member = &self.members[*at];
            let waits = member.opens.as_ref().filter(|waits| waits.0 == *opens)?;
            let is_waiting = member.record.phase == NodePhase::Pending && member.online.is_some();
            (is_waiting && !member.has_left).then_some(waits.1.as_str())
        });
        let first = waits.next()?;
        Some((1 + waits.count(), first))
    }
}
