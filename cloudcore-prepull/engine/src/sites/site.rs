//! One site: its books, their indexes, and the changes that keep all indexes right.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use prepull_api::task::{JobUid, TaskId};

use super::book::{AssignedSource, BlobBook, BookId, Seeker};
use super::nodes::{NodeId, SiteNodes};
use super::report::{SiteCounters, SiteEvent, SiteEventKind};
use super::trust::Pairs;
use super::{GATHER, HOUR, REMINDER, Time};

/// The number of a timer's book for a node's reminder, and of a timer's node for the book itself.
pub(super) const NONE: u32 = u32::MAX;
/// Blobs of one node that count as few in the order of leases: an image or two.
const FEW_BLOBS: usize = 128;
/// Steps of one look, each some hundred nanoseconds. The next look does the rest.
pub(super) const STEPS: usize = 4096;
/// Time until the next look if this one left work.
const BEHIND: Time = 20;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Site {
    pub(super) name: Arc<str>,
    pub(super) ids: BTreeMap<BookId, u32>,
    pub(super) books: BTreeMap<u32, BlobBook>,
    pub(super) next_id: u32,
    pub(super) dirty: VecDeque<u32>,
    /// Nodes that may serve one more, in their order, and the same ones.
    pub(super) offered: VecDeque<NodeId>,
    pub(super) is_offered: HashSet<NodeId>,
    /// Nodes with a reminder among the timers.
    pub(super) has_reminder: HashSet<NodeId>,
    pub(super) to_tell: VecDeque<(NodeId, u32)>,
    pub(super) timers: BTreeSet<(Time, u32, NodeId)>,
    pub(super) places: BTreeSet<super::book::LeasePlace>,
    /// Books with a lease, and all downloads over the uplink.
    pub(super) leases: BTreeSet<u32>,
    pub(super) carrying: BTreeSet<(NodeId, u32)>,
    pub(super) rates: BTreeMap<JobUid, NonZeroU64>,
    pub(super) has_new_rates: bool,
    pub(super) pairs: Pairs,
    /// The fastest uplink seen, in confirmed bytes a second of all leases, when, and by which node.
    pub(super) fastest: (u64, Time, NodeId),
    pub(super) counters: SiteCounters,
    pub(super) nodes: usize,
    pub(super) waiting_nodes: usize,
    pub(super) idle: BTreeSet<(Time, u32)>,
    pub(super) looked_at: Time,
    /// The last look left work.
    pub(super) is_behind: bool,
    /// The entry in the order of all sites.
    pub(super) due: Option<Time>,
}

/// A site with what it works on.
pub(super) struct TrackerTurn<'a> {
    pub(super) site: &'a mut Site,
    pub(super) nodes: &'a mut SiteNodes,
    pub(super) events: &'a mut VecDeque<SiteEvent>,
    /// Bytes of all books of all sites.
    pub(super) bytes: &'a mut usize,
    pub(super) now: Time,
    /// How long a blob without a lease waits.
    pub(super) gather: Time,
    pub(super) steps: usize,
}

impl Site {
    /// Time of the next look.
    pub(super) fn next_look(&self) -> Option<Time> {
        let has_work = !(self.dirty.is_empty() && self.offered.is_empty() && self.to_tell.is_empty());
        let work = (has_work || self.has_new_rates)
            .then(|| self.looked_at + if self.is_behind { BEHIND } else { super::PACE });
        let at = [work, self.timers.first().map(|timer| timer.0)].into_iter().flatten().min()?;
        Some(if self.is_behind { at.max(self.looked_at + BEHIND) } else { at })
    }

    /// The limit of a job's bytes a second over the uplink.
    pub(super) fn set_rate(&mut self, job: &JobUid, max_rate: Option<NonZeroU64>) {
        if self.rates.get(job).copied() != max_rate {
            self.has_new_rates = true;
            match max_rate {
                Some(rate) => _ = self.rates.insert(job.clone(), rate),
                None => _ = self.rates.remove(job),
            }
        }
    }

    pub(super) fn mark(&mut self, id: u32) {
        if let Some(book) = self.books.get_mut(&id).filter(|book| !book.is_dirty) {
            book.is_dirty = true;
            self.dirty.push_back(id);
        }
    }
}

impl TrackerTurn<'_> {
    pub(super) fn push_event(&mut self, node: NodeId, digest: &str, kind: SiteEventKind) {
        if self.events.len() >= super::MAX_EVENTS {
            self.events.pop_front();
        }
        let (site, node) = (self.site.name.to_string(), self.nodes[node].name.clone());
        self.events.push_back(SiteEvent { site, node, digest: digest.to_owned(), kind });
    }

    pub(super) fn is_of_site(&self, node: NodeId) -> bool {
        self.nodes[node].site.as_ref() == Some(&self.site.name)
    }

    pub(super) fn add_book(&mut self, id: BookId) -> u32 {
        let number = self.site.next_id;
        self.site.next_id = (number + 1) % NONE;
        self.site.ids.insert(id.clone(), number);
        self.site.books.insert(number, BlobBook { id, ..BlobBook::default() });
        number
    }

    pub(super) fn remove_book(&mut self, number: u32) {
        let Some(book) = self.site.books.get(&number) else { return };
        let nodes: Vec<NodeId> = book.seekers.keys().chain(book.holders.keys()).copied().collect();
        for node in nodes {
            self.leave_book(number, node);
        }
        let Some(book) = self.site.books.remove(&number) else { return };
        self.site.ids.remove(&book.id);
        book.idle_since.inspect(|since| _ = self.site.idle.remove(&(*since, number)));
        book.place.inspect(|place| _ = self.site.places.remove(place));
        *self.bytes -= book.charged;
    }

    /// The books of a digest, of all sizes.
    pub(super) fn books_of(&self, entitlement: &Arc<str>, digest: &str) -> Vec<u32> {
        let id = |size| BookId { entitlement: entitlement.clone(), digest: digest.into(), size };
        self.site.ids.range(id(0)..=id(u64::MAX)).map(|(_, number)| *number).collect()
    }

    /// Removes the book that was idle for the longest time.
    pub(super) fn make_room(&mut self) -> bool {
        let Some((_, number)) = self.site.idle.first().copied() else { return false };
        self.remove_book(number);
        true
    }

    /// Changes the end of a seeker's source. A waiting node must report again.
    pub(super) fn limit_time(&mut self, number: u32, node: NodeId, until: impl Fn(Time) -> Time) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        match book.seekers.get_mut(&node).map(|seeker| &mut seeker.way) {
            None => return,
            Some(AssignedSource::Wait) => self.remove_seeker(number, node),
            Some(AssignedSource::Registry(carry)) => carry.until = until(carry.until),
            Some(AssignedSource::Peer { read, .. }) => read.until = until(read.until),
        }
        self.wake_seeker(number, node);
    }

    /// A node's new session has a moment to go on. Another one before its next progress has no more, or a box that only
    /// connects would keep its lease and its place at a source.
    pub(super) fn note_return(&mut self, number: u32, node: NodeId) {
        let end = self.now + super::RETURN;
        let seeker = self.site.books.get_mut(&number).and_then(|book| book.seekers.get_mut(&node));
        let has_returned = match seeker.map(|seeker| &mut seeker.way) {
            Some(AssignedSource::Registry(carry)) => std::mem::replace(&mut carry.has_returned, true),
            Some(AssignedSource::Peer { read, .. }) => std::mem::replace(&mut read.has_returned, true),
            Some(AssignedSource::Wait) | None => false,
        };
        self.limit_time(number, node, |until| if has_returned { until.min(end) } else { end });
    }

    /// Updates the indexes of a book after a change.
    pub(super) fn update_indexes(&mut self, number: u32) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        *self.bytes = *self.bytes + book.cost() - book.charged;
        book.charged = book.cost();
        let needs_carrier = book.carrier.is_none() && !book.waiting.is_empty();
        let place = needs_carrier.then(|| {
            // A node that names many blobs alone comes after one that names few.
            let alone = if book.waiting.len() == 1 { book.waiting.first() } else { None };
            let of_node = alone.map_or(0, |node| {
                u32::try_from(self.nodes[*node].books.len() / FEW_BLOBS).unwrap_or(u32::MAX)
            });
            (std::cmp::Reverse(book.waiting.len()), of_node, std::cmp::Reverse(book.id.size), number)
        });
        if place != book.place {
            std::mem::replace(&mut book.place, place).inspect(|old| _ = self.site.places.remove(old));
            self.site.places.extend(place);
        }
        let idle = book.seekers.is_empty().then(|| book.idle_since.unwrap_or(self.now));
        if idle != book.idle_since {
            std::mem::replace(&mut book.idle_since, idle)
                .inspect(|since| _ = self.site.idle.remove(&(*since, number)));
            self.site.idle.extend(idle.map(|since| (since, number)));
        }
        if book.seekers.is_empty() && book.holders.is_empty() {
            self.remove_book(number);
        }
    }

    /// Adds a book to a node's own. `false`: it has too many.
    pub(super) fn join_book(&mut self, number: u32, node: NodeId) -> bool {
        let books = &mut self.nodes[node].books;
        if !books.contains(&number) && books.len() >= super::MAX_BOOKS_OF_NODE {
            return false;
        }
        self.site.nodes += usize::from(books.is_empty());
        books.insert(number);
        true
    }

    pub(super) fn part_with_book(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get(&number) else { return };
        if !book.seekers.contains_key(&node)
            && !book.holders.contains_key(&node)
            && self.nodes[node].books.remove(&number)
        {
            self.site.nodes -= usize::from(self.nodes[node].books.is_empty());
        }
    }

    /// Removes a node from a book.
    pub(super) fn leave_book(&mut self, number: u32, node: NodeId) {
        self.remove_holder(number, node);
        self.remove_seeker(number, node);
    }

    pub(super) fn remove_holder(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if book.holders.remove(&node).is_some() {
            self.detach_readers(number, node);
            self.part_with_book(number, node);
            self.update_indexes(number);
        }
    }

    pub(super) fn remove_seeker(&mut self, number: u32, node: NodeId) {
        self.set_way(number, node, AssignedSource::Wait);
        self.detach_readers(number, node);
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if book.seekers.remove(&node).is_none() {
            return;
        }
        book.waiting.remove(&node);
        self.count_waiting(node, false);
        self.part_with_book(number, node);
        self.update_indexes(number);
    }

    fn count_waiting(&mut self, node: NodeId, more: bool) {
        let of = &mut self.nodes[node];
        if more {
            self.site.waiting_nodes += usize::from(of.waiting == 0);
            of.waiting += 1;
            if self.site.has_reminder.insert(node) {
                self.site.timers.insert((self.now + REMINDER, NONE, node));
            }
        } else {
            of.waiting -= 1;
            self.site.waiting_nodes -= usize::from(of.waiting == 0);
        }
    }

    pub(super) fn add_seeker(&mut self, number: u32, node: NodeId, task: &Arc<TaskId>) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        if book.seekers.is_empty() {
            book.gather_until = self.now + self.gather;
        }
        let gather_until = book.gather_until;
        book.seekers.insert(node, Seeker::new(task.clone()));
        book.waiting.insert(node);
        let carrier = book.carrier;
        self.count_waiting(node, true);
        // The nodes that avoid such a carrier would each download for themselves.
        let may_carry = |id: NodeId| self.nodes[id].may_carry(self.now);
        if let Some(carrier) = carrier.filter(|carrier| !may_carry(*carrier) && may_carry(node)) {
            self.set_way(number, carrier, AssignedSource::Wait);
        }
        self.wake_book(number, gather_until.max(self.now + GATHER));
        self.site.mark(number);
        self.update_indexes(number);
    }

    /// Takes its readers away from a node.
    pub(super) fn detach_readers(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get(&number) else { return };
        for reader in book.readers_of(node).collect::<Vec<_>>() {
            self.set_way(number, reader, AssignedSource::Wait);
        }
    }

    /// Gives a seeker another source.
    pub(super) fn set_way(&mut self, number: u32, node: NodeId, way: AssignedSource) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let Some(seeker) = book.seekers.get_mut(&node) else { return };
        let new = match &way {
            AssignedSource::Wait => None,
            AssignedSource::Registry(carry) => Some((None, carry.until, carry.alone.is_empty())),
            AssignedSource::Peer { from, is_stream, read, .. } => {
                Some((Some((*from, *is_stream)), read.until, false))
            }
        };
        seeker.is_told = false;
        match std::mem::replace(&mut seeker.way, way) {
            AssignedSource::Wait => {
                if new.is_none() {
                    return;
                }
                book.waiting.remove(&node);
                self.count_waiting(node, false);
            }
            AssignedSource::Registry(_) => {
                self.nodes[node].carries -= 1;
                self.site.carrying.remove(&(node, number));
                self.site.has_new_rates = true;
                if book.carrier == Some(node) {
                    book.carrier = None;
                    self.site.leases.remove(&number);
                }
            }
            AssignedSource::Peer { from, is_stream, .. } => {
                book.readers.remove(&(from, node));
                let source = &mut self.nodes[from];
                source.serves -= 1;
                source.streamed -= usize::from(is_stream);
                self.offer(from);
            }
        }
        let Some(book) = self.site.books.get_mut(&number) else { return };
        self.site.to_tell.push_back((node, number));
        let Some((source, until, is_lease)) = new else {
            book.waiting.insert(node);
            book.receiving.remove(&node);
            self.count_waiting(node, true);
            self.detach_readers(number, node);
            self.site.mark(number);
            return self.update_indexes(number);
        };
        book.receiving.insert(node);
        self.site.timers.insert((until, number, node));
        if let Some((from, is_stream)) = source {
            book.readers.insert((from, node));
            let source = &mut self.nodes[from];
            source.serves += 1;
            source.streamed += usize::from(is_stream);
            if book.carrier == Some(from)
                && let Some(carry) = book.leased_carry()
            {
                carry.tested_since.get_or_insert(self.now);
            }
        } else {
            self.nodes[node].carries += 1;
            self.site.carrying.insert((node, number));
            self.site.has_new_rates = true;
            if is_lease {
                book.carrier = Some(node);
                self.site.leases.insert(number);
            }
        }
        self.offer(node);
        self.update_indexes(number);
    }

    /// Sends a seeker its source with this look or the next one.
    pub(super) fn tell_later(&mut self, number: u32, node: NodeId) {
        let seeker = self.site.books.get_mut(&number).and_then(|book| book.seekers.get_mut(&node));
        if let Some(seeker) = seeker {
            seeker.is_told = false;
            self.site.to_tell.push_back((node, number));
        }
    }

    pub(super) fn offer(&mut self, node: NodeId) {
        if self.site.is_offered.insert(node) {
            self.site.offered.push_back(node);
        }
    }

    pub(super) fn wake_book(&mut self, number: u32, at: Time) {
        self.site.timers.insert((at, number, NONE));
    }

    /// Sets the timer of a seeker to the end of its source's time.
    pub(super) fn wake_seeker(&mut self, number: u32, node: NodeId) {
        let until = self.site.books.get(&number).and_then(|book| book.seekers.get(&node)?.source_until());
        self.site.timers.extend(until.map(|until| (until.max(self.now + super::SECOND), number, node)));
    }

    /// Makes a node a holder of nothing for an hour.
    pub(super) fn bar_holder(&mut self, node: NodeId, digest: &str) {
        self.nodes[node].trust.no_holder_until = self.now + HOUR;
        self.site.counters.holders_delisted += 1;
        self.push_event(node, digest, SiteEventKind::HolderDelisted);
        for number in self.nodes[node].books.clone() {
            self.remove_holder(number, node);
            if self.site.books.get(&number).is_some_and(|book| book.carrier == Some(node)) {
                self.set_way(number, node, AssignedSource::Wait);
            }
        }
    }
}
