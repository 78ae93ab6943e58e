//! What nodes have against each other: who reaches whom not, who lies, who is slow.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::sites::{PeerFailure, PeerFault};
use prepull_api::task::NodeName;

/// Neighbours that a node cannot reach, and nobody else has reached, until it counts as one that reaches none: where
/// clients of a Wi-Fi are isolated from each other, nobody reaches anybody.
const UNREACHED: usize = 3;
/// The same where others reach them: it is in another network than they are. Until then there may be somebody in its own.
const UNREACHED_BY_NODE: usize = 8;
/// Time for which a neighbour that is busy is left alone. Whoever needs it waits meanwhile: it is cheaper than the uplink.
const BUSY: Duration = Duration::from_secs(5);
/// How often in a row a neighbour may be busy until it counts as one that is too slow.
const BUSY_TIMES: u32 = 12;
/// Time for which a node that reaches no neighbour downloads for itself.
const LONER: Duration = Duration::from_secs(600);
/// Time for which a carrier that was too slow carries nothing while others can.
const SLOW: Duration = Duration::from_secs(300);
/// Time for which nobody is sent to a node about which two others complain that its bytes are wrong.
const BANNED: Duration = Duration::from_secs(3600);
/// Different nodes that have to complain: one alone may be what is broken, or lie.
const COMPLAINTS: usize = 2;
/// Most pairs that are remembered: all of a site of 64 nodes. Of a larger one, the oldest are forgotten, and tried again.
const MAX_PAIRS: usize = 4096;

/// See the module. Everything in it ends by itself.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Whom each node is not sent to, until when, and whether that was for want of a connection.
    avoided: BTreeMap<(NodeName, NodeName), (Timestamp, bool)>,
    loners: BTreeMap<NodeName, Timestamp>,
    slow: BTreeMap<NodeName, Timestamp>,
    complaints: BTreeMap<NodeName, BTreeSet<NodeName>>,
    banned: BTreeMap<NodeName, Timestamp>,
    /// Who has delivered to somebody.
    reached: BTreeSet<NodeName>,
    /// How often in a row each node was told by another that it is busy, and the last time.
    busy: BTreeMap<(NodeName, NodeName), (u32, Timestamp)>,
}

impl Faults {
    /// A neighbour did not deliver.
    pub(super) fn note(&mut self, node: &NodeName, failure: &PeerFailure, now: Timestamp) {
        let (seconds, is_unreachable) = match failure.fault {
            PeerFault::Unreachable => (300, true),
            PeerFault::Damaged => (3600, false),
            PeerFault::Refused | PeerFault::Stalled => (60, false),
            PeerFault::Busy => return self.note_busy(node, &failure.peer, now),
            // It is no holder any more.
            PeerFault::Gone => return,
        };
        self.remember(node, &failure.peer, after(now, Duration::from_secs(seconds)), is_unreachable);
        if is_unreachable {
            let unreached = || self.of(node).filter(|(_, is_unreachable)| *is_unreachable);
            let by_nobody = unreached().filter(|(peer, _)| !self.reached.contains(*peer)).count();
            if by_nobody >= UNREACHED || unreached().count() >= UNREACHED_BY_NODE {
                self.loners.insert(node.clone(), after(now, LONER));
            }
        }
        if failure.fault == PeerFault::Damaged {
            let complaints = self.complaints.entry(failure.peer.clone()).or_default();
            complaints.insert(node.clone());
            if complaints.len() >= COMPLAINTS {
                self.banned.insert(failure.peer.clone(), after(now, BANNED));
            }
        }
    }

    fn note_busy(&mut self, node: &NodeName, peer: &NodeName, now: Timestamp) {
        if self.busy.len() >= MAX_PAIRS {
            self.busy.clear();
        }
        let (times, last) = self.busy.entry((node.clone(), peer.clone())).or_insert((0, now));
        (*times, *last) = (*times + 1, now);
        if *times >= BUSY_TIMES {
            self.busy.remove(&(node.clone(), peer.clone()));
            self.avoid(node, peer, now);
        }
    }

    /// Whether the neighbour has just said that it is busy.
    pub(super) fn is_busy(&self, node: &NodeName, peer: &NodeName, now: Timestamp) -> bool {
        self.busy.get(&(node.clone(), peer.clone())).is_some_and(|(_, last)| after(*last, BUSY) > now)
    }

    /// A neighbour was too slow.
    pub(super) fn avoid(&mut self, node: &NodeName, peer: &NodeName, now: Timestamp) {
        self.remember(node, peer, after(now, SLOW), false);
    }

    fn remember(&mut self, node: &NodeName, peer: &NodeName, until: Timestamp, is_unreachable: bool) {
        if self.avoided.len() >= MAX_PAIRS
            && let Some(first) =
                self.avoided.iter().min_by_key(|(_, (until, _))| *until).map(|(pair, _)| pair.clone())
        {
            self.avoided.remove(&first);
        }
        self.avoided.insert((node.clone(), peer.clone()), (until, is_unreachable));
    }

    fn of(&self, node: &NodeName) -> impl Iterator<Item = (&NodeName, bool)> {
        let from = (node.clone(), NodeName::default());
        let of_node = self.avoided.range(from..).take_while(move |((of, _), _)| of == node);
        of_node.map(|((_, peer), (_, is_unreachable))| (peer, *is_unreachable))
    }

    /// A neighbour has delivered: the node is reached by somebody.
    pub(super) fn note_success(&mut self, node: &NodeName, peer: Option<&NodeName>) {
        if self.reached.len() < MAX_PAIRS {
            self.reached.extend(peer.cloned());
        }
        self.loners.remove(node);
        self.busy.retain(|(of, _), _| of != node);
        self.avoided.retain(|(of, _), (_, is_unreachable)| of != node || !*is_unreachable);
    }

    /// A session of the node has begun: what could not be reached before may be now.
    pub(super) fn forget_connections(&mut self, node: &NodeName) {
        self.avoided
            .retain(|(of, peer), (_, is_unreachable)| !*is_unreachable || (of != node && peer != node));
        self.loners.remove(node);
    }

    /// A carrier has made no progress.
    pub(super) fn note_slow_carrier(&mut self, node: &NodeName, now: Timestamp) {
        self.slow.insert(node.clone(), after(now, SLOW));
    }

    pub(super) fn is_slow(&self, node: &NodeName) -> bool {
        self.slow.contains_key(node)
    }

    /// Whether the node is not sent to this neighbour.
    pub(super) fn avoids(&self, node: &NodeName, peer: &NodeName) -> bool {
        self.banned.contains_key(peer) || self.avoided.contains_key(&(node.clone(), peer.clone()))
    }

    /// Whether the node reaches no neighbour.
    pub(super) fn is_loner(&self, node: &NodeName) -> bool {
        self.loners.contains_key(node)
    }

    pub(super) fn expire(&mut self, now: Timestamp) {
        self.avoided.retain(|_, (until, _)| *until > now);
        self.busy.retain(|_, (_, last)| after(*last, SLOW) > now);
        for map in [&mut self.loners, &mut self.slow, &mut self.banned] {
            map.retain(|_, until| *until > now);
        }
        // A complaint counts as long as the one who made it stays away.
        let avoided = &self.avoided;
        self.complaints.retain(|peer, by| {
            by.retain(|node| avoided.contains_key(&(node.clone(), peer.clone())));
            !by.is_empty()
        });
    }

    /// When the first of all that ends.
    pub(super) fn next_end(&self, now: Timestamp) -> Option<Timestamp> {
        let pairs = self.avoided.values().map(|(until, _)| until);
        let nodes = [&self.loners, &self.slow, &self.banned];
        let busy = self.busy.values().map(|(_, last)| after(*last, BUSY)).filter(|end| *end > now);
        pairs.copied().chain(busy).chain(nodes.into_iter().flat_map(BTreeMap::values).copied()).min()
    }
}

fn after(now: Timestamp, time: Duration) -> Timestamp {
    now.saturating_add(time).unwrap_or(now)
}
