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

/// What the nodes of a site have to do, over all blobs.
#[derive(Default)]
struct Load<'a> {
    into_site: usize,
    carried: HashMap<&'a NodeName, usize>,
    served: HashMap<&'a NodeName, usize>,
}

/// Decides for all who wait. Returns when it is to be decided again although nothing happens.
pub(super) fn assign(
    books: &mut BTreeMap<BookId, Book>,
    members: &BTreeMap<NodeName, Member>,
    faults: &Faults,
    now: Timestamp,
) -> Option<Timestamp> {
    for book in books.values_mut() {
        stop_needless_carrier(book, members, faults, now);
    }
    let mut load = Load::default();
    for (node, seeker) in books.values().flat_map(|book| &book.seekers) {
        // By the names that live longer than the books.
        let name = |node: &NodeName| members.get_key_value(node).map(|(name, _)| name);
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
    // The largest first: what is left at the end is small, and is with everybody soon.
    let mut order: Vec<_> =
        books.values_mut().filter(|book| book.seekers.values().any(|s| s.way == Way::Wait)).collect();
    order.sort_by_key(|book| std::cmp::Reverse(book.size));
    let waits = order.into_iter().map(|book| assign_book(book, members, faults, &mut load, now));
    waits.fold(None, |first, wait| [first, wait].into_iter().flatten().min())
}

/// Stops a carrier that has hardly begun where a neighbour has the blob already. After a failover, whoever comes back first
/// wants it before the others have said what they have.
fn stop_needless_carrier(
    book: &mut Book,
    members: &BTreeMap<NodeName, Member>,
    faults: &Faults,
    now: Timestamp,
) {
    let Some(carrier) = book.carrier() else { return };
    let is_of_use = |holder: &NodeName| {
        members.get(holder).is_some_and(Member::serves)
            && !faults.avoids(carrier, holder)
            && !faults.is_busy(carrier, holder, now)
    };
    let half = book.size / 2;
    if !faults.is_loner(carrier)
        && book.holders.iter().any(is_of_use)
        && let Some(seeker) = book.seekers.get_mut(&carrier.clone()).filter(|seeker| seeker.done < half)
    {
        seeker.send(Way::Wait);
    }
}

fn assign_book<'a>(
    book: &mut Book,
    members: &'a BTreeMap<NodeName, Member>,
    faults: &Faults,
    load: &mut Load<'a>,
    now: Timestamp,
) -> Option<Timestamp> {
    let waiting = book.seekers.iter().filter(|(_, seeker)| seeker.way == Way::Wait).map(|(node, _)| node);
    let waiting: Vec<&'a NodeName> = waiting
        .filter_map(|node| members.get_key_value(node))
        .filter(|(_, member)| member.is_online)
        .map(|(name, _)| name)
        .collect();
    let holders: Vec<&'a NodeName> = book
        .holders
        .iter()
        .filter_map(|node| members.get_key_value(node))
        .filter(|(_, member)| member.serves())
        .map(|(name, _)| name)
        .collect();
    let mut without = Vec::new();
    for node in waiting {
        let reachable: Vec<&'a NodeName> = holders
            .iter()
            .copied()
            .filter(|holder| *holder != node && !faults.avoids(node, holder))
            .collect();
        let is_free = |holder: &&NodeName| !faults.is_busy(node, holder, now);
        let mut usable: Vec<&'a NodeName> = reachable.iter().copied().filter(is_free).collect();
        if usable.is_empty() && !reachable.is_empty() && !faults.is_loner(node) {
            // They are busy for a moment, and worth waiting for: to get the blob over the uplink once more costs more.
            continue;
        }
        if usable.is_empty() || faults.is_loner(node) {
            without.push(node);
            continue;
        }
        usable.sort_by_key(|holder| load.served.get(holder).copied().unwrap_or(0));
        let Some(first) = usable.first().copied() else { continue };
        let served = load.served.entry(first).or_default();
        if *served >= SERVED_BY_NODE {
            // Soon there are more holders, or this one has less to do.
            continue;
        }
        *served += 1;
        let peers = usable.into_iter().take(MAX_PEERS).cloned().collect();
        if let Some(seeker) = book.seekers.get_mut(node) {
            seeker.send(Way::Peers { peers, lease: Lease::new(seeker.done, now) });
        }
    }
    let serves = |node: &NodeName| members.get(node).is_some_and(Member::serves);
    // Who has it and is away for a moment only is cheaper to wait for.
    let awaited = book.holders.iter().filter_map(|node| members.get(node)?.awaited_until(now)).max();
    if book.carrier().is_none()
        && holders.is_empty()
        && awaited.is_none()
        && load.into_site < CARRIED_INTO_SITE
        && let Some(carrier) = choose_carrier(book, &without, faults, load, &serves)
    {
        load.into_site += 1;
        *load.carried.entry(carrier).or_default() += 1;
        if let Some(seeker) = book.seekers.get_mut(carrier) {
            seeker.send(Way::Registry { alone: "", lease: Lease::new(seeker.done, now) });
        }
    }
    // Who can get it neither from those who have it nor from the one who is getting it does not wait for them.
    let carrier = book.carrier().cloned();
    // Where the LAN is split, the other half has a carrier of its own in them.
    let mut alone: Vec<NodeName> = book
        .seekers
        .iter()
        .filter(|(node, seeker)| seeker.way != Way::Wait && seeker.is_alone() && serves(node))
        .map(|(node, _)| node.clone())
        .collect();
    for node in without {
        let is_loner = faults.is_loner(node);
        let Some(seeker) = book.seekers.get_mut(node).filter(|seeker| seeker.way == Way::Wait) else {
            continue;
        };
        if !is_loner && alone.iter().any(|other| !faults.avoids(node, other)) {
            continue;
        }
        let serves_nobody =
            |node: &NodeName| members.get(node).is_some_and(|member| member.addresses.is_none());
        let why = match &carrier {
            _ if is_loner => UNREACHABLE,
            Some(carrier) if faults.avoids(node, carrier) => UNREACHABLE,
            // One that is offline for a moment is waited for; its lease ends soon if it stays away.
            Some(carrier) if serves_nobody(carrier) => NO_NEIGHBOUR,
            None if !holders.is_empty() => UNREACHABLE,
            // It is being carried, or too much else is at the moment.
            Some(_) | None => continue,
        };
        let carried = load.carried.entry(node).or_default();
        if *carried < CARRIED_BY_NODE {
            *carried += 1;
            seeker.send(Way::Registry { alone: why, lease: Lease::new(seeker.done, now) });
            if serves(node) {
                alone.push(node.clone());
            }
        }
    }
    awaited
}

/// The one of these nodes that gets the blob for the site: one that can serve it afterwards, has most of it, and has least
/// to do.
fn choose_carrier<'a>(
    book: &Book,
    nodes: &[&'a NodeName],
    faults: &Faults,
    load: &Load<'_>,
    serves: &dyn Fn(&NodeName) -> bool,
) -> Option<&'a NodeName> {
    let carried = |node: &NodeName| load.carried.get(node).copied().unwrap_or(0);
    let free = nodes.iter().copied().filter(|node| carried(node) < CARRIED_BY_NODE);
    free.min_by_key(|node| {
        let done = book.seekers.get(*node).map_or(0, |seeker| seeker.done);
        (!serves(node), faults.is_loner(node), faults.is_slow(node), std::cmp::Reverse(done), carried(node))
    })
}
