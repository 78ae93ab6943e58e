//! The rollout of one job over its nodes: which nodes start, which are out of time, and when the job is over.
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

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{NodePhase, NodeStatus, RolloutStatus, Summary, Tristate};
use prepull_api::task::NodeName;

use crate::prepull::validate::{Ratio, Step};
use crate::shared::node_view::NodeView;
use crate::shared::session::SessionId;

mod books;
mod edges;
mod record;
#[cfg(test)]
mod tests;
mod waves;

use waves::Waves;

/// The grace for the report of a timeout to arrive: the edge ends the task at `timeoutSeconds` and says so; only a node
/// that is silent for this much longer becomes Unknown.
pub const REPORT_GRACE: Duration = Duration::from_secs(2);

/// The reasons of pending nodes that do not start although the concurrency allows it.
const OFFLINE: &str = "offline: its edgecore-prepull is not connected";
const BUSY: &str = "waits: the node works on another job";

/// The settings of a rollout, which may change while the job runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Nodes that may be in progress at the same time.
    pub concurrency: usize,
    /// The share of the nodes that may fail.
    pub tolerance: Ratio,
    /// How long one node may take, from its start.
    pub timeout: Duration,
    /// The waves; without any all nodes are in one.
    pub steps: Vec<Step>,
    /// The pause between two waves.
    pub pause: Duration,
    /// Whether no further node may start.
    pub hold: bool,
}

/// A record that has changed since the last call of [`Rollout::take_touched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The place of the node in the job's order.
    pub at: usize,
    /// Whether its phase or reason changed, and not only its progress.
    pub phase: bool,
}

/// How far an Assign has got. Volatile: after a restart of cloudcore it starts from what the edge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    /// The start is not yet recorded in the API server; nothing has been sent.
    Recording,
    /// Keys are being resolved, then it is sent. `again`: the edge may have it already. `session`: the session of the
    /// node when that began.
    Dispatching { again: bool, session: Option<SessionId> },
    /// Handed to this session, or by an earlier run of cloudcore (no session).
    Sent(Option<SessionId>),
    /// The edge has it in its ledger.
    Accepted,
}

#[derive(Clone, Debug)]
struct Member {
    record: NodeStatus,
    flight: Flight,
    online: Option<SessionId>,
    /// Whether it works on as many tasks as it can.
    busy: bool,
}

/// A decision that the controller carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Record the node as in progress; once that is written, dispatch its task.
    Start(NodeName),
    /// The node is out of time: cancel its task, if it can be reached.
    Expire(NodeName),
}

/// What is to be done about a task that an edge holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reattach {
    /// Do nothing: the task is on its way, or its result is.
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
    /// The places of nodes that are pending, online and not busy.
    startable: BTreeSet<usize>,
    in_progress: BTreeSet<usize>,
    /// The deadlines of the nodes in progress, with their places.
    deadlines: BTreeSet<(Timestamp, usize)>,
    /// How many nodes are pending and offline.
    offline: usize,
    counts: Summary,
    waves: Waves,
    /// Whether the job is over.
    closed: bool,
    /// Records that changed: see [`Self::take_touched`].
    touched: Vec<Touched>,
    /// Nodes that took or gave back a slot: see [`Self::take_moves`].
    moves: Vec<(NodeName, bool)>,
}

impl Rollout {
    /// A job that begins, or goes on after a restart: the records are taken as they are. Nodes are started in
    /// the order of the records.
    pub fn new(settings: Settings, records: Vec<NodeStatus>) -> Self {
        let mut rollout = Self {
            settings,
            members: Vec::with_capacity(records.len()),
            index: HashMap::with_capacity(records.len()),
            startable: BTreeSet::new(),
            in_progress: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            offline: 0,
            counts: Summary::default(),
            waves: Waves::default(),
            closed: false,
            touched: Vec::new(),
            moves: Vec::new(),
        };
        for record in records {
            rollout.add(record);
        }
        rollout
    }

    /// Resumes the waves where an earlier run of cloudcore left them.
    pub fn resume_waves(&mut self, status: &RolloutStatus) {
        self.waves = Waves::resumed(status);
        self.waves.catch_up(&self.settings.steps, &self.counts);
    }

    /// Adds a node after all others, unless it is there already.
    pub fn add(&mut self, record: NodeStatus) {
        let (at, name) = (self.members.len(), NodeName(record.node_name.clone()));
        if self.index.contains_key(&name) {
            return;
        }
        self.index.insert(name.clone(), at);
        self.counts.desired += 1;
        *self.count(record.phase) += 1;
        match record.phase {
            NodePhase::Pending => self.offline += 1,
            NodePhase::InProgress => {
                self.in_progress.insert(at);
                self.moves.push((name, true));
            }
            NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown => {}
        }
        self.members.push(Member { record, flight: Flight::Sent(None), online: None, busy: false });
        self.index_member(at);
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The place of a node in the job's order.
    pub fn position(&self, node: &NodeName) -> Option<usize> {
        self.index.get(node).copied()
    }

    /// Whether one of these places is in progress.
    pub fn any_in_progress(&self, places: Range<usize>) -> bool {
        self.in_progress.range(places).next().is_some()
    }

    /// The records that changed since the last call.
    pub fn take_touched(&mut self) -> Vec<Touched> {
        std::mem::take(&mut self.touched)
    }

    /// The nodes that took (`true`) or gave back a slot since the last call.
    pub fn take_moves(&mut self) -> Vec<(NodeName, bool)> {
        std::mem::take(&mut self.moves)
    }

    /// Where the waves stand; `None` for a job without waves.
    pub fn waves(&self) -> Option<RolloutStatus> {
        self.waves.status(&self.settings.steps, self.counts.desired)
    }

    /// How many nodes are in each phase; `skipped` is not known here.
    pub fn summary(&self) -> &Summary {
        &self.counts
    }

    /// The records, in the job's order.
    pub fn records(&self) -> impl Iterator<Item = &NodeStatus> {
        self.members.iter().map(|member| &member.record)
    }

    /// The records of these places.
    pub fn records_of(&self, places: Range<usize>) -> impl Iterator<Item = &NodeStatus> {
        self.members.get(places).unwrap_or_default().iter().map(|member| &member.record)
    }

    /// The record of a node.
    pub fn record(&self, node: &NodeName) -> Option<&NodeStatus> {
        self.index.get(node).map(|&at| &self.members[at].record)
    }

    /// How many pending nodes have no session.
    pub fn waiting_offline(&self) -> usize {
        self.offline
    }

    /// The current settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings, for the nodes in progress as well.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
        self.waves.catch_up(&self.settings.steps, &self.counts);
        self.deadlines.clear();
        for at in 0..self.members.len() {
            self.index_member(at);
        }
    }

    /// Whether the job is over, and how. The tolerance holds for the wave that runs.
    pub fn verdict(&self) -> Verdict {
        let limit = self.waves.limit(&self.settings.steps, self.counts.desired);
        let exceeded = self.settings.tolerance.exceeded_by(self.counts.failure + self.counts.unknown, limit);
        match (exceeded, self.counts.in_progress, self.counts.pending) {
            (true, 0, _) => Verdict::Failed,
            (true, _, _) => Verdict::Draining,
            (false, 0, 0) => Verdict::Completed,
            (false, _, _) => Verdict::Running,
        }
    }

    /// The moment at which [`Self::advance`] has something to do although nothing happened.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let wave = self.waves.paused_until().filter(|_| self.verdict() == Verdict::Running);
        deadline.into_iter().chain(wave).min()
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
            decisions.push(self.expire(at, &reason, now));
        }
        if self.verdict() == Verdict::Running {
            let Settings { steps, pause, .. } = &self.settings;
            self.waves.advance(steps, *pause, &self.counts, now);
        }
        let limit = self.waves.limit(&self.settings.steps, self.counts.desired);
        while !self.settings.hold
            && self.waves.paused_until().is_none()
            && self.verdict() == Verdict::Running
            && (self.counts.in_progress as usize) < self.settings.concurrency
            && self.counts.desired - self.counts.pending < limit
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

    /// Ends every node in progress: the time of the whole job is over.
    pub fn expire_all(&mut self, reason: &str, now: Timestamp) -> Vec<Decision> {
        let running: Vec<usize> = self.in_progress.iter().copied().collect();
        running.into_iter().map(|at| self.expire(at, reason, now)).collect()
    }

    fn expire(&mut self, at: usize, reason: &str, now: Timestamp) -> Decision {
        self.end(at, NodePhase::Unknown, reason, now);
        Decision::Expire(self.name(at))
    }

    /// Marks all nodes offline: while the job was over nobody reported their sessions.
    pub fn forget_sessions(&mut self) {
        for at in 0..self.members.len() {
            self.set_online(at, None);
        }
    }

    /// The nodes in progress that have a session and were sent their task. A task that is still to be sent takes the
    /// settings of that moment anyway.
    pub fn reachable(&self) -> Vec<NodeName> {
        let sent = self.in_progress.iter().filter(|&&at| {
            let Member { flight, online, .. } = &self.members[at];
            online.is_some() && matches!(flight, Flight::Sent(_) | Flight::Accepted)
        });
        sent.map(|&at| self.name(at)).collect()
    }

    /// Begins a further round: the failed, unknown and not started nodes become pending, with a new attempt. Returns how
    /// many.
    pub fn begin_round(&mut self) -> usize {
        self.closed = false;
        let mut again = 0;
        for at in 0..self.members.len() {
            let phase = self.members[at].record.phase;
            if !matches!(phase, NodePhase::Failure | NodePhase::Unknown | NodePhase::Pending) {
                continue;
            }
            again += 1;
            let record = &mut self.members[at].record;
            if record.attempt > 0 {
                record.attempt += 1;
            }
            record.start_time = None;
            record.action_flow.clear();
            for image in record.image_status.iter_mut().filter(|image| image.status != Tristate::True) {
                (image.status, image.attempts) = (Tristate::Unknown, 0);
                image.reason.clear();
            }
            self.set(at, NodePhase::Pending, String::new());
        }
        self.waves = Waves::again(&self.settings.steps, &self.counts);
        again
    }

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

    /// Closes the rollout: the job is over, and nothing starts any more. Nodes that never started get this reason.
    pub fn close(&mut self, reason: &str) {
        self.closed = true;
        for (at, member) in self.members.iter_mut().enumerate() {
            if member.record.phase == NodePhase::Pending && member.record.reason != reason {
                reason.clone_into(&mut member.record.reason);
                self.touched.push(Touched { at, phase: true });
            }
        }
    }

    /// Closes the rollout of a job that was over before this run of cloudcore: the records stay as they are.
    #[must_use]
    pub fn closed(mut self) -> Self {
        self.closed = true;
        self
    }

    /// The images that the node has pulled in an earlier attempt, by their index.
    pub fn pulled_images(&self, node: &NodeName) -> Vec<usize> {
        let images = self.record(node).map(|record| record.image_status.as_slice()).unwrap_or_default();
        let there = images.iter().enumerate().filter(|(_, image)| image.status == Tristate::True);
        there.map(|(index, _)| index).collect()
    }

    /// Ends the pending nodes whose Node objects are not among these.
    pub fn remove_missing(&mut self, nodes: &BTreeMap<NodeName, NodeView>) {
        for at in 0..self.members.len() {
            let name = self.name(at);
            if !nodes.contains_key(&name) {
                self.remove_node(&name);
            }
        }
    }

    /// The nodes in progress, each with its attempt.
    pub fn tasks_in_progress(&self) -> impl Iterator<Item = (NodeName, u32)> {
        self.in_progress.iter().map(|&at| (self.name(at), self.members[at].record.attempt))
    }

    /// The Node object was deleted: a pending node ends as Unknown, one in progress keeps its deadline. Returns whether
    /// anything changed.
    pub fn remove_node(&mut self, node: &NodeName) -> bool {
        match self.index.get(node) {
            Some(&at) if self.members[at].record.phase == NodePhase::Pending => {
                self.set(at, NodePhase::Unknown, "the Node was deleted before it started".to_owned());
                true
            }
            _ => false,
        }
    }

    fn in_progress(&self, node: &NodeName) -> Option<usize> {
        self.index.get(node).copied().filter(|&at| self.members[at].record.phase == NodePhase::InProgress)
    }

    fn name(&self, at: usize) -> NodeName {
        NodeName(self.members[at].record.node_name.clone())
    }
}
