//! The choice of a source for a waiting node: a whole copy first, then a node that is still receiving one.

use prepull_api::sites::{PeerFailure, PeerFault};

use super::book::{AssignedSource, ReadDeadline, round_from};
use super::nodes::NodeId;
use super::site::TrackerTurn;
use super::trust::SourceReach;
use super::{LEASE, SECOND};

/// Most neighbours that one node serves at a time: by then others have the blob too, and serve the next ones sooner.
const SERVED_BY_NODE: usize = 4;
/// Most of them that read a blob that is still arriving: a stream lasts as long as the uplink takes, and readers of whole
/// copies mustn't wait for it.
const STREAMED_BY_NODE: usize = 3;
/// Most neighbours between a reader and the uplink: each adds the delay of a hop.
const DEPTH: usize = 6;
/// Most sources tried for one node, and most books tried for one free node. The next attempt goes on behind them.
const TRIES: usize = 16;
/// Most waiting nodes tried for one book.
const WAITING_TRIES: usize = 64;
/// Most readers of an unproven holder: a false holder holds up few, and one slow reader can't keep the others away.
const UNPROVEN_READERS: usize = 2;
/// An unproven holder has this long to deliver something to its first reader.
const UNPROVEN_READ: super::Time = LEASE / 2;
/// A node has this long after the beginning of its session to open its door and its blobs: until then readers avoid it, and
/// only wrong bytes count against it.
const BEGINNING: super::Time = 30 * SECOND;
/// A node without a source tries again after this long: a timer of a pair may have ended.
const RETRY: super::Time = 5 * SECOND;

const NO_NEIGHBOUR: &str = "no neighbour serves it (is --peer-listen set on the nodes of the site?)";
const UNREACHABLE: &str =
    "it reaches no neighbour of its site (is the port of --peer-listen open between them?)";

/// Whether a waiting node may read from a possible source.
enum Fit {
    /// Yes; the least rank is the best.
    Free((bool, usize, usize)),
    /// Perhaps later.
    Full,
    Never,
}

impl TrackerTurn<'_> {
    /// Finds sources for the waiting nodes of changed books, and readers for nodes that have become free.
    pub(super) fn match_nodes(&mut self) {
        for _ in 0..self.site.dirty.len() {
            if self.steps == 0 {
                return;
            }
            let Some(number) = self.site.dirty.pop_front() else { return };
            if let Some(book) = self.site.books.get_mut(&number) {
                book.is_dirty = false;
                self.match_book(number);
            }
        }
        for _ in 0..self.site.offered.len() {
            if self.steps == 0 {
                return;
            }
            let Some(node) = self.site.offered.pop_front() else { return };
            self.site.is_offered.remove(&node);
            // It may have moved to another site.
            if self.is_of_site(node) {
                self.match_node(node);
            }
        }
    }

    fn match_book(&mut self, number: u32) {
        let Some(book) = self.site.books.get(&number) else { return };
        let waiting: Vec<NodeId> = book.waiting_round().take(WAITING_TRIES).collect();
        let gathers = book.gather_until > self.now;
        let (mut placed, mut failed) = (0, 0);
        for node in waiting {
            if self.steps == 0 || failed >= TRIES {
                break;
            }
            if self.find_source(number, node, gathers) {
                placed += 1;
            } else {
                failed += 1;
                let Some(book) = self.site.books.get_mut(&number) else { return };
                book.next_waiting = node.wrapping_add(1);
                if book.seekers.get(&node).is_some_and(|seeker| !seeker.is_told) && !gathers {
                    self.tell_later(number, node);
                }
            }
        }
        let still_waits = self.site.books.get(&number).is_some_and(|book| !book.waiting.is_empty());
        if still_waits && (placed > 0 || self.steps == 0) {
            self.site.mark(number);
        } else if still_waits && !gathers {
            self.wake_book(number, self.now + RETRY);
        }
    }

    /// Gives a free node readers.
    fn match_node(&mut self, node: NodeId) {
        let of = &self.nodes[node];
        let books: Vec<u32> = round_from(&of.books, of.next_book).take(TRIES).collect();
        for number in books {
            self.steps = self.steps.saturating_sub(1);
            self.nodes[node].next_book = number.wrapping_add(1);
            let Some(book) = self.site.books.get(&number) else { continue };
            let waiting: Vec<NodeId> = book.waiting_round().take(TRIES).collect();
            for reader in waiting {
                if self.nodes[node].serves >= SERVED_BY_NODE {
                    return;
                }
                if let Fit::Free(_) = self.source_fit(number, reader, node) {
                    self.send_to(number, reader, node, [node; 2]);
                }
            }
        }
    }

    fn source_fit(&mut self, number: u32, reader: NodeId, source: NodeId) -> Fit {
        self.steps = self.steps.saturating_sub(1);
        let Some(book) = self.site.books.get(&number) else { return Fit::Never };
        let (of, to) = (&self.nodes[source], &self.nodes[reader]);
        let may_read = to.is_online && to.trust.loner_until <= self.now;
        if source == reader || !may_read || !of.is_source(self.now) {
            return Fit::Never;
        }
        match self.site.pairs.check_reach(reader, source, self.now) {
            SourceReach::Avoided => return Fit::Never,
            SourceReach::Busy => return Fit::Full,
            SourceReach::Open => {}
        }
        if let Some(holder) = book.holders.get(&source) {
            let is_tested = || book.readers_of(source).nth(UNPROVEN_READERS - 1).is_some();
            let is_full = of.serves >= SERVED_BY_NODE || !holder.is_proven && is_tested();
            return if is_full {
                Fit::Full
            } else {
                Fit::Free((false, of.serves, usize::from(!holder.is_proven)))
            };
        }
        let Some(seeker) = book.seekers.get(&source) else { return Fit::Never };
        // A node that downloads is worth waiting for, even if it can't serve yet.
        let later = if matches!(seeker.way, AssignedSource::Registry(_)) { Fit::Full } else { Fit::Never };
        if book.is_whole_only
            || !of.streams
            || !to.reads_streams
            || seeker.done < book.done_of(reader)
            || matches!(seeker.way, AssignedSource::Wait)
        {
            return later;
        }
        let (mut depth, mut above) = (0, source);
        while let Some(next) = book.source_of(above) {
            (depth, above) = (depth + 1, next);
            if above == reader {
                return Fit::Never;
            }
            if depth >= DEPTH {
                return later;
            }
        }
        if of.streamed >= STREAMED_BY_NODE || of.serves >= SERVED_BY_NODE {
            return later;
        }
        Fit::Free((true, depth, of.serves))
    }

    /// Finds a source for a waiting node. Returns whether it has one.
    fn find_source(&mut self, number: u32, node: NodeId, gathers: bool) -> bool {
        let Some(book) = self.site.books.get_mut(&number) else { return false };
        if !self.nodes[node].is_online {
            return false;
        }
        let from = book.next_source;
        let holders =
            book.holders.range(from..).chain(book.holders.range(..from)).map(|(id, _)| *id).take(TRIES);
        let receiving = round_from(&book.receiving, from).take(TRIES);
        let sources: Vec<NodeId> = holders.chain(receiving).chain(book.carrier).collect();
        let mut found = Vec::new();
        let mut may_wait = false;
        for source in sources {
            match self.source_fit(number, node, source) {
                Fit::Free(rank) => found.push((rank, source)),
                Fit::Full => may_wait = true,
                Fit::Never => {}
            }
        }
        found.sort_unstable();
        if let Some(&((is_stream, ..), best)) = found.first() {
            let mut others =
                found.iter().skip(1).filter(|((stream, ..), _)| *stream == is_stream).map(|(_, id)| *id);
            let others = [others.next().unwrap_or(best), others.next().unwrap_or(best)];
            self.send_to(number, node, best, others);
            if let Some(book) = self.site.books.get_mut(&number) {
                book.next_source = best.wrapping_add(1);
            }
            return true;
        }
        !may_wait && !gathers && self.leave_alone(number, node)
    }

    fn send_to(&mut self, number: u32, reader: NodeId, source: NodeId, others: [NodeId; 2]) {
        let Some(book) = self.site.books.get(&number) else { return };
        let holder = book.holders.get(&source);
        let time = if holder.is_some_and(|holder| !holder.is_proven) { UNPROVEN_READ } else { LEASE };
        let (is_stream, read) = (holder.is_none(), ReadDeadline::new(book.done_of(reader), time, self.now));
        self.set_way(number, reader, AssignedSource::Peer { from: source, others, is_stream, read });
    }

    /// Sends a node to the registry if it can read neither from a holder nor from the carrier.
    fn leave_alone(&mut self, number: u32, node: NodeId) -> bool {
        let Some(book) = self.site.books.get(&number) else { return false };
        let is_loner = self.nodes[node].trust.loner_until > self.now;
        let avoids = |source| self.site.pairs.check_reach(node, source, self.now) == SourceReach::Avoided;
        let awaited = |source: &NodeId| !avoids(*source) && self.nodes[*source].is_awaited(self.now);
        let may_restart = |source: &NodeId| self.site.pairs.may_restart(node, *source, self.now);
        let mut holders = book.holders.iter().take(TRIES);
        let why = match book.carrier {
            _ if is_loner => UNREACHABLE,
            // A carrier that is offline comes back in a moment, or loses its lease.
            Some(carrier) if !self.nodes[carrier].is_online || may_restart(&carrier) => return false,
            None if book.holders.keys().take(TRIES).any(may_restart) => return false,
            Some(carrier) if avoids(carrier) => UNREACHABLE,
            Some(carrier) if self.nodes[carrier].addresses.is_none() => NO_NEIGHBOUR,
            None if book.holders.keys().take(TRIES).any(awaited) => return false,
            None if holders.any(|(id, of)| of.is_proven && self.nodes[*id].is_source(self.now)) => {
                UNREACHABLE
            }
            _ => return false,
        };
        self.carry_alone(number, node, why)
    }

    /// Stops a carrier that has less than half of the blob, since a proven holder is there.
    pub(super) fn stop_needless_carrier(&mut self, number: u32, holder: NodeId) {
        let Some(book) = self.site.books.get(&number) else { return };
        let Some(carrier) = book.carrier else { return };
        let has_begun = book.seekers.get(&carrier).is_some_and(|seeker| seeker.done >= book.id.size / 2);
        let reach = self.site.pairs.check_reach(carrier, holder, self.now);
        let is_loner = self.nodes[carrier].trust.loner_until > self.now;
        if !has_begun && !is_loner && reach == SourceReach::Open && self.nodes[holder].serves_now() {
            self.set_way(number, carrier, AssignedSource::Wait);
        }
    }

    /// Takes in a reader's complaint about its source. Returns whether the reader needs another one.
    pub(super) fn note_failure(&mut self, number: u32, reader: NodeId, failure: &PeerFailure) -> bool {
        let now = self.now;
        let Some(source) = self.nodes.id(&failure.peer) else { return false };
        let Some(book) = self.site.books.get_mut(&number) else { return false };
        let Some(AssignedSource::Peer { from, others, .. }) =
            book.seekers.get(&reader).map(|seeker| &seeker.way)
        else {
            return false;
        };
        // A complaint counts only about a neighbour that the reader was sent to.
        if *from != source && !others.contains(&source) {
            return false;
        }
        let is_first = *from == source;
        let is_carrier = book.carrier == Some(source);
        // Wrong bytes of a node that took over the lease may come from its previous source.
        let is_pure = is_carrier && book.leased_carry().is_some_and(|carry| carry.is_pure);
        let is_holder = book.holders.contains_key(&source);
        // An offline node may be back in a moment.
        if self.nodes[source].is_online {
            // A node that has just begun again may not have opened the blob yet.
            let has_begun = self.nodes[source].online_since + BEGINNING > now;
            let is_late = failure.fault == PeerFault::Gone && !is_holder && has_begun;
            let pair = (reader, source);
            let counts = if is_late {
                self.site.pairs.note_beginning(pair, now);
                false
            } else {
                let is_settled = !has_begun || failure.fault == PeerFault::Damaged;
                self.site.pairs.note_fault(self.nodes, pair, failure.fault, now) && is_settled
            };
            if is_carrier
                && (failure.fault == PeerFault::Unreachable || is_late)
                && let Some(carry) = self.site.books.get_mut(&number).and_then(|book| book.leased_carry())
            {
                carry.tested_since = None;
            }
            if failure.fault == PeerFault::Damaged && !is_holder && self.note_wrong(number, reader) {
                self.replace_carrier(number);
            }
            if counts && failure.fault == PeerFault::Damaged && (is_holder || is_pure) {
                let name = self.nodes[reader].name.clone();
                let before = self.nodes[source].trust.damaged.replace((name.clone(), now));
                if before.is_some_and(|(other, at)| other != name && at + super::HOUR > now) {
                    self.bar_holder(source, &failure.digest);
                    self.nodes[source].trust.no_lease_until = now + super::HOUR;
                }
            }
            if counts {
                self.note_complaint(number, reader, source, &failure.digest);
            }
        }
        is_first
    }

    /// Notes that a node threw its bytes of a blob away. The second such node ends the blob's streams; returns whether it's
    /// that one.
    pub(super) fn note_wrong(&mut self, number: u32, node: NodeId) -> bool {
        let Some(book) = self.site.books.get_mut(&number) else { return false };
        if *book.found_wrong.get_or_insert(node) == node || std::mem::replace(&mut book.is_whole_only, true) {
            return false;
        }
        let is_stream = |id: &NodeId| {
            matches!(
                book.seekers.get(id).map(|of| &of.way),
                Some(AssignedSource::Peer { is_stream: true, .. })
            )
        };
        for reader in book.receiving.iter().copied().filter(is_stream).collect::<Vec<_>>() {
            self.set_way(number, reader, AssignedSource::Wait);
        }
        if let Some(carry) = self.site.books.get_mut(&number).and_then(|book| book.leased_carry()) {
            carry.tested_since = None;
        }
        true
    }

    /// Gives the lease of a blob with wrong bytes to another node: nothing confirms its carrier any more. The carrier isn't
    /// blamed, since it may be honest.
    fn replace_carrier(&mut self, number: u32) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let Some(carrier) = book.carrier else { return };
        book.put_last(carrier);
        self.set_way(number, carrier, AssignedSource::Wait);
    }

    /// Counts a complaint about a holder. The second reader delists it; an unproven one is then barred for an hour.
    pub(super) fn note_complaint(&mut self, number: u32, reader: NodeId, source: NodeId, digest: &str) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let Some(holder) = book.holders.get_mut(&source) else { return };
        if holder.complaint.replace(reader).is_none_or(|other| other == reader) {
            return;
        }
        if holder.is_proven {
            self.site.counters.holders_delisted += 1;
            self.push_event(source, digest, super::SiteEventKind::HolderDelisted);
            self.remove_holder(number, source);
        } else {
            self.bar_holder(source, digest);
        }
        self.site.mark(number);
    }
}
