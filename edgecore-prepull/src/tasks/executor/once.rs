//! One pull of a reference at a time, over all tasks of the node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use prepull_api::wire::Key;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::images::puller::Pulled;

/// What somebody who waited finds: the pull that has just ended.
#[derive(Debug)]
pub(super) struct Fresh {
    key: Arc<Key>,
    pulled: Pulled,
}

/// The turn of one pull of a reference. The next one's begins when it is dropped.
pub(super) type Turn = OwnedMutexGuard<Option<Fresh>>;

type Slot = AsyncMutex<Option<Fresh>>;

/// References that are being pulled or waited for, and no others.
#[derive(Debug, Default)]
pub(super) struct Once {
    slots: Mutex<HashMap<String, Weak<Slot>>>,
}

impl Once {
    /// Waits until nobody else pulls the reference.
    pub(super) async fn turn(&self, reference: &str) -> Turn {
        self.slot(reference).lock_owned().await
    }

    /// A turn, if nobody else pulls the reference.
    pub(super) fn free_turn(&self, reference: &str) -> Option<Turn> {
        self.slot(reference).try_lock_owned().ok()
    }

    fn slot(&self, reference: &str) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(reference).and_then(Weak::upgrade) {
            return slot;
        }
        slots.retain(|_, slot| slot.strong_count() > 0);
        let slot = Arc::default();
        slots.insert(reference.to_owned(), Arc::downgrade(&slot));
        slot
    }
}

impl Fresh {
    /// For whoever waits meanwhile.
    pub(super) fn new(key: &Arc<Key>, pulled: &Pulled) -> Self {
        Self { key: key.clone(), pulled: pulled.clone() }
    }

    /// The pull, if it was allowed by this very key: with another one the registry is to be asked, it may say
    /// no.
    pub(super) fn by(&self, key: &Key) -> Option<&Pulled> {
        (*self.key == *key).then_some(&self.pulled)
    }
}
