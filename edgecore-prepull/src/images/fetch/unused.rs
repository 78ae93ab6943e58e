//! Finds images that nothing needs: no container, no job's pin, no open task, and not the runtime itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::removal::{Freed, Removable};
use crate::clock::dates_images;
use crate::images::containerd::{Holdings, ImageRecord};

/// Youngest age for removal: an image may have been pulled for a container that isn't there yet. The kubelet removes an
/// image no earlier than two minutes after it noticed it (`imageMinimumGCAge`), and it looks for new ones every five.
/// If it finds too few old ones, it evicts pods.
const MIN_AGE: Duration = Duration::from_secs(420);

/// Images and their use, as reported by CRI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listing {
    pub(super) images: Vec<ListedImage>,
    /// Ids and names in use by containers, including ended ones.
    pub(super) used: BTreeSet<String>,
}

/// An image in CRI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ListedImage {
    pub(super) id: String,
    /// Its tags and digests.
    pub(super) names: Vec<String>,
    pub(super) is_pinned: bool,
    /// Bytes by the runtime's own count.
    pub(super) size: u64,
}

/// Content that must stay, besides the images in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needed<'a> {
    /// Names of images: those of open tasks, and the sandbox.
    pub(super) names: &'a BTreeSet<String>,
    /// Blobs and snapshots of the image that is being pulled.
    pub(super) pieces: &'a BTreeSet<String>,
}

/// Times of the last known use of images. It's only in memory, like the kubelet's: after a restart we use the times of
/// the pulls, and an image from before the clock was set is new again.
#[derive(Debug, Default)]
pub(super) struct LastUses(Mutex<HashMap<String, ImageTimes>>);

/// When we saw an image.
#[derive(Clone, Copy, Debug)]
struct ImageTimes {
    first: SystemTime,
    used: Option<SystemTime>,
}

/// The content that a removal would free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnusedContent {
    pub(super) images: Vec<Removable>,
    /// Blobs that nothing else holds, with their sizes.
    pub(super) blobs: BTreeMap<String, Freed>,
    /// Unpacked layers that nothing else holds.
    pub(super) snapshots: BTreeSet<String>,
}

impl ListedImage {
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.id == name || self.names.iter().any(|own| own == name)
    }

    pub(super) fn is_any_of(&self, names: &BTreeSet<String>) -> bool {
        names.contains(&self.id) || self.names.iter().any(|name| names.contains(name))
    }
}

impl LastUses {
    /// Records the current use, and forgets images that are gone.
    pub(super) fn note_uses(&self, listing: &Listing, now: SystemTime) {
        let mut uses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|id, _| listing.images.iter().any(|image| image.id == *id));
        for image in &listing.images {
            let times = uses.entry(image.id.clone()).or_insert(ImageTimes { first: now, used: None });
            if dates_images(now) && !dates_images(times.first) {
                times.first = now;
            }
            if image.is_any_of(&listing.used) {
                times.used = Some(now);
            }
        }
    }

    fn times(&self, id: &str) -> Option<ImageTimes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).copied()
    }

    fn last_use(&self, id: &str) -> Option<SystemTime> {
        self.times(id)?.used
    }

    /// When an image was pulled, by its record. If the clock wasn't set then but is now, it's the time at which we first saw
    /// the image.
    fn arrival(&self, id: &str, recorded: SystemTime, now: SystemTime) -> SystemTime {
        if dates_images(recorded) || !dates_images(now) {
            return recorded;
        }
        self.times(id).map_or(now, |times| times.first)
    }
}

/// Finds the images that may be removed.
pub(super) fn find_unused(
    listing: &Listing,
    holdings: &Holdings,
    needed: Needed<'_>,
    uses: &LastUses,
    now: SystemTime,
) -> UnusedContent {
    let parents = holdings.parents_of_active();
    let mut images = Vec::new();
    let mut kept: BTreeSet<&str> = needed.pieces.iter().map(String::as_str).collect();
    kept.extend(holdings.used_snapshots());
    let stray = |record: &&ImageRecord| !listing.images.iter().any(|image| image.is_called(&record.name));
    for record in holdings.records.iter().filter(stray) {
        let (blobs, snapshots) = holdings.reachable_from(&record.target);
        kept.extend(blobs.into_iter().chain(snapshots));
    }
    let mut unused_snapshots = BTreeSet::new();
    for image in &listing.images {
        let records = || holdings.records.iter().filter(|record| image.is_called(&record.name));
        let (mut blobs, mut snapshots) = (BTreeSet::new(), BTreeSet::new());
        for record in records() {
            let below = holdings.reachable_from(&record.target);
            blobs.extend(below.0);
            snapshots.extend(below.1);
        }
        let top = holdings.blobs.get(&image.id).and_then(|config| config.snapshot.as_deref());
        let created = records().filter_map(|record| record.created).max();
        let created = created.map(|created| uses.arrival(&image.id, created, now));
        let is_new = created.is_none_or(|created| now.duration_since(created).is_ok_and(|age| age < MIN_AGE));
        let is_needed = image.is_pinned
            || records().any(|record| record.is_pinned)
            || image.is_any_of(&listing.used)
            || image.is_any_of(needed.names)
            || top.is_some_and(|top| parents.contains(top))
            || is_new;
        if is_needed {
            kept.extend(blobs.into_iter().chain(snapshots));
            continue;
        }
        unused_snapshots.extend(snapshots.iter().copied());
        let last_needed = created.max(uses.last_use(&image.id)).unwrap_or(SystemTime::UNIX_EPOCH);
        let pieces = blobs.into_iter().chain(snapshots).map(str::to_owned).collect();
        let (id, names) = (image.id.clone(), image.names.clone());
        images.push(Removable { id, names, last_needed, pieces });
    }
    let is_free = |piece: &&str| !kept.contains(*piece);
    let pieces = images.iter().flat_map(|image| image.pieces.iter()).map(String::as_str).filter(is_free);
    let blobs = pieces.filter_map(|digest| {
        let content = holdings.blobs.get(digest)?.size;
        Some((digest.to_owned(), Freed { content, ..Freed::default() }))
    });
    let blobs = blobs.collect();
    let snapshots = unused_snapshots.into_iter().filter(is_free).map(str::to_owned).collect();
    UnusedContent { images, blobs, snapshots }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::containerd::{Snapshot, StoredBlob};

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Images `a`, `b`, …, on a common layer, each with a layer of its own, pulled at 100, 200, ….
    fn node(names: &[&str]) -> (Listing, Holdings) {
        let (mut listing, mut holdings) = (Listing::default(), Holdings::default());
        let snapshot = |parent: &str| Snapshot { parent: parent.to_owned(), is_active: false };
        holdings.snapshots.insert("base".to_owned(), snapshot(""));
        for (name, created) in names.iter().zip(1..) {
            let [id, tag, target, layer, top] =
                ["id", "tag", "target", "layer", "top"].map(|kind| format!("{kind}-{name}"));
            listing.images.push(ListedImage {
                id: id.clone(),
                names: vec![tag.clone()],
                is_pinned: false,
                size: 0,
            });
            for name in [&id, &tag] {
                let created = Some(at(created * 100));
                let record = ImageRecord {
                    name: name.clone(),
                    target: target.clone(),
                    is_pinned: false,
                    is_pinned_by_job: false,
                    created,
                };
                holdings.records.push(record);
            }
            let keeps = vec![id.clone(), layer.clone(), "layer-base".to_owned()];
            let blob = |size, keeps, snapshot| StoredBlob { size, keeps, snapshot };
            holdings.blobs.insert(target, blob(1, keeps, None));
            holdings.blobs.insert(id, blob(1, Vec::new(), Some(top.clone())));
            holdings.blobs.insert(layer, blob(10, Vec::new(), None));
            holdings.blobs.insert("layer-base".to_owned(), blob(100, Vec::new(), None));
            holdings.snapshots.insert(top, snapshot("base"));
        }
        (listing, holdings)
    }

    fn unused(listing: &Listing, holdings: &Holdings, now: u64) -> Vec<String> {
        let (uses, nothing) = (LastUses::default(), set(&[]));
        let needed = Needed { names: &nothing, pieces: &nothing };
        let unused = find_unused(listing, holdings, needed, &uses, at(now));
        unused.images.iter().map(|image| image.name().to_owned()).collect()
    }

    #[test]
    fn what_is_needed_stays() {
        let all = |listing: &Listing, holdings: &Holdings| unused(listing, holdings, 10_000);
        let (listing, holdings) = node(&["a", "b"]);
        assert_eq!(all(&listing, &holdings), ["tag-a", "tag-b"]);

        let pinned = {
            let mut listing = listing.clone();
            listing.images[0].is_pinned = true;
            all(&listing, &holdings)
        };
        assert_eq!(pinned, ["tag-b"]);
        let (_, mut labelled) = node(&["a", "b"]);
        labelled.records[1].is_pinned = true;
        assert_eq!(all(&listing, &labelled), ["tag-b"], "an old containerd doesn't report pins");
        for name in ["id-a", "tag-a"] {
            let used = Listing { used: set(&[name]), ..listing.clone() };
            assert_eq!(all(&used, &holdings), ["tag-b"], "a container has {name}");
            let (uses, names, pieces) = (LastUses::default(), set(&[name]), set(&[]));
            let needed = Needed { names: &names, pieces: &pieces };
            let left = find_unused(&listing, &holdings, needed, &uses, at(10_000)).images;
            assert_eq!(left.len(), 1, "a task wants {name}");
        }
        // The sandbox of a pod isn't a container in CRI.
        let (_, mut sandbox) = node(&["a", "b"]);
        let active = Snapshot { parent: "top-b".to_owned(), is_active: true };
        sandbox.snapshots.insert("sandbox".to_owned(), active);
        assert_eq!(all(&listing, &sandbox), ["tag-a"]);
    }

    #[test]
    fn new_images_stay() {
        let (listing, holdings) = node(&["a"]);
        // At 50, the clock has been set back since the pull, so the age is unknown.
        for (now, expected) in [(100, 0), (220, 0), (519, 0), (520, 1), (50, 1)] {
            assert_eq!(unused(&listing, &holdings, now).len(), expected, "at {now}");
        }
    }

    #[test]
    fn shared_pieces_stay_with_what_is_used() {
        let (listing, holdings) = node(&["a", "b"]);
        let (uses, nothing) = (LastUses::default(), set(&[]));
        let find = |listing: &Listing, pieces: &BTreeSet<String>| {
            let needed = Needed { names: &nothing, pieces };
            find_unused(listing, &holdings, needed, &uses, at(10_000))
        };
        let both = find(&listing, &nothing);
        assert_eq!(both.blobs.values().fold(0, |sum, blob| sum + blob.content), 100 + 2 * 12);
        assert_eq!(both.snapshots, set(&["base", "top-a", "top-b"]));
        let one = find(&Listing { used: set(&["id-b"]), ..listing.clone() }, &nothing);
        assert_eq!(one.blobs.values().fold(0, |sum, blob| sum + blob.content), 12);
        assert_eq!(one.snapshots, set(&["top-a"]));
        let pulled = find(&listing, &set(&["layer-base", "base"]));
        assert_eq!(pulled.blobs.values().fold(0, |sum, blob| sum + blob.content), 2 * 12);
        assert_eq!(pulled.snapshots, set(&["top-a", "top-b"]));
    }

    #[test]
    fn use_makes_an_image_younger() {
        let (listing, holdings) = node(&["a", "b"]);
        let uses = LastUses::default();
        uses.note_uses(&Listing { used: set(&["tag-a"]), ..listing.clone() }, at(5000));
        uses.note_uses(&listing, at(6000));
        let nothing = set(&[]);
        let needed = Needed { names: &nothing, pieces: &nothing };
        let found = find_unused(&listing, &holdings, needed, &uses, at(10_000)).images;
        let times: Vec<_> = found.iter().map(|image| (image.name(), image.last_needed)).collect();
        assert_eq!(times, [("tag-a", at(5000)), ("tag-b", at(200))]);
        uses.note_uses(&Listing::default(), at(7000));
        assert_eq!(uses.last_use("id-a"), None, "it's gone");
    }

    #[test]
    fn an_image_from_before_the_clock_was_set_is_new() {
        let (listing, mut holdings) = node(&["a", "b"]);
        let today = 1_800_000_000;
        // `b` was pulled yesterday.
        for record in holdings.records.iter_mut().skip(2) {
            record.created = Some(at(today - 86_400));
        }
        let uses = LastUses::default();
        let removable = |now: u64| {
            uses.note_uses(&listing, at(now));
            let nothing = set(&[]);
            let needed = Needed { names: &nothing, pieces: &nothing };
            let found = find_unused(&listing, &holdings, needed, &uses, at(now)).images;
            found.into_iter().map(|image| (image.name().to_owned(), image.last_needed)).collect::<Vec<_>>()
        };
        removable(50);
        let of_b = ("tag-b".to_owned(), at(today - 86_400));
        assert_eq!(removable(today), std::slice::from_ref(&of_b));
        assert_eq!(removable(today + 500), [("tag-a".to_owned(), at(today)), of_b]);
    }
}
