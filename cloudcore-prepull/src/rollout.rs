//! One job's way over its nodes: who starts, who has run out of time, when the job is over.
//!
//! Pure: `now` is passed in, and what is to be done comes out as [`Decision`]s. The records are the very
//! [`NodeStatus`] that the API server keeps, so that a restart loses nothing that was written.
//!
//! ```text
//!            start (a slot is free, the edge is online)
//!  Pending ─────────────────────────────────────────▶ InProgress ──result──▶ Successful | Failure
//!     ▲                                                 │    │                    ▲
//!     └── the Assign could not be handed to a session ──┘    └──deadline──▶ Unknown ──late result
//! ```

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{Action, ActionStatus, NodePhase, NodeStatus, Summary, Tristate};
use prepull_api::task::{NodeName, TaskOutcome, TaskResult};
use prepull_api::wire::{OpenPhase, Progress, bounded_reason};

use crate::plan::NodePlan;
use crate::tunnel::SessionId;
use crate::validate::Ratio;

mod record;
#[cfg(test)]
mod tests;

/// What the node's own deadline is given to travel: the edge ends the task at `timeoutSeconds` and says so;
/// only a node that is silent for this much longer becomes Unknown.
pub const REPORT_GRACE: Duration = Duration::from_secs(2);

/// Why a pending node does not start although there is a slot.
const OFFLINE: &str = "offline: its edgecore-prepull is not connected";

/// What of a job may change while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Nodes that may be in progress at the same time.
    pub concurrency: usize,
    /// The part of the nodes that may fail.
    pub tolerance: Ratio,
    /// Of one node, from its start.
    pub timeout: Duration,
}

/// How far an Assign has got. Volatile: after a restart of cloudcore it starts from what the edge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    /// The start is not yet recorded in the API server; nothing has been sent.
    Recording,
    /// Keys are being resolved, then it is sent.
    Dispatching,
    /// Handed to this session, or taken over from an earlier life of cloudcore (no session).
    Sent(Option<SessionId>),
    /// The edge has it in its ledger.
    Accepted,
}

#[derive(Clone, Debug)]
struct Member {
    record: NodeStatus,
    flight: Flight,
    online: Option<SessionId>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Record the node as in progress; once that is written, dispatch its task.
    Start(NodeName),
    /// The node's time is over: tell it to stop, should it hear.
    Expire(NodeName),
}

/// What is to be done about a task that an edge holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reattach {
    /// Nothing: it is on its way, or its result is.
    Leave,
    /// Send the Assign again.
    Dispatch,
    /// Tell the edge to stop.
    Cancel,
}

/// Whether the job is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nodes run or wait.
    Running,
    /// More nodes failed than are tolerated; those that run may end, nothing starts.
    Draining,
    /// Every node ended within the tolerance.
    Completed,
    /// More nodes failed than are tolerated, and none runs any more.
    Failed,
}

/// The nodes of one job.
#[derive(Clone, Debug)]
pub struct Rollout {
    settings: Settings,
    members: Vec<Member>,
    index: HashMap<NodeName, usize>,
    /// Pending and online, in the job's order.
    startable: BTreeSet<usize>,
    /// Of the nodes in progress.
    deadlines: BTreeSet<(Timestamp, usize)>,
    counts: Summary,
}

impl Rollout {
    /// A job that begins, or goes on after a restart: the records are taken as they are. Nodes are started in
    /// the order of the records.
    pub fn new(settings: Settings, records: Vec<NodeStatus>) -> Self {
        let mut rollout = Self {
            settings,
            index: records.iter().enumerate().map(|(at, r)| (NodeName(r.node_name.clone()), at)).collect(),
            members: Vec::with_capacity(records.len()),
            startable: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            counts: Summary::default(),
        };
        rollout.counts.desired = u32::try_from(records.len()).unwrap_or(u32::MAX);
        for (at, record) in records.into_iter().enumerate() {
            *rollout.count(record.phase) += 1;
            rollout.members.push(Member { record, flight: Flight::Sent(None), online: None });
            rollout.index_member(at);
        }
        rollout
    }

    /// The nodes, counted; `skipped` is not known here.
    pub fn summary(&self) -> &Summary {
        &self.counts
    }

    /// The records, in the job's order.
    pub fn records(&self) -> impl Iterator<Item = &NodeStatus> {
        self.members.iter().map(|member| &member.record)
    }

    /// One record.
    pub fn record(&self, node: &NodeName) -> Option<&NodeStatus> {
        self.index.get(node).map(|&at| &self.members[at].record)
    }

    /// How many pending nodes have no session.
    pub fn waiting_offline(&self) -> usize {
        self.counts.pending as usize - self.startable.len()
    }

    /// Takes over changed settings; they hold for the nodes in progress as well.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
        self.deadlines.clear();
        for at in 0..self.members.len() {
            self.index_member(at);
        }
    }

    /// Whether the job is over, and how.
    pub fn verdict(&self) -> Verdict {
        let exceeded = self
            .settings
            .tolerance
            .exceeded_by(self.counts.failure + self.counts.unknown, self.counts.desired);
        match (exceeded, self.counts.in_progress, self.counts.pending) {
            (true, 0, _) => Verdict::Failed,
            (true, _, _) => Verdict::Draining,
            (false, 0, 0) => Verdict::Completed,
            (false, _, _) => Verdict::Running,
        }
    }

    /// The moment at which [`Self::advance`] has something to do although nothing happened.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Ends the nodes whose time is over, and starts as many as the concurrency and the tolerance allow.
    pub fn advance(&mut self, now: Timestamp) -> Vec<Decision> {
        let mut decisions = Vec::new();
        while let Some(&(deadline, at)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now) {
            let timeout = self.settings.timeout.as_secs();
            let reason = match self.members[at].online {
                Some(_) => {
                    format!("no result within timeoutSeconds ({timeout}): the node is connected and silent")
                }
                None => format!("no result within timeoutSeconds ({timeout}): the node is offline"),
            };
            self.deadlines.remove(&(deadline, at));
            self.close_actions(at, Tristate::Unknown, &reason, now);
            self.set(at, NodePhase::Unknown, reason);
            decisions.push(Decision::Expire(self.name(at)));
        }
        while self.verdict() == Verdict::Running
            && (self.counts.in_progress as usize) < self.settings.concurrency
        {
            let Some(at) = self.startable.first().copied() else { break };
            let member = &mut self.members[at];
            member.record.attempt = member.record.attempt.max(1);
            member.record.start_time = Some(Time(now));
            member.flight = Flight::Recording;
            self.set(at, NodePhase::InProgress, String::new());
            decisions.push(Decision::Start(self.name(at)));
        }
        decisions
    }

    /// The start of the node is recorded: its task is being dispatched. Says whether there is still something
    /// to dispatch, and for how long.
    pub fn dispatching(&mut self, node: &NodeName, now: Timestamp) -> Option<Duration> {
        let at = self.in_progress(node)?;
        self.members[at].flight = Flight::Dispatching;
        let started = self.members[at].record.start_time.as_ref()?.0;
        let deadline = started.checked_add(self.settings.timeout).ok()?;
        Duration::try_from(deadline.duration_since(now)).ok().filter(|remaining| !remaining.is_zero())
    }

    /// The Assign was handed to a session. Where the node has another one by now, it is to be sent again.
    pub fn sent(&mut self, node: &NodeName, session: SessionId) -> Reattach {
        let Some(at) = self.in_progress(node) else { return Reattach::Leave };
        let member = &mut self.members[at];
        match member.online {
            Some(current) if current > session => Reattach::Dispatch,
            _ => {
                if member.flight == Flight::Dispatching {
                    member.flight = Flight::Sent(Some(session));
                }
                Reattach::Leave
            }
        }
    }

    /// The Assign could not be handed to any session: the node gives its slot back and waits.
    pub fn not_sent(&mut self, node: &NodeName) {
        if let Some(at) = self.in_progress(node)
            && self.members[at].flight == Flight::Dispatching
        {
            self.set(at, NodePhase::Pending, String::new());
            self.members[at].record.start_time = None;
        }
    }

    /// The task of the node cannot be sent at all.
    pub fn refused(&mut self, node: &NodeName, reason: &str, now: Timestamp) {
        if let Some(at) = self.in_progress(node) {
            self.close_actions(at, Tristate::False, reason, now);
            self.set(at, NodePhase::Failure, reason.to_owned());
        }
    }

    /// The edge has the task in its ledger.
    pub fn accepted(&mut self, node: &NodeName, attempt: u32) {
        if let Some(at) = self.in_progress(node)
            && self.members[at].record.attempt == attempt
        {
            self.members[at].flight = Flight::Accepted;
        }
    }

    /// The node has a session. `open` is what its `Hello` says of this job's task, if anything.
    pub fn online(
        &mut self,
        node: &NodeName,
        session: SessionId,
        open: Option<(u32, OpenPhase)>,
        now: Timestamp,
    ) -> Reattach {
        let Some(&at) = self.index.get(node) else { return Reattach::Cancel };
        self.members[at].online = Some(session);
        self.index_member(at);
        let record = &self.members[at].record;
        let current = open.filter(|(attempt, _)| *attempt == record.attempt.max(1));
        match (record.phase, current) {
            // Its result follows, and is acknowledged when it is written.
            (_, Some((_, OpenPhase::Finished))) => Reattach::Leave,
            (NodePhase::InProgress, Some((_, OpenPhase::Running))) => {
                self.members[at].flight = Flight::Accepted;
                Reattach::Leave
            }
            (NodePhase::InProgress, _) => match self.members[at].flight {
                // It will be sent to the session that is there then.
                Flight::Recording | Flight::Dispatching => Reattach::Leave,
                Flight::Sent(_) | Flight::Accepted => Reattach::Dispatch,
            },
            // A start is recorded before it is sent, so the record was lost: the status shows 200 nodes at
            // the most, or was edited or restored by hand. What runs is taken as it is.
            (NodePhase::Pending, Some((attempt, _))) => {
                self.members[at].record.attempt = attempt;
                self.members[at].record.start_time = Some(Time(now));
                self.members[at].flight = Flight::Accepted;
                self.set(at, NodePhase::InProgress, String::new());
                Reattach::Dispatch
            }
            (NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown, Some(_)) => Reattach::Cancel,
            (_, None) => Reattach::Leave,
        }
    }

    /// The node lost its session. A node in progress keeps its slot until its deadline: it may well be pulling.
    pub fn offline(&mut self, node: &NodeName, session: SessionId) {
        if let Some(&at) = self.index.get(node)
            && self.members[at].online == Some(session)
        {
            self.members[at].online = None;
            self.index_member(at);
        }
    }

    /// The job is over with nodes that never started: says why.
    pub fn abandon_pending(&mut self, reason: &str) {
        for member in self.members.iter_mut().filter(|member| member.record.phase == NodePhase::Pending) {
            reason.clone_into(&mut member.record.reason);
        }
    }

    /// The tasks that an edge may be working on.
    pub fn running(&self) -> impl Iterator<Item = (NodeName, u32)> {
        let running = self.members.iter().filter(|member| member.record.phase == NodePhase::InProgress);
        running.map(|member| (NodeName(member.record.node_name.clone()), member.record.attempt))
    }

    /// The Node object is gone: a node that waits will not come back, one that runs has its deadline.
    pub fn deleted(&mut self, node: &NodeName) -> bool {
        match self.index.get(node) {
            Some(&at) if self.members[at].record.phase == NodePhase::Pending => {
                self.set(at, NodePhase::Unknown, "the Node was deleted before it started".to_owned());
                true
            }
            _ => false,
        }
    }

    /// How far the node is. Returns whether anything changed.
    pub fn progress(
        &mut self,
        node: &NodeName,
        plan: &NodePlan,
        progress: &Progress,
        now: Timestamp,
    ) -> bool {
        let Some(at) = self.in_progress(node) else { return false };
        if self.members[at].record.attempt != progress.task.attempt {
            return false;
        }
        self.members[at].flight = Flight::Accepted;
        record::apply_progress(&mut self.members[at].record, plan, progress, now);
        true
    }

    /// The end of a task. Also taken after the deadline, and after the job's end: it is the truth about the
    /// node. Returns whether anything changed.
    pub fn result(
        &mut self,
        node: &NodeName,
        plan: Option<&NodePlan>,
        result: &TaskResult,
        now: Timestamp,
    ) -> bool {
        let Some(&at) = self.index.get(node) else { return false };
        let before = self.members[at].record.phase;
        if self.members[at].record.attempt.max(1) != result.task.attempt
            || matches!(before, NodePhase::Successful | NodePhase::Failure)
        {
            return false;
        }
        record::apply_result(&mut self.members[at].record, plan, result, now);
        let (phase, reason) = match (result.outcome, before) {
            (TaskOutcome::Succeeded, _) => (NodePhase::Successful, String::new()),
            // The answer to the Cancel that followed the deadline: what it says of the images is kept.
            (TaskOutcome::Cancelled, NodePhase::Unknown) => (before, self.members[at].record.reason.clone()),
            (TaskOutcome::Failed | TaskOutcome::DeadlineExceeded | TaskOutcome::Cancelled, _) => {
                (NodePhase::Failure, bounded_reason(&result.reason))
            }
        };
        self.set(at, phase, reason);
        true
    }

    fn in_progress(&self, node: &NodeName) -> Option<usize> {
        self.index.get(node).copied().filter(|&at| self.members[at].record.phase == NodePhase::InProgress)
    }

    fn name(&self, at: usize) -> NodeName {
        NodeName(self.members[at].record.node_name.clone())
    }

    fn set(&mut self, at: usize, phase: NodePhase, reason: String) {
        let before = self.members[at].record.phase;
        *self.count(before) -= 1;
        *self.count(phase) += 1;
        let record = &mut self.members[at].record;
        record.phase = phase;
        record.reason = reason;
        self.index_member(at);
    }

    fn count(&mut self, phase: NodePhase) -> &mut u32 {
        match phase {
            NodePhase::Pending => &mut self.counts.pending,
            NodePhase::InProgress => &mut self.counts.in_progress,
            NodePhase::Successful => &mut self.counts.successful,
            NodePhase::Failure => &mut self.counts.failure,
            NodePhase::Unknown => &mut self.counts.unknown,
        }
    }

    /// Brings the two indexes in line with the member.
    fn index_member(&mut self, at: usize) {
        let member = &mut self.members[at];
        match (member.record.phase, member.online) {
            (NodePhase::Pending, Some(_)) => {
                member.record.reason.clear();
                self.startable.insert(at);
            }
            (phase, _) => {
                if phase == NodePhase::Pending {
                    OFFLINE.clone_into(&mut member.record.reason);
                }
                self.startable.remove(&at);
            }
        }
        let Some(started) = &member.record.start_time else { return };
        // A timeout of days cannot overflow a timestamp of this millennium.
        let Ok(deadline) = started.0.checked_add(self.settings.timeout + REPORT_GRACE) else { return };
        if member.record.phase == NodePhase::InProgress {
            self.deadlines.insert((deadline, at));
        } else {
            self.deadlines.remove(&(deadline, at));
        }
    }

    /// Ends the actions that are still open.
    fn close_actions(&mut self, at: usize, status: Tristate, reason: &str, now: Timestamp) {
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
    }
}
