//! Turns events of a watch into changes of a map that mirrors the API server.

use std::collections::HashSet;
use std::hash::Hash;

use kube::runtime::watcher::Event;

/// The keys of the list that is being read: a watch begins with one, and with another each time that it has missed
/// something.
#[derive(Debug)]
pub(crate) struct Listing<K>(HashSet<K>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ListChange<T, K: Eq + Hash> {
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
    pub(crate) fn take_event<T>(
        &mut self,
        event: Event<T>,
        key: impl FnOnce(&T) -> K,
    ) -> Option<ListChange<T, K>> {
        match event {
            Event::Init => {
                self.0.clear();
                None
            }
            Event::InitApply(object) => {
                self.0.insert(key(&object));
                Some(ListChange::Put(object))
            }
            Event::InitDone => Some(ListChange::Retain(std::mem::take(&mut self.0))),
            Event::Apply(object) => Some(ListChange::Put(object)),
            Event::Delete(object) => Some(ListChange::Remove(object)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_list_removes_all_others() {
        let mut listing = Listing::default();
        let mut take = |event| listing.take_event(event, |name: &&str| (*name).to_owned());
        assert_eq!(take(Event::Apply("a")), Some(ListChange::Put("a")));
        assert_eq!(take(Event::Delete("a")), Some(ListChange::Remove("a")));
        assert_eq!(take(Event::Init), None);
        assert_eq!(take(Event::InitApply("b")), Some(ListChange::Put("b")));
        // It was cut, and begins again.
        assert_eq!(take(Event::Init), None);
        assert_eq!(take(Event::InitApply("c")), Some(ListChange::Put("c")));
        assert_eq!(take(Event::InitDone), Some(ListChange::Retain(["c".to_owned()].into())));
        assert_eq!(take(Event::InitDone), Some(ListChange::Retain(HashSet::new())));
    }
}
