#![allow(clippy::unwrap_used)]

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::apply::{ApplyLimits, OldRootFiles, apply_diff};

/// A tar entry: a file, another name of a file, a directory, a link.
#[derive(Clone, Debug)]
enum Item {
    File(Vec<u8>),
    Hard(&'static str),
    Directory,
    Soft(&'static str),
}

fn file(content: &[u8]) -> Item {
    Item::File(content.to_vec())
}

fn tar_of(items: &[(&str, Item)], mtime: u64) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, item) in items {
        let mut header = tar::Header::new_gnu();
        header.set_mtime(mtime);
        header.set_mode(if matches!(item, Item::Directory) { 0o755 } else { 0o644 });
        let (kind, content, link) = match item {
            Item::File(content) => (tar::EntryType::Regular, content.clone(), None),
            Item::Hard(to) => (tar::EntryType::Link, Vec::new(), Some(to)),
            Item::Directory => (tar::EntryType::Directory, Vec::new(), None),
            Item::Soft(to) => (tar::EntryType::Symlink, Vec::new(), Some(to)),
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        match link {
            Some(to) => builder.append_link(&mut header, path, to).unwrap(),
            None => builder.append_data(&mut header, path, &content[..]).unwrap(),
        }
    }
    builder.into_inner().unwrap()
}

fn root(tars: &[Vec<u8>]) -> Root<'_> {
    Root::read(tars.iter().map(|tar| tar as &dyn Tar).collect()).unwrap()
}

fn settings() -> Resources {
    Resources { threads: 2, memory: 16 << 20 }
}

/// Makes a diff, and returns it.
fn made(old: &[Vec<u8>], new: &Vec<u8>) -> (Made, Vec<u8>) {
    let (mut out, mut done) = (Cursor::new(Vec::new()), 0);
    let made = make_diff(&root(old), new, &mut out, &settings(), &mut |bytes| {
        assert!(bytes >= done);
        done = bytes;
    });
    let made = made.unwrap();
    assert_eq!((done, made.uncompressed), (new.len() as u64, new.len() as u64));
    let out = out.into_inner();
    assert_eq!(made.size, out.len() as u64);
    (made, out)
}

/// Bytes that nothing compresses.
fn noise(length: usize, mut seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.push((seed >> 56) as u8);
    }
    bytes
}

fn content_of(root: &Root<'_>, path: &str) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    let mut sources = root;
    sources.open(path.as_bytes()).ok()?.read_to_end(&mut content).unwrap();
    Some(content)
}

#[test]
fn a_delta_costs_what_changed() {
    let (same, moved) = (noise(300_000, 1), noise(200_000, 2));
    let program = noise(500_000, 3);
    let mut relinked = program.clone();
    for at in (0..relinked.len()).step_by(1000) {
        relinked[at] = relinked[at].wrapping_add(8);
    }
    relinked.splice(250_000..250_000, *b"a new function");
    let fresh = noise(50_000, 4);
    let old = vec![
        tar_of(&[("usr/bin/app", file(&program)), ("a/moved", file(&moved))], 1),
        tar_of(&[("./usr/share/same", file(&same)), ("tiny", file(b"x"))], 1),
    ];
    let new = tar_of(
        &[
            ("usr/bin/app", file(&relinked)),
            ("b/elsewhere", file(&moved)),
            ("usr/share/same", file(&same)),
            ("etc/fresh", file(&fresh)),
            ("tiny", file(b"y")),
            ("empty", file(b"")),
        ],
        2,
    );
    let (made, _) = made(&old, &new);
    assert!(made.size < 60_000, "{} bytes", made.size);
    let unshrunk: Vec<_> = made.unshrunk.iter().map(|file| (file.path.as_str(), file.cause)).collect();
    assert_eq!(unshrunk, [("etc/fresh", Cause::New)]);
    assert!((50_000..made.size).contains(&made.unshrunk[0].sent));
}

/// A tar of one file in a directory, each with its mode and its owner.
fn tar_of_owned(directory: (u32, u64), file: (u32, u64), content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |path: &str, kind, (mode, uid): (u32, u64), content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(uid);
        header.set_gid(uid);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, content).unwrap();
    };
    add("app", tar::EntryType::Directory, directory, b"");
    add("app/data", tar::EntryType::Regular, file, content);
    builder.into_inner().unwrap()
}

#[test]
fn only_files_that_the_agent_can_read_are_sources() {
    let content = noise(100_000, 1);
    for (directory, file, is_used) in [
        ((0o755, 0), (0o644, 1000), true),
        ((0o755, 0), (0o600, 0), true),
        ((0o700, 0), (0o600, 0), true),
        ((0o711, 1000), (0o604, 1000), true),
        ((0o755, 0), (0o600, 1000), false),
        ((0o755, 0), (0o640, 1000), false),
        ((0o700, 1000), (0o644, 1000), false),
        ((0o755, 0), (0o000, 0), false),
    ] {
        let old = tar_of_owned(directory, file, &content);
        let (made, _) = made(std::slice::from_ref(&old), &old);
        assert_eq!(made.size < 1000, is_used, "{directory:?} {file:?}: {} bytes", made.size);
        let causes: Vec<_> = made.unshrunk.iter().map(|file| file.cause).collect();
        assert_eq!(causes, if is_used { vec![] } else { vec![Cause::Closed] }, "{directory:?} {file:?}");
    }
}

#[test]
fn unlike_files_are_sent_as_they_are() {
    let old = vec![tar_of(&[("app.jar", file(&noise(100_000, 1)))], 1)];
    let new = tar_of(&[("app.jar", file(&noise(100_000, 2)))], 1);
    let (made, _) = made(&old, &new);
    assert_eq!(made.unshrunk[0].cause, Cause::Unlike);
    assert!(made.size < 102_000, "{}", made.size);
}

#[test]
fn the_root_follows_whiteouts_and_links() {
    let tars = vec![
        tar_of(
            &[
                ("etc", Item::Directory),
                ("etc/kept", file(b"kept")),
                ("etc/gone", file(b"gone")),
                ("opt/a/b", file(b"b")),
                ("var/lib/x", file(b"x")),
                ("bin/real", file(b"real")),
                ("bin/other", Item::Hard("bin/real")),
                ("lib", Item::Soft("usr/lib")),
                ("lib/below", file(b"below")),
                ("was/directory", file(b"1")),
            ],
            1,
        ),
        tar_of(
            &[
                ("etc/.wh.gone", file(b"")),
                ("opt/.wh.a", file(b"")),
                ("var/lib/y", file(b"y")),
                ("var/lib/.wh..wh..opq", file(b"")),
                ("was", file(b"a file now")),
                ("bin/upper", Item::Hard("bin/real")),
            ],
            1,
        ),
    ];
    let root = root(&tars);
    for (path, expected) in [
        ("etc/kept", Some("kept")),
        ("etc/gone", None),
        ("opt/a/b", None),
        ("var/lib/x", None),
        ("var/lib/y", Some("y")),
        ("bin/real", Some("real")),
        ("bin/other", Some("real")),
        ("bin/upper", None),
        ("was", Some("a file now")),
        ("was/directory", None),
        ("lib", None),
        ("etc", None),
    ] {
        assert_eq!(content_of(&root, path).as_deref(), expected.map(str::as_bytes), "{path}");
    }
    let files: Vec<_> = root.files().into_iter().map(|(path, _)| String::from_utf8_lossy(path)).collect();
    assert_eq!(files, ["bin/other", "bin/real", "etc/kept", "var/lib/y", "was"], "nothing below a link");
}

#[test]
fn trailing_bytes_and_no_files_are_kept() {
    for new in [Vec::new(), vec![0; 1024], [tar_of(&[("a", file(&noise(100, 1)))], 1), noise(77, 1)].concat()]
    {
        made(&[], &new);
    }
}

#[test]
fn what_is_no_tar_is_an_error() {
    let new = noise(2000, 1);
    let made = make_diff(&root(&[]), &new, &mut Cursor::new(Vec::new()), &settings(), &mut |_| {});
    assert!(matches!(made, Err(MakeError::Tar(_))), "{made:?}");
}

#[test]
fn blobs_are_unpacked_by_their_first_bytes() {
    let tar = tar_of(&[("a", file(b"content"))], 1);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::encode_all(&tar[..], 3).unwrap();
    for (blob, expected) in [
        (gzip.clone(), tar.clone()),
        ([gzip.clone(), gzip].concat(), tar.repeat(2)),
        (zstd, tar.clone()),
        (tar.clone(), tar),
        (Vec::new(), Vec::new()),
    ] {
        let mut unpacked = Vec::new();
        unpack(&blob[..]).unwrap().read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, expected);
    }
}

fn content() -> impl Strategy<Value = Vec<u8>> {
    (any::<u64>(), 0..4000_usize, prop::collection::vec((0..4000_usize, any::<u8>()), 0..4)).prop_map(
        |(seed, length, changes)| {
            let mut content = noise(length, seed % 3);
            for (at, byte) in changes {
                if let Some(place) = content.get_mut(at) {
                    *place = byte;
                }
            }
            content
        },
    )
}

fn layer() -> impl Strategy<Value = Vec<u8>> {
    let path = prop_oneof![Just("a"), Just("d/b1"), Just("d/b2"), Just("e/f/c"), Just("d/.wh.b1")];
    prop::collection::vec((path, content().prop_map(Item::File)), 0..5).prop_map(|items| tar_of(&items, 1))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_images_have_a_delta(old in prop::collection::vec(layer(), 0..3), new in layer()) {
        let (_, diff) = made(&old, &new);
        let (root, mut out) = (root(&old), Vec::new());
        apply_diff(&diff[..], &mut &root, &mut out, &ApplyLimits { output: new.len() as u64 }).unwrap();
        prop_assert_eq!(out, new);
    }
}
