//! Whether an image fits: decided before the first byte of it is fetched.
//!
//! What is missing arrives compressed in the content store and is unpacked beside it. Both must leave so much free that
//! the kubelet neither removes images nor evicts pods, which it does from its thresholds on. What the pulls that began
//! earlier will still write is not free either, although it is not written yet.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use futures::stream::{self, StreamExt};
use prepull_registry::Repository;
use prepull_registry::manifest::Descriptor;

use super::flights::Flight;
use crate::config::{Amount, Percent};
use crate::images::containerd::ContentStore;

/// Bytes of unpacked content for each file: most images have larger files.
const BYTES_PER_FILE: u64 = 32 * 1024;
/// Layers whose size the registries are asked for at the same time.
const QUESTIONS: usize = 3;
/// Part of all inodes that stays free: below it, the kubelet evicts pods (nodefs.inodesFree).
const INODES_LEFT: Amount = Amount::Percent(5);

/// What must stay free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomRules {
    /// Disk usage above which the kubelet removes images, its `--image-gc-high-threshold`.
    pub gc_high_threshold: Percent,
    /// Least free space, `--disk-min-free`.
    pub disk_min_free: Amount,
}

/// A layer that was not there when a pull began.
#[derive(Clone, Copy)]
pub(super) struct Awaited<'a> {
    pub(super) layer: &'a Descriptor,
    pub(super) flight: &'a Flight,
    /// Where it is from, if that is known.
    pub(super) repository: Option<&'a Repository>,
}

/// What is still to be written, each layer once.
#[derive(Default)]
pub(super) struct Todo<'a> {
    /// Of the image that is to be judged, with the compressed bytes that are missing.
    own: Vec<(Awaited<'a>, u64)>,
    /// Of the images whose pulls began earlier.
    others: Vec<(Awaited<'a>, u64)>,
}

/// The file systems that an image is written to, and what must stay free there.
pub(super) struct Room {
    /// Where compressed layers are.
    pub(super) content: Disk,
    /// Where they are unpacked; may be the same file system.
    pub(super) images: Disk,
    pub(super) rules: RoomRules,
}

/// What layers will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    /// Compressed bytes that are still to come.
    download: u64,
    /// Bytes of what is unpacked of them.
    unpacked: u64,
}

/// A file system, as statvfs tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) path: String,
    /// The same for all directories on it.
    pub(super) device: u64,
    pub(super) capacity: u64,
    pub(super) available: u64,
    /// 0 where inodes are made as they are needed.
    pub(super) inodes: u64,
    pub(super) free_inodes: u64,
}

impl Disk {
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
    /// What these layers leave to be done. A layer that has arrived may not be unpacked yet; its label in the store tells.
    pub(super) async fn of(
        own: impl Iterator<Item = Awaited<'a>>,
        others: impl Iterator<Item = Awaited<'a>>,
        store: &ContentStore,
    ) -> Self {
        let (own, others): (Vec<_>, Vec<_>) = (own.collect(), others.collect());
        let mut unpacked = HashSet::new();
        for awaited in own.iter().chain(&others).filter(|awaited| awaited.missing() == 0) {
            if store.was_unpacked(&awaited.layer.digest).await {
                unpacked.insert(awaited.layer.digest.as_str());
            }
        }
        Self::without(own, others, unpacked)
    }

    fn without(own: Vec<Awaited<'a>>, others: Vec<Awaited<'a>>, mut done: HashSet<&'a str>) -> Self {
        let mut todo = |layers: Vec<Awaited<'a>>| {
            let todo = layers.into_iter().filter(|awaited| done.insert(&awaited.layer.digest));
            todo.map(|awaited| (awaited, awaited.missing())).collect()
        };
        Self { own: todo(own), others: todo(others) }
    }

    /// Decides whether the image fits. The error has the numbers. The registries are asked how large layers are when they
    /// are unpacked only where that decides.
    pub(super) async fn check(&self, room: &Room) -> Result<(), String> {
        // None is smaller than it is compressed.
        self.judge(room, |awaited| awaited.flight.unpacked().unwrap_or(awaited.layer.size))?;
        if self.judge(room, Awaited::guess).is_ok() {
            return Ok(());
        }
        let all: Vec<&Awaited<'_>> =
            self.own.iter().chain(&self.others).map(|(awaited, _)| awaited).collect();
        let ask = |index: usize| all[index].ask();
        stream::iter((0..all.len()).map(ask)).buffer_unordered(QUESTIONS).collect::<()>().await;
        self.judge(room, Awaited::guess)
    }

    fn judge(&self, room: &Room, unpacked: impl Fn(&Awaited<'a>) -> u64) -> Result<(), String> {
        let need = |todo: &[(Awaited<'a>, u64)]| {
            let add = |need: Need, (awaited, missing): &(Awaited<'a>, u64)| Need {
                download: need.download.saturating_add(*missing),
                unpacked: need.unpacked.saturating_add(unpacked(awaited).max(awaited.layer.size)),
            };
            todo.iter().fold(Need::default(), add)
        };
        judge(need(&self.own), need(&self.others), room)
    }
}

impl Awaited<'_> {
    /// Compressed bytes that are missing now.
    fn missing(&self) -> u64 {
        self.layer.size.saturating_sub(self.flight.written())
    }

    /// What the layer unpacks to, as far as anybody knows.
    fn guess(&self) -> u64 {
        self.flight.unpacked().unwrap_or_else(|| self.layer.guess_unpacked())
    }

    /// Has the registry tell what the layer unpacks to.
    async fn ask(&self) {
        let Some(repository) = self.repository else { return };
        let answer = async {
            let told = repository.unpacked_size(self.layer).await;
            told.ok().flatten().unwrap_or_else(|| self.layer.guess_unpacked())
        };
        self.flight.ask_unpacked(answer).await;
    }
}

/// Decides whether there is room for this image besides the others.
fn judge(own: Need, others: Need, Room { content, images, rules }: &Room) -> Result<(), String> {
    let mut needs: BTreeMap<u64, (&Disk, u64, u64)> =
        BTreeMap::from([(content.device, (content, own.download, others.download))]);
    let (_, bytes, promised) = needs.entry(images.device).or_insert((images, 0, 0));
    *bytes = bytes.saturating_add(own.unpacked);
    *promised = promised.saturating_add(others.unpacked);
    for (disk, bytes, promised) in needs.into_values() {
        let (kept, why) = kept_free(disk, rules);
        if disk.available < bytes.saturating_add(promised).saturating_add(kept) {
            return Err(format!(
                "no room for the image: it takes {} ({} to download, about {} unpacked), and {} has {} free, of which {} stay free ({why}){}",
                mib(bytes),
                mib(own.download),
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

/// What other pulls of the node will still write, in words.
fn for_others(promised: u64, amount: impl Fn(u64) -> String) -> String {
    if promised == 0 {
        String::new()
    } else {
        format!(" and {} are for images that are being pulled", amount(promised))
    }
}

/// Bytes that stay free, and by which rule.
fn kept_free(disk: &Disk, rules: &RoomRules) -> (u64, String) {
    let RoomRules { gc_high_threshold, disk_min_free } = rules;
    let of_kubelet = free_percent(*gc_high_threshold).in_bytes(disk.capacity);
    let of_agent = disk_min_free.in_bytes(disk.capacity);
    if of_kubelet >= of_agent {
        (of_kubelet, format!("--image-gc-high-threshold {gc_high_threshold}"))
    } else {
        (of_agent, format!("--disk-min-free {disk_min_free}"))
    }
}

/// What is left of a disk that is used up to this percentage.
fn free_percent(used: Percent) -> Amount {
    Amount::Percent(u8::try_from(100_u32.saturating_sub(used.0)).unwrap_or(0))
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::super::flights::Flights;
    use super::*;

    const MIB: u64 = 1 << 20;
    const RULES: RoomRules = RoomRules { gc_high_threshold: Percent(85), disk_min_free: Amount::Percent(10) };

    fn disk(device: u64, available: u64) -> Disk {
        let path = format!("/{device}");
        Disk { path, device, capacity: 1000 * MIB, available, inodes: 10_000, free_inodes: 10_000 }
    }

    fn alone(need: Need, content: Disk, images: Disk, rules: RoomRules) -> Result<(), String> {
        judge(need, Need::default(), &Room { content, images, rules })
    }

    #[test]
    fn an_image_fits_if_the_kubelet_has_no_reason_to_remove_any() {
        let need = Need { download: 10 * MIB, unpacked: 40 * MIB };
        let judge = |content, images| alone(need, content, images, RULES);
        let one = |available| judge(disk(1, available), disk(1, available));
        assert_eq!(one(200 * MIB), Ok(()));
        assert_eq!(
            one(200 * MIB - 1).unwrap_err(),
            "no room for the image: it takes 50 MiB (10 MiB to download, about 40 MiB unpacked), and /1 has 200 MiB free, of which 150 MiB stay free (--image-gc-high-threshold 85%)"
        );
        // On two file systems, each has its own part.
        assert_eq!(judge(disk(1, 160 * MIB), disk(2, 190 * MIB)), Ok(()));
        let full = judge(disk(1, 159 * MIB), disk(2, 190 * MIB)).unwrap_err();
        assert!(full.contains("it takes 10 MiB") && full.contains("/1 has 159 MiB"), "{full}");
        let full = judge(disk(1, 160 * MIB), disk(2, 189 * MIB)).unwrap_err();
        assert!(full.contains("it takes 40 MiB") && full.contains("/2 has 189 MiB"), "{full}");
    }

    #[test]
    fn the_stricter_of_the_two_rules_holds() {
        let rules = RoomRules { disk_min_free: Amount::Bytes(300 * MIB), ..RULES };
        let need = Need { download: MIB, unpacked: MIB };
        let full = alone(need, disk(1, 301 * MIB), disk(1, 301 * MIB), rules).unwrap_err();
        assert!(full.contains("300 MiB stay free (--disk-min-free"), "{full}");
    }

    #[test]
    fn inodes_count_where_the_file_system_has_a_number_of_them() {
        let need = Need { download: 0, unpacked: 320 * MIB };
        let few = Disk { free_inodes: 5000, ..disk(1, 900 * MIB) };
        assert!(alone(need, few.clone(), few.clone(), RULES).unwrap_err().contains("10240 inodes"));
        let dynamic = Disk { inodes: 0, free_inodes: 0, ..few };
        assert_eq!(alone(need, dynamic.clone(), dynamic, RULES), Ok(()));
    }

    fn awaited<'a>(layers: &'a [(Descriptor, Arc<Flight>)]) -> Vec<Awaited<'a>> {
        let awaited =
            |(layer, flight): &'a (Descriptor, Arc<Flight>)| Awaited { layer, flight, repository: None };
        layers.iter().map(awaited).collect()
    }

    #[tokio::test]
    async fn an_image_fits_besides_what_earlier_pulls_will_still_write_each_layer_once() {
        let flights = Flights::default();
        let layer = |name: &str, size: u64, written: u64| {
            let digest = format!("sha256:{name}");
            let flight = flights.of(&digest);
            flight.set_written(written * MIB);
            (Descriptor { digest, size: size * MIB, ..Descriptor::default() }, flight)
        };
        let own = [layer("own", 10, 0), layer("shared", 20, 5)];
        let others = [
            layer("shared", 20, 5),
            layer("theirs", 40, 30),
            layer("arrived", 3, 3),
            layer("unpacked", 100, 100),
        ];
        let done = HashSet::from(["sha256:unpacked"]);
        let todo = Todo::without(awaited(&own), awaited(&others), done);
        // Of its own 10 + 15 to download and 30 unpacked; of the others 10 to download and 40 + 3 unpacked.
        let check = async |available| {
            let (content, images) = (disk(1, available), disk(1, available));
            todo.check(&Room { content, images, rules: RULES }).await
        };
        assert_eq!(check((150 + 55 + 53) * MIB).await, Ok(()));
        assert_eq!(
            check((150 + 55 + 53) * MIB - 1).await.unwrap_err(),
            "no room for the image: it takes 55 MiB (25 MiB to download, about 30 MiB unpacked), and /1 has 258 MiB free, of which 150 MiB stay free (--image-gc-high-threshold 85%) and 53 MiB are for images that are being pulled"
        );
        // What somebody has asked a registry counts, and not what is usual.
        own[0].1.ask_unpacked(async { 11 * MIB }).await;
        assert!(check((150 + 55 + 53) * MIB).await.is_err());
        assert_eq!(check((150 + 56 + 53) * MIB).await, Ok(()));
    }

    #[test]
    fn the_disk_of_a_directory_can_be_read() {
        let root = Disk::read(Path::new("/")).unwrap();
        assert!(root.capacity > 0 && root.capacity >= root.available);
    }
}
