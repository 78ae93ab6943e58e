//! Slots that go to the source that has the fewest of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use prepull_program::places::ConnectionSource;
use tokio::sync::oneshot;

/// A number of slots. Where there are not enough, each source gets as many as any other one, however many of its
/// connections wait; within a source, who came first is first. All clones share them.
#[derive(Clone, Debug)]
pub(super) struct Slots(Arc<Mutex<SlotBook>>);

#[derive(Debug)]
struct SlotBook {
    free: usize,
    next: u64,
    /// The number of slots of each source that has any.
    taken: HashMap<ConnectionSource, usize>,
    waiting: HashMap<ConnectionSource, BTreeMap<u64, oneshot::Sender<Slot>>>,
    /// The sources that wait, by their slots and by who has waited longest. The first one is next.
    order: BTreeSet<(usize, u64, ConnectionSource)>,
}

/// A slot, until it is dropped.
#[derive(Debug)]
pub(in crate::edges) struct Slot {
    slots: Slots,
    source: ConnectionSource,
}

impl Slots {
    pub(super) fn new(slots: usize) -> Self {
        let book = SlotBook {
            free: slots,
            next: 0,
            taken: HashMap::new(),
            waiting: HashMap::new(),
            order: BTreeSet::new(),
        };
        Self(Arc::new(Mutex::new(book)))
    }

    /// Takes a slot if one is free. None is as long as anybody waits.
    pub(super) fn try_take(&self, source: ConnectionSource) -> Option<Slot> {
        let is_taken = self.0.lock().take_free(source);
        is_taken.then(|| Slot { slots: self.clone(), source })
    }

    pub(super) async fn take(&self, source: ConnectionSource) -> Slot {
        loop {
            let (giver, given) = oneshot::channel();
            let number = {
                let mut book = self.0.lock();
                let is_taken = book.take_free(source);
                if is_taken { None } else { Some(book.enqueue(source, giver)) }
            };
            let Some(number) = number else { return Slot { slots: self.clone(), source } };
            let _waiting = WaitingSource { slots: self, source, number };
            // An error is impossible: the sender is dropped only with the guard.
            if let Ok(slot) = given.await {
                return slot;
            }
        }
    }

    pub(super) fn are_awaited(&self) -> bool {
        !self.0.lock().order.is_empty()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let next = {
            let mut book = self.slots.0.lock();
            book.update_taken(self.source, |taken| *taken -= 1);
            let next = book.dequeue();
            match &next {
                Some((source, _)) => book.update_taken(*source, |taken| *taken += 1),
                None => book.free += 1,
            }
            next
        };
        // Without the lock: where the receiver is gone, the slot is dropped here, and goes to the next one.
        if let Some((source, giver)) = next {
            drop(giver.send(Self { slots: self.slots.clone(), source }));
        }
    }
}

/// One that waits, until it has its slot or gives up.
struct WaitingSource<'a> {
    slots: &'a Slots,
    source: ConnectionSource,
    number: u64,
}

impl Drop for WaitingSource<'_> {
    fn drop(&mut self) {
        let left = {
            let mut book = self.slots.0.lock();
            book.update_waiting(self.source, |waiting| waiting.remove(&self.number))
        };
        drop(left);
    }
}

impl SlotBook {
    fn take_free(&mut self, source: ConnectionSource) -> bool {
        let is_free = self.free > 0;
        if is_free {
            self.free -= 1;
            self.update_taken(source, |taken| *taken += 1);
        }
        is_free
    }

    fn enqueue(&mut self, source: ConnectionSource, giver: oneshot::Sender<Slot>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.update_waiting(source, |waiting| {
            waiting.insert(number, giver);
        });
        number
    }

    fn dequeue(&mut self) -> Option<(ConnectionSource, oneshot::Sender<Slot>)> {
        let (_, _, source) = *self.order.first()?;
        let (_, giver) = self.update_waiting(source, BTreeMap::pop_first)?;
        Some((source, giver))
    }

    /// Changes the number of a source's slots, and keeps its rank.
    fn update_taken(&mut self, source: ConnectionSource, change: impl FnOnce(&mut usize)) {
        self.unrank(source);
        let taken = self.taken.entry(source).or_default();
        change(taken);
        if *taken == 0 {
            self.taken.remove(&source);
        }
        self.rank(source);
    }

    /// Changes who waits of a source, and keeps its rank.
    fn update_waiting<T>(
        &mut self,
        source: ConnectionSource,
        change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<Slot>>) -> T,
    ) -> T {
        self.unrank(source);
        let waiting = self.waiting.entry(source).or_default();
        let changed = change(waiting);
        if waiting.is_empty() {
            self.waiting.remove(&source);
        }
        self.rank(source);
        changed
    }

    fn rank_of(&self, source: ConnectionSource) -> Option<(usize, u64, ConnectionSource)> {
        let (first, _) = self.waiting.get(&source)?.first_key_value()?;
        Some((self.taken.get(&source).copied().unwrap_or_default(), *first, source))
    }

    fn unrank(&mut self, source: ConnectionSource) {
        if let Some(rank) = self.rank_of(source) {
            self.order.remove(&rank);
        }
    }

    fn rank(&mut self, source: ConnectionSource) {
        if let Some(rank) = self.rank_of(source) {
            self.order.insert(rank);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::IpAddr;
    use std::pin::Pin;

    use futures::FutureExt;

    use super::*;

    fn source(last: u8) -> ConnectionSource {
        IpAddr::from([192, 0, 2, last]).into()
    }

    type Taking<'a> = Pin<Box<dyn Future<Output = Slot> + 'a>>;

    /// One that waits: it has been polled once.
    fn waits(slots: &Slots, last: u8) -> Taking<'_> {
        let mut taking: Taking<'_> = Box::pin(slots.take(source(last)));
        assert!((&mut taking).now_or_never().is_none());
        taking
    }

    #[test]
    fn sources_with_fewer_slots_go_first() {
        let slots = Slots::new(3);
        let mut held: Vec<_> = (0..3).map(|_| slots.try_take(source(66)).unwrap()).collect();
        assert!(slots.try_take(source(1)).is_none() && !slots.are_awaited());
        let mut flood: Vec<_> = (0..10).map(|_| waits(&slots, 66)).collect();
        let (mut first, mut second) = (waits(&slots, 1), waits(&slots, 1));
        assert!(slots.are_awaited());
        held.pop();
        let one = (&mut first).now_or_never().expect("it has none, and the other source two");
        held.pop();
        // Both sources have one: who has waited longest is next.
        let of_flood = (&mut flood[0]).now_or_never().expect("it has waited longer");
        held.pop();
        let more_of_flood = (&mut flood[1]).now_or_never().expect("likewise");
        drop(one);
        let two = (&mut second).now_or_never().expect("it has none again");
        drop((two, of_flood, more_of_flood));
        drop(flood);
        assert!(!slots.are_awaited());
        let book = slots.0.lock();
        assert_eq!((book.free, book.taken.len(), book.waiting.len()), (3, 0, 0));
    }

    #[test]
    fn who_gives_up_loses_nobody_a_slot() {
        let slots = Slots::new(1);
        let held = slots.try_take(source(1)).unwrap();
        let (gives_up, has_it, mut waits_on) = (waits(&slots, 1), waits(&slots, 1), waits(&slots, 1));
        drop(gives_up);
        drop(held);
        // It has been given a slot, and ends before it knows.
        drop(has_it);
        assert!((&mut waits_on).now_or_never().is_some());
        assert_eq!(slots.0.lock().free, 1);
    }
}
