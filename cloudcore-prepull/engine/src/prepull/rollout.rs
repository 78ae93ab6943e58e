//! The rollout of one job over its nodes: which nodes start, which are out of time, and when the job is over.
//!
//! Pure: `now` is passed in, and [`RolloutDecision`]s come out. The records are the very [`NodeStatus`] that the API server
//! keeps, so that a restart loses nothing that was written.
//!
//! ```text
//!            start (a slot is free, the edge is online)
//!  Pending ─────────────────────────────────────────▶ InProgress ──result──▶ Successful | Failure
//!     ▲                                                 │    │                    ▲
//!     ├── the Assign could not be handed to a session ──┤    └──deadline──▶ Unknown ──late result
//!     └── a secret cannot be read, or used, for now ────┘
//! ```
//!
//! A node that loses its Node before it has started leaves the rollout. Its place stays empty, so that the places of
//! the others, and with them their reports, stay what they are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::{FailureCount, NodeClock, NodePhase, NodeStatus, RolloutStatus, Summary};
use prepull_api::failure::FailureCode;
use prepull_api::task::{LAST_REMOVAL, NodeName};

use crate::fleet::session::SessionId;
use crate::prepull::aggregate::{FIRST_ATTEMPT, in_phase};
use crate::prepull::download::WindowRule;
use crate::prepull::validate::{Ratio, WaveStep};
use crate::shared::delay_queue::DelayQueue;
use crate::shared::postponement::Postponement;

mod books;
mod decisions;
mod edges;
mod postponed;
mod recheck;
mod record;
mod rounds;
mod starts;
#[cfg(test)]
mod tests;
mod waves;
mod windows;

pub use decisions::{Reattach, RolloutDecision, RolloutVerdict};
pub use recheck::{RECHECK_TIME, Rechecked, begin_recheck, is_rechecking, keep_result};
use waves::Waves;

/// The grace for the report of a timeout to arrive: the edge ends the task at `timeoutSeconds` and reports that; only a
/// node that is silent for this much longer becomes Unknown.
pub const REPORT_GRACE: Duration = Duration::from_secs(2);
/// [`REPORT_GRACE`] of a job that removes images: the edge first waits for the image that its runtime is removing.
pub const REMOVAL_GRACE: Duration = LAST_REMOVAL.saturating_add(REPORT_GRACE);

/// The reasons of pending nodes that do not start although the concurrency allows it.
const OFFLINE: &str = "offline: its edgecore-prepull is not connected";
const BUSY: &str = "waits: the node works on another job";

/// The settings of a rollout, which may change while the job runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutSettings {
    /// Nodes that may be in progress at the same time.
    pub concurrency: usize,
    /// The share of the nodes that may fail.
    pub tolerance: Ratio,
    /// How long one node may take, from its start.
    pub timeout: Duration,
    /// How long after its time a node may be silent, before it becomes Unknown.
    pub grace: Duration,
    /// The waves; without any all nodes are in one.
    pub steps: Vec<WaveStep>,
    /// The pause between two waves.
    pub pause: Duration,
    /// Whether no further node may start.
    pub hold: bool,
    /// When nodes may download: their time counts, and they start, only then.
    pub windows: WindowRule,
}

/// A record that has changed since the last call of [`Rollout::take_touched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The place of the node in the job's order.
    pub at: usize,
    /// Whether its phase or reason changed, and not only its progress.
    pub phase: bool,
}

/// How far an Assign has got. Volatile: after a restart of cloudcore, the edge's `Hello` restores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AssignStage {
    /// The start is not yet recorded in the API server; nothing has been sent.
    Recording,
    /// Keys are being resolved, then it is sent. `again`: the edge may have it already. `session`: the session of the
    /// node when that began. `is_outdated`: the settings have changed since.
    Dispatching { again: bool, session: Option<SessionId>, is_outdated: bool },
    /// Handed to this session, or by an earlier run of cloudcore (no session).
    Sent(Option<SessionId>),
    /// The edge has it in its ledger.
    Accepted,
}

#[derive(Clone, Debug)]
struct Member {
    record: NodeStatus,
    flight: AssignStage,
    online: Option<SessionId>,
    /// Whether it works on as many tasks as it can.
    busy: bool,
    /// By what its edge counts its time.
    clock: NodeClock,
    /// When its window opens, and the reason why it does not start before.
    opens: Option<(Timestamp, String)>,
    /// Its place is empty.
    has_left: bool,
    /// The number of its last start.
    start: u64,
    /// Whether a write of that start, or of an earlier one that was withdrawn since, has begun and is not taken back.
    is_stamped: bool,
    /// Once a secret of its task could not be read in this attempt.
    postponed: Option<Box<Postponed>>,
    asked: KeyInquiry,
}

/// Whether a node was asked if it needs the keys that are withheld: see [`Rollout::mark_asked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyInquiry {
    /// It was not, in this round.
    No,
    /// The task that it has may be without keys.
    Asking,
    Needs,
}

/// A node with unreadable or withheld secrets.
#[derive(Clone, Debug)]
struct Postponed {
    postponement: Postponement,
    /// When to read them again, and why they could not be read; `None` once that time has come.
    waits: Option<(Timestamp, String)>,
    /// The secrets that it waits for because their owners have not allowed their use, as namespace/name.
    withheld: Vec<String>,
}

/// Whether this is the record of a node that did not exist when the job began, and counts as failed.
pub fn is_missing(record: &NodeStatus) -> bool {
    record.phase == NodePhase::Failure && record.attempt == 0
}

/// A further round begins for the node of this record, which is in no rollout yet.
pub fn begin_again(record: &mut NodeStatus) {
    record::begin_again(record);
    (record.phase, record.code) = (NodePhase::Pending, None);
    record.reason.clear();
}

/// The nodes of one job.
#[derive(Clone, Debug, Default)]
pub struct Rollout {
    settings: RolloutSettings,
    members: Vec<Member>,
    index: HashMap<NodeName, usize>,
    /// The places of nodes that have left, should they come back.
    left: HashMap<NodeName, usize>,
    /// The places of nodes that are pending, online and not busy.
    startable: BTreeSet<usize>,
    in_progress: BTreeSet<usize>,
    /// The places of nodes in progress with an unrecorded start.
    recording: BTreeSet<usize>,
    /// The places of nodes with a withdrawn start that the API server may still have as started. They hold their slots,
    /// since the next leader would let them go on.
    withdrawn: BTreeSet<usize>,
    /// The places of nodes that were in progress when their Nodes were deleted: see [`Self::remove_nodeless`].
    nodeless: BTreeSet<usize>,
    first_attempt: u32,
    /// How many starts there were: see [`StartId`](crate::shared::writes::StartId).
    starts: u64,
    /// When the re-check that runs is over.
    recheck_until: Option<Timestamp>,
    /// The places of nodes that are being checked.
    rechecking: BTreeSet<usize>,
    /// When the nodes in progress, by their places, are out of time.
    deadlines: DelayQueue<usize>,
    /// When to read the secrets of postponed nodes again, with their places.
    postponed: BTreeSet<(Timestamp, usize)>,
    /// When the windows open of pending nodes that are online, with their places.
    shut: BTreeSet<(Timestamp, usize)>,
    /// How many nodes are pending and offline.
    offline: usize,
    counts: Summary,
    /// How many nodes are in Failure or Unknown, by code; a code of no node may be there.
    failures: BTreeMap<FailureCode, u32>,
    /// How many nodes have failed because there is no Node of their name. They take no part in the waves.
    missing: u32,
    waves: Waves,
    closed: bool,
    /// Records that changed: see [`Self::take_touched`].
    touched: Vec<Touched>,
    /// Nodes that took or gave back a slot: see [`Self::take_moves`].
    moves: Vec<(NodeName, bool)>,
}

impl Rollout {
    /// A job that begins, or goes on after a restart: the records are taken as they are. Nodes are started in
    /// the order of the records.
    pub fn new(settings: RolloutSettings, records: Vec<NodeStatus>) -> Self {
        Self::with_records(settings, records, false)
    }

    /// A job that was over before this run of cloudcore: the records stay as they are.
    pub fn for_ended_job(settings: RolloutSettings, records: Vec<NodeStatus>) -> Self {
        Self::with_records(settings, records, true)
    }

    fn with_records(settings: RolloutSettings, records: Vec<NodeStatus>, closed: bool) -> Self {
        let mut rollout = Self {
            members: Vec::with_capacity(records.len()),
            index: HashMap::with_capacity(records.len()),
            first_attempt: FIRST_ATTEMPT,
            settings,
            closed,
            ..Self::default()
        };
        for record in records {
            rollout.add(record);
        }
        rollout
    }

    /// Counts attempts from this number. An edge may still hold a task of an earlier run of the job, and its result
    /// must not count for this run.
    #[must_use]
    pub fn counting_from(mut self, first_attempt: u32) -> Self {
        self.first_attempt = first_attempt;
        self
    }

    /// The attempt that the node of this record makes, or would make first.
    pub fn attempt_of(&self, record: &NodeStatus) -> u32 {
        record.attempt.max(self.first_attempt)
    }

    /// The highest number of an attempt that a node has made.
    pub fn last_attempt(&self) -> u32 {
        self.members.iter().map(|member| member.record.attempt).max().unwrap_or(0)
    }

    /// Resumes the waves where an earlier run of cloudcore left them.
    pub fn resume_waves(&mut self, status: &RolloutStatus) {
        self.waves = Waves::from_status(status, self.settings.pause);
        // A wave that has shrunk since, because waiting nodes were deleted, has not ended by that.
        if self.started_count() > status.nodes {
            self.waves.catch_up(&self.settings.steps, &self.present_counts());
        }
    }

    /// Begins the waves of a further round.
    pub fn restart_waves(&mut self) {
        self.waves = Waves::for_further_round(&self.settings.steps, &self.present_counts());
    }

    /// Adds a node after all others, unless it is there already. One that had left gets its old place: another place may
    /// belong to another report, and until both reports are written the API server would have two records of the node.
    pub fn add(&mut self, record: NodeStatus) {
        let (at, name) = (self.members.len(), NodeName(record.node_name.clone()));
        if self.index.contains_key(&name) {
            return;
        }
        if let Some(place) = self.left.remove(&name) {
            return self.come_back(place, record);
        }
        self.index.insert(name.clone(), at);
        self.counts.desired += 1;
        *in_phase(&mut self.counts, record.phase) += 1;
        match record.phase {
            NodePhase::Pending => self.offline += 1,
            NodePhase::InProgress => {
                self.in_progress.insert(at);
                self.moves.push((name, true));
            }
            NodePhase::Successful | NodePhase::Failure | NodePhase::Unknown => {}
        }
        let flight = AssignStage::Sent(None);
        // What an earlier leader has sent may have been without keys.
        let asked = if record.phase == NodePhase::InProgress { KeyInquiry::Asking } else { KeyInquiry::No };
        let clock = record.clock.clone().unwrap_or_default();
        self.members.push(Member {
            record,
            flight,
            online: None,
            busy: false,
            clock,
            opens: None,
            has_left: false,
            start: 0,
            is_stamped: false,
            postponed: None,
            asked,
        });
        self.count_failure(at, true);
        self.index_member(at);
    }

    /// How many places there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no places.
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
        self.waves.status(&self.settings.steps, self.wave_size(), self.settings.pause)
    }

    /// How many nodes are in each phase; `skipped` is not known here.
    pub fn summary(&self) -> &Summary {
        &self.counts
    }

    /// How many nodes have failed or are unknown, by code, the most frequent code first.
    pub fn failures(&self) -> Vec<FailureCount> {
        let counts = self.failures.iter().filter(|(_, nodes)| **nodes > 0);
        let mut failures: Vec<_> =
            counts.map(|(code, nodes)| FailureCount { code: *code, nodes: *nodes }).collect();
        failures.sort_by_key(|failure| std::cmp::Reverse(failure.nodes));
        failures
    }

    /// The records, in the job's order.
    pub fn records(&self) -> impl Iterator<Item = &NodeStatus> {
        self.members.iter().filter(|member| !member.has_left).map(|member| &member.record)
    }

    /// The records of these places.
    pub fn records_of(&self, places: Range<usize>) -> impl Iterator<Item = &NodeStatus> {
        let members = self.members.get(places).unwrap_or_default().iter();
        members.filter(|member| !member.has_left).map(|member| &member.record)
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
    pub fn settings(&self) -> &RolloutSettings {
        &self.settings
    }

    /// Changes the settings, for the nodes in progress as well.
    pub fn configure(&mut self, settings: RolloutSettings) {
        let has_new_waves = self.settings.steps != settings.steps;
        let has_new_windows = self.settings.windows != settings.windows;
        self.settings = settings;
        if has_new_waves {
            self.waves.catch_up(&self.settings.steps, &self.present_counts());
        }
        for at in 0..self.members.len() {
            if has_new_windows {
                self.recompute_times(at);
            } else {
                self.index_member(at);
            }
        }
    }

    /// The counts that the waves go by: a node that doesn't exist isn't desired.
    fn present_counts(&self) -> Summary {
        Summary { desired: self.counts.desired - self.missing, ..self.counts.clone() }
    }

    /// How many nodes do not exist, and count as failed.
    pub fn missing_count(&self) -> u32 {
        self.missing
    }

    /// Whether the nodes that do not exist are more than may fail, so that no round can help.
    pub fn is_lost(&self) -> bool {
        self.settings.tolerance.exceeded_by(self.missing, self.counts.desired)
    }

    /// Whether the job is over, and how. The tolerance holds for the wave that runs; nodes that do not exist count against
    /// that of the whole job.
    pub fn verdict(&self) -> RolloutVerdict {
        if self.counts.desired == 0 {
            return RolloutVerdict::NoneLeft;
        }
        let bad = self.counts.failure + self.counts.unknown;
        let tolerance = &self.settings.tolerance;
        let exceeded = tolerance.exceeded_by(bad - self.missing, self.wave_size())
            || tolerance.exceeded_by(bad, self.counts.desired);
        if self.recheck_until.is_some() {
            // All are asked, however many lack something.
            let runs = !self.rechecking.is_empty() || self.counts.in_progress > 0;
            return match (runs, exceeded, self.counts.pending) {
                (true, ..) => RolloutVerdict::Running,
                (false, true, _) => RolloutVerdict::Failed,
                (false, false, 0) => RolloutVerdict::Completed,
                (false, false, _) => RolloutVerdict::NotAllStarted,
            };
        }
        match (exceeded, self.counts.in_progress, self.counts.pending) {
            (true, 0, _) => RolloutVerdict::Failed,
            (true, _, _) => RolloutVerdict::Draining,
            (false, 0, 0) => RolloutVerdict::Completed,
            (false, _, _) => RolloutVerdict::Running,
        }
    }

    /// How many nodes have started, those that have ended included.
    fn started_count(&self) -> u32 {
        self.counts.desired - self.counts.pending - self.missing
    }

    /// How many nodes the wave that runs has, those of the earlier waves included. More may have started than it would
    /// have now that waiting nodes were deleted.
    fn wave_size(&self) -> u32 {
        self.waves.start_limit(&self.settings.steps, self.present_counts().desired).max(self.started_count())
    }

    /// The settings have changed. Returns the nodes in progress that have a session and were sent their task. One whose task
    /// is being dispatched gets them [once it's sent](Self::mark_sent); a task that is still to be made takes them anyway.
    pub fn change_settings(&mut self) -> Vec<NodeName> {
        for &at in &self.in_progress {
            if let AssignStage::Dispatching { is_outdated, .. } = &mut self.members[at].flight {
                *is_outdated = true;
            }
        }
        let sent = self.in_progress.iter().filter(|&&at| {
            let Member { flight, online, .. } = &self.members[at];
            online.is_some() && matches!(flight, AssignStage::Sent(_) | AssignStage::Accepted)
        });
        sent.map(|&at| self.node_name(at)).collect()
    }

    fn in_progress(&self, node: &NodeName) -> Option<usize> {
        self.index.get(node).copied().filter(|&at| self.members[at].record.phase == NodePhase::InProgress)
    }

    fn node_name(&self, at: usize) -> NodeName {
        NodeName(self.members[at].record.node_name.clone())
    }
}
