//! Places for connections that haven't authenticated yet.
//!
//! Any host that reaches a port can open connections without limit and send nothing. Refusing the newest would lock all
//! clients out, and a fixed number for each address would lock out a fleet behind one NAT. So every connection gets a
//! place while there are free ones. When there are none, the source with the most loses its oldest. An honest client
//! speaks within milliseconds, long before its connection is the oldest of thousands.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Where a connection comes from: an IPv4 address, or the /64 of an IPv6 address, which one host has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionSource(IpAddr);

impl From<IpAddr> for ConnectionSource {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

/// Which of its places a source loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loses {
    /// The oldest, of clients that have been silent: it has had the most time to speak.
    Oldest,
    /// The newest, of clients that wait for us: it has waited the least.
    Newest,
}

/// A bounded number of places. All clones share them.
#[derive(Clone, Debug)]
pub struct ConnectionPlaces(Arc<Mutex<Book>>);

impl ConnectionPlaces {
    /// Creates `capacity` free places.
    pub fn new(capacity: usize, loses: Loses) -> Self {
        let book =
            Book { capacity, loses, taken: 0, next: 0, sources: HashMap::new(), by_size: BTreeSet::new() };
        Self(Arc::new(Mutex::new(book)))
    }

    /// Takes a place. It may be lost again at any time, even at once: see [`ConnectionPlace::wait_for_loss`].
    pub fn take(&self, source: ConnectionSource) -> ConnectionPlace {
        let (holder, lost) = oneshot::channel();
        let (number, evicted) = {
            let mut book = self.lock();
            let number = book.enter(source, holder);
            (number, (book.taken > book.capacity).then(|| book.evict()))
        };
        // Wakes the task that has lost its place, without the lock.
        drop(evicted);
        ConnectionPlace { places: self.clone(), source, number, lost }
    }

    /// The number of places that are taken.
    pub fn taken(&self) -> usize {
        self.lock().taken
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        // Nothing that holds the lock can leave the book half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct ConnectionPlace {
    places: ConnectionPlaces,
    source: ConnectionSource,
    number: u64,
    lost: oneshot::Receiver<()>,
}

impl ConnectionPlace {
    /// Waits until another connection gets the place.
    pub async fn wait_for_loss(&mut self) {
        // Nothing is ever sent: the other half is dropped.
        let _ = (&mut self.lost).await;
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let left = self.places.lock().leave(self.source, self.number);
        drop(left);
    }
}

/// The places that are taken, by source.
#[derive(Debug)]
struct Book {
    capacity: usize,
    loses: Loses,
    taken: usize,
    /// The number of the next place: older places have lower numbers.
    next: u64,
    sources: HashMap<ConnectionSource, BTreeMap<u64, oneshot::Sender<()>>>,
    /// Each source by its number of places, and by the age of the oldest of them. The last one loses.
    by_size: BTreeSet<(usize, Reverse<u64>, ConnectionSource)>,
}

impl Book {
    fn enter(&mut self, source: ConnectionSource, holder: oneshot::Sender<()>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.change(source, |places| {
            places.insert(number, holder);
        });
        self.taken += 1;
        number
    }

    /// Removes the place, unless it has been lost already.
    fn leave(&mut self, source: ConnectionSource, number: u64) -> Option<oneshot::Sender<()>> {
        let left = self.change(source, |places| places.remove(&number));
        self.taken -= usize::from(left.is_some());
        left
    }

    /// Takes a place from the source that has the most; of several such sources, from the one that has had its first
    /// place for longest.
    fn evict(&mut self) -> Option<oneshot::Sender<()>> {
        let (_, _, source) = *self.by_size.last()?;
        let loses = self.loses;
        let evicted = self.change(source, |places| match loses {
            Loses::Oldest => places.pop_first(),
            Loses::Newest => places.pop_last(),
        });
        self.taken -= usize::from(evicted.is_some());
        evicted.map(|(_, holder)| holder)
    }

    /// Changes the places of a source, and keeps its rank.
    fn change<T>(
        &mut self,
        source: ConnectionSource,
        change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<()>>) -> T,
    ) -> T {
        let rank = |places: &BTreeMap<u64, _>| {
            places.first_key_value().map(|(oldest, _)| (places.len(), Reverse(*oldest), source))
        };
        let places = self.sources.entry(source).or_default();
        if let Some(before) = rank(places) {
            self.by_size.remove(&before);
        }
        let changed = change(places);
        match rank(places) {
            Some(after) => _ = self.by_size.insert(after),
            None => _ = self.sources.remove(&source),
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::Ipv4Addr;

    use futures::FutureExt;

    use super::*;

    fn source(last: u8) -> ConnectionSource {
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, last)).into()
    }

    fn is_lost(place: &mut ConnectionPlace) -> bool {
        place.wait_for_loss().now_or_never().is_some()
    }

    #[test]
    fn one_hosts_addresses_are_one_source() {
        let of = |text: &str| ConnectionSource::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::2"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8::1"));
        assert_eq!(of("::ffff:192.0.2.1"), source(1));
        assert_ne!(source(1), source(2));
    }

    #[test]
    fn the_source_with_the_most_places_loses_its_oldest() {
        let places = ConnectionPlaces::new(4, Loses::Oldest);
        let mut honest = places.take(source(1));
        let mut flood: Vec<_> = (0..100).map(|_| places.take(source(66))).collect();
        assert_eq!(places.taken(), 4);
        assert!(!is_lost(&mut honest), "the one place of another source is left alone");
        let kept = flood.iter_mut().map(is_lost).collect::<Vec<_>>();
        assert_eq!(kept.iter().position(|lost| !lost), Some(97), "the newest three are kept");
        // Within one source the oldest goes, whosever it is.
        drop(honest);
        let mut newest = places.take(source(66));
        assert!(!is_lost(&mut newest) && !is_lost(&mut flood[97]), "one place was free");
        drop(flood);
        drop(newest);
        assert_eq!(places.taken(), 0);
        assert!(places.lock().sources.is_empty() && places.lock().by_size.is_empty());
    }

    #[test]
    fn of_equal_sources_the_one_that_came_first_loses() {
        let places = ConnectionPlaces::new(3, Loses::Oldest);
        let mut taken: Vec<_> = (1..=3).map(|last| places.take(source(last))).collect();
        let mut fourth = places.take(source(4));
        assert!(is_lost(&mut taken[0]) && !is_lost(&mut taken[1]) && !is_lost(&mut fourth));
    }

    #[test]
    fn waiting_for_us_costs_no_place() {
        let places = ConnectionPlaces::new(3, Loses::Newest);
        let mut first: Vec<_> = (0..3).map(|_| places.take(source(1))).collect();
        // More of the same source: it is the newest itself.
        assert!(is_lost(&mut places.take(source(1))));
        assert!(!first.iter_mut().any(is_lost));
        // Another source gets a place of the source that has them all.
        let mut other = places.take(source(2));
        assert!(!is_lost(&mut other) && is_lost(&mut first[2]) && !is_lost(&mut first[1]));
        // A place that was lost does not free another one when it is dropped.
        drop(first.pop());
        assert_eq!(places.taken(), 3);
    }
}
