//! The nodes of one job: how each stands, and how many stand how. The counts follow each change.

use std::collections::{BTreeSet, HashMap};

use jiff::Timestamp;
use prepull_api::task::{JobUid, NodeName};

use super::fleet::{Known, Node, Presence};
use super::group::{Group, count};
use super::wishes;
use crate::kruise::Standing;

/// How a node stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not asked.
    Waiting {
        /// Whether what stands there already is of no account: the job's image was changed.
        anew: bool,
    },
    /// Asked, and neither succeeded nor failed.
    Open {
        /// The end of the round before, until this one is known to have begun: what ended then does not end it.
        beyond: Option<Timestamp>,
        /// What stands there may be of another wish.
        stale: bool,
    },
    /// Over with it.
    Ended {
        succeeded: bool,
        at: Timestamp,
        /// A further round is to begin.
        due: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Of those that are not, only the state is kept.
    selected: bool,
    presence: Presence,
    state: State,
}

impl Entry {
    fn holds_slot(&self) -> bool {
        matches!(self.state, State::Open { .. }) && self.presence != Presence::Away
    }

    fn is_wanted(&self, presence: Presence) -> bool {
        let open = matches!(self.state, State::Waiting { .. } | State::Ended { due: true, .. });
        open && self.presence == presence
    }
}

/// How many nodes stand how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) desired: u32,
    /// Open, and hold a slot.
    pub(super) active: u32,
    pub(super) succeeded: u32,
    pub(super) failed: u32,
    /// Would be asked if there were slots.
    pub(super) wanted: u32,
    /// Would be asked, and have been offline for a short time only.
    pub(super) fading: u32,
}

#[derive(Debug)]
pub(super) struct Roster {
    job: JobUid,
    entries: HashMap<Node, Entry>,
    /// Whether what has ended begins again each day, and is not over until the job is.
    never: bool,
    /// Whether the nodes count: not while the job is refused.
    live: bool,
    counts: Counts,
    failed: BTreeSet<Node>,
    stale: BTreeSet<Node>,
    rounds: BTreeSet<(Timestamp, Node)>,
}

impl Roster {
    pub(super) fn new(job: JobUid) -> Self {
        Self {
            job,
            entries: HashMap::new(),
            never: false,
            live: false,
            counts: Counts::default(),
            failed: BTreeSet::new(),
            stale: BTreeSet::new(),
            rounds: BTreeSet::new(),
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// By name.
    pub(super) fn failed(&self) -> impl Iterator<Item = &NodeName> {
        self.failed.iter().map(|node| &**node)
    }

    /// The selected nodes that have not ended, by name.
    pub(super) fn open(&self) -> BTreeSet<&NodeName> {
        let open = self.entries.iter().filter(|(_, e)| e.selected && !matches!(e.state, State::Ended { .. }));
        open.map(|(node, _)| &**node).collect()
    }

    /// The nodes count from now on.
    pub(super) fn go_live(&mut self, never: bool, group: &mut Group) {
        self.halt(group);
        (self.live, self.never) = (true, never);
        for (node, entry) in self.snapshot() {
            self.count(&node, entry, true, group);
        }
    }

    /// The nodes do not count any more.
    pub(super) fn halt(&mut self, group: &mut Group) {
        for (node, entry) in self.snapshot() {
            self.count(&node, entry, false, group);
        }
        self.live = false;
    }

    fn snapshot(&self) -> Vec<(Node, Entry)> {
        self.entries.iter().map(|(node, entry)| (node.clone(), *entry)).collect()
    }

    /// Whether the node is one of the job's. Says whether that is new.
    pub(super) fn select(&mut self, known: &Known, selected: bool, group: &mut Group) -> bool {
        if !self.entries.contains_key(&known.name) {
            if !selected {
                return false;
            }
            self.insert(&known.name, known.presence);
        }
        let changed = self.change(&known.name, group, |entry| entry.selected = selected);
        self.prune(&known.name);
        changed
    }

    /// Forgets a node of which there is nothing to know.
    fn prune(&mut self, node: &NodeName) {
        let nothing = |e: &Entry| !e.selected && e.state == State::Waiting { anew: false };
        if self.entries.get(node).is_some_and(nothing) {
            self.entries.remove(node);
        }
    }

    fn insert(&mut self, node: &Node, presence: Presence) {
        let entry = Entry { selected: false, presence, state: State::Waiting { anew: false } };
        self.entries.insert(node.clone(), entry);
    }

    /// The node is gone. Says whether it counted.
    pub(super) fn remove(&mut self, node: &NodeName, group: &mut Group) -> bool {
        let changed = self.change(node, group, |entry| entry.selected = false);
        self.entries.remove(node);
        changed
    }

    pub(super) fn presence(&mut self, node: &NodeName, presence: Presence, group: &mut Group) -> bool {
        self.change(node, group, |entry| entry.presence = presence)
    }

    /// How the present image stands on the node.
    pub(super) fn standing(&mut self, known: &Known, standing: Standing, group: &mut Group) -> bool {
        if !self.entries.contains_key(&known.name) {
            self.insert(&known.name, known.presence);
        }
        let never = self.never;
        let changed =
            self.change(&known.name, group, |entry| entry.state = follow(entry.state, standing, never));
        self.prune(&known.name);
        changed
    }

    /// The image is another one: nothing that was counts.
    pub(super) fn begin_anew(&mut self, group: &mut Group) {
        for (node, _) in self.snapshot() {
            self.change(&node, group, |entry| entry.state = State::Waiting { anew: true });
        }
    }

    /// The wish is another one: what is open is to hear of it.
    pub(super) fn wish_changed(&mut self, group: &mut Group) {
        for (node, _) in self.snapshot() {
            self.change(&node, group, |entry| {
                if let State::Open { stale, .. } = &mut entry.state {
                    *stale = true;
                }
            });
        }
    }

    /// Whether the job would ask the node.
    pub(super) fn wants(&self, node: &NodeName) -> bool {
        self.live
            && self.entries.get(node).is_some_and(|entry| entry.selected && entry.is_wanted(Presence::Online))
    }

    /// The node is asked. Whether for a further round.
    pub(super) fn ask(&mut self, node: &NodeName, group: &mut Group) -> bool {
        let mut again = false;
        self.change(node, group, |entry| {
            let beyond = match entry.state {
                State::Ended { at, .. } => Some(at),
                _ => None,
            };
            again = beyond.is_some() || entry.state == State::Waiting { anew: true };
            entry.state = State::Open { beyond, stale: false };
        });
        again
    }

    /// An open node that is online and has not heard of the wish as it is. It counts as asked.
    pub(super) fn next_stale(&mut self, group: &mut Group) -> Option<NodeName> {
        let node = self.stale.first().cloned()?;
        self.change(&node, group, |entry| {
            if let State::Open { stale, .. } = &mut entry.state {
                *stale = false;
            }
        });
        Some((*node).clone())
    }

    /// Has the rounds begin whose time has come.
    pub(super) fn begin_rounds(&mut self, now: Timestamp, group: &mut Group) {
        while let Some((_, node)) = self.rounds.first().filter(|(at, _)| *at <= now).cloned() {
            self.change(&node, group, |entry| {
                if let State::Ended { due, .. } = &mut entry.state {
                    *due = true;
                }
            });
        }
    }

    /// When [`Self::begin_rounds`] has one to begin.
    pub(super) fn next_round(&self) -> Option<Timestamp> {
        self.rounds.first().map(|(at, _)| *at)
    }

    /// Whether the entry is another one now.
    fn change(&mut self, node: &NodeName, group: &mut Group, change: impl FnOnce(&mut Entry)) -> bool {
        let Some((node, before)) = self.entries.get_key_value(node).map(|(node, e)| (node.clone(), *e))
        else {
            return false;
        };
        let mut after = before;
        change(&mut after);
        if before == after {
            return false;
        }
        self.count(&node, before, false, group);
        self.entries.insert(node.clone(), after);
        self.count(&node, after, true, group);
        true
    }

    /// Adds an entry to the counts, or takes it out.
    fn count(&mut self, node: &Node, entry: Entry, add: bool, group: &mut Group) {
        if !self.live || !entry.selected {
            return;
        }
        let counts = &mut self.counts;
        count(&mut counts.desired, add);
        if entry.holds_slot() {
            count(&mut counts.active, add);
            group.busy(node, add);
        }
        if entry.is_wanted(Presence::Online) {
            count(&mut counts.wanted, add);
            group.wanted(node, add);
        }
        if entry.is_wanted(Presence::Fading) {
            count(&mut counts.fading, add);
        }
        match entry.state {
            State::Waiting { .. } | State::Open { stale: false, .. } => {}
            State::Open { .. } if entry.presence != Presence::Online => {}
            State::Open { .. } => put(&mut self.stale, node.clone(), add),
            State::Ended { succeeded, at, due } => {
                if succeeded {
                    count(&mut counts.succeeded, add);
                } else {
                    count(&mut counts.failed, add);
                    put(&mut self.failed, node.clone(), add);
                }
                if self.never && !due {
                    put(&mut self.rounds, (wishes::next_round(&self.job, node, at), node.clone()), add);
                }
            }
        }
    }
}

fn put<T: Ord>(set: &mut BTreeSet<T>, item: T, add: bool) {
    if add {
        set.insert(item)
    } else {
        set.remove(&item)
    };
}

/// What a node's state becomes by what its NodeImage says.
fn follow(state: State, standing: Standing, never: bool) -> State {
    let ended = |succeeded, at| match state {
        State::Ended { succeeded: was, at: then, .. } if was == succeeded && then == at => state,
        State::Open { beyond: Some(beyond), .. } if at <= beyond => state,
        _ => State::Ended { succeeded, at, due: false },
    };
    match (state, standing) {
        (State::Waiting { anew: true }, _) => state,
        // A node that is over with it stays so, whatever others do with the tag. That the image is there after all
        // is good to know.
        (State::Ended { .. }, Standing::Absent | Standing::Open)
        | (State::Ended { succeeded: true, .. }, Standing::Failed(_))
            if !never =>
        {
            state
        }
        (_, Standing::Absent) => State::Waiting { anew: false },
        // Nobody of this life has asked for it.
        (State::Waiting { .. }, Standing::Open) => State::Open { beyond: None, stale: true },
        // The round has begun: whatever ends from now on is of this round.
        (State::Open { stale, .. }, Standing::Open) => State::Open { beyond: None, stale },
        // Another job asked, or a person.
        (State::Ended { .. }, Standing::Open) => State::Open { beyond: None, stale: false },
        (_, Standing::Succeeded(at)) => ended(true, at),
        (_, Standing::Failed(at)) => ended(false, at),
    }
}
