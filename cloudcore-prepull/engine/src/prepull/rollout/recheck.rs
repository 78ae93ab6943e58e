//! Re-checks: the nodes that succeeded are asked whether their images are still there, and download nothing.
//!
//! ```text
//!  Successful ──begin──▶ Pending ──▶ InProgress ──every image is there──▶ Successful
//!                           │            │ └───────an image is missing──▶ Failure (Removed)
//!                           └────────────┴─no answer, or an unclear one─▶ Successful, not checked
//! ```
//!
//! A node is being checked while it is pending or in progress and its record has [`NodeStatus::recheck`]: so the next
//! leader knows that too, and asks nodes only to look.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::{NodePhase, NodeRecheck, NodeStatus};
use prepull_api::failure::FailureCode;
use prepull_api::task::{NodeName, TaskResult};
use prepull_api::wire::truncate_reason;

use super::record::{self, RecheckFinding};
use super::{OFFLINE, Rollout, RolloutDecision};

/// How long a re-check lasts at most. A look takes no link and no registry, so this is for an agent that is reconnecting,
/// or that finishes another task first. Nodes that are away for longer must not keep the job from its end.
pub const RECHECK_TIME: Duration = Duration::from_secs(120);

const NO_ANSWER: &str = "no answer: its edgecore-prepull is connected and silent";
const SUPERSEDED: &str = "the re-check was given up for a retry round";

/// What a re-check has found so far, in nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rechecked {
    /// They have every image.
    pub present: u32,
    /// They lack an image that they had.
    pub missing: u32,
    /// They have not answered.
    pub not_checked: u32,
}

/// Whether the node of this record is being checked.
pub fn is_rechecking(record: &NodeStatus) -> bool {
    record.recheck.is_some() && matches!(record.phase, NodePhase::Pending | NodePhase::InProgress)
}

/// A re-check begins for the node of this record, which has succeeded and is in no rollout yet.
pub fn begin_recheck(record: &mut NodeStatus) {
    note_recheck(record);
    (record.phase, record.code) = (NodePhase::Pending, None);
    record.reason.clear();
}

/// The node of this record is asked again, under another number.
fn note_recheck(record: &mut NodeStatus) {
    record.attempt = record.attempt.max(1).saturating_add(1);
    let checked_time = record.recheck.take().and_then(|recheck| recheck.checked_time);
    record.recheck = Some(NodeRecheck { checked_time, not_checked_reason: String::new() });
}

/// The node of this record, which is in no rollout yet, keeps the result that it had before the re-check.
pub fn keep_result(record: &mut NodeStatus) {
    note_not_checked(record, SUPERSEDED);
    (record.phase, record.code) = (NodePhase::Successful, None);
    record.reason.clear();
}

fn note_not_checked(record: &mut NodeStatus, reason: &str) {
    record.recheck.get_or_insert_default().not_checked_reason = truncate_reason(reason);
}

impl Rollout {
    /// Asks the successful nodes with `may_ask` which images they still have. The other successful nodes keep their
    /// result. Returns the number of asked nodes.
    pub fn begin_recheck(&mut self, until: Timestamp, may_ask: impl Fn(&NodeName) -> bool) -> usize {
        self.closed = false;
        self.recheck_until = Some(until);
        for at in self.taken_places() {
            if self.members[at].record.phase != NodePhase::Successful {
                // A node that never started must not do so now.
                self.index_member(at);
            } else if may_ask(&self.node_name(at)) {
                self.members[at].postponed = None;
                note_recheck(&mut self.members[at].record);
                self.set_phase(at, NodePhase::Pending, String::new());
            } else {
                self.leave_unchecked(at, "there is no Node of this name any more");
            }
        }
        self.rechecking.len()
    }

    /// Goes on with a re-check that an earlier run of cloudcore began.
    pub fn resume_recheck(&mut self, until: Timestamp) {
        self.recheck_until = Some(until);
        for at in self.taken_places() {
            self.index_member(at);
        }
    }

    /// The re-check of this node, if there is one.
    pub fn is_rechecking(&self, node: &NodeName) -> bool {
        self.position(node).is_some_and(|at| self.rechecking.contains(&at))
    }

    /// How many nodes are still to answer, and how many of them are offline.
    pub fn count_unanswered(&self) -> (usize, usize) {
        let offline = self.rechecking.iter().filter(|&&at| self.members[at].online.is_none());
        (self.rechecking.len(), offline.count())
    }

    /// What the last re-check has found.
    pub fn rechecked(&self) -> Rechecked {
        let mut found = Rechecked::default();
        for record in self.records() {
            match (record.phase, &record.recheck) {
                (NodePhase::Successful, Some(recheck)) if recheck.not_checked_reason.is_empty() => {
                    found.present += 1;
                }
                (NodePhase::Successful, Some(_)) => found.not_checked += 1,
                (NodePhase::Failure, Some(_)) => found.missing += 1,
                _ => {}
            }
        }
        found
    }

    /// Names of nodes that lack an image which they had.
    pub fn nodes_lacking_images(&self) -> Vec<String> {
        let lacks = |record: &&NodeStatus| record.phase == NodePhase::Failure && record.recheck.is_some();
        self.records().filter(lacks).map(|record| record.node_name.clone()).collect()
    }

    /// Ends re-checks that are out of time. Returns the nodes with edges that may still work on one.
    pub(super) fn end_late_rechecks(&mut self, now: Timestamp) -> Vec<RolloutDecision> {
        if self.recheck_until.is_none_or(|until| until > now) {
            return Vec::new();
        }
        self.abandon_rechecks(None)
    }

    /// Nodes that have not answered keep the result that they had.
    pub(super) fn abandon_rechecks(&mut self, why: Option<&str>) -> Vec<RolloutDecision> {
        let mut decisions = Vec::new();
        for at in self.rechecking.iter().copied().collect::<Vec<_>>() {
            let member = &self.members[at];
            let reason = match (why, member.online, member.record.phase) {
                (Some(why), ..) => why.to_owned(),
                (None, None, _) => OFFLINE.to_owned(),
                (None, Some(_), NodePhase::Pending) if !member.record.reason.is_empty() => {
                    member.record.reason.clone()
                }
                (None, Some(_), _) => NO_ANSWER.to_owned(),
            };
            let was_asked = member.record.phase == NodePhase::InProgress && !self.recording.contains(&at);
            self.leave_unchecked(at, &reason);
            if was_asked {
                decisions.push(RolloutDecision::StopRecheck(self.node_name(at)));
            }
        }
        decisions
    }

    /// Gives up a node's re-check when its retry round begins.
    pub(super) fn supersede_recheck(&mut self) {
        self.recheck_until = None;
        self.abandon_rechecks(Some(SUPERSEDED));
    }

    /// The node keeps the result that it had.
    pub(super) fn leave_unchecked(&mut self, at: usize, reason: &str) {
        note_not_checked(&mut self.members[at].record, reason);
        self.set_phase(at, NodePhase::Successful, String::new());
    }

    /// Takes what a node has found, if it is being checked. Returns whether it was.
    pub(super) fn take_look(&mut self, at: usize, result: &TaskResult, now: Timestamp) -> bool {
        if !self.rechecking.contains(&at) {
            return false;
        }
        match record::apply_look(&mut self.members[at].record, result, now) {
            RecheckFinding::Present => self.set_phase(at, NodePhase::Successful, String::new()),
            RecheckFinding::Missing(reason) => {
                self.fail_node(at, (NodePhase::Failure, FailureCode::Removed), truncate_reason(&reason));
            }
            RecheckFinding::Unclear(reason) => self.leave_unchecked(at, &reason),
        }
        true
    }
}
