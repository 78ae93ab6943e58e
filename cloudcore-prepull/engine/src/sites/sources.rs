//! The choice of a source for a waiting node: a whole copy first, then a node that is still receiving one.

use prepull_api::sites::{PeerFailure, PeerFault};

use super::book::{Read, Way};
use super::nodes::NodeId;
use super::site::Turn;
use super::trust::Reach;
use super::{LEASE, SECOND};

/// Most neighbours that one node serves at a time: the next ones are served sooner by those that have it by then.
const SERVED_BY_NODE: usize = 4;
/// Those of them whose blob is still arriving: a stream takes as long as the uplink, and whole copies mustn't wait for it.
const STREAMED_BY_NODE: usize = 3;
/// Most neighbours between a reader and the uplink: each adds the delay of a hop.
const DEPTH: usize = 6;
/// Sources that are tried for one node, waiting nodes that are tried for one book, and books for one free node. The next
/// attempt goes on behind them.
const TRIES: usize = 16;
const WAITING_TRIES: usize = 64;
/// An unproven holder has this long to deliver something to its first reader.
const UNPROVEN_READ: super::Time = LEASE / 2;
/// A node that found no source tries others after this long, although nothing has happened.
const RETRY: super::Time = 5 * SECOND;

const NO_NEIGHBOUR: &str = "no neighbour serves it (is --peer-listen set on the nodes of the site?)";
const UNREACHABLE: &str =
    "it reaches no neighbour of its site (is the port of --peer-listen open between them?)";

/// What a pair of a waiting node and a possible source allows.
enum Fit {
    /// The rank, of which the least is the best.
    Free((bool, usize, usize)),
    /// Later, perhaps.
    Full,
    Never,
}

impl Turn<'_> {
    /// Finds sources for the nodes that wait for books that have changed, and readers for nodes that have become free.
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
            self.nodes[node].is_offered = false;
            self.match_node(node);
        }
    }

    fn match_book(&mut self, number: u32) {
        let Some(book) = self.site.books.get(&number) else { return };
        let from = book.next_waiting;
        let waiting: Vec<NodeId> = book
            .waiting
            .range(from..)
            .chain(book.waiting.range(..from))
            .take(WAITING_TRIES)
            .copied()
            .collect();
        let gathers = book.gather_until > self.now;
        let (mut placed, mut failed) = (0, 0);
        for node in waiting {
            if self.steps == 0 || failed >= TRIES {
                break;
            }
            if self.place(number, node, gathers) {
                placed += 1;
            } else {
                failed += 1;
                let Some(book) = self.site.books.get_mut(&number) else { return };
                book.next_waiting = node.wrapping_add(1);
                if book.seekers.get(&node).is_some_and(|seeker| !seeker.is_told) && !gathers {
                    self.tell_waiting(number, node);
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
        let from = self.nodes[node].next_book;
        let of = &self.nodes[node].books;
        let books: Vec<u32> = of.range(from..).chain(of.range(..from)).take(TRIES).copied().collect();
        for number in books {
            self.steps = self.steps.saturating_sub(1);
            self.nodes[node].next_book = number.wrapping_add(1);
            let Some(book) = self.site.books.get(&number) else { continue };
            let from = book.next_waiting;
            let waiting: Vec<NodeId> =
                book.waiting.range(from..).chain(book.waiting.range(..from)).take(TRIES).copied().collect();
            for reader in waiting {
                if self.nodes[node].serves >= SERVED_BY_NODE {
                    return;
                }
                if let Fit::Free(_) = self.fit(number, reader, node) {
                    self.send_to(number, reader, node, [node; 2]);
                }
            }
        }
    }

    fn fit(&mut self, number: u32, reader: NodeId, source: NodeId) -> Fit {
        self.steps = self.steps.saturating_sub(1);
        let Some(book) = self.site.books.get(&number) else { return Fit::Never };
        let (of, trust) = (&self.nodes[source], &self.nodes[source].trust);
        let is_barred = trust.no_holder_until > self.now;
        let to = &self.nodes[reader];
        if source == reader
            || is_barred
            || !of.serves_now()
            || !to.is_online
            || to.trust.loner_until > self.now
        {
            return Fit::Never;
        }
        match self.site.pairs.check(reader, source, self.now) {
            Reach::Avoided => return Fit::Never,
            Reach::Busy => return Fit::Full,
            Reach::Open => {}
        }
        if let Some(holder) = book.holders.get(&source) {
            let is_full =
                of.serves >= SERVED_BY_NODE || !holder.is_proven && book.readers_of(source).next().is_some();
            return if is_full {
                Fit::Full
            } else {
                Fit::Free((false, of.serves, usize::from(!holder.is_proven)))
            };
        }
        let Some(seeker) = book.seekers.get(&source) else { return Fit::Never };
        // A node that downloads is waited for, where it can't be read from yet.
        let later = if matches!(seeker.way, Way::Registry(_)) { Fit::Full } else { Fit::Never };
        let wanted = book.seekers.get(&reader).map_or(0, |seeker| seeker.done);
        if book.is_whole_only
            || !of.streams
            || !to.reads_streams
            || seeker.done < wanted
            || matches!(seeker.way, Way::Wait)
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
    fn place(&mut self, number: u32, node: NodeId, gathers: bool) -> bool {
        let Some(book) = self.site.books.get_mut(&number) else { return false };
        if !self.nodes[node].is_online {
            return false;
        }
        let from = book.next_source;
        let holders =
            book.holders.range(from..).chain(book.holders.range(..from)).map(|(id, _)| *id).take(TRIES);
        let receiving = book.receiving.range(from..).chain(book.receiving.range(..from)).copied().take(TRIES);
        let sources: Vec<NodeId> = holders.chain(receiving).chain(book.carrier).collect();
        let mut found = Vec::new();
        let mut may_wait = false;
        for source in sources {
            match self.fit(number, node, source) {
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
        let done = book.seekers.get(&reader).map_or(0, |seeker| seeker.done);
        let (is_stream, read) = (holder.is_none(), Read::new(done, time, self.now));
        self.set_way(number, reader, Way::Peer { from: source, others, is_stream, read });
    }

    /// A node that can get the blob neither from those that have it nor from the one that is getting it doesn't wait.
    fn leave_alone(&mut self, number: u32, node: NodeId) -> bool {
        let Some(book) = self.site.books.get(&number) else { return false };
        let is_loner = self.nodes[node].trust.loner_until > self.now;
        let avoids = |source| self.site.pairs.check(node, source, self.now) == Reach::Avoided;
        let awaited = |source: &NodeId| !avoids(*source) && self.nodes[*source].is_awaited(self.now);
        let is_offered = |source: &NodeId| {
            let trust = &self.nodes[*source].trust;
            self.nodes[*source].serves_now() && trust.no_holder_until <= self.now
        };
        let why = match book.carrier {
            _ if is_loner => UNREACHABLE,
            Some(carrier) if avoids(carrier) => UNREACHABLE,
            Some(carrier) if self.nodes[carrier].addresses.is_none() => NO_NEIGHBOUR,
            None if book.holders.keys().take(TRIES).any(awaited) => return false,
            None if book.holders.iter().take(TRIES).any(|(id, of)| of.is_proven && is_offered(id)) => {
                UNREACHABLE
            }
            // A carrier that is offline for a moment loses its lease soon if it stays away.
            _ => return false,
        };
        self.carry_alone(number, node, why)
    }

    /// Stops a carrier that has hardly begun where a neighbour is known to have the blob.
    pub(super) fn stop_needless_carrier(&mut self, number: u32, holder: NodeId) {
        let Some(book) = self.site.books.get(&number) else { return };
        let Some(carrier) = book.carrier else { return };
        let has_begun = book.seekers.get(&carrier).is_some_and(|seeker| seeker.done >= book.id.size / 2);
        let reach = self.site.pairs.check(carrier, holder, self.now);
        let is_loner = self.nodes[carrier].trust.loner_until > self.now;
        if !has_begun && !is_loner && reach == Reach::Open && self.nodes[holder].serves_now() {
            self.set_way(number, carrier, Way::Wait);
        }
    }

    /// A reader complains about its source. Returns whether it needs another one.
    pub(super) fn note_failure(&mut self, number: u32, reader: NodeId, failure: &PeerFailure) -> bool {
        let now = self.now;
        let Some(source) = self.nodes.id(&failure.peer) else { return false };
        let Some(book) = self.site.books.get_mut(&number) else { return false };
        let Some(Way::Peer { from, others, .. }) = book.seekers.get(&reader).map(|seeker| &seeker.way) else {
            return false;
        };
        // A complaint counts only about a neighbour that the reader was sent to.
        if *from != source && !others.contains(&source) {
            return false;
        }
        let is_first = *from == source;
        let is_carrier = book.carrier == Some(source);
        // Wrong bytes of a node that took the lease over may be those of the source that it had before.
        let is_pure = is_carrier && book.carry().is_some_and(|carry| carry.is_pure);
        let is_holder = book.holders.contains_key(&source);
        // A node that is away may be back in a moment, and one that is still receiving may be held up itself.
        if self.nodes[source].is_online {
            let excused = !is_holder && !is_carrier && failure.fault == PeerFault::Stalled;
            let counts = self.site.pairs.note(self.nodes, (reader, source), failure.fault, now) && !excused;
            if is_carrier
                && failure.fault == PeerFault::Unreachable
                && let Some(carry) = self.site.books.get_mut(&number).and_then(|book| book.carry())
            {
                carry.tested_since = None;
            }
            if failure.fault == PeerFault::Damaged && !is_holder {
                self.note_wrong(number, reader);
            }
            if counts && failure.fault == PeerFault::Damaged && (is_holder || is_pure) {
                let before = self.nodes[source].trust.damaged.replace((reader, now));
                if before.is_some_and(|(other, at)| other != reader && at + super::HOUR > now) {
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

    /// A node has thrown its bytes of a blob away. The second one ends the streams of it.
    pub(super) fn note_wrong(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if *book.found_wrong.get_or_insert(node) == node || std::mem::replace(&mut book.is_whole_only, true) {
            return;
        }
        let is_stream = |id: &NodeId| {
            matches!(book.seekers.get(id).map(|of| &of.way), Some(Way::Peer { is_stream: true, .. }))
        };
        for reader in book.receiving.iter().copied().filter(is_stream).collect::<Vec<_>>() {
            self.set_way(number, reader, Way::Wait);
        }
        if let Some(carry) = self.site.books.get_mut(&number).and_then(|book| book.carry()) {
            carry.tested_since = None;
        }
    }

    /// Two readers delist a holder of a blob. One that was never proven isn't believed for an hour.
    pub(super) fn note_complaint(&mut self, number: u32, reader: NodeId, source: NodeId, digest: &str) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let Some(holder) = book.holders.get_mut(&source) else { return };
        if holder.complaint.replace(reader).is_none_or(|other| other == reader) {
            return;
        }
        if holder.is_proven {
            self.site.counters.holders_delisted += 1;
            self.event(source, digest, super::SiteEventKind::HolderDelisted);
            self.remove_holder(number, source);
        } else {
            self.bar_holder(source, digest);
        }
        self.site.mark(number);
    }
}
