//! Keys by the moment at which each is due.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use jiff::Timestamp;

/// A delay queue: each key has at most one moment. Of keys with the same moment the smaller one comes first.
#[derive(Clone, Debug)]
pub(crate) struct DelayQueue<K> {
    order: BTreeSet<(Timestamp, K)>,
    moments: HashMap<K, Timestamp>,
}

impl<K> Default for DelayQueue<K> {
    fn default() -> Self {
        Self { order: BTreeSet::new(), moments: HashMap::new() }
    }
}

impl<K: Clone + Hash + Ord> DelayQueue<K> {
    /// Replaces the key's moment; with `None` the key leaves the queue.
    pub(crate) fn set(&mut self, key: &K, at: Option<Timestamp>) {
        let before = match at {
            Some(at) => self.moments.insert(key.clone(), at),
            None => self.moments.remove(key),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.order.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.order.insert((at, key.clone()));
        }
    }

    /// Takes out the first key that is due.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<K> {
        if self.next_due()? > now {
            return None;
        }
        let (_, key) = self.order.pop_first()?;
        self.moments.remove(&key);
        Some(key)
    }

    /// When [`Self::pop_due`] has something to take out.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        self.order.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000_000 + second).unwrap()
    }

    fn take_due(queue: &mut DelayQueue<&'static str>, second: i64) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.pop_due(at(second))).collect()
    }

    #[test]
    fn keys_come_out_by_their_last_moment() {
        let mut queue = DelayQueue::default();
        for (key, second) in [("b", 1), ("a", 1), ("c", 5), ("d", 3)] {
            queue.set(&key, Some(at(second)));
        }
        queue.set(&"c", Some(at(2)));
        queue.set(&"d", None);
        assert_eq!(take_due(&mut queue, 0), [""; 0]);
        assert_eq!(queue.next_due(), Some(at(1)));
        assert_eq!(take_due(&mut queue, 2), ["a", "b", "c"]);
        assert_eq!((take_due(&mut queue, 100), queue.next_due()), (Vec::new(), None));
    }

    proptest! {
        #[test]
        fn the_queue_yields_the_earliest_moment(
            steps in proptest::collection::vec((0_u8..8, proptest::option::of(0_i64..50), 0_i64..50), 0..100),
        ) {
            let (mut queue, mut expected) = (DelayQueue::default(), BTreeMap::new());
            for (key, moment, now) in steps {
                let moment = moment.map(at);
                queue.set(&key, moment);
                match moment {
                    Some(moment) => _ = expected.insert(key, moment),
                    None => _ = expected.remove(&key),
                }
                prop_assert_eq!(queue.next_due(), expected.values().min().copied());
                let first = expected.iter().map(|(key, moment)| (*moment, *key)).min();
                let due = first.filter(|(moment, _)| *moment <= at(now)).map(|(_, key)| key);
                prop_assert_eq!(queue.pop_due(at(now)), due);
                if let Some(due) = due {
                    expected.remove(&due);
                }
            }
        }
    }
}
