//! The nodes of one job with their states, and totals that follow each change.

use std::collections::{BTreeSet, HashMap};

use jiff::Timestamp;
use prepull_api::task::{JobUid, NodeName};

use super::fleet::{FleetNode, Presence, SharedName};
use super::tag_requests;
use super::tally::{adjust_count, adjust_set};
use crate::kruise::TagState;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RosterState {
    /// The job has not requested its tag of this node.
    Waiting {
        /// The job's image was changed: a tag that the NodeImage has for it already is from earlier and does not count.
        ignore_existing: bool,
    },
    /// The tag is requested, and has neither succeeded nor failed.
    Pending {
        /// When the round before ended, until this one is known to have begun: that end is not this round's.
        previous_end: Option<Timestamp>,
        /// The NodeImage may have an earlier request of the job, which must be replaced.
        is_outdated: bool,
    },
    Ended {
        succeeded: bool,
        at: Timestamp,
        /// The job is a Never job, and the next round is to begin.
        is_round_due: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RosterEntry {
    /// Whether the job selects the node. An entry that is not selected is kept for its state alone.
    is_selected: bool,
    presence: Presence,
    state: RosterState,
}

impl RosterEntry {
    fn holds_slot(&self) -> bool {
        matches!(self.state, RosterState::Pending { .. }) && self.presence != Presence::Offline
    }

    /// Whether the job would ask the node if it were online.
    fn is_wanted(&self) -> bool {
        matches!(self.state, RosterState::Waiting { .. } | RosterState::Ended { is_round_due: true, .. })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RosterCounts {
    pub(super) desired: u32,
    pub(super) succeeded: u32,
    pub(super) failed: u32,
    /// Recently offline ones that would be asked.
    pub(super) wanted_offline: u32,
}

#[derive(Debug, Default)]
pub(super) struct NodeRoster {
    job: JobUid,
    entries: HashMap<SharedName, RosterEntry>,
    /// Whether the job is a Never job: a node's end is not final, and its rounds repeat daily.
    is_never: bool,
    counts: RosterCounts,
    /// Pending nodes that hold a slot.
    busy: BTreeSet<SharedName>,
    /// Online nodes that would be asked if there were slots.
    wanted: BTreeSet<SharedName>,
    failed: BTreeSet<SharedName>,
    /// Online nodes with an outdated pending request.
    outdated: BTreeSet<SharedName>,
    /// When the next round of each ended node of a Never job begins.
    rounds: BTreeSet<(Timestamp, SharedName)>,
}

impl NodeRoster {
    pub(super) fn new(job: JobUid) -> Self {
        Self { job, ..Self::default() }
    }

    pub(super) fn counts(&self) -> RosterCounts {
        self.counts
    }

    /// The selected nodes that hold a slot, by name.
    pub(super) fn busy_nodes(&self) -> &BTreeSet<SharedName> {
        &self.busy
    }

    /// The selected nodes that the job would ask now, by name.
    pub(super) fn wanted_nodes(&self) -> &BTreeSet<SharedName> {
        &self.wanted
    }

    pub(super) fn failed_nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.failed.iter().map(|node| &**node)
    }

    /// The selected nodes that have not ended, by name.
    pub(super) fn unfinished_nodes(&self) -> BTreeSet<&NodeName> {
        let is_unfinished =
            |entry: &RosterEntry| entry.is_selected && !matches!(entry.state, RosterState::Ended { .. });
        let unfinished = self.entries.iter().filter(|(_, entry)| is_unfinished(entry));
        unfinished.map(|(node, _)| &**node).collect()
    }

    pub(super) fn set_never(&mut self, is_never: bool) {
        if self.is_never == is_never {
            return;
        }
        let nodes = self.nodes();
        for node in &nodes {
            self.tally(node, self.entries[node], false);
        }
        self.is_never = is_never;
        for node in &nodes {
            self.tally(node, self.entries[node], true);
        }
    }

    fn nodes(&self) -> Vec<SharedName> {
        self.entries.keys().cloned().collect()
    }

    /// Sets whether the job selects the node. Returns whether that is a change.
    pub(super) fn set_selected(&mut self, node: &FleetNode, is_selected: bool) -> bool {
        if !self.entries.contains_key(&node.name) {
            if !is_selected {
                return false;
            }
            self.insert(&node.name, node.presence);
        }
        let changed = self.change_entry(&node.name, |entry| entry.is_selected = is_selected);
        self.prune(&node.name);
        changed
    }

    /// Forgets a node that is not selected and has no state to be kept.
    fn prune(&mut self, node: &NodeName) {
        let is_void =
            |e: &RosterEntry| !e.is_selected && e.state == RosterState::Waiting { ignore_existing: false };
        if self.entries.get(node).is_some_and(is_void) {
            self.entries.remove(node);
        }
    }

    fn insert(&mut self, node: &SharedName, presence: Presence) {
        let state = RosterState::Waiting { ignore_existing: false };
        self.entries.insert(node.clone(), RosterEntry { is_selected: false, presence, state });
    }

    /// Removes a node. Returns whether it was counted.
    pub(super) fn remove(&mut self, node: &NodeName) -> bool {
        let changed = self.change_entry(node, |entry| entry.is_selected = false);
        self.entries.remove(node);
        changed
    }

    pub(super) fn set_presence(&mut self, node: &NodeName, presence: Presence) -> bool {
        self.change_entry(node, |entry| entry.presence = presence)
    }

    /// Takes over the state of the job's tag from the node's NodeImage.
    pub(super) fn set_tag_state(&mut self, node: &FleetNode, tag_state: TagState) -> bool {
        if !self.entries.contains_key(&node.name) {
            self.insert(&node.name, node.presence);
        }
        let is_never = self.is_never;
        let changed = self.change_entry(&node.name, |entry| {
            entry.state = next_state(entry.state, tag_state, is_never);
        });
        self.prune(&node.name);
        changed
    }

    /// The job's image has changed: each node starts over.
    pub(super) fn restart_nodes(&mut self) {
        for node in self.nodes() {
            self.change_entry(&node, |entry| entry.state = RosterState::Waiting { ignore_existing: true });
        }
    }

    /// The job's request has changed: the nodes that are pending get the new one.
    pub(super) fn mark_requests_outdated(&mut self) {
        for node in self.nodes() {
            self.set_outdated(&node, true);
        }
    }

    fn set_outdated(&mut self, node: &NodeName, value: bool) {
        self.change_entry(node, |entry| {
            if let RosterState::Pending { is_outdated, .. } = &mut entry.state {
                *is_outdated = value;
            }
        });
    }

    /// Marks the node as asked. Returns whether to pull an ended tag once more.
    pub(super) fn mark_requested(&mut self, node: &NodeName) -> bool {
        let mut new_round = false;
        self.change_entry(node, |entry| {
            let previous_end = match entry.state {
                RosterState::Ended { at, .. } => Some(at),
                _ => None,
            };
            new_round =
                previous_end.is_some() || entry.state == RosterState::Waiting { ignore_existing: true };
            entry.state = RosterState::Pending { previous_end, is_outdated: false };
        });
        new_round
    }

    /// Takes the next online node with an outdated pending request; it counts as asked again.
    pub(super) fn pop_outdated(&mut self) -> Option<NodeName> {
        let node = self.outdated.first().cloned()?;
        self.set_outdated(&node, false);
        Some((*node).clone())
    }

    /// Marks the nodes due for their next round.
    pub(super) fn begin_rounds(&mut self, now: Timestamp) {
        while let Some((_, node)) = self.rounds.first().filter(|(at, _)| *at <= now).cloned() {
            self.change_entry(&node, |entry| {
                if let RosterState::Ended { is_round_due, .. } = &mut entry.state {
                    *is_round_due = true;
                }
            });
        }
    }

    /// When [`Self::begin_rounds`] has a node to mark.
    pub(super) fn next_round(&self) -> Option<Timestamp> {
        self.rounds.first().map(|(at, _)| *at)
    }

    /// Changes an entry, and the totals with it. Returns whether the entry is another one now.
    fn change_entry(&mut self, node: &NodeName, change: impl FnOnce(&mut RosterEntry)) -> bool {
        let Some((node, before)) = self.entries.get_key_value(node).map(|(node, e)| (node.clone(), *e))
        else {
            return false;
        };
        let mut after = before;
        change(&mut after);
        if before == after {
            return false;
        }
        self.tally(&node, before, false);
        self.entries.insert(node.clone(), after);
        self.tally(&node, after, true);
        true
    }

    /// Adds an entry to the totals (`add`), or takes it out.
    fn tally(&mut self, node: &SharedName, entry: RosterEntry, add: bool) {
        if !entry.is_selected {
            return;
        }
        let counts = &mut self.counts;
        adjust_count(&mut counts.desired, add);
        if entry.holds_slot() {
            adjust_set(&mut self.busy, node.clone(), add);
        }
        match entry.presence {
            Presence::Online if entry.is_wanted() => adjust_set(&mut self.wanted, node.clone(), add),
            Presence::RecentlyOffline if entry.is_wanted() => adjust_count(&mut counts.wanted_offline, add),
            _ => {}
        }
        match entry.state {
            RosterState::Pending { is_outdated: true, .. } if entry.presence == Presence::Online => {
                adjust_set(&mut self.outdated, node.clone(), add);
            }
            RosterState::Waiting { .. } | RosterState::Pending { .. } => {}
            RosterState::Ended { succeeded, at, is_round_due } => {
                if succeeded {
                    adjust_count(&mut counts.succeeded, add);
                } else {
                    adjust_count(&mut counts.failed, add);
                    adjust_set(&mut self.failed, node.clone(), add);
                }
                if self.is_never && !is_round_due {
                    let round = (tag_requests::next_round(&self.job, node, at), node.clone());
                    adjust_set(&mut self.rounds, round, add);
                }
            }
        }
    }
}

/// The state of a node after its NodeImage has said something about the job's tag.
fn next_state(state: RosterState, tag_state: TagState, is_never: bool) -> RosterState {
    let ended = |succeeded, at| match state {
        RosterState::Ended { succeeded: before, at: then, .. } if before == succeeded && then == at => state,
        RosterState::Pending { previous_end: Some(previous), .. } if at <= previous => state,
        _ => RosterState::Ended { succeeded, at, is_round_due: false },
    };
    match (state, tag_state) {
        (RosterState::Waiting { ignore_existing: true }, _) => state,
        // A finished node stays finished if the tag vanishes or reopens; a failure may still become a success.
        (RosterState::Ended { .. }, TagState::Absent | TagState::Pending)
        | (RosterState::Ended { succeeded: true, .. }, TagState::Failed(_))
            if !is_never =>
        {
            state
        }
        (_, TagState::Absent) => RosterState::Waiting { ignore_existing: false },
        // Requested before a restart of cloudcore, perhaps for an earlier spec.
        (RosterState::Waiting { .. }, TagState::Pending) => {
            RosterState::Pending { previous_end: None, is_outdated: true }
        }
        // The round has begun: every pull that ends from now on belongs to it.
        (RosterState::Pending { is_outdated, .. }, TagState::Pending) => {
            RosterState::Pending { previous_end: None, is_outdated }
        }
        // Another job of the tag, or a person, has begun a round.
        (RosterState::Ended { .. }, TagState::Pending) => {
            RosterState::Pending { previous_end: None, is_outdated: false }
        }
        (_, TagState::Succeeded(at)) => ended(true, at),
        (_, TagState::Failed(at)) => ended(false, at),
    }
}
