//! Leases: at most one for each blob, given by the tracker alone, and kept while neighbours confirm its progress.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU64;

use prepull_api::task::JobUid;

use super::book::{AssignedSource, Carry};
use super::nodes::NodeId;
use super::report::SiteEventKind;
use super::site::TrackerTurn;
use super::{HOUR, LEASE, SECOND, Time};

/// Most blobs that are carried into a site at a time: more connections would share the same uplink.
const CARRIED_INTO_SITE: usize = 6;
/// Most blobs that one node downloads over the uplink at a time, as without a site.
const CARRIED_BY_NODE: usize = 3;
/// Most candidates for one lease, and most blobs without a lease, that one look considers: a bound on its time.
const CANDIDATES: usize = 64;
const PLACES: usize = 256;
/// Waiting nodes that are asked whether they can still test an unproven holder. Two complaints bar it.
const TESTERS: usize = 4;
/// A lease that no neighbour can confirm lasts this long, or as long as a quarter of the fastest uplink seen here takes.
const UNCONFIRMED: Time = 600 * SECOND;
/// An older lease changes hands if a node still waits for a source. Honest nodes lose seconds by it.
const TURN: Time = 300 * SECOND;
/// A site remembers the limits of more jobs only while their nodes download.
const RATES: usize = 64;
/// A carrier must reach this part of its share of the fastest uplink seen here. A busy link varies less.
const SLOWEST: u64 = 4;
/// A waiting node takes a lease over if it has this part of the blob more than is confirmed.
const TAKEOVER: u64 = 4;

impl Carry {
    pub(super) fn note_reported(&mut self, done: u64, now: Time) {
        if done > self.best && self.tested_since.is_none() {
            self.until = (now + LEASE).min(self.unconfirmed_until);
        }
        self.best = self.best.max(done);
        let (from, since) = self.reported;
        if now - since >= LEASE / 4 {
            self.bytes_per_second = bytes_per_second(done.saturating_sub(from), now - since);
            self.reported = (done, now);
        }
    }
}

fn bytes_per_second(bytes: u64, time: Time) -> u64 {
    bytes.saturating_mul(1000) / u64::try_from(time).unwrap_or(1).max(1)
}

impl TrackerTurn<'_> {
    /// Notes that another node has received this much of the blob.
    pub(super) fn note_confirmed(&mut self, number: u32, done: u64) {
        let (now, lanes) = (self.now, self.site.leases.len() as u64);
        let Some(book) = self.site.books.get_mut(&number) else { return };
        book.confirmed = book.confirmed.max(done);
        let (confirmed, size) = (book.confirmed, book.id.size);
        let Some(carry) = book.leased_carry() else { return };
        (carry.until, carry.has_returned) = (now + LEASE, false);
        let (from, since) = carry.confirmed;
        let is_measured = now - since >= LEASE || confirmed == size && now - since >= SECOND;
        let uplink =
            bytes_per_second(confirmed.saturating_sub(from), now - since).saturating_mul(lanes.max(1));
        if is_measured {
            carry.confirmed = (confirmed, now);
        }
        // The link works, so the loser was slow.
        if let Some((loser, before, slow)) = book.suspect
            && confirmed > before
            && (slow == 0 || is_measured)
        {
            book.suspect = None;
            if slow == 0 || uplink > slow.saturating_mul(SLOWEST) {
                self.blame(loser);
            }
        }
        if is_measured {
            self.judge_rate(number, uplink);
        }
    }

    /// Ends a lease that is far slower than the uplink, if another node can go on. While no other node has shown how fast
    /// the uplink is, the lease of a long download changes hands once: it's the only way to tell a slow node from a slow link.
    fn judge_rate(&mut self, number: u32, uplink: u64) {
        let Some(book) = self.site.books.get(&number) else { return };
        let Some(carrier) = book.carrier else { return };
        let (fastest, at, by) = self.site.fastest;
        let is_alone = at == 0 || at + HOUR < self.now || by == carrier;
        if uplink >= fastest || is_alone {
            self.site.fastest = (uplink, self.now, carrier);
        }
        let may_go_on = |id: NodeId| !book.losers.contains(&id) && self.nodes[id].may_carry(self.now);
        let takes_long = || {
            let left = book.id.size.saturating_sub(book.confirmed).saturating_mul(1000);
            left / uplink.max(1) > UNCONFIRMED.unsigned_abs()
        };
        let is_slow = if is_alone {
            book.losers.is_empty() && takes_long()
        } else {
            uplink.saturating_mul(SLOWEST) < fastest
        };
        if is_slow && book.readers_of(carrier).any(may_go_on) {
            self.end_lease(number, carrier, uplink.max(1));
        }
    }

    fn end_lease(&mut self, number: u32, node: NodeId, slow: u64) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        book.put_last(node);
        book.suspect = Some((node, book.confirmed, slow));
        let digest = book.id.digest.clone();
        let readers: Vec<NodeId> = book.readers_of(node).collect();
        if slow == 0 {
            for reader in readers {
                self.site.pairs.avoid((reader, node), self.now);
            }
        }
        self.site.counters.leases_lost += 1;
        self.push_event(node, &digest, SiteEventKind::LeaseLost);
        self.set_way(number, node, AssignedSource::Wait);
    }

    /// Counts a lost lease against a node, once its successor has shown that the link works. After the second one it gets
    /// no lease for an hour.
    pub(super) fn blame(&mut self, node: NodeId) {
        let trust = &mut self.nodes[node].trust;
        if trust.lost_at.replace(self.now).is_some_and(|at| at + HOUR > self.now) {
            trust.no_lease_until = self.now + HOUR;
            self.push_event(node, "", SiteEventKind::CarriesNothing);
        }
    }

    /// A seeker's timer has ended. Unless its source got more time, it gets another one.
    pub(super) fn expire_seeker(&mut self, number: u32, node: NodeId) {
        let now = self.now;
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let (confirmed, seekers) = (book.confirmed, book.seekers.len());
        let can_confirm = || {
            let mut others = book.seekers.keys().filter(|id| **id != node).take(CANDIDATES);
            others.any(|id| self.nodes[*id].reads_streams && self.nodes[*id].trust.loner_until <= now)
        };
        let can_confirm = self.nodes[node].streams && can_confirm();
        let Some(seeker) = book.seekers.get_mut(&node) else { return };
        let done = seeker.done;
        match &mut seeker.way {
            AssignedSource::Wait => {}
            AssignedSource::Registry(carry) if carry.until > now => {
                if carry.alone.is_empty() && carry.since + TURN <= now && self.nodes[node].streams {
                    self.hand_over(number, node);
                }
                self.wake_seeker(number, node);
            }
            AssignedSource::Peer { read, .. } if read.until > now => self.wake_seeker(number, node),
            _ if !self.nodes[node].is_online => self.remove_seeker(number, node),
            AssignedSource::Registry(carry) => {
                let is_lease = carry.alone.is_empty();
                let tested_since = carry.tested_since.filter(|_| can_confirm);
                let from = if seekers == 1 { Some(now) } else { tested_since };
                if let Some(end) = from.map(|from| from + LEASE).filter(|end| *end > now) {
                    carry.until = end;
                    self.wake_seeker(number, node);
                } else if is_lease {
                    self.end_lease(number, node, 0);
                } else {
                    self.set_way(number, node, AssignedSource::Wait);
                }
            }
            AssignedSource::Peer { from, is_stream, read, .. } => {
                let from = *from;
                // The whole tree is held up: judge the lease at its root.
                if *is_stream && confirmed <= done {
                    read.until = now + LEASE;
                    return self.wake_seeker(number, node);
                }
                self.site.pairs.avoid((node, from), now);
                let digest = book.id.digest.clone();
                self.set_way(number, node, AssignedSource::Wait);
                self.note_complaint(number, node, from, &digest);
            }
        }
    }

    /// Ends an old lease without blame if a node still waits for a source: the only reader that confirms the carrier may
    /// collude with it. Each node has one such turn.
    fn hand_over(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let is_next = |id: &NodeId| {
            let of = &self.nodes[*id];
            of.is_online && of.may_carry(self.now) && *id != node && !book.losers.contains(id)
        };
        let may_stream = |id: &NodeId| self.nodes[*id].is_online && self.nodes[*id].reads_streams;
        if book.waiting.iter().take(CANDIDATES).any(may_stream)
            && book.seekers.keys().take(CANDIDATES).any(is_next)
        {
            book.losers.push(node);
            self.set_way(number, node, AssignedSource::Wait);
        }
    }

    /// A waiting node that has far more than the carrier takes over its lease, once.
    pub(super) fn note_ahead(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let done = book.done_of(node);
        if !book.waiting.contains(&node) || done == 0 {
            return;
        }
        if book.ahead.is_none_or(|ahead| !book.waiting.contains(&ahead) || book.done_of(ahead) < done) {
            book.ahead = Some(node);
        }
        let Some(carrier) = book.carrier else { return };
        let has = book.leased_carry().map_or(0, |carry| carry.confirmed.0);
        let has = has.max(book.confirmed);
        let is_far =
            done.saturating_sub(has) >= (book.id.size / TAKEOVER).max(1) && done > book.done_of(carrier);
        let is_free = self.nodes[node].carries < CARRIED_BY_NODE;
        if is_far && is_free && !book.losers.contains(&node) && self.nodes[node].may_carry(self.now) {
            book.losers.push(node);
            self.set_way(number, carrier, AssignedSource::Wait);
            self.give_lease(number, node);
        }
    }

    pub(super) fn give_lease(&mut self, number: u32, node: NodeId) {
        let Some(book) = self.site.books.get_mut(&number) else { return };
        let done = book.done_of(node);
        let fastest = self.site.fastest.0 / SLOWEST / CARRIED_INTO_SITE as u64;
        let time = book.id.size.saturating_mul(1000).checked_div(fastest).unwrap_or(0);
        let time = Time::try_from(time).unwrap_or(Time::MAX).clamp(UNCONFIRMED, 24 * HOUR);
        // The bytes of the previous carrier may have been wrong: they don't confirm this one.
        book.confirmed = done;
        if let Some(suspect) = &mut book.suspect {
            suspect.1 = done;
        }
        let mut carry = Carry::new("", done, book.confirmed, self.now);
        carry.unconfirmed_until = self.now + time;
        self.set_way(number, node, AssignedSource::Registry(Box::new(carry)));
        self.site.mark(number);
    }

    pub(super) fn carry_alone(&mut self, number: u32, node: NodeId, why: &'static str) -> bool {
        if self.nodes[node].carries >= CARRIED_BY_NODE {
            return false;
        }
        let Some(book) = self.site.books.get(&number) else { return false };
        let carry = Carry::new(why, book.done_of(node), book.confirmed, self.now);
        self.set_way(number, node, AssignedSource::Registry(Box::new(carry)));
        true
    }

    /// Gives leases while lanes are free or can be freed, in the order of the books' places.
    pub(super) fn give_leases(&mut self) {
        let places: Vec<_> = self.site.places.iter().take(PLACES).copied().collect();
        for (Reverse(waiting), _, _, number) in places {
            self.steps = self.steps.saturating_sub(1);
            let Some(node) = self.lease_candidate(number) else { continue };
            if self.site.leases.len() >= CARRIED_INTO_SITE && !(waiting > 1 && self.end_lone_lease()) {
                break;
            }
            self.give_lease(number, node);
        }
    }

    /// Ends the oldest lease of a blob that no other node wants, without blame, if it has had a minute.
    fn end_lone_lease(&mut self) -> bool {
        let lease = |number: &u32| {
            let book = self.site.books.get_mut(number).filter(|book| book.seekers.len() == 1)?;
            let carrier = book.carrier?;
            Some((book.leased_carry()?.since, *number, carrier))
        };
        let oldest = self.site.leases.iter().filter_map(lease).min();
        let Some((_, number, carrier)) = oldest.filter(|(since, ..)| since + LEASE <= self.now) else {
            return false;
        };
        self.set_way(number, carrier, AssignedSource::Wait);
        true
    }

    /// The node that should carry the blob: it has most of it, can serve it afterwards, and has least to do.
    fn lease_candidate(&mut self, number: u32) -> Option<NodeId> {
        let book = self.site.books.get(&number).filter(|book| book.gather_until <= self.now)?;
        let now = self.now;
        let waiting = book.waiting_round().take(CANDIDATES);
        let holders = || book.holders.iter().take(CANDIDATES);
        let avoids = |node, holder| {
            self.site.pairs.check_reach(node, holder, now) == super::trust::SourceReach::Avoided
        };
        let is_root = |holder: NodeId, is_proven: bool| {
            let of = &self.nodes[holder];
            let is_there = of.is_source(now) || of.is_awaited(now);
            let is_tested = || {
                let mut waiting = book.waiting.iter().take(TESTERS);
                book.readers_of(holder).next().is_some() || waiting.any(|node| !avoids(*node, holder))
            };
            is_there && (is_proven || is_tested())
        };
        if holders().any(|(id, of)| is_root(*id, of.is_proven)) {
            return None;
        }
        self.steps = self.steps.saturating_sub(CANDIDATES / 8);
        let free = |id: &NodeId| self.nodes[*id].is_online && self.nodes[*id].carries < CARRIED_BY_NODE;
        let ahead = book.ahead.filter(|ahead| book.waiting.contains(ahead));
        ahead.into_iter().chain(waiting).filter(free).min_by_key(|id| {
            let of = &self.nodes[*id];
            let lost = book.losers.iter().position(|loser| loser == id).map_or(0, |place| place + 1);
            (
                !of.may_carry(now),
                lost,
                // Barred holders too: otherwise nodes that complain about others would come before them.
                !of.serves_now(),
                of.trust.loner_until > now,
                std::cmp::Reverse(book.done_of(*id)),
                of.carries,
            )
        })
    }

    /// Divides the limit of each job among its nodes that download over the uplink, and then among the blobs of each node.
    pub(super) fn divide_rates(&mut self) {
        if !std::mem::take(&mut self.site.has_new_rates) {
            return;
        }
        let mut parts: BTreeMap<JobUid, BTreeMap<NodeId, u64>> = BTreeMap::new();
        let job_of = |number: &u32, node: &NodeId| {
            let seeker = self.site.books.get(number)?.seekers.get(node)?;
            Some(seeker.task.job.clone())
        };
        let jobs: Vec<_> = self
            .site
            .carrying
            .iter()
            .filter_map(|(node, number)| Some((*node, *number, job_of(number, node)?)))
            .collect();
        for (node, _, job) in &jobs {
            *parts.entry(job.clone()).or_default().entry(*node).or_default() += 1;
        }
        if self.site.rates.len() > RATES {
            self.site.rates.retain(|job, _| parts.contains_key(job));
        }
        for (node, number, job) in jobs {
            let part = self.site.rates.get(&job).zip(parts.get(&job)).map(|(rate, nodes)| {
                let blobs = nodes.get(&node).copied().unwrap_or(1);
                NonZeroU64::new(rate.get() / nodes.len() as u64 / blobs).unwrap_or(NonZeroU64::MIN)
            });
            let Some(seeker) = self.site.books.get_mut(&number).and_then(|book| book.seekers.get_mut(&node))
            else {
                continue;
            };
            if let AssignedSource::Registry(carry) = &mut seeker.way
                && std::mem::replace(&mut carry.max_rate, part) != part
            {
                self.tell_later(number, node);
            }
        }
    }
}
