//! State that several tasks share under a key, for as long as one of them holds it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One `T` per key in use. It's dropped with its last holder.
#[derive(Debug, Default)]
pub(crate) struct ByKey<T> {
    held: Mutex<HashMap<String, Weak<T>>>,
}

impl<T: Default> ByKey<T> {
    /// The value of this key, shared by all holders.
    pub(crate) fn shared_value(&self, key: &str) -> Arc<T> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = held.get(key).and_then(Weak::upgrade) {
            return value;
        }
        held.retain(|_, value| value.strong_count() > 0);
        let value = Arc::default();
        held.insert(key.to_owned(), Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn unheld_keys_are_dropped() {
        let values = ByKey::<AtomicU64>::default();
        values.shared_value("sha256:a").store(7, Ordering::Relaxed);
        assert_eq!(values.shared_value("sha256:a").load(Ordering::Relaxed), 0);
        assert_eq!(values.held.lock().unwrap().len(), 1);
    }
}
