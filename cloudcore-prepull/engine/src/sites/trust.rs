//! Pairs of nodes that avoid each other for a time after a complaint.

use std::collections::{BTreeMap, BTreeSet};

use prepull_api::sites::PeerFault;

use super::nodes::{NodeId, SiteNodes};
use super::{HOUR, SECOND, Time};

/// A node counts as a loner after this many unreachable neighbours that no other node has reached either: a Wi-Fi with
/// client isolation looks like this.
const UNREACHED: usize = 3;
/// The same if others reach them: the node is in another network. Before that, a neighbour may be in the same one.
const UNREACHED_BY_NODE: usize = 8;
/// A reader leaves a busy neighbour alone for this long. Waiting is cheaper than the uplink.
const BUSY: Time = 5 * SECOND;
/// After this many times in a row a busy neighbour counts as too slow.
const BUSY_TIMES: u32 = 12;
/// A node that reaches no neighbour downloads for itself for this long.
const LONER: Time = 600 * SECOND;
/// A reader avoids a neighbour that was too slow or unreachable for this long.
const SLOW: Time = 300 * SECOND;
/// The same after a complaint that may have been an accident.
const SHORT: Time = 60 * SECOND;
/// A source that doesn't answer may be restarting for this long. Its readers wait, rather than use the uplink.
const RESTART: Time = 5 * SECOND;
/// Most pairs of a site: all of 64 nodes. In a larger site the pair that ends first is dropped.
const MAX_PAIRS: usize = 4096;

/// The pairs of one site: reader, then source.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    avoided: BTreeMap<(NodeId, NodeId), Avoided>,
    by_end: BTreeSet<(Time, NodeId, NodeId)>,
}

#[derive(Debug, Default)]
struct Avoided {
    until: Time,
    /// Since when the source is unreachable.
    unreachable_since: Option<Time>,
    /// The source answered that it hasn't the blob.
    is_gone: bool,
    /// How often in a row the neighbour was busy.
    busy: u32,
}

impl Pairs {
    /// Notes a complaint. Returns whether it also counts against the source for other readers.
    pub(super) fn note_fault(
        &mut self,
        nodes: &mut SiteNodes,
        (reader, source): (NodeId, NodeId),
        fault: PeerFault,
        now: Time,
    ) -> bool {
        let (time, counts) = match fault {
            PeerFault::Unreachable => (SLOW, false),
            PeerFault::Damaged => (HOUR, true),
            PeerFault::Gone => (SLOW, true),
            PeerFault::Refused | PeerFault::Stalled => (SHORT, true),
            PeerFault::Busy => {
                let busy = self.avoided.get(&(reader, source)).map_or(0, |pair| pair.busy) + 1;
                let time = if busy >= BUSY_TIMES { SLOW } else { BUSY };
                self.insert((reader, source), Avoided { until: now + time, busy, ..Avoided::default() });
                return false;
            }
        };
        let (is_unreachable, is_gone) = (fault == PeerFault::Unreachable, fault == PeerFault::Gone);
        nodes[source].trust.has_gone |= is_gone;
        let before = self.unreachable_since(reader, source, now);
        let unreachable_since = is_unreachable.then(|| before.unwrap_or(now));
        self.insert((reader, source), Avoided { until: now + time, unreachable_since, is_gone, busy: 0 });
        if is_unreachable {
            nodes[reader].trust.has_unreachable = true;
            nodes[source].trust.has_unreachable = true;
            let unreached = self.avoided_by(reader, now).filter(|(_, pair)| pair.unreachable_since.is_some());
            let (count, by_none) = unreached.fold((0, 0), |(count, by_none), (peer, _)| {
                (count + 1, by_none + usize::from(!nodes[peer].trust.is_reached))
            });
            if by_none >= UNREACHED || count >= UNREACHED_BY_NODE {
                nodes[reader].trust.loner_until = now + LONER;
            }
        }
        counts
    }

    /// The source has just begun again, and is asked again in a moment.
    pub(super) fn note_beginning(&mut self, pair: (NodeId, NodeId), now: Time) {
        let busy = self.avoided.get(&pair).map_or(1, |pair| pair.busy.max(1));
        self.insert(pair, Avoided { until: now + BUSY, busy, ..Avoided::default() });
    }

    /// A read was too slow.
    pub(super) fn avoid(&mut self, pair: (NodeId, NodeId), now: Time) {
        self.insert(pair, Avoided { until: now + SLOW, ..Avoided::default() });
    }

    fn insert(&mut self, pair: (NodeId, NodeId), avoided: Avoided) {
        self.remove(pair);
        if self.avoided.len() >= MAX_PAIRS
            && let Some((_, reader, source)) = self.by_end.pop_first()
        {
            self.avoided.remove(&(reader, source));
        }
        self.by_end.insert((avoided.until, pair.0, pair.1));
        self.avoided.insert(pair, avoided);
    }

    /// The source sends bytes: it isn't busy any more.
    pub(super) fn note_progress(&mut self, pair: (NodeId, NodeId)) {
        if self.avoided.get(&pair).is_some_and(|avoided| avoided.busy > 0) {
            self.remove(pair);
        }
    }

    fn remove(&mut self, pair: (NodeId, NodeId)) {
        if let Some(avoided) = self.avoided.remove(&pair) {
            self.by_end.remove(&(avoided.until, pair.0, pair.1));
        }
    }

    fn unreachable_since(&self, reader: NodeId, source: NodeId, now: Time) -> Option<Time> {
        self.avoided.get(&(reader, source)).filter(|pair| pair.until > now)?.unreachable_since
    }

    /// Whether a source that a reader can't reach may be restarting: the end of its session may be noticed after the complaint.
    pub(super) fn may_restart(&self, reader: NodeId, source: NodeId, now: Time) -> bool {
        self.unreachable_since(reader, source, now).is_some_and(|since| since + RESTART > now)
    }

    fn avoided_by(&self, reader: NodeId, now: Time) -> impl Iterator<Item = (NodeId, &Avoided)> {
        let pairs = self.avoided.range((reader, 0)..=(reader, NodeId::MAX));
        pairs.filter(move |(_, pair)| pair.until > now).map(|((_, peer), pair)| (*peer, pair))
    }

    /// A neighbour has delivered.
    pub(super) fn note_success(&mut self, nodes: &mut SiteNodes, reader: NodeId, source: NodeId, now: Time) {
        nodes[source].trust.is_reached = true;
        nodes[reader].trust.loner_until = 0;
        let ended = |pair: &Avoided| pair.unreachable_since.is_some() || pair.busy > 0;
        let ended: Vec<_> =
            self.avoided_by(reader, now).filter(|(_, pair)| ended(pair)).map(|(peer, _)| peer).collect();
        for peer in ended {
            self.remove((reader, peer));
        }
    }

    /// A session of the node has begun: unreachable neighbours may be reachable now.
    pub(super) fn forget_connections(&mut self, nodes: &mut SiteNodes, node: NodeId) {
        let trust = &mut nodes[node].trust;
        trust.loner_until = 0;
        if std::mem::take(&mut trust.has_unreachable) {
            self.forget_where(node, |pair| pair.unreachable_since.is_some());
        }
    }

    /// The node reports that it hasn't a blob any more: a reader that found this out first may come back for others.
    pub(super) fn forget_gone(&mut self, nodes: &mut SiteNodes, node: NodeId) {
        if std::mem::take(&mut nodes[node].trust.has_gone) {
            self.forget_where(node, |pair| pair.is_gone);
        }
    }

    /// Forgets the pairs of a node.
    fn forget_where(&mut self, node: NodeId, which: impl Fn(&Avoided) -> bool) {
        let is_of = |pair: &(NodeId, NodeId)| pair.0 == node || pair.1 == node;
        let gone: Vec<_> = self
            .avoided
            .iter()
            .filter(|(pair, of)| is_of(pair) && which(of))
            .map(|(pair, _)| *pair)
            .collect();
        for pair in gone {
            self.remove(pair);
        }
    }

    pub(super) fn forget_all(&mut self, node: NodeId) {
        self.forget_where(node, |_| true);
    }

    /// Whether a reader may be sent to a source. A busy one is worth waiting for.
    pub(super) fn check_reach(&self, reader: NodeId, source: NodeId, now: Time) -> SourceReach {
        match self.avoided.get(&(reader, source)).filter(|pair| pair.until > now) {
            None => SourceReach::Open,
            Some(pair) if (1..BUSY_TIMES).contains(&pair.busy) => SourceReach::Busy,
            Some(_) => SourceReach::Avoided,
        }
    }

    pub(super) fn expire(&mut self, now: Time) {
        // A busy pair is kept for some time, since it counts how often in a row.
        while let Some((until, reader, source)) = self.by_end.first().copied()
            && until + SLOW <= now
        {
            self.remove((reader, source));
        }
    }
}

/// Whether a reader may be sent to a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceReach {
    Open,
    Busy,
    Avoided,
}
