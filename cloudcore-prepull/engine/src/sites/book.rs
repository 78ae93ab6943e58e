//! What is known of one blob at one site: who has it, who wants it, and where each gets it from.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::sites::PeerFailure;
use prepull_api::task::{NodeName, TaskId};

use super::LEASE;
use super::faults::Faults;

/// Least bytes by which a lease is renewed: less is what a connection brings that is as good as dead.
const LEAST_PROGRESS: u64 = 64 * 1024;

/// A blob as part of images. The same blob of other images is another one: who may have those need not be allowed to have
/// these.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BookId {
    /// The references of the task that names them.
    pub(super) images: Arc<str>,
    pub(super) digest: String,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Book {
    pub(super) size: u64,
    /// Those who have it.
    pub(super) holders: BTreeSet<NodeName>,
    /// Those who want it.
    pub(super) seekers: BTreeMap<NodeName, Seeker>,
    /// Since when nobody wants it.
    pub(super) idle_since: Option<Timestamp>,
}

/// A node that wants a blob.
#[derive(Debug)]
pub(super) struct Seeker {
    pub(super) task: TaskId,
    /// Bytes that it has.
    pub(super) done: u64,
    pub(super) way: Way,
    /// Its part of the limit of the uplink, while it downloads over it.
    pub(super) max_rate: Option<NonZeroU64>,
    /// Whether it has been told of its way.
    pub(super) is_told: bool,
    pub(super) told_at: Timestamp,
}

/// Where a node gets a blob from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Wait,
    Registry {
        /// Why from no neighbour; empty for the carrier of the site.
        alone: &'static str,
        lease: Lease,
    },
    Peers {
        /// The first one is asked first, and is counted as busy with it.
        peers: Vec<NodeName>,
        lease: Lease,
    },
}

/// The time that a node has to make progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) until: Timestamp,
    /// Bytes that were there when it began.
    from: u64,
}

impl Lease {
    pub(super) fn new(done: u64, now: Timestamp) -> Self {
        Self { until: now.saturating_add(LEASE).unwrap_or(now), from: done }
    }

    /// Renews it where there was progress.
    pub(super) fn renew(&mut self, done: u64, least: u64, now: Timestamp) {
        // After a restart of the node, or of the blob, it begins anew, once.
        if done < self.from {
            self.from = done;
        } else if done - self.from >= least.max(LEAST_PROGRESS) {
            *self = Self::new(done, now);
        }
    }
}

impl Seeker {
    pub(super) fn new(task: TaskId, now: Timestamp) -> Self {
        Self { task, done: 0, way: Way::Wait, max_rate: None, is_told: false, told_at: now }
    }

    pub(super) fn send(&mut self, way: Way) {
        (self.way, self.is_told, self.max_rate) = (way, false, None);
    }

    /// Whether it downloads for itself.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.way, Way::Registry { alone, .. } if !alone.is_empty())
    }

    fn lease(&self) -> Option<&Lease> {
        match &self.way {
            Way::Wait => None,
            Way::Registry { lease, .. } | Way::Peers { lease, .. } => Some(lease),
        }
    }
}

impl Book {
    pub(super) fn new(size: u64) -> Self {
        Self { size, holders: BTreeSet::new(), seekers: BTreeMap::new(), idle_since: None }
    }

    /// The node that gets the blob for the others.
    pub(super) fn carrier(&self) -> Option<&NodeName> {
        let is_carrier = |seeker: &Seeker| matches!(seeker.way, Way::Registry { alone: "", .. });
        self.seekers.iter().find(|(_, seeker)| is_carrier(seeker)).map(|(node, _)| node)
    }

    /// A node says that it downloads the blob, which nobody here has told it: the one that has more goes on.
    pub(super) fn claim(&mut self, node: &NodeName, done: u64, now: Timestamp) {
        let other = self.carrier().cloned();
        if let Some(other) = other.and_then(|other| self.seekers.get_mut(&other)) {
            if other.done >= done {
                if let Some(seeker) = self.seekers.get_mut(node) {
                    seeker.is_told = false;
                }
                return;
            }
            other.send(Way::Wait);
        }
        if let Some(seeker) = self.seekers.get_mut(node) {
            // It does so already, and need not be told.
            seeker.is_told = true;
            seeker.way = Way::Registry { alone: "", lease: Lease::new(done, now) };
        }
    }

    /// A node says that a neighbour did not deliver. Returns whether it was sent to that one.
    pub(super) fn note_failure(&mut self, node: &NodeName, failure: &PeerFailure) -> bool {
        let Some(seeker) = self.seekers.get_mut(node) else { return false };
        let Way::Peers { peers, .. } = &mut seeker.way else { return false };
        let before = peers.len();
        peers.retain(|peer| *peer != failure.peer);
        let was_sent = peers.len() < before;
        if peers.is_empty() {
            seeker.send(Way::Wait);
        }
        if was_sent && failure.fault == prepull_api::sites::PeerFault::Gone {
            self.holders.remove(&failure.peer);
        }
        was_sent
    }

    /// The node has left the site.
    pub(super) fn forget(&mut self, node: &NodeName, now: Timestamp) {
        self.holders.remove(node);
        self.seekers.remove(node);
        self.note_idle(now);
    }

    /// A new session of the node has begun, in which it says what it still wants. What it carries is its own until its lease
    /// ends: after a restart it needs some seconds to go on.
    pub(super) fn reconnect(&mut self, node: &NodeName, until: Timestamp) {
        match self.seekers.get_mut(node).map(|seeker| &mut seeker.way) {
            Some(Way::Registry { lease, .. }) => lease.until = lease.until.max(until),
            Some(Way::Wait | Way::Peers { .. }) => _ = self.seekers.remove(node),
            None => {}
        }
    }

    /// The session of the node has ended: what it was told holds for this much longer.
    pub(super) fn shorten(&mut self, node: &NodeName, until: Timestamp) {
        if let Some(Way::Registry { lease, .. } | Way::Peers { lease, .. }) =
            self.seekers.get_mut(node).map(|seeker| &mut seeker.way)
        {
            lease.until = lease.until.min(until);
        }
    }

    /// Gives a carrier that is offline until then at least.
    pub(super) fn prolong_offline_carrier(
        &mut self,
        until: Timestamp,
        is_online: impl Fn(&NodeName) -> bool,
    ) {
        for (node, seeker) in &mut self.seekers {
            if let Way::Registry { lease, .. } = &mut seeker.way
                && !is_online(node)
            {
                lease.until = lease.until.max(until);
            }
        }
    }

    /// Ends the leases that have run out. Who is offline is forgotten with it: it says by itself what it wants when it is back.
    pub(super) fn expire(
        &mut self,
        now: Timestamp,
        faults: &mut Faults,
        is_online: impl Fn(&NodeName) -> bool,
    ) {
        for (node, seeker) in &mut self.seekers {
            match &seeker.way {
                Way::Registry { lease, .. } if lease.until <= now => {
                    faults.note_slow_carrier(node, now);
                    seeker.send(Way::Wait);
                }
                Way::Peers { lease, peers } if lease.until <= now => {
                    // Of one that says nothing itself, nobody knows whether its neighbour is slow.
                    if let Some(peer) = peers.first().filter(|_| is_online(node)) {
                        faults.avoid(node, peer, now);
                    }
                    seeker.send(Way::Wait);
                }
                _ => {}
            }
        }
        self.seekers.retain(|node, seeker| seeker.way != Way::Wait || is_online(node));
    }

    /// When leases end.
    pub(super) fn leases(&self) -> impl Iterator<Item = Timestamp> {
        self.seekers.values().filter_map(|seeker| Some(seeker.lease()?.until))
    }

    /// Since when nobody wants the blob.
    pub(super) fn note_idle(&mut self, now: Timestamp) -> Option<Timestamp> {
        if self.seekers.is_empty() {
            self.idle_since.get_or_insert(now);
        } else {
            self.idle_since = None;
        }
        self.idle_since
    }
}
