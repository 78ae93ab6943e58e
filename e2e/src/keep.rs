//! The switch for `KEEP=1`, with which the demo leaves everything running.

use std::sync::atomic::{AtomicBool, Ordering};

/// Set by [`keep_everything`].
static KEEP: AtomicBool = AtomicBool::new(false);

/// From now on nothing is stopped or removed on drop.
pub fn keep_everything() {
    KEEP.store(true, Ordering::SeqCst);
}

/// Whether [`keep_everything`] was called.
pub fn keeping() -> bool {
    KEEP.load(Ordering::SeqCst)
}
