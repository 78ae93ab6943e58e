//! Values that many others have in common, each kept once.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

/// Values of one type, each once for as long as it is used.
#[derive(Debug)]
pub struct Shelf<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// Fewer values than these are not worth a sweep.
    least: usize,
    /// At this number of values, those that are used no more are removed.
    sweep_at: usize,
}

impl<T: Hash + Eq + ?Sized> Shelf<T> {
    /// An empty shelf, which is not swept before it has this many values.
    pub fn new(least: usize) -> Self {
        Self { values: HashSet::new(), least, sweep_at: least }
    }

    /// The value as it is kept. `make` makes it if it is not there.
    pub fn share(&mut self, value: &T, make: impl FnOnce() -> Arc<T>) -> Arc<T> {
        if let Some(known) = self.values.get(value) {
            return Arc::clone(known);
        }
        if self.values.len() >= self.sweep_at {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_at = self.least.max(2 * self.values.len());
            self.values.shrink_to(self.sweep_at);
        }
        let new = make();
        self.values.insert(Arc::clone(&new));
        new
    }

    /// The number of values, including those no longer in use.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kept_while_they_are_used() {
        let mut shelf: Shelf<str> = Shelf::new(4);
        let share = |shelf: &mut Shelf<str>, number: usize| {
            let text = number.to_string();
            shelf.share(&text, || text.as_str().into())
        };
        assert!(shelf.is_empty());
        let used: Vec<Arc<str>> = (0..4).map(|number| share(&mut shelf, number)).collect();
        assert!(!shelf.is_empty());
        // A sweep in vain: the next one is at twice as many.
        (4..8).for_each(|number| drop(share(&mut shelf, number)));
        assert_eq!(shelf.len(), 8);
        drop(share(&mut shelf, 8));
        assert_eq!(shelf.len(), 5);
        for (number, value) in used.iter().enumerate() {
            assert!(Arc::ptr_eq(value, &share(&mut shelf, number)));
        }
    }
}
