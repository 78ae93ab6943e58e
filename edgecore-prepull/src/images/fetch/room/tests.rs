#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::*;
use crate::images::fetch::flights::Flights;

const MIB: u64 = 1 << 20;
const RULES: RoomRules =
    RoomRules { gc_high_threshold: Percent(85), disk_min_free: Amount::Percent(10), make_room: false };

fn disk(device: u64, available: u64) -> DiskSpace {
    let path = format!("/{device}");
    DiskSpace { path, device, capacity: 1000 * MIB, available, inodes: 10_000, free_inodes: 10_000 }
}

fn alone(need: Need, content: DiskSpace, images: DiskSpace, rules: RoomRules) -> Result<(), String> {
    judge_room(need, Need::default(), &Room { content, images, rules })
}

#[test]
fn an_image_fits_below_the_kubelets_threshold() {
    let need = Need { download: 10 * MIB, tars: 0, unpacked: 40 * MIB };
    let judge = |content, images| alone(need, content, images, RULES);
    let one = |available| judge(disk(1, available), disk(1, available));
    assert_eq!(one(200 * MIB), Ok(()));
    assert_eq!(
        one(200 * MIB - 1).unwrap_err(),
        "no room for the image: it takes 50 MiB (10 MiB to download, about 40 MiB unpacked), and /1 has 200 MiB free, of which 150 MiB stay free (--image-gc-high-threshold 85%)"
    );
    // On two file systems, each takes its own part.
    assert_eq!(judge(disk(1, 160 * MIB), disk(2, 190 * MIB)), Ok(()));
    let full = judge(disk(1, 159 * MIB), disk(2, 190 * MIB)).unwrap_err();
    assert!(full.contains("it takes 10 MiB") && full.contains("/1 has 159 MiB"), "{full}");
    let full = judge(disk(1, 160 * MIB), disk(2, 189 * MIB)).unwrap_err();
    assert!(full.contains("it takes 40 MiB") && full.contains("/2 has 189 MiB"), "{full}");
}

#[test]
fn a_rebuilt_tar_lies_beside_its_delta() {
    let need = Need { download: MIB, tars: 40 * MIB, unpacked: 40 * MIB };
    let judge = |content, images| alone(need, content, images, RULES);
    assert_eq!(judge(disk(1, 231 * MIB), disk(1, 231 * MIB)), Ok(()));
    let full = judge(disk(1, 230 * MIB), disk(1, 230 * MIB)).unwrap_err();
    assert!(full.contains("81 MiB (1 MiB to download, 40 MiB for rebuilt layers, about 40 MiB"), "{full}");
    assert_eq!(judge(disk(1, 191 * MIB), disk(2, 190 * MIB)), Ok(()));
    let full = judge(disk(1, 190 * MIB), disk(2, 190 * MIB)).unwrap_err();
    assert!(full.contains("it takes 41 MiB") && full.contains("/1 has 190 MiB"), "{full}");
}

#[test]
fn the_stricter_rule_holds() {
    let rules = RoomRules { disk_min_free: Amount::Bytes(300 * MIB), ..RULES };
    let need = Need { download: MIB, tars: 0, unpacked: MIB };
    let full = alone(need, disk(1, 301 * MIB), disk(1, 301 * MIB), rules).unwrap_err();
    assert!(full.contains("300 MiB stay free (--disk-min-free"), "{full}");
}

#[test]
fn inodes_count_where_they_are_limited() {
    let need = Need { download: 0, tars: 0, unpacked: 320 * MIB };
    let few = DiskSpace { free_inodes: 5000, ..disk(1, 900 * MIB) };
    assert!(alone(need, few.clone(), few.clone(), RULES).unwrap_err().contains("10240 inodes"));
    let dynamic = DiskSpace { inodes: 0, free_inodes: 0, ..few };
    assert_eq!(alone(need, dynamic.clone(), dynamic, RULES), Ok(()));
}

fn awaited<'a>(layers: &'a [(Descriptor, Arc<Flight>)]) -> Vec<Awaited<'a>> {
    let awaited = |(layer, flight): &'a (Descriptor, Arc<Flight>)| Awaited {
        layer,
        flight,
        rebuilt: None,
        repository: None,
    };
    layers.iter().map(awaited).collect()
}

#[tokio::test]
async fn earlier_pulls_take_room_each_layer_once() {
    let flights = Flights::default();
    let layer = |name: &str, size: u64, written: u64| {
        let digest = format!("sha256:{name}");
        let flight = flights.shared_value(&digest);
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
    let todo = Todo::without_done(awaited(&own), awaited(&others), done);
    // Its own: 10 + 15 to download and 30 unpacked. The others: 10 to download and 40 + 3 unpacked.
    let check = async |available| {
        let (content, images) = (disk(1, available), disk(1, available));
        todo.check(&Room { content, images, rules: RULES }).await
    };
    assert_eq!(check((150 + 55 + 53) * MIB).await, Ok(()));
    assert_eq!(
        check((150 + 55 + 53) * MIB - 1).await.unwrap_err(),
        "no room for the image: it takes 55 MiB (25 MiB to download, about 30 MiB unpacked), and /1 has 258 MiB free, of which 150 MiB stay free (--image-gc-high-threshold 85%) and 53 MiB are for images that are being pulled"
    );
    // A registry's answer counts, and not the estimate.
    own[0].1.ask_unpacked(async { 11 * MIB }).await;
    assert!(check((150 + 55 + 53) * MIB).await.is_err());
    assert_eq!(check((150 + 56 + 53) * MIB).await, Ok(()));
}

#[tokio::test]
async fn a_deltas_sizes_count_for_its_pull_alone() {
    let flights = Flights::default();
    let layer = Descriptor { digest: "sha256:delta".to_owned(), size: MIB, ..Descriptor::default() };
    let blob = [(layer, flights.shared_value("sha256:delta"))];
    let disk = disk(1, 230 * MIB);
    let room = Room { content: disk.clone(), images: disk, rules: RULES };
    let judge = async |rebuilt| {
        let own = awaited(&blob).into_iter().map(|awaited| Awaited { rebuilt, ..awaited }).collect();
        Todo::without_done(own, Vec::new(), HashSet::new()).check(&room).await
    };
    let full = judge(Some(RebuiltSizes { tar: 40 * MIB, unpacked: 40 * MIB })).await.unwrap_err();
    assert!(full.contains("81 MiB (1 MiB to download, 40 MiB for rebuilt layers, about 40 MiB"), "{full}");
    assert_eq!(judge(None).await, Ok(()), "another image has the same blob as a layer");
}

#[test]
fn a_directorys_disk_can_be_read() {
    let root = DiskSpace::read(Path::new("/")).unwrap();
    assert!(root.capacity > 0 && root.capacity >= root.available);
}

/// A disk of 1000 MiB, and an image of 25 + 75 MiB that isn't there.
async fn decide(available: u64, make_room: bool, images: &[(&str, u64)]) -> Result<Vec<String>, String> {
    let flights = Flights::default();
    let layer = Descriptor { digest: "sha256:own".to_owned(), size: 25 * MIB, ..Descriptor::default() };
    let own = [(layer, flights.shared_value("sha256:own"))];
    own[0].1.ask_unpacked(async { 75 * MIB }).await;
    let todo = Todo::without_done(awaited(&own), Vec::new(), HashSet::new());
    let disk = disk(1, available * MIB);
    let room = Room { content: disk.clone(), images: disk, rules: RoomRules { make_room, ..RULES } };
    let refusal = todo.check(&room).await.unwrap_err();
    let removable = |(index, (name, _)): (usize, &(&str, u64))| Removable {
        id: name.to_string(),
        names: vec![name.to_string()],
        last_needed: std::time::UNIX_EPOCH + std::time::Duration::from_secs(index as u64),
        pieces: [name.to_string()].into(),
    };
    let pieces = images.iter().map(|(name, mib)| {
        let (content, unpacked) = (mib * MIB / 4, mib * MIB - mib * MIB / 4);
        (name.to_string(), Freed { content, unpacked, inodes: 0 })
    });
    let removables = Removables::new(images.iter().enumerate().map(removable).collect(), pieces.collect());
    match todo.decide(&refusal, &room, &removables) {
        RoomVerdict::LeftToKubelet => Ok(vec!["kubelet".to_owned()]),
        RoomVerdict::Remove(chosen) => {
            Ok(chosen.into_iter().map(|(image, _)| image.name().to_owned()).collect())
        }
        RoomVerdict::Refuse(reason) => Err(reason.split_once("; ").unwrap().1.to_owned()),
    }
}

#[tokio::test]
async fn unneeded_images_count_as_free() {
    let images = [("a", 40), ("b", 60), ("c", 100), ("d", 100)];
    let ok = |names: &[&str]| Ok(names.iter().map(ToString::to_string).collect::<Vec<_>>());
    // 150 MiB must stay free, or 100 for a while.
    for (available, make_room, expected) in [
        (249, false, ok(&["kubelet"])),
        (200, false, ok(&["kubelet"])),
        (249, true, ok(&["a"])),
        (200, true, ok(&["b"])),
        (150, true, ok(&["a", "b"])),
        (50, true, ok(&["a", "b", "c"])),
        (40, true, ok(&["a", "c", "d"])),
        (
            199,
            false,
            Err("removing an image that nothing needs (b) would give 60 MiB, which the agent does with --make-room"
                .to_owned()),
        ),
    ] {
        assert_eq!(decide(available, make_room, &images).await, expected, "{available} {make_room}");
    }
}

#[tokio::test]
async fn too_little_to_remove_is_left() {
    for make_room in [false, true] {
        let reason = decide(200, make_room, &[("a", 40), ("b", 9)]).await.unwrap_err();
        assert_eq!(reason, "2 images that nothing needs would give 49 MiB, which is not enough");
        let reason = decide(200, make_room, &[]).await.unwrap_err();
        assert_eq!(reason, "no image can be removed: all are in use, pinned, new, or wanted by a task");
    }
}
