//! The repositories that the bytes of unfinished blobs are from.
//!
//! An interrupted pull leaves what it has of a blob, and a pull of another image goes on from there. Neighbours that may have
//! that image mustn't read these bytes: its registry may know no more of the blob than its digest.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Most beginnings that we remember. More than an image has layers.
const MAX_BEGINNINGS: usize = 4096;

/// The repositories of beginnings, by the names of their ingests. After a restart none is known, and each counts as the
/// image's own: what the runtime's own pulls leave is gone within a second.
#[derive(Debug, Default)]
pub(super) struct Beginnings(Mutex<HashMap<String, String>>);

impl Beginnings {
    /// Notes that a pull from a repository goes on with an ingest. Returns whether the bytes so far are of this repository.
    ///
    /// All bytes at once may be from another namespace of containerd, which the registry was never asked for. They count only
    /// if we know where they are from.
    pub(super) fn go_on(&self, ingest: String, repository: &str, (offset, size): (u64, u64)) -> bool {
        if offset > 0 && offset < size {
            return self.is_own(&ingest, repository);
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if offset > 0 {
            return known.get(&ingest).is_some_and(|of| of == repository);
        }
        if known.len() >= MAX_BEGINNINGS {
            known.clear();
        }
        known.insert(ingest, repository.to_owned());
        true
    }

    /// Whether an ingest with bytes has those of this repository.
    pub(super) fn is_own(&self, ingest: &str, repository: &str) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(ingest).is_none_or(|of| of == repository)
    }

    /// Forgets an ingest that is a whole blob now.
    pub(super) fn forget(&self, ingest: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(ingest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_repository_are_not_ones_own() {
        let beginnings = Beginnings::default();
        let go_on = |repository, offset| beginnings.go_on("layer-a".to_owned(), repository, (offset, 100));
        assert!(go_on("r.io/bank", 7), "left before a restart");
        assert!(!go_on("r.io/bank", 100), "in another namespace");
        assert!(go_on("r.io/bank", 0) && go_on("r.io/bank", 100));
        assert!(!go_on("evil.io/x", 7) && !beginnings.is_own("layer-a", "evil.io/x"));
        assert!(go_on("r.io/bank", 8), "its own pull goes on");
        assert!(beginnings.is_own("layer-b", "evil.io/x"));
        assert!(go_on("evil.io/x", 0) && !go_on("r.io/bank", 9), "begun again");
        beginnings.forget("layer-a");
        assert!(go_on("r.io/bank", 9));
        for other in 0..MAX_BEGINNINGS * 2 {
            beginnings.go_on(other.to_string(), "r.io/bank", (0, 100));
        }
        assert!(beginnings.0.lock().unwrap_or_else(PoisonError::into_inner).len() <= MAX_BEGINNINGS);
    }
}
