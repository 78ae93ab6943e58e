//! Turns events of a watch into changes of a map that mirrors the API server.

use std::collections::HashSet;
use std::hash::Hash;

use kube::runtime::watcher::Event;

/// The keys of the list that is being read: a watch begins with one, and with another each time that it has missed
/// something.
#[derive(Debug)]
pub(crate) struct Listing<K>(HashSet<K>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change<T, K: Eq + Hash> {
    Put(T),
    Remove(T),
    /// The list is complete: all other keys were deleted while the watch was down.
    Retain(HashSet<K>),
}

impl<K> Default for Listing<K> {
    fn default() -> Self {
        Self(HashSet::new())
    }
}

impl<K: Eq + Hash> Listing<K> {
    /// Takes an event; `key` is that of its object.
    pub(crate) fn take<T>(&mut self, event: Event<T>, key: impl FnOnce(&T) -> K) -> Option<Change<T, K>> {
        match event {
            Event::Init => {
                self.0.clear();
                None
            }
            Event::InitApply(object) => {
                self.0.insert(key(&object));
                Some(Change::Put(object))
            }
            Event::InitDone => Some(Change::Retain(std::mem::take(&mut self.0))),
            Event::Apply(object) => Some(Change::Put(object)),
            Event::Delete(object) => Some(Change::Remove(object)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_list_removes_all_others() {
        let mut listing = Listing::default();
        let mut take = |event| listing.take(event, |name: &&str| (*name).to_owned());
        assert_eq!(take(Event::Apply("a")), Some(Change::Put("a")));
        assert_eq!(take(Event::Delete("a")), Some(Change::Remove("a")));
        assert_eq!(take(Event::Init), None);
        assert_eq!(take(Event::InitApply("b")), Some(Change::Put("b")));
        // It was cut, and begins again.
        assert_eq!(take(Event::Init), None);
        assert_eq!(take(Event::InitApply("c")), Some(Change::Put("c")));
        assert_eq!(take(Event::InitDone), Some(Change::Retain(["c".to_owned()].into())));
        assert_eq!(take(Event::InitDone), Some(Change::Retain(HashSet::new())));
    }
}
