//! Whether an image fits: decided before the first byte of it is fetched.
//!
//! What is missing arrives compressed in the content store and is unpacked beside it. Both must leave so much free that
//! the kubelet neither removes images nor evicts pods, which it does from its thresholds on.

use std::collections::BTreeMap;
use std::path::Path;

use prepull_registry::manifest::Descriptor;

use crate::config::{Amount, Percent};

/// Bytes of unpacked content for each file: most images have larger files.
const BYTES_PER_FILE: u64 = 32 * 1024;
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

/// What an image will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// Compressed bytes that are still to come.
    pub(super) download: u64,
    /// Bytes of what is unpacked of them.
    pub(super) unpacked: u64,
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

impl Need {
    /// Adds a layer of which so many compressed bytes are missing.
    pub(super) fn add(&mut self, layer: &Descriptor, missing: u64, unpacked: u64) {
        self.download = self.download.saturating_add(missing);
        self.unpacked = self.unpacked.saturating_add(unpacked.max(layer.size));
    }
}

/// Decides whether an image fits. `content` is where compressed layers are, `images` where they are unpacked; the two
/// may be the same file system. The error has the numbers.
pub(super) fn judge(need: Need, content: &Disk, images: &Disk, rules: &RoomRules) -> Result<(), String> {
    let mut needs: BTreeMap<u64, (&Disk, u64)> = BTreeMap::from([(content.device, (content, need.download))]);
    needs.entry(images.device).or_insert((images, 0)).1 += need.unpacked;
    for (disk, bytes) in needs.into_values() {
        let (kept, why) = kept_free(disk, rules);
        if disk.available < bytes.saturating_add(kept) {
            return Err(format!(
                "no room for the image: it takes {} ({} to download, about {} unpacked), and {} has {} free, of which {} stay free ({why})",
                mib(bytes),
                mib(need.download),
                mib(need.unpacked),
                disk.path,
                mib(disk.available),
                mib(kept)
            ));
        }
    }
    let (files, kept) = (need.unpacked / BYTES_PER_FILE, INODES_LEFT.in_bytes(images.inodes));
    if images.inodes > 0 && images.free_inodes < files.saturating_add(kept) {
        return Err(format!(
            "no room for the image: it takes about {files} inodes, and {} has {} free, of which {kept} stay free (the kubelet evicts pods from {INODES_LEFT} on)",
            images.path, images.free_inodes
        ));
    }
    Ok(())
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

    use super::*;

    const MIB: u64 = 1 << 20;
    const RULES: RoomRules = RoomRules { gc_high_threshold: Percent(85), disk_min_free: Amount::Percent(10) };

    fn disk(device: u64, available: u64) -> Disk {
        let path = format!("/{device}");
        Disk { path, device, capacity: 1000 * MIB, available, inodes: 10_000, free_inodes: 10_000 }
    }

    #[test]
    fn an_image_fits_if_the_kubelet_has_no_reason_to_remove_any() {
        let need = Need { download: 10 * MIB, unpacked: 40 * MIB };
        let one = |available| judge(need, &disk(1, available), &disk(1, available), &RULES);
        assert_eq!(one(200 * MIB), Ok(()));
        assert_eq!(
            one(200 * MIB - 1).unwrap_err(),
            "no room for the image: it takes 50 MiB (10 MiB to download, about 40 MiB unpacked), and /1 has 200 MiB free, of which 150 MiB stay free (--image-gc-high-threshold 85%)"
        );
        // On two file systems, each has its own part.
        assert_eq!(judge(need, &disk(1, 160 * MIB), &disk(2, 190 * MIB), &RULES), Ok(()));
        let full = judge(need, &disk(1, 159 * MIB), &disk(2, 190 * MIB), &RULES).unwrap_err();
        assert!(full.contains("it takes 10 MiB") && full.contains("/1 has 159 MiB"), "{full}");
        let full = judge(need, &disk(1, 160 * MIB), &disk(2, 189 * MIB), &RULES).unwrap_err();
        assert!(full.contains("it takes 40 MiB") && full.contains("/2 has 189 MiB"), "{full}");
    }

    #[test]
    fn the_stricter_of_the_two_rules_holds() {
        let rules = RoomRules { disk_min_free: Amount::Bytes(300 * MIB), ..RULES };
        let need = Need { download: MIB, unpacked: MIB };
        let full = judge(need, &disk(1, 301 * MIB), &disk(1, 301 * MIB), &rules).unwrap_err();
        assert!(full.contains("300 MiB stay free (--disk-min-free"), "{full}");
    }

    #[test]
    fn inodes_count_where_the_file_system_has_a_number_of_them() {
        let need = Need { download: 0, unpacked: 320 * MIB };
        let few = Disk { free_inodes: 5000, ..disk(1, 900 * MIB) };
        assert!(judge(need, &few, &few, &RULES).unwrap_err().contains("10240 inodes"));
        let dynamic = Disk { inodes: 0, free_inodes: 0, ..few };
        assert_eq!(judge(need, &dynamic, &dynamic, &RULES), Ok(()));
    }

    #[test]
    fn the_disk_of_a_directory_can_be_read() {
        let root = Disk::read(Path::new("/")).unwrap();
        assert!(root.capacity > 0 && root.capacity >= root.available);
    }
}
