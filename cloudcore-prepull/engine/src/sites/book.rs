//! One blob at one site: its holders, its seekers, and the source of each seeker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prepull_api::task::TaskId;

use super::nodes::NodeId;
use super::{LEASE, Time};

/// Fewest bytes that renew a read from a whole holder: a dead connection brings less.
const LEAST_READ: u64 = 64 * 1024;

/// The identity of a blob. It includes the size, so that a node with a wrong size is alone with its blob, and the
/// entitlement, since a node may be allowed the images of one task and not those of another.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BookId {
    pub(super) entitlement: Arc<str>,
    pub(super) digest: Arc<str>,
    pub(super) size: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct BlobBook {
    pub(super) id: BookId,
    pub(super) holders: BTreeMap<NodeId, Holder>,
    pub(super) seekers: BTreeMap<NodeId, Seeker>,
    /// The seekers without a source.
    pub(super) waiting: BTreeSet<NodeId>,
    /// The seekers that receive: sources of streams.
    pub(super) receiving: BTreeSet<NodeId>,
    /// Readers by the node that they read from.
    pub(super) readers: BTreeSet<(NodeId, NodeId)>,
    /// The node with the lease.
    pub(super) carrier: Option<NodeId>,
    /// The most bytes that a node other than the carrier has received from a neighbour.
    pub(super) confirmed: u64,
    /// The waiting node with the most bytes.
    pub(super) ahead: Option<NodeId>,
    /// No lease before this: nodes with more bytes may still report them.
    pub(super) gather_until: Time,
    /// Nodes that lost a lease of this blob or took one over, the latest at the end.
    pub(super) losers: Vec<NodeId>,
    /// The last loser, until its successor shows whether the link or the node was slow. With the confirmed bytes at that
    /// time, and the bytes a second.
    pub(super) suspect: Option<(NodeId, u64, u64)>,
    /// The first node that found its bytes wrong.
    pub(super) found_wrong: Option<NodeId>,
    /// A second node found them wrong too: only whole copies are read, since each stream may pass wrong bytes on.
    pub(super) is_whole_only: bool,
    pub(super) idle_since: Option<Time>,
    /// The place in the order of leases.
    pub(super) place: Option<LeasePlace>,
    /// Where the next search for a source or a reader starts.
    pub(super) next_source: NodeId,
    pub(super) next_waiting: NodeId,
    pub(super) is_dirty: bool,
    /// Its cost in the budget.
    pub(super) charged: usize,
}

/// The order in which blobs get a lease: many waiting nodes first, then nodes with few blobs, then large ones.
pub(super) type LeasePlace = (std::cmp::Reverse<usize>, u32, std::cmp::Reverse<u64>, u32);

/// A node that reports that it has the blob.
#[derive(Debug, Default)]
pub(super) struct Holder {
    /// Another node got the blob from it, or its task is known to have succeeded.
    pub(super) is_proven: bool,
    pub(super) complaint: Option<NodeId>,
}

/// A node that wants the blob.
#[derive(Debug)]
pub(super) struct Seeker {
    pub(super) task: Arc<TaskId>,
    /// Bytes that it reports.
    pub(super) done: u64,
    pub(super) way: AssignedSource,
    pub(super) is_told: bool,
    /// A neighbour already got the whole blob from it.
    pub(super) is_proven: bool,
}

/// The source of a node.
#[derive(Debug)]
pub(super) enum AssignedSource {
    Wait,
    Registry(Box<Carry>),
    Peer { from: NodeId, others: [NodeId; 2], is_stream: bool, read: ReadDeadline },
}

/// A download over the uplink.
#[derive(Debug, Default)]
pub(super) struct Carry {
    /// Why from no neighbour; empty for the carrier with the lease.
    pub(super) alone: &'static str,
    pub(super) since: Time,
    /// Whether all of its bytes are from the registry.
    pub(super) is_pure: bool,
    /// It ends then without progress.
    pub(super) until: Time,
    /// Since when a reader could confirm it.
    pub(super) tested_since: Option<Time>,
    /// The confirmed bytes at the start of the present minute.
    pub(super) confirmed: (u64, Time),
    /// The reported bytes at the start of the present minute.
    pub(super) reported: (u64, Time),
    /// The most that the node has reported.
    pub(super) best: u64,
    /// The end of a lease that no reader can confirm.
    pub(super) unconfirmed_until: Time,
    pub(super) bytes_per_second: u64,
    pub(super) max_rate: Option<std::num::NonZeroU64>,
    /// The node has begun a session since a neighbour confirmed its progress.
    pub(super) has_returned: bool,
}

/// The time that a read has to make progress.
#[derive(Debug)]
pub(super) struct ReadDeadline {
    pub(super) until: Time,
    /// Bytes that were there when it began.
    from: u64,
    /// The node has begun a session in this time.
    pub(super) has_returned: bool,
}

impl Carry {
    pub(super) fn new(alone: &'static str, done: u64, confirmed: u64, now: Time) -> Self {
        Self {
            alone,
            since: now,
            until: now + LEASE,
            // Bytes from before the lease show nothing of the uplink.
            confirmed: (confirmed.max(done), now),
            reported: (done, now),
            best: done,
            is_pure: done == 0,
            unconfirmed_until: Time::MAX,
            ..Self::default()
        }
    }
}

impl ReadDeadline {
    pub(super) fn new(done: u64, time: Time, now: Time) -> Self {
        Self { until: now + time, from: done, has_returned: false }
    }

    pub(super) fn renew(&mut self, done: u64, least: u64, now: Time) {
        if done < self.from {
            self.from = done;
        } else if done - self.from >= least {
            *self = Self::new(done, LEASE, now);
        }
    }
}

impl Seeker {
    pub(super) fn new(task: Arc<TaskId>) -> Self {
        Self { task, done: 0, way: AssignedSource::Wait, is_told: false, is_proven: false }
    }

    /// The end of its source's time.
    pub(super) fn source_until(&self) -> Option<Time> {
        match &self.way {
            AssignedSource::Wait => None,
            AssignedSource::Registry(carry) => Some(carry.until),
            AssignedSource::Peer { read, .. } => Some(read.until),
        }
    }
}

impl BlobBook {
    /// Bytes of memory, roughly.
    pub(super) fn cost(&self) -> usize {
        /// The book, its texts, and its entries in the indexes.
        const BOOK: usize = size_of::<BlobBook>() + 400;
        /// A seeker and its entries in `waiting`, `readers`, the timers and the list of its node.
        const SEEKER: usize = size_of::<Seeker>() + 120;
        const HOLDER: usize = size_of::<Holder>() + 24;
        BOOK + self.seekers.len() * SEEKER + self.holders.len() * HOLDER
    }

    /// Bytes a minute that a read from a whole holder must bring.
    pub(super) fn least_read(&self) -> u64 {
        (self.id.size / 512).max(LEAST_READ)
    }

    pub(super) fn leased_carry(&mut self) -> Option<&mut Carry> {
        match &mut self.seekers.get_mut(&self.carrier?)?.way {
            AssignedSource::Registry(carry) => Some(carry),
            _ => None,
        }
    }

    /// Puts a node behind all others that may carry the blob.
    pub(super) fn put_last(&mut self, node: NodeId) {
        self.losers.retain(|loser| *loser != node);
        self.losers.push(node);
    }

    /// Bytes that a seeker reports.
    pub(super) fn done_of(&self, node: NodeId) -> u64 {
        self.seekers.get(&node).map_or(0, |seeker| seeker.done)
    }

    /// Waiting nodes, from where the last search ended.
    pub(super) fn waiting_round(&self) -> impl Iterator<Item = NodeId> {
        round_from(&self.waiting, self.next_waiting)
    }

    /// The nodes that read from this one.
    pub(super) fn readers_of(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        self.readers.range((node, 0)..=(node, NodeId::MAX)).map(|(_, reader)| *reader)
    }

    /// The node that this one reads from.
    pub(super) fn source_of(&self, node: NodeId) -> Option<NodeId> {
        match self.seekers.get(&node)?.way {
            AssignedSource::Peer { from, .. } => Some(from),
            _ => None,
        }
    }
}

/// All of a set, beginning with this one.
pub(super) fn round_from(all: &BTreeSet<u32>, from: u32) -> impl Iterator<Item = u32> {
    all.range(from..).chain(all.range(..from)).copied()
}
