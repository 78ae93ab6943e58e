//! Who gets which blob from where: decided anew for whoever waits.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use prepull_api::sites::MAX_PEERS;
use prepull_api::task::NodeName;

use super::book::{Book, BookId, Lease, Way};
use super::faults::Faults;
use super::member::Member;

/// Most blobs that are carried into a site at a time: more connections would share the same uplink, and each blob would be
/// there later.
const CARRIED_INTO_SITE: usize = 6;
/// Most blobs that one node carries at a time, which is what it downloads of an image at a time without a site.
const CARRIED_BY_NODE: usize = 3;
/// Most neighbours that one node serves at a time: the next ones are served sooner by those that have it by then.
const SERVED_BY_NODE: usize = 4;

const NO_NEIGHBOUR: &str = "no neighbour serves it (is --peer-listen set on the nodes of the site?)";
const UNREACHABLE: &str =
    "it reaches no neighbour of its site (is the port of --peer-listen open between them?)";

/// Decides for all who wait. Returns when it is to be decided again although nothing happens.
pub(super) fn assign(
    books: &mut BTreeMap<BookId, Book>,
    members: &BTreeMap<NodeName, Member>,
    faults: &Faults,
    now: Timestamp,
) -> Option<Timestamp> {
    let mut assigning = Assigning { members, faults, now, load: Load::default() };
    for book in books.values_mut() {
        assigning.stop_needless_carrier(book);
    }
    assigning.load = Load::of(books.values(), members);
    // The largest first: what is left at the end is small, and is with everybody soon.
    let mut order: Vec<_> =
        books.values_mut().filter(|book| book.seekers.values().any(|s| s.way == Way::Wait)).collect();
    order.sort_by_key(|book| std::cmp::Reverse(book.size));
    let waits = order.into_iter().map(|book| assigning.decide(book));
    waits.fold(None, |first, wait| [first, wait].into_iter().flatten().min())
}

/// What the nodes of a site have to do, over all blobs.
#[derive(Default)]
struct Load<'a> {
    into_site: usize,
    carried: HashMap<&'a NodeName, usize>,
    served: HashMap<&'a NodeName, usize>,
}

impl<'a> Load<'a> {
    fn of<'b>(books: impl Iterator<Item = &'b Book>, members: &'a BTreeMap<NodeName, Member>) -> Self {
        let mut load = Load::default();
        // By the names that live longer than the books.
        let name = |node: &NodeName| members.get_key_value(node).map(|(name, _)| name);
        for (node, seeker) in books.flat_map(|book| &book.seekers) {
            match &seeker.way {
                Way::Wait => {}
                Way::Registry { alone, .. } => {
                    load.into_site += usize::from(alone.is_empty());
                    if let Some(node) = name(node) {
                        *load.carried.entry(node).or_default() += 1;
                    }
                }
                Way::Peers { peers, .. } => {
                    if let Some(peer) = peers.first().and_then(name) {
                        *load.served.entry(peer).or_default() += 1;
                    }
                }
            }
        }
        load
    }

    fn carried(&self, node: &NodeName) -> usize {
        self.carried.get(node).copied().unwrap_or(0)
    }

    fn served(&self, node: &NodeName) -> usize {
        self.served.get(node).copied().unwrap_or(0)
    }
}

/// One look at a site.
struct Assigning<'a> {
    members: &'a BTreeMap<NodeName, Member>,
    faults: &'a Faults,
    now: Timestamp,
    load: Load<'a>,
}

impl<'a> Assigning<'a> {
    /// Decides for all who wait for one blob. Returns until when somebody is waited for who has it and is away for a moment.
    fn decide(&mut self, book: &mut Book) -> Option<Timestamp> {
        let members = self.members;
        let holders: Vec<&'a NodeName> = book
            .holders
            .iter()
            .filter_map(|node| members.get_key_value(node))
            .filter(|(_, member)| member.serves())
            .map(|(name, _)| name)
            .collect();
        let without = self.send_to_neighbours(book, &holders);
        // Cheaper than to carry it once more.
        let awaited = book.holders.iter().filter_map(|node| members.get(node)?.awaited_until(self.now)).max();
        if book.carrier().is_none() && holders.is_empty() && awaited.is_none() {
            self.lease_to_carrier(book, &without);
        }
        self.leave_alone(book, &holders, without);
        awaited
    }

    /// Stops a carrier that has hardly begun where a neighbour has the blob already. After a failover, whoever comes back
    /// first wants it before the others have said what they have.
    fn stop_needless_carrier(&self, book: &mut Book) {
        let Some(carrier) = book.carrier().filter(|carrier| !self.faults.is_loner(carrier)) else { return };
        let is_of_use = |holder: &NodeName| {
            self.serves(holder)
                && !self.faults.avoids(carrier, holder)
                && !self.faults.is_busy(carrier, holder, self.now)
        };
        let half = book.size / 2;
        if book.holders.iter().any(is_of_use)
            && let Some(seeker) = book.seekers.get_mut(&carrier.clone()).filter(|seeker| seeker.done < half)
        {
            seeker.send(Way::Wait);
        }
    }

    /// Sends those who wait to neighbours that have it. Returns those who can get it from none of them.
    fn send_to_neighbours(&mut self, book: &mut Book, holders: &[&'a NodeName]) -> Vec<&'a NodeName> {
        let (members, faults, now) = (self.members, self.faults, self.now);
        let waiting = book.seekers.iter_mut().filter(|(_, seeker)| seeker.way == Way::Wait);
        let online = waiting.filter_map(|(node, seeker)| {
            let (name, member) = members.get_key_value(node)?;
            member.is_online.then_some((name, seeker))
        });
        let mut without = Vec::new();
        for (node, seeker) in online {
            let reachable = |holder: &&'a NodeName| *holder != node && !faults.avoids(node, holder);
            let reachable: Vec<&'a NodeName> = holders.iter().copied().filter(reachable).collect();
            if reachable.is_empty() || faults.is_loner(node) {
                without.push(node);
                continue;
            }
            // Those who are busy for a moment are worth waiting for: to carry it once more costs more.
            let is_free = |holder: &&NodeName| !faults.is_busy(node, holder, now);
            let mut usable: Vec<&'a NodeName> = reachable.into_iter().filter(is_free).collect();
            usable.sort_by_key(|holder| self.load.served(holder));
            // Where even the first serves enough, there are more holders soon, or it has less to do.
            if let Some(first) = usable.first().filter(|first| self.load.served(first) < SERVED_BY_NODE) {
                *self.load.served.entry(*first).or_default() += 1;
                let peers = usable.into_iter().take(MAX_PEERS).cloned().collect();
                seeker.send(Way::Peers { peers, lease: Lease::new(seeker.done, now) });
            }
        }
        without
    }

    /// Lets one of these nodes get the blob for the site: one that can serve it afterwards, has most of it, and has least to
    /// do.
    fn lease_to_carrier(&mut self, book: &mut Book, nodes: &[&'a NodeName]) {
        if self.load.into_site >= CARRIED_INTO_SITE {
            return;
        }
        let (load, faults) = (&self.load, self.faults);
        let free = nodes.iter().copied().filter(|node| load.carried(node) < CARRIED_BY_NODE);
        let best = free.min_by_key(|node| {
            let done = book.seekers.get(*node).map_or(0, |seeker| seeker.done);
            let most_done = std::cmp::Reverse(done);
            (!self.serves(node), faults.is_loner(node), faults.is_slow(node), most_done, load.carried(node))
        });
        if let Some((carrier, seeker)) = best.and_then(|node| Some((node, book.seekers.get_mut(node)?))) {
            seeker.send(Way::Registry { alone: "", lease: Lease::new(seeker.done, self.now) });
            self.load.into_site += 1;
            *self.load.carried.entry(carrier).or_default() += 1;
        }
    }

    /// Whoever can get it neither from those who have it nor from the one who is getting it does not wait for them.
    fn leave_alone(&mut self, book: &mut Book, holders: &[&'a NodeName], without: Vec<&'a NodeName>) {
        let carrier = book.carrier().cloned();
        // Where the LAN is split, the other half has a carrier of its own in them.
        let alone = book.seekers.iter().filter(|(node, seeker)| seeker.is_alone() && self.serves(node));
        let mut alone: Vec<NodeName> = alone.map(|(node, _)| node.clone()).collect();
        for node in without {
            let is_loner = self.faults.is_loner(node);
            let Some(seeker) = book.seekers.get_mut(node).filter(|seeker| seeker.way == Way::Wait) else {
                continue;
            };
            if !is_loner && alone.iter().any(|other| !self.faults.avoids(node, other)) {
                continue;
            }
            let why = match &carrier {
                _ if is_loner => UNREACHABLE,
                Some(carrier) if self.faults.avoids(node, carrier) => UNREACHABLE,
                // One that is offline for a moment is waited for; its lease ends soon if it stays away.
                Some(carrier)
                    if self.members.get(carrier).is_some_and(|member| member.addresses.is_none()) =>
                {
                    NO_NEIGHBOUR
                }
                None if !holders.is_empty() => UNREACHABLE,
                // It is being carried, or too much else is at the moment.
                Some(_) | None => continue,
            };
            if self.load.carried(node) < CARRIED_BY_NODE {
                *self.load.carried.entry(node).or_default() += 1;
                seeker.send(Way::Registry { alone: why, lease: Lease::new(seeker.done, self.now) });
                if self.serves(node) {
                    alone.push(node.clone());
                }
            }
        }
    }

    fn serves(&self, node: &NodeName) -> bool {
        self.members.get(node).is_some_and(Member::serves)
    }
}
