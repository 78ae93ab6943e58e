//! The counts and indexes of a rollout, which change together with its members, and only here.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{Action, ActionStatus, NodePhase, NodeStatus, Tristate};
use prepull_api::failure::FailureCode;
use prepull_api::task::NodeName;

use super::{BUSY, OFFLINE, Rollout, RolloutDecision, Touched, is_missing, is_rechecking};
use crate::fleet::session::SessionId;
use crate::prepull::aggregate::in_phase;
use crate::shared::pacing::Moment;
use crate::shared::writes::StartId;

impl Rollout {
    /// Notes whether the node works on as many tasks as it can. Returns whether its record changed by that.
    pub fn set_busy(&mut self, node: &NodeName, busy: bool) -> bool {
        let Some(&at) = self.index.get(node) else { return false };
        let member = &mut self.members[at];
        if member.busy == busy {
            return false;
        }
        member.busy = busy;
        let waits = member.record.phase == NodePhase::Pending && member.online.is_some();
        self.index_member(at);
        waits
    }

    /// The node waits, works, or has succeeded.
    pub(super) fn set_phase(&mut self, at: usize, phase: NodePhase, reason: String) {
        self.change_phase(at, phase, None, reason);
    }

    /// The node ends in Failure or Unknown, for this cause.
    pub(super) fn fail_node(&mut self, at: usize, (phase, code): (NodePhase, FailureCode), reason: String) {
        self.change_phase(at, phase, Some(code), reason);
    }

    fn change_phase(&mut self, at: usize, phase: NodePhase, code: Option<FailureCode>, reason: String) {
        let before = self.members[at].record.phase;
        self.count_failure(at, false);
        *in_phase(&mut self.counts, before) -= 1;
        *in_phase(&mut self.counts, phase) += 1;
        let offline = usize::from(self.members[at].online.is_none());
        for (changed, entered) in [(before, false), (phase, true)] {
            match changed {
                NodePhase::InProgress => {
                    if entered {
                        self.in_progress.insert(at)
                    } else {
                        self.recording.remove(&at);
                        self.members[at].record.clock = None;
                        self.in_progress.remove(&at)
                    };
                    self.moves.push((self.node_name(at), entered));
                }
                NodePhase::Pending if entered => self.offline += offline,
                NodePhase::Pending => self.offline -= offline,
                _ => {}
            }
        }
        let record = &mut self.members[at].record;
        record.phase = phase;
        record.reason = reason;
        record.code = code;
        self.count_failure(at, true);
        self.touched.push(Touched { at, phase: true });
        self.index_member(at);
    }

    pub(super) fn set_online(&mut self, at: usize, online: Option<SessionId>) {
        let member = &mut self.members[at];
        let before = std::mem::replace(&mut member.online, online);
        if online.is_none()
            && member.record.phase != NodePhase::Pending
            && let Some(postponed) = &mut member.postponed
        {
            // Its task is sent again when it's back.
            postponed.waits = None;
        }
        if member.record.phase == NodePhase::Pending {
            self.offline += usize::from(online.is_none());
            self.offline -= usize::from(before.is_none());
        }
        self.index_member(at);
    }

    /// A node that waits leaves the job.
    pub(super) fn leave_job(&mut self, at: usize) {
        let name = self.node_name(at);
        self.index.remove(&name);
        self.left.insert(name, at);
        self.counts.desired -= 1;
        self.counts.pending -= 1;
        self.offline -= usize::from(self.members[at].online.is_none());
        self.members[at].has_left = true;
        self.touched.push(Touched { at, phase: true });
        self.index_member(at);
    }

    /// A node that had left is there again, and waits. The number of an attempt is not used twice.
    pub(super) fn come_back(&mut self, at: usize, record: NodeStatus) {
        let member = &mut self.members[at];
        let attempt = member.record.attempt;
        member.record = NodeStatus { attempt, ..record };
        member.opens = None;
        (member.has_left, member.online, member.busy) = (false, None, false);
        member.postponed = None;
        self.index.insert(self.node_name(at), at);
        self.counts.desired += 1;
        self.counts.pending += 1;
        self.offline += 1;
        self.touched.push(Touched { at, phase: true });
        self.index_member(at);
    }

    /// The start of a node that was sent nothing does not happen: it waits again.
    pub(super) fn withdraw_start(&mut self, at: usize) -> Option<RolloutDecision> {
        self.set_phase(at, NodePhase::Pending, String::new());
        let member = &mut self.members[at];
        if !self.rechecking.contains(&at) {
            member.record.start_time = None;
        }
        if !member.is_stamped {
            return None;
        }
        let start = StartId { place: at, number: member.start };
        self.withdrawn.insert(at);
        Some(RolloutDecision::Withdraw(self.node_name(at), start))
    }

    /// Counts the failure of a node by its code, or takes that back.
    pub(super) fn count_failure(&mut self, at: usize, is_new: bool) {
        let record = &self.members[at].record;
        if !matches!(record.phase, NodePhase::Failure | NodePhase::Unknown) {
            return;
        }
        // A record that was edited by hand may have none.
        let nodes = self.failures.entry(record.code.unwrap_or(FailureCode::Other)).or_default();
        let missing = u32::from(is_missing(record));
        if is_new {
            *nodes += 1;
            self.missing += missing;
        } else {
            *nodes -= 1;
            self.missing -= missing;
        }
    }

    /// Brings the two indexes in line with the member.
    pub(super) fn index_member(&mut self, at: usize) {
        let is_rechecking = is_rechecking(&self.members[at].record) && !self.members[at].has_left;
        if is_rechecking {
            self.rechecking.insert(at);
        } else {
            self.rechecking.remove(&at);
        }
        self.deadlines.set(&at, self.deadline(at));
        let member = &mut self.members[at];
        let postponed = member.postponed.as_ref().and_then(|postponed| postponed.waits.as_ref());
        let waits = match (member.record.phase, member.online, member.busy) {
            _ if member.has_left => None,
            // In a re-check nothing begins that had not begun before.
            _ if self.recheck_until.is_some() && !is_rechecking => None,
            (NodePhase::Pending, None, _) => Some(OFFLINE),
            (NodePhase::Pending, Some(_), _) if postponed.is_some() => postponed.map(|(_, why)| why.as_str()),
            (NodePhase::Pending, Some(_), true) => Some(BUSY),
            (NodePhase::Pending, Some(_), false) if member.opens.is_some() => {
                member.opens.as_ref().map(|(_, why)| why.as_str())
            }
            (NodePhase::Pending, Some(_), false) => Some(""),
            _ => None,
        };
        let may_start = waits == Some("");
        if let Some(reason) = waits.filter(|_| !self.closed) {
            reason.clone_into(&mut member.record.reason);
        }
        if may_start {
            self.startable.insert(at);
        } else {
            self.startable.remove(&at);
        }
    }

    /// When the node is out of time, if it is in progress.
    fn deadline(&self, at: usize) -> Option<Timestamp> {
        let started = self.members[at].record.start_time.as_ref()?.0;
        self.is_counted(at).then(|| self.end_of_time(at, started).later_by(self.settings.grace))
    }

    /// Whether the time of the node passes. It begins when its start is recorded: until then nothing is sent.
    pub(super) fn is_counted(&self, at: usize) -> bool {
        let record = &self.members[at].record;
        record.phase == NodePhase::InProgress && !self.recording.contains(&at) && !is_rechecking(record)
    }

    /// A node in progress ends without a result of its edge: so do the actions that are still open.
    pub(super) fn end_without_result(
        &mut self,
        at: usize,
        (phase, code): (NodePhase, FailureCode),
        reason: &str,
        now: Timestamp,
    ) {
        if self.rechecking.contains(&at) {
            return self.leave_unchecked(at, reason);
        }
        let status = if phase == NodePhase::Failure { Tristate::False } else { Tristate::Unknown };
        let flow = &mut self.members[at].record.action_flow;
        if flow.is_empty() {
            flow.push(ActionStatus {
                action: Action::Check,
                status: Tristate::Unknown,
                reason: String::new(),
                time: Time(now),
            });
        }
        for action in flow.iter_mut().filter(|action| action.status == Tristate::Unknown) {
            action.status = status;
            reason.clone_into(&mut action.reason);
            action.time = Time(now);
        }
        self.fail_node(at, (phase, code), reason.to_owned());
    }
}
