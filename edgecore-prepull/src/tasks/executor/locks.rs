//! Locks by image reference: one pull of a reference at a time, over all tasks of the node.

use std::collections::BTreeSet;
use std::sync::Arc;

use prepull_api::image::listed_name;
use prepull_api::wire::PullKey;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::by_key::ByKey;
use crate::images::puller::Pulled;

/// The last completed pull, for others that waited for the same reference.
#[derive(Debug)]
pub(super) struct RecentPull {
    key: Arc<PullKey>,
    pulled: Pulled,
}

/// Exclusive right to pull a reference, until it's dropped. Holds the last completed pull.
pub(super) type ReferenceGuard = OwnedMutexGuard<Option<RecentPull>>;

/// Locks of the references that are being pulled or waited for, by the names that the runtime lists: a removal knows no others.
#[derive(Debug, Default)]
pub(super) struct ReferenceLocks(ByKey<Mutex<Option<RecentPull>>>);

impl ReferenceLocks {
    /// Waits until no other pull of the reference is running.
    pub(super) async fn lock(&self, reference: &str) -> ReferenceGuard {
        self.0.shared_value(&listed_name(reference)).lock_owned().await
    }

    /// Returns `None` if a pull of the reference is running.
    pub(super) fn try_lock(&self, reference: &str) -> Option<ReferenceGuard> {
        self.0.shared_value(&listed_name(reference)).try_lock_owned().ok()
    }

    /// Returns `None` if a pull of one of the names is running.
    pub(super) fn try_lock_all(&self, names: &[String]) -> Option<Vec<ReferenceGuard>> {
        // A runtime may list one name twice, and the second one would be locked by ourselves.
        let names: BTreeSet<_> = names.iter().map(|name| listed_name(name)).collect();
        names.iter().map(|name| self.try_lock(name)).collect()
    }
}

impl RecentPull {
    pub(super) fn new(key: &Arc<PullKey>, pulled: &Pulled) -> Self {
        Self { key: key.clone(), pulled: pulled.clone() }
    }

    /// Returns the pull if it used the same key. With another key we must ask the registry, which may refuse.
    pub(super) fn if_pulled_with(&self, key: &PullKey) -> Option<&Pulled> {
        (*self.key == *key).then_some(&self.pulled)
    }
}
