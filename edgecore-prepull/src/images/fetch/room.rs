//! Decides whether an image fits, before its first byte is fetched.
//!
//! The missing blobs arrive compressed in the content store and are unpacked beside it. Both must leave so much free
//! space that the kubelet neither removes images nor evicts pods. Bytes that earlier pulls have yet to write don't
//! count as free.
//!
//! If unneeded images fill the disk, [`Room::decide`] takes them into account.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use futures::stream::{self, StreamExt};
use prepull_registry::Repository;
use prepull_registry::manifest::Descriptor;

use super::delta::RebuiltSizes;
use super::flights::Flight;
use super::removal::{Freed, Removable, Removables};
use crate::images::containerd::ContentStore;
use crate::units::{Amount, Percent};

/// Unpacked bytes per file: most images have larger files.
const BYTES_PER_FILE: u64 = 32 * 1024;
/// Concurrent requests for layer sizes.
const QUESTIONS: usize = 3;
/// Share of all inodes that stays free: below it, the kubelet evicts pods (nodefs.inodesFree).
const INODES_LEFT: Amount = Amount::Percent(5);

/// Most images named in a reason.
const NAMED: usize = 3;

/// Limits for the free space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomRules {
    /// Disk usage above which the kubelet removes images, its `--image-gc-high-threshold`.
    pub gc_high_threshold: Percent,
    /// Least free space, `--disk-min-free`.
    pub disk_min_free: Amount,
    /// Whether the agent removes images that nothing needs, `--make-room`.
    pub make_room: bool,
}

/// A layer that was missing when a pull began.
#[derive(Clone, Copy)]
pub(super) struct Awaited<'a> {
    pub(super) layer: &'a Descriptor,
    pub(super) flight: &'a Flight,
    /// The sizes of what is rebuilt from it, if it's a delta. They count for this pull alone: others may share the flight, and
    /// fetch the same digest as a layer.
    pub(super) rebuilt: Option<RebuiltSizes>,
    /// Its repository, if it's known.
    pub(super) repository: Option<&'a Repository>,
}

/// Layers still to be written, each once.
#[derive(Default)]
pub(super) struct Todo<'a> {
    /// Layers of the image in question, with their missing compressed bytes.
    own: Vec<(Awaited<'a>, u64)>,
    /// Layers of earlier pulls.
    others: Vec<(Awaited<'a>, u64)>,
}

/// The file systems that an image is written to, and their limits.
pub(super) struct Room {
    /// File system of compressed layers.
    pub(super) content: DiskSpace,
    /// File system of unpacked layers, possibly the same.
    pub(super) images: DiskSpace,
    pub(super) rules: RoomRules,
}

/// The decision about an image that doesn't fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RoomVerdict<'a> {
    /// It may be pulled: it takes the disk above the kubelet's threshold, and the kubelet then finds enough images to
    /// remove.
    LeftToKubelet,
    /// It fits once the agent has removed these images, in this order.
    Remove(Vec<(&'a Removable, Freed)>),
    /// It may not be pulled, and nothing is removed for it.
    Refuse(String),
}

/// Space that layers will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    /// Compressed bytes that are missing.
    download: u64,
    /// Bytes of the tars that are rebuilt from deltas, beside the compressed ones.
    tars: u64,
    /// Their size after unpacking.
    unpacked: u64,
}

/// A file system as reported by statvfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskSpace {
    pub(super) path: String,
    /// Device number, the same for all directories on it.
    pub(super) device: u64,
    pub(super) capacity: u64,
    pub(super) available: u64,
    /// 0 if the file system creates inodes on demand.
    pub(super) inodes: u64,
    pub(super) free_inodes: u64,
}

impl DiskSpace {
    /// Reads the file system of a directory. May block on a dead file server.
    pub(super) fn read(directory: &Path) -> std::io::Result<Self> {
        let (stat, of) = (rustix::fs::statvfs(directory)?, rustix::fs::stat(directory)?);
        Ok(Self {
            path: directory.display().to_string(),
            device: of.st_dev,
            capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
            inodes: stat.f_files,
            free_inodes: stat.f_favail,
        })
    }
}

impl<'a> Todo<'a> {
    /// The work left for these layers. The label of a blob in the store shows whether its layer is unpacked.
    pub(super) async fn for_layers(
        own: impl Iterator<Item = Awaited<'a>>,
        others: impl Iterator<Item = Awaited<'a>>,
        store: &ContentStore,
    ) -> Self {
        let (own, others): (Vec<_>, Vec<_>) = (own.collect(), others.collect());
        let mut unpacked = HashSet::new();
        for awaited in own.iter().chain(&others).filter(|awaited| awaited.missing_bytes() == 0) {
            if store.was_unpacked(&awaited.layer.digest).await {
                unpacked.insert(awaited.layer.digest.as_str());
            }
        }
        Self::without_done(own, others, unpacked)
    }

    fn without_done(own: Vec<Awaited<'a>>, others: Vec<Awaited<'a>>, mut done: HashSet<&'a str>) -> Self {
        // A delta with the digest of another image's layer doesn't stand for that.
        let mut deltas = HashSet::new();
        let mut todo = |layers: Vec<Awaited<'a>>| {
            let todo = layers.into_iter().filter(|awaited| {
                let seen = if awaited.rebuilt.is_some() { &mut deltas } else { &mut done };
                seen.insert(awaited.layer.digest.as_str())
            });
            todo.map(|awaited| (awaited, awaited.missing_bytes())).collect()
        };
        Self { own: todo(own), others: todo(others) }
    }

    /// Decides about an image that [`Self::check`] has refused for this reason.
    ///
    /// The kubelet removes images only if the disk is above its threshold. So without `--make-room` the image may take
    /// the disk there, if removing unneeded images brings it down again and `--disk-min-free` stays free in between.
    pub(super) fn decide<'r>(
        &self,
        refusal: &str,
        room: &Room,
        removables: &'r Removables,
    ) -> RoomVerdict<'r> {
        let fits_without = |freed| self.fits(&room.after_removal(freed)).is_ok();
        let Some(chosen) = removables.choose(fits_without) else {
            let found = match removables.count() {
                0 => "no image can be removed: all are in use, pinned, new, or wanted by a task".to_owned(),
                count => format!(
                    "{} that nothing needs would give {}, which is not enough",
                    images_text(count),
                    mib(removables.freed_by_all().bytes())
                ),
            };
            return RoomVerdict::Refuse(format!("{refusal}; {found}"));
        };
        if room.rules.make_room {
            return RoomVerdict::Remove(chosen);
        }
        if self.fits(&room.without_threshold()).is_ok() {
            return RoomVerdict::LeftToKubelet;
        }
        let given = chosen.iter().fold(Freed::default(), |sum, (_, freed)| sum.plus(*freed));
        let names: Vec<&str> = chosen.iter().take(NAMED).map(|(image, _)| image.name()).collect();
        let more = if chosen.len() > NAMED { ", …" } else { "" };
        RoomVerdict::Refuse(format!(
            "{refusal}; removing {} that nothing needs ({}{more}) would give {}, which the agent does with --make-room",
            images_text(chosen.len()),
            names.join(", "),
            mib(given.bytes())
        ))
    }

    /// Like [`Self::check`], with the layer sizes known so far.
    pub(super) fn fits(&self, room: &Room) -> Result<(), String> {
        self.judge_with(room, Awaited::unpacked_or_guess)
    }

    /// Decides whether the image fits. The error has the numbers. Asks the registries for unpacked sizes only if they
    /// make a difference.
    pub(super) async fn check(&self, room: &Room) -> Result<(), String> {
        // A layer never unpacks to less than its compressed size, so that's a lower bound.
        self.judge_with(room, |awaited| awaited.unpacked_size().unwrap_or(awaited.layer.size))?;
        if self.fits(room).is_ok() {
            return Ok(());
        }
        self.ask_sizes().await;
        self.fits(room)
    }

    /// Asks the registries for the unpacked sizes that aren't known yet.
    pub(super) async fn ask_sizes(&self) {
        let all: Vec<&Awaited<'_>> =
            self.own.iter().chain(&self.others).map(|(awaited, _)| awaited).collect();
        let ask = |index: usize| all[index].ask_size();
        stream::iter((0..all.len()).map(ask)).buffer_unordered(QUESTIONS).collect::<()>().await;
    }

    fn judge_with(&self, room: &Room, unpacked: impl Fn(&Awaited<'a>) -> u64) -> Result<(), String> {
        let need = |todo: &[(Awaited<'a>, u64)]| {
            let add = |need: Need, (awaited, missing): &(Awaited<'a>, u64)| Need {
                download: need.download.saturating_add(*missing),
                tars: need.tars.saturating_add(awaited.rebuilt.map_or(0, |rebuilt| rebuilt.tar)),
                unpacked: need.unpacked.saturating_add(unpacked(awaited).max(awaited.layer.size)),
            };
            todo.iter().fold(Need::default(), add)
        };
        judge_room(need(&self.own), need(&self.others), room)
    }
}

impl Room {
    /// The same room after images were removed.
    fn after_removal(&self, freed: Freed) -> Self {
        let Self { content, images, rules } = self;
        let (of_content, of_images) = if content.device == images.device {
            (freed.bytes(), freed.bytes())
        } else {
            (freed.content, freed.unpacked)
        };
        let with = |disk: &DiskSpace, bytes: u64, inodes: u64| DiskSpace {
            available: disk.available.saturating_add(bytes),
            free_inodes: disk.free_inodes.saturating_add(inodes),
            ..disk.clone()
        };
        let (content, images) = (with(content, of_content, 0), with(images, of_images, freed.inodes));
        Self { content, images, rules: *rules }
    }

    /// The same room without the kubelet's threshold.
    fn without_threshold(&self) -> Self {
        let Self { content, images, rules } = self;
        let rules = RoomRules { gc_high_threshold: Percent(100), ..*rules };
        Self { content: content.clone(), images: images.clone(), rules }
    }
}

impl Awaited<'_> {
    /// Compressed bytes that are missing now.
    fn missing_bytes(&self) -> u64 {
        self.layer.size.saturating_sub(self.flight.written_bytes())
    }

    /// The unpacked size if a registry has answered, or the publisher of the delta has announced it.
    fn unpacked_size(&self) -> Option<u64> {
        self.rebuilt.map(|rebuilt| rebuilt.unpacked).or_else(|| self.flight.unpacked_size())
    }

    /// The same, or else an estimate.
    fn unpacked_or_guess(&self) -> u64 {
        self.unpacked_size().unwrap_or_else(|| self.layer.guess_unpacked())
    }

    /// Asks the registry for the unpacked size, unless it's a delta's.
    async fn ask_size(&self) {
        let Some(repository) = self.repository.filter(|_| self.rebuilt.is_none()) else { return };
        let answer = async {
            let size = repository.unpacked_size(self.layer).await;
            size.ok().flatten().unwrap_or_else(|| self.layer.guess_unpacked())
        };
        self.flight.ask_unpacked(answer).await;
    }
}

/// Decides whether there's room for this image besides the others.
fn judge_room(own: Need, others: Need, Room { content, images, rules }: &Room) -> Result<(), String> {
    let in_content = |need: Need| need.download.saturating_add(need.tars);
    let mut needs: BTreeMap<u64, (&DiskSpace, u64, u64)> =
        BTreeMap::from([(content.device, (content, in_content(own), in_content(others)))]);
    let (_, bytes, promised) = needs.entry(images.device).or_insert((images, 0, 0));
    *bytes = bytes.saturating_add(own.unpacked);
    *promised = promised.saturating_add(others.unpacked);
    for (disk, bytes, promised) in needs.into_values() {
        let (kept, why) = kept_free(disk, rules);
        if disk.available < bytes.saturating_add(promised).saturating_add(kept) {
            return Err(format!(
                "no room for the image: it takes {} ({} to download,{} about {} unpacked), and {} has {} free, of which {} stay free ({why}){}",
                mib(bytes),
                mib(own.download),
                if own.tars > 0 { format!(" {} for rebuilt layers,", mib(own.tars)) } else { String::new() },
                mib(own.unpacked),
                disk.path,
                mib(disk.available),
                mib(kept),
                for_others(promised, mib)
            ));
        }
    }
    let files = |need: Need| need.unpacked / BYTES_PER_FILE;
    let (own, others, kept) = (files(own), files(others), INODES_LEFT.in_bytes(images.inodes));
    if images.inodes > 0 && images.free_inodes < own.saturating_add(others).saturating_add(kept) {
        return Err(format!(
            "no room for the image: it takes about {own} inodes, and {} has {} free, of which {kept} stay free (the kubelet evicts pods from {INODES_LEFT} on){}",
            images.path,
            images.free_inodes,
            for_others(others, |inodes| format!("about {inodes}"))
        ));
    }
    Ok(())
}

/// Text about the bytes that other pulls of the node will still write.
fn for_others(promised: u64, amount: impl Fn(u64) -> String) -> String {
    if promised == 0 {
        String::new()
    } else {
        format!(" and {} are for images that are being pulled", amount(promised))
    }
}

/// Bytes that stay free, and the name of the rule.
fn kept_free(disk: &DiskSpace, rules: &RoomRules) -> (u64, String) {
    let RoomRules { gc_high_threshold, disk_min_free, make_room: _ } = rules;
    let of_kubelet = free_percent(*gc_high_threshold).in_bytes(disk.capacity);
    let of_agent = disk_min_free.in_bytes(disk.capacity);
    if of_kubelet >= of_agent {
        (of_kubelet, format!("--image-gc-high-threshold {gc_high_threshold}"))
    } else {
        (of_agent, format!("--disk-min-free {disk_min_free}"))
    }
}

/// The free share of a disk that is used up to this percentage.
fn free_percent(used: Percent) -> Amount {
    Amount::Percent(u8::try_from(100_u32.saturating_sub(used.0)).unwrap_or(0))
}

fn images_text(count: usize) -> String {
    if count == 1 { "an image".to_owned() } else { format!("{count} images") }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests;
