//! Assignment of new manifests to the pulls of their repository.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::images::containerd::StoredManifest;

/// The claims of all pulls that are being watched: as many as may run at once, which is a handful.
#[derive(Debug, Default)]
pub(super) struct Claims {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    list: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    repository: String,
    digest: Option<String>,
    /// Whether the pull has ended. Its entry stays until the last pull of the repository has ended, so that no other
    /// pull takes its manifest.
    ended: bool,
}

/// Claim of one pull to a manifest of its repository. Dropped when the pull ends.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    claims: &'a Claims,
    id: u64,
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a pull of a repository. `digest` is the manifest, if the reference names it.
    pub(super) fn enter(&self, repository: &str, digest: Option<&str>) -> Claim<'_> {
        let mut entries = self.lock();
        let id = entries.next;
        entries.next += 1;
        let digest = digest.map(str::to_owned);
        entries.list.push(Entry { id, repository: repository.to_owned(), digest, ended: false });
        Claim { claims: self, id }
    }
}

impl Claim<'_> {
    pub(super) fn digest(&self) -> Option<String> {
        self.claims.lock().list.iter().find(|entry| entry.id == self.id)?.digest.clone()
    }

    pub(super) fn set_digest(&self, digest: &str) {
        if let Some(entry) = self.claims.lock().list.iter_mut().find(|entry| entry.id == self.id) {
            entry.digest = Some(digest.to_owned());
        }
    }

    /// Claims the manifest, if exactly one candidate is unclaimed and no other running pull of the repository lacks
    /// one. Otherwise the digest stays unknown.
    pub(super) fn resolve(&self, candidates: &[StoredManifest]) {
        let mut entries = self.claims.lock();
        let Some(own) = entries.list.iter().position(|entry| entry.id == self.id) else { return };
        let repository = entries.list[own].repository.clone();
        let siblings = || entries.list.iter().filter(|entry| entry.repository == repository);
        if siblings().any(|entry| entry.id != self.id && !entry.ended && entry.digest.is_none()) {
            return;
        }
        let mut taken: BTreeSet<&str> = siblings().filter_map(|entry| entry.digest.as_deref()).collect();
        // The manifest of a platform belongs to its index, which is the candidate.
        taken.extend(candidates.iter().flat_map(|candidate| &candidate.children).map(String::as_str));
        let mut free = candidates.iter().filter(|candidate| !taken.contains(candidate.digest.as_str()));
        if let (Some(only), None) = (free.next(), free.next()) {
            entries.list[own].digest = Some(only.digest.clone());
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut entries = self.claims.lock();
        let Some(own) = entries.list.iter_mut().find(|entry| entry.id == self.id) else { return };
        own.ended = true;
        let repository = own.repository.clone();
        if entries.list.iter().all(|entry| entry.repository != repository || entry.ended) {
            entries.list.retain(|entry| entry.repository != repository);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(digest: &str, children: &[&str]) -> StoredManifest {
        StoredManifest {
            digest: digest.to_owned(),
            children: children.iter().map(|&child| child.to_owned()).collect(),
        }
    }

    #[test]
    fn a_single_pull_claims_the_index_and_not_its_manifest() {
        let claims = Claims::default();
        let claim = claims.enter("r.io/a", None);
        claim.resolve(&[]);
        assert_eq!(claim.digest(), None);
        claim.resolve(&[candidate("manifest", &[]), candidate("index", &["manifest", "other"])]);
        assert_eq!(claim.digest().as_deref(), Some("index"));
    }

    #[test]
    fn two_pulls_of_one_repository_claim_nothing_until_one_has_ended() {
        let claims = Claims::default();
        let (first, second) = (claims.enter("r.io/a", None), claims.enter("r.io/a", None));
        let by_digest = claims.enter("r.io/a", Some("three"));
        let elsewhere = claims.enter("r.io/b", None);
        let new = [candidate("one", &[]), candidate("two", &[]), candidate("three", &[])];
        first.resolve(&new);
        second.resolve(&new);
        assert_eq!((first.digest(), second.digest()), (None, None));
        elsewhere.resolve(&[candidate("four", &[])]);
        assert_eq!(elsewhere.digest().as_deref(), Some("four"));

        // The first pull ends with a known manifest: the other one belongs to the second pull.
        first.set_digest("one");
        drop(first);
        second.resolve(&new);
        assert_eq!(second.digest().as_deref(), Some("two"));
        drop((second, by_digest, elsewhere));
        assert!(claims.lock().list.is_empty(), "nothing is kept after the last pull");
    }

    #[test]
    fn two_candidates_left_resolve_to_no_digest() {
        let claims = Claims::default();
        let (first, second) = (claims.enter("r.io/a", None), claims.enter("r.io/a", None));
        drop(first);
        second.resolve(&[candidate("one", &[]), candidate("two", &[])]);
        assert_eq!(second.digest(), None);
    }
}
