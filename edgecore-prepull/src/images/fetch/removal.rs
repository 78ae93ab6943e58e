//! Chooses images to remove: the longest unneeded first, and no more than necessary.
//!
//! Images share layers. A shared layer is freed only with its last image, so the choice counts pieces (blobs and
//! unpacked layers) and not the sizes of images.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

/// The space that a removal frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Freed {
    /// Bytes on the file system of compressed layers.
    pub(super) content: u64,
    /// Bytes on the file system of unpacked layers.
    pub(super) unpacked: u64,
    /// Inodes on the file system of unpacked layers.
    pub(super) inodes: u64,
}

/// An image that may be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removable {
    /// Its id in the runtime.
    pub(super) id: String,
    /// Its tags and digests.
    pub(super) names: Vec<String>,
    /// Time of the pull, or of the last use that we saw.
    pub(super) last_needed: SystemTime,
    /// Its blobs and unpacked layers.
    pub(super) pieces: BTreeSet<String>,
}

/// All images that may be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Removables {
    /// Sorted by `last_needed`, oldest first.
    images: Vec<Removable>,
    /// The size of each piece, except for pieces that something else holds as well.
    pieces: BTreeMap<String, Freed>,
}

impl Freed {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            content: self.content.saturating_add(other.content),
            unpacked: self.unpacked.saturating_add(other.unpacked),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }

    /// Bytes on all disks.
    pub(super) fn bytes(self) -> u64 {
        self.content.saturating_add(self.unpacked)
    }
}

impl Removable {
    /// A name for people.
    pub(super) fn name(&self) -> &str {
        self.names.first().unwrap_or(&self.id)
    }
}

impl Removables {
    pub(super) fn new(mut images: Vec<Removable>, pieces: BTreeMap<String, Freed>) -> Self {
        images.sort_by(|one, other| (one.last_needed, &one.id).cmp(&(other.last_needed, &other.id)));
        Self { images, pieces }
    }

    /// Number of images that may be removed.
    pub(super) fn count(&self) -> usize {
        self.images.len()
    }

    /// The space that removing all of them frees.
    pub(super) fn freed_by_all(&self) -> Freed {
        self.freed_by(&(0..self.images.len()).collect())
    }

    /// The images to remove until `is_enough`, in this order, each with the space that its removal adds. `None` if
    /// removing all of them isn't enough.
    pub(super) fn choose(&self, is_enough: impl Fn(Freed) -> bool) -> Option<Vec<(&Removable, Freed)>> {
        let mut chosen = BTreeSet::new();
        let mut next = 0..self.images.len();
        while !is_enough(self.freed_by(&chosen)) {
            chosen.insert(next.next()?);
        }
        // Spare images that turned out to add nothing, the most recently needed first.
        for spared in (0..self.images.len()).rev() {
            if chosen.remove(&spared) && !is_enough(self.freed_by(&chosen)) {
                chosen.insert(spared);
            }
        }
        let mut gone = BTreeSet::new();
        let mut before = Freed::default();
        let each = chosen.into_iter().map(|index| {
            gone.insert(index);
            let after = self.freed_by(&gone);
            let added = Freed {
                content: after.content - before.content,
                unpacked: after.unpacked - before.unpacked,
                inodes: after.inodes - before.inodes,
            };
            before = after;
            (&self.images[index], added)
        });
        Some(each.collect())
    }

    /// The space that removing these frees.
    fn freed_by(&self, gone: &BTreeSet<usize>) -> Freed {
        let stays = |index: &usize| !gone.contains(index);
        let held: BTreeSet<&String> =
            (0..self.images.len()).filter(stays).flat_map(|index| &self.images[index].pieces).collect();
        let freed: BTreeSet<&String> = gone.iter().flat_map(|index| &self.images[*index].pieces).collect();
        let freed = freed.difference(&held).filter_map(|piece| self.pieces.get(*piece));
        freed.fold(Freed::default(), |sum, piece| sum.plus(*piece))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn image(id: &str, needed: u64, pieces: &[&str]) -> Removable {
        Removable {
            id: id.to_owned(),
            names: vec![format!("r.io/{id}:v1")],
            last_needed: SystemTime::UNIX_EPOCH + Duration::from_secs(needed),
            pieces: pieces.iter().map(|piece| (*piece).to_owned()).collect(),
        }
    }

    fn piece(name: &str, unpacked: u64) -> (String, Freed) {
        (name.to_owned(), Freed { unpacked, ..Freed::default() })
    }

    fn chosen(removables: &Removables, bytes: u64) -> Option<Vec<(&str, u64)>> {
        let chosen = removables.choose(|freed| freed.bytes() >= bytes)?;
        Some(chosen.into_iter().map(|(image, freed)| (image.id.as_str(), freed.bytes())).collect())
    }

    #[test]
    fn the_longest_unneeded_go_first() {
        let removables = Removables::new(
            vec![image("new", 30, &["n"]), image("old", 10, &["o"]), image("middle", 20, &["m"])],
            BTreeMap::from([piece("n", 100), piece("o", 10), piece("m", 20)]),
        );
        for (bytes, expected) in [
            (0, Some(vec![])),
            (10, Some(vec![("old", 10)])),
            (11, Some(vec![("middle", 20)])),
            (21, Some(vec![("old", 10), ("middle", 20)])),
            (31, Some(vec![("new", 100)])),
            (130, Some(vec![("old", 10), ("middle", 20), ("new", 100)])),
            (131, None),
        ] {
            assert_eq!(chosen(&removables, bytes), expected, "{bytes}");
        }
        assert_eq!((removables.count(), removables.freed_by_all().bytes()), (3, 130));
    }

    #[test]
    fn the_last_image_frees_a_shared_layer() {
        let removables = Removables::new(
            vec![image("a", 1, &["base", "a"]), image("b", 2, &["base", "b"]), image("c", 3, &["used", "c"])],
            BTreeMap::from([piece("base", 50), piece("a", 1), piece("b", 2), piece("c", 3)]),
        );
        assert_eq!(chosen(&removables, 2), Some(vec![("b", 2)]));
        assert_eq!(chosen(&removables, 53), Some(vec![("a", 1), ("b", 52)]));
        assert_eq!(chosen(&removables, 57), None, "something else holds `used`");
    }

    proptest! {
        #[test]
        fn no_more_go_than_needed(
            images in prop::collection::vec((0_u64..20, prop::collection::btree_set(0_usize..12, 0..5)), 0..9),
            sizes in prop::collection::vec(0_u64..50, 12),
            bytes in 0_u64..400,
        ) {
            let pieces = sizes.iter().enumerate().map(|(index, size)| piece(&index.to_string(), *size));
            let images = images.iter().enumerate().map(|(index, (needed, pieces))| {
                let pieces: Vec<String> = pieces.iter().map(ToString::to_string).collect();
                image(&index.to_string(), *needed, &pieces.iter().map(String::as_str).collect::<Vec<_>>())
            });
            let removables = Removables::new(images.collect(), pieces.collect());
            let index = |id: &str| removables.images.iter().position(|image| image.id == id).unwrap();
            match chosen(&removables, bytes) {
                None => prop_assert!(removables.freed_by_all().bytes() < bytes),
                Some(chosen) => {
                    let gone: BTreeSet<usize> = chosen.iter().map(|(id, _)| index(id)).collect();
                    let freed = removables.freed_by(&gone);
                    prop_assert!(freed.bytes() >= bytes);
                    prop_assert_eq!(freed.bytes(), chosen.iter().map(|(_, freed)| freed).sum::<u64>());
                    for spared in &gone {
                        let others = gone.iter().copied().filter(|other| other != spared).collect();
                        prop_assert!(removables.freed_by(&others).bytes() < bytes, "{spared} was needless");
                    }
                    // The most recently needed image goes only if the others aren't enough.
                    if let Some(last) = gone.last() {
                        prop_assert!(removables.freed_by(&(0..*last).collect()).bytes() < bytes);
                    }
                }
            }
        }
    }
}
