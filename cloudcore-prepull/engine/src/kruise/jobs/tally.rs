//! Counts and sets that follow each change of an entry: what the entry was is taken out, what it is now is added.

use std::collections::BTreeSet;

/// Counts one more (`add`), or one less.
pub(super) fn adjust_count(number: &mut u32, add: bool) {
    *number = if add { *number + 1 } else { number.saturating_sub(1) };
}

/// Adds an item to a set (`add`), or takes it out.
pub(super) fn adjust_set<T: Ord>(set: &mut BTreeSet<T>, item: T, add: bool) {
    if add {
        set.insert(item)
    } else {
        set.remove(&item)
    };
}
