//! Removes images for a job, and measures what that frees.
//!
//! The images and their use come from CRI, as with every runtime. Of containerd we also know the age of an image, the pins
//! of our jobs, and which blobs and unpacked layers it shares with others.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use prepull_api::task::KeepCode;

use super::fetcher::Fetcher;
use super::removal::Removable;
use super::runtime::SurveyFacts;
use super::unused::{ListedImage, Listing};
use crate::images::containerd::{Holdings, ImageRecord};
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{HeldImage, PullError, Removed};

/// What the node has at one moment.
pub(super) struct Survey {
    pub(super) listing: Listing,
    /// `None` for runtimes other than containerd.
    store: Option<SurveyedStore>,
}

/// What containerd has.
struct SurveyedStore {
    /// `None` for a snapshotter that may fetch by itself. Then only the records of `holdings` were read.
    snapshotter: Option<String>,
    /// The image of the sandboxes of pods, which older releases don't report as pinned.
    sandbox: Option<String>,
    holdings: Holdings,
}

impl Survey {
    fn image(&self, id: &str) -> Option<&ListedImage> {
        self.listing.images.iter().find(|image| image.id == id)
    }

    fn held_images(&self) -> Vec<HeldImage> {
        self.listing.images.iter().map(|image| self.describe(image)).collect()
    }

    fn describe(&self, image: &ListedImage) -> HeldImage {
        let (id, names, size) = (image.id.clone(), image.names.clone(), image.size);
        let created = self.records_of(image).filter_map(|record| record.created).max();
        HeldImage { id, names, needed: self.reason_to_keep(image), created, size }
    }

    /// What needs an image.
    fn reason_to_keep(&self, image: &ListedImage) -> Option<KeepCode> {
        let is_container = |store: &SurveyedStore| {
            let top = store.holdings.blobs.get(&image.id).and_then(|config| config.snapshot.as_deref());
            top.is_some_and(|top| store.holdings.parents_of_active().contains(top))
        };
        let is_sandbox =
            |store: &SurveyedStore| store.sandbox.as_deref().is_some_and(|name| image.is_called(name));
        let store = self.store.as_ref();
        if image.is_any_of(&self.listing.used) || store.is_some_and(is_container) {
            Some(KeepCode::InUse)
        } else if self.records_of(image).any(|record| record.is_pinned_by_job) {
            Some(KeepCode::PinnedByJob)
        } else if image.is_pinned
            || self.records_of(image).any(|record| record.is_pinned)
            || store.is_some_and(is_sandbox)
        {
            Some(KeepCode::PinnedByRuntime)
        } else {
            None
        }
    }

    /// Whether an image that was chosen may still go: nothing needs it, and it has no other name by now.
    pub(super) fn may_go(&self, chosen: &Removable) -> bool {
        self.image(&chosen.id).is_some_and(|image| {
            self.reason_to_keep(image).is_none() && image.names.iter().all(|name| chosen.names.contains(name))
        })
    }

    fn records_of<'a>(&'a self, image: &'a ListedImage) -> impl Iterator<Item = &'a ImageRecord> {
        let records = self.store.iter().flat_map(|store| &store.holdings.records);
        records.filter(|record| image.is_called(&record.name))
    }

    /// What containerd has, if that shows what a removal frees.
    fn measurable(&self) -> Option<(&SurveyedStore, &str)> {
        let store = self.store.as_ref()?;
        Some((store, store.snapshotter.as_deref()?))
    }

    /// The blobs and unpacked layers of an image.
    fn pieces(&self, image: &ListedImage) -> BTreeSet<&str> {
        let Some(store) = &self.store else { return BTreeSet::new() };
        let below = self.records_of(image).map(|record| store.holdings.reachable_from(&record.target));
        below.flat_map(|(blobs, snapshots)| blobs.into_iter().chain(snapshots)).collect()
    }

    /// The pieces that other images, names or containers hold.
    fn held_by_others(&self, ids: &[String]) -> BTreeSet<&str> {
        let Some(store) = &self.store else { return BTreeSet::new() };
        let goes = |record: &&ImageRecord| {
            let going = ids.iter().filter_map(|id| self.image(id));
            going.into_iter().any(|image| image.is_called(&record.name))
        };
        let stays = store.holdings.records.iter().filter(|record| !goes(record));
        let below = stays.map(|record| store.holdings.reachable_from(&record.target));
        let held = below.flat_map(|(blobs, snapshots)| blobs.into_iter().chain(snapshots));
        held.chain(store.holdings.used_snapshots()).collect()
    }
}

impl Fetcher {
    pub(super) async fn survey(&self) -> Result<Survey, PullError> {
        let listing = self.runtime.list().await?;
        let Some(SurveyFacts { snapshotter, sandbox }) = self.runtime.survey_facts().await? else {
            return Ok(Survey { listing, store: None });
        };
        let holdings = match &snapshotter {
            Some(snapshotter) => self.holdings.read(snapshotter).await,
            None => self.holdings.read_records().await,
        };
        let holdings = holdings.map_err(|status| to_pull_error(&status, "", &self.endpoint))?;
        Ok(Survey { listing, store: Some(SurveyedStore { snapshotter, sandbox, holdings }) })
    }

    pub(super) async fn held_images(&self) -> Result<Vec<HeldImage>, PullError> {
        Ok(self.survey().await?.held_images())
    }

    /// The bytes that removing these images would free, of each after those before it.
    pub(super) async fn weigh(&self, ids: &[String]) -> Result<Vec<u64>, PullError> {
        let survey = self.survey().await?;
        let mut counted = survey.held_by_others(ids);
        let mut weights = Vec::with_capacity(ids.len());
        for id in ids {
            let image = survey.image(id);
            weights.push(match (image, survey.measurable()) {
                (None, _) => 0,
                (Some(image), None) => image.size,
                (Some(image), Some((store, snapshotter))) => {
                    let pieces: Vec<&str> = survey.pieces(image).difference(&counted).copied().collect();
                    counted.extend(&pieces);
                    self.piece_sizes(&store.holdings, snapshotter, &pieces).await.values().sum()
                }
            });
        }
        Ok(weights)
    }

    /// Removes an image, if it's there and the caller agrees.
    pub(super) async fn remove_if_agreed(
        &self,
        id: &str,
        agrees: impl FnOnce(&[HeldImage]) -> bool,
    ) -> Result<Removed, PullError> {
        let _turn = self.removing.lock().await;
        let before = self.survey().await?;
        let Some(image) = before.image(id) else { return Ok(Removed::Absent) };
        if !agrees(&before.held_images()) {
            return Ok(Removed::Declined);
        }
        let Some((store, snapshotter)) = before.measurable() else {
            self.runtime.remove(id).await?;
            return Ok(Removed::Freed(image.size));
        };
        let pieces: Vec<&str> = before.pieces(image).into_iter().collect();
        let sizes = self.piece_sizes(&store.holdings, snapshotter, &pieces).await;
        // containerd answers after its garbage collection.
        self.runtime.remove(id).await?;
        let refused = |status| to_pull_error(&status, "", &self.endpoint);
        let after = self.holdings.read(snapshotter).await.map_err(refused)?;
        let is_gone =
            |piece: &&&str| !after.blobs.contains_key(**piece) && !after.snapshots.contains_key(**piece);
        let gone: BTreeSet<String> = pieces.iter().filter(is_gone).map(|piece| (*piece).to_owned()).collect();
        if let Some(neighbourhood) = &self.neighbourhood {
            neighbourhood.hub.forget(&gone);
        }
        Ok(Removed::Freed(gone.iter().filter_map(|piece| sizes.get(piece.as_str())).sum()))
    }

    /// Bytes of each of these pieces.
    async fn piece_sizes<'a>(
        &self,
        holdings: &Holdings,
        snapshotter: &str,
        pieces: &[&'a str],
    ) -> HashMap<&'a str, u64> {
        let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
        for piece in pieces.iter().copied() {
            let size = match holdings.blobs.get(piece) {
                Some(blob) => blob.size,
                // A missing snapshot frees nothing.
                None => self.holdings.usage(snapshotter, piece).await.unwrap_or_default().0,
            };
            sizes.insert(piece, size);
        }
        sizes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_became_needed_stays() {
        let names = vec!["r.io/a:1".to_owned()];
        let image = ListedImage { id: "id".to_owned(), names: names.clone(), ..ListedImage::default() };
        let chosen = Removable {
            id: "id".to_owned(),
            names,
            last_needed: SystemTime::UNIX_EPOCH,
            pieces: BTreeSet::new(),
        };
        let may_go = |image: ListedImage, used: &[&str], records| {
            let used = used.iter().map(|name| (*name).to_owned()).collect();
            let holdings = Holdings { records, ..Holdings::default() };
            let store = Some(SurveyedStore { snapshotter: None, sandbox: None, holdings });
            Survey { listing: Listing { images: vec![image], used }, store }.may_go(&chosen)
        };
        assert!(may_go(image.clone(), &[], Vec::new()));
        assert!(!may_go(image.clone(), &["r.io/a:1"], Vec::new()), "a container has it");
        assert!(!may_go(ListedImage { is_pinned: true, ..image.clone() }, &[], Vec::new()));
        let pinned = ImageRecord {
            name: "r.io/a:1".to_owned(),
            target: String::new(),
            is_pinned: true,
            is_pinned_by_job: true,
            created: None,
        };
        assert!(!may_go(image.clone(), &[], vec![pinned]), "an old containerd doesn't report pins");
        let renamed = vec!["r.io/a:1".to_owned(), "r.io/b:1".to_owned()];
        assert!(
            !may_go(ListedImage { names: renamed, ..image.clone() }, &[], Vec::new()),
            "it has another name"
        );
        assert!(!may_go(ListedImage { id: "other".to_owned(), ..image }, &[], Vec::new()), "it's gone");
    }
}
