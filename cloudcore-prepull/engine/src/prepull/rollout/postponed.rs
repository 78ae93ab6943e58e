//! Nodes with registry secrets that can't be read for now, or are withheld: they give their slot back, and wait with
//! the reason.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::NodePhase;
use prepull_api::failure::FailureCode;
use prepull_api::task::{NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::truncate_reason;

use super::{AssignStage, KeyInquiry, Member, Postponed, Rollout, RolloutDecision, record};
use crate::shared::pacing::Moment;
use crate::shared::postponement::Postponement;

impl Rollout {
    /// Whether a task with withheld secrets may wait for their owners. That may take at most half of the node's time,
    /// so that there is time to pull the images that need none of them. A task that an edge may have already goes on.
    pub fn may_wait_for_consent(&self, node: &NodeName) -> bool {
        let Some(at) = self.in_progress(node) else { return false };
        let member = &self.members[at];
        let is_new = !matches!(
            member.flight,
            AssignStage::Sent(_) | AssignStage::Accepted | AssignStage::Dispatching { again: true, .. }
        );
        let so_far = member.postponed.as_ref().map(|postponed| postponed.postponement.clone());
        is_new && so_far.unwrap_or_default().next_wait(Duration::ZERO, self.settings.timeout / 2).is_some()
    }

    /// Whether it is known that the node needs keys that are withheld.
    pub fn has_asked(&self, node: &NodeName) -> bool {
        self.in_progress(node).is_some_and(|at| self.members[at].asked == KeyInquiry::Needs)
    }

    /// The node's task was sent without the keys that are withheld. What is there needs none; if something is missing, the
    /// node waits for them with its next attempt.
    pub fn mark_asked(&mut self, node: &NodeName) {
        if let Some(at) = self.in_progress(node) {
            self.members[at].asked = KeyInquiry::Asking;
        }
    }

    /// Whether the task of a node in progress has failed for want of keys that it was sent without, and nothing else.
    pub(super) fn needs_keys(&self, at: usize, result: &TaskResult) -> bool {
        let Member { record, asked, .. } = &self.members[at];
        let mut failed = result.images.iter().filter(|image| !image.outcome.is_on_node()).peekable();
        *asked == KeyInquiry::Asking
            && record.phase == NodePhase::InProgress
            && result.outcome == TaskOutcome::Failed
            && failed.peek().is_some()
            && failed.all(|image| image.code == Some(FailureCode::SecretUnusable))
    }

    /// The node begins another attempt, with the keys. What it has pulled stays.
    pub(super) fn begin_with_keys(&mut self, at: usize) {
        self.members[at].asked = KeyInquiry::Needs;
        record::begin_again(&mut self.members[at].record);
        self.set_phase(at, NodePhase::Pending, String::new());
    }

    /// The owner of this secret has allowed its use: the nodes that wait for that go on.
    pub fn end_waits_for(&mut self, secret: &str, now: Timestamp) {
        let waiting: Vec<usize> = self.postponed.iter().map(|(_, at)| *at).collect();
        for at in waiting {
            let member = &mut self.members[at];
            let is_charged = member.record.phase == NodePhase::Pending;
            let postponed = member.postponed.as_mut();
            let Some(postponed) =
                postponed.filter(|postponed| postponed.withheld.iter().any(|name| name == secret))
            else {
                continue;
            };
            if let Some((until, _)) = &mut postponed.waits {
                if is_charged {
                    postponed.postponement.end_wait_early(Moment::time_since(*until, now));
                }
                *until = now;
                self.postponed.insert((now, at));
            }
        }
    }

    /// The node is back, and its secrets are read at once: what is left of its wait is not charged.
    pub(super) fn end_wait_at_return(&mut self, at: usize, now: Timestamp) {
        let member = &mut self.members[at];
        if let Some(postponed) = &mut member.postponed
            && let Some((until, _)) = postponed.waits.take()
            && member.record.phase == NodePhase::Pending
        {
            postponed.postponement.end_wait_early(Moment::time_since(until, now));
        }
    }

    /// A secret of the node's task could not be read, or those of `withheld` may not be used. The node becomes pending
    /// again, and restarts after a while. If its edge may have the task already, it keeps its slot, and its task is
    /// dispatched again. `false` if the node's time does not allow another try: it has failed.
    pub fn postpone(&mut self, node: &NodeName, reason: &str, withheld: &[String], now: Timestamp) -> bool {
        let Some(at) = self.in_progress(node) else { return true };
        let AssignStage::Dispatching { again, session, .. } = self.members[at].flight else { return true };
        let timeout = self.settings.timeout;
        let member = &mut self.members[at];
        let tried = member
            .record
            .start_time
            .as_ref()
            .map_or(Duration::ZERO, |start| Moment::time_since(now, start.0));
        let postponed = member.postponed.get_or_insert_with(|| {
            Box::new(Postponed { postponement: Postponement::default(), waits: None, withheld: Vec::new() })
        });
        // One that keeps its slot keeps its start as well, and with it its deadline.
        let wait = if again {
            Some(postponed.postponement.next_wait_in_its_time())
        } else {
            postponed.postponement.next_wait(tried, timeout)
        };
        let Some(wait) = wait else {
            // Only secrets that cannot be read postpone a task.
            self.fail_unsendable(node, FailureCode::SecretUnusable, reason, now);
            return false;
        };
        let until = now.later_by(wait);
        postponed.waits = Some((until, truncate_reason(reason)));
        postponed.withheld = withheld.to_vec();
        self.postponed.insert((until, at));
        if again {
            member.flight = AssignStage::Sent(session);
        } else {
            self.withdraw_start(at);
        }
        true
    }

    /// Lets nodes go on after their wait. Returns those that have kept their slot.
    pub(super) fn end_postponements(&mut self, now: Timestamp) -> Vec<RolloutDecision> {
        let mut decisions = Vec::new();
        while let Some(&(until, at)) = self.postponed.first().filter(|(until, _)| *until <= now) {
            self.postponed.remove(&(until, at));
            let member = &mut self.members[at];
            let waits =
                member.postponed.as_mut().and_then(|postponed| postponed.waits.take_if(|w| w.0 == until));
            match (member.record.phase, waits) {
                (NodePhase::Pending, Some(_)) => self.index_member(at),
                (NodePhase::InProgress, Some(_))
                    if matches!(member.flight, AssignStage::Sent(_) | AssignStage::Accepted) =>
                {
                    decisions.push(RolloutDecision::Redispatch(self.node_name(at)));
                }
                // It has ended, or gone on, in the meantime.
                _ => {}
            }
        }
        decisions
    }

    /// How many pending nodes wait for a secret, and the reason of the first of them.
    pub fn waiting_for_secrets(&self) -> Option<(usize, &str)> {
        let waits = self.postponed.iter().filter_map(|(until, at)| {
            let member = &self.members[*at];
            let waits = member.postponed.as_ref()?.waits.as_ref().filter(|waits| waits.0 == *until)?;
            let is_waiting = member.record.phase == NodePhase::Pending && member.online.is_some();
            (is_waiting && !member.has_left).then_some(waits.1.as_str())
        });
        let (count, first) =
            waits.fold((0, None), |(count, first), reason| (count + 1, first.or(Some(reason))));
        Some((count, first?))
    }

    /// The rest of a node's time from its start on: the wait for its secrets counts.
    pub(super) fn time_of(&self, at: usize) -> Duration {
        let postponed = self.members[at].postponed.as_ref();
        let spent = postponed.map_or(Duration::ZERO, |postponed| postponed.postponement.spent());
        self.settings.timeout.saturating_sub(spent)
    }
}
