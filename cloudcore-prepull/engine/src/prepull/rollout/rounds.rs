//! The end of a job, its further rounds, and nodes that leave it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use prepull_api::crd::status::NodePhase;
use prepull_api::failure::FailureCode;
use prepull_api::task::NodeName;

use super::{KeyInquiry, Rollout, RolloutDecision, Touched, is_missing, record};
use crate::fleet::node_view::NodeView;

const CANCELLED: &str = "stopped: the job was cancelled";

impl Rollout {
    pub(super) fn taken_places(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&at| !self.members[at].has_left).collect()
    }

    /// Ends every node in progress, and every look: the job was cancelled.
    pub fn cancel_all(&mut self, now: Timestamp) -> Vec<RolloutDecision> {
        let mut decisions = self.abandon_rechecks(Some(CANCELLED));
        decisions.extend(self.expire_all(FailureCode::Cancelled, CANCELLED, now));
        decisions
    }

    /// Ends every node in progress, for a reason of the whole job. A node with an unrecorded start has been sent
    /// nothing, and waits again.
    pub fn expire_all(&mut self, code: FailureCode, reason: &str, now: Timestamp) -> Vec<RolloutDecision> {
        let mut decisions = Vec::new();
        for at in self.in_progress.iter().copied().collect::<Vec<_>>() {
            if self.recording.contains(&at) {
                decisions.extend(self.withdraw_start(at));
            } else {
                decisions.push(self.expire(at, code, reason, now));
            }
        }
        decisions
    }

    pub(super) fn expire(
        &mut self,
        at: usize,
        code: FailureCode,
        reason: &str,
        now: Timestamp,
    ) -> RolloutDecision {
        self.end_without_result(at, (NodePhase::Unknown, code), reason, now);
        RolloutDecision::Expire(self.node_name(at))
    }

    /// Marks all nodes offline: an ended job gets no session events.
    pub fn forget_sessions(&mut self) {
        for at in self.taken_places() {
            self.set_online(at, None);
        }
    }

    /// Begins a further round: the failed, unknown and not started nodes become pending, with a new attempt. Those that
    /// did not exist at the start, and `remain` missing, stay as they are. Returns how many become pending.
    pub fn begin_round(&mut self, remain: impl Fn(&NodeName) -> bool) -> usize {
        self.closed = false;
        self.supersede_recheck();
        let mut again = 0;
        for at in self.taken_places() {
            let phase = self.members[at].record.phase;
            if !matches!(phase, NodePhase::Failure | NodePhase::Unknown | NodePhase::Pending)
                || (is_missing(&self.members[at].record) && remain(&self.node_name(at)))
            {
                continue;
            }
            again += 1;
            self.members[at].postponed = None;
            self.members[at].asked = KeyInquiry::No;
            record::begin_again(&mut self.members[at].record);
            self.set_phase(at, NodePhase::Pending, String::new());
        }
        self.restart_waves();
        again
    }

    /// A node that did not exist does now: it waits like any other.
    pub fn mark_found(&mut self, node: &NodeName) {
        if let Some(&at) = self.index.get(node)
            && is_missing(&self.members[at].record)
        {
            self.set_phase(at, NodePhase::Pending, String::new());
        }
    }

    /// Closes the rollout: the job is over, and nothing starts any more. Nodes that never started get this reason.
    pub fn close(&mut self, reason: &str) {
        self.closed = true;
        for (at, member) in self.members.iter_mut().enumerate().filter(|(_, member)| !member.has_left) {
            if member.record.phase == NodePhase::Pending && member.record.reason != reason {
                reason.clone_into(&mut member.record.reason);
                self.touched.push(Touched { at, phase: true });
            }
        }
    }

    /// Closes the rollout after a re-check: the nodes that never started have their reasons.
    pub fn close_after_recheck(&mut self) {
        self.closed = true;
    }

    /// Removes the nodes without a Node object among these. Returns those that have left, see [`Self::remove_node`].
    pub fn remove_missing(&mut self, nodes: &BTreeMap<NodeName, NodeView>) -> Vec<NodeName> {
        let missing = self.taken_places().into_iter().map(|at| self.node_name(at));
        let missing: Vec<_> = missing.filter(|name| !nodes.contains_key(name)).collect();
        missing.into_iter().filter(|name| self.remove_node(name)).collect()
    }

    /// Looks again at the nodes that were in progress when their Nodes were deleted: an unrecorded or unsent start may have
    /// been withdrawn since, or a task may need keys. Returns those that have left, see [`Self::remove_node`].
    pub fn remove_nodeless(&mut self, nodes: &BTreeMap<NodeName, NodeView>) -> Vec<NodeName> {
        let nodeless = std::mem::take(&mut self.nodeless).into_iter().map(|at| self.node_name(at));
        let missing: Vec<_> = nodeless.filter(|name| !nodes.contains_key(name)).collect();
        missing.into_iter().filter(|name| self.remove_node(name)).collect()
    }

    /// The Node object was deleted. A node that has never started leaves the job; one that waits for a further attempt
    /// ends as Unknown; one in progress keeps its deadline. Returns whether the node has left.
    pub fn remove_node(&mut self, node: &NodeName) -> bool {
        let Some(&at) = self.index.get(node) else { return false };
        let member = &self.members[at];
        match (member.record.phase, member.record.attempt) {
            (NodePhase::Pending, _) if self.rechecking.contains(&at) => {
                self.leave_unchecked(at, "its Node was deleted");
                false
            }
            // The first attempt doesn't count if it never reached a session.
            (NodePhase::Pending, attempt) if attempt <= self.first_attempt => {
                self.leave_job(at);
                true
            }
            (NodePhase::Pending, _) => {
                let cause = (NodePhase::Unknown, FailureCode::NodeNotFound);
                self.fail_node(at, cause, "the Node was deleted before it started again".to_owned());
                false
            }
            (NodePhase::InProgress, _) => {
                self.nodeless.insert(at);
                false
            }
            _ => false,
        }
    }
}
