//! The switch behind `KEEP=1`, with which the demo leaves everything running.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether [`keep_everything`] was called.
static KEEP: AtomicBool = AtomicBool::new(false);

/// Stops and removes nothing on drop from now on.
pub fn keep_everything() {
    KEEP.store(true, Ordering::SeqCst);
}

/// Whether drops must stop and remove nothing.
pub fn keeps_everything() -> bool {
    KEEP.load(Ordering::SeqCst)
}
