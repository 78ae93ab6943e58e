//! Test vectors, made from the description of the format by an encoder of a few lines.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{self, Cursor};

use proptest::prelude::*;

use super::*;

/// An operation and its payload. Of those without payload it's the size.
#[derive(Clone, Debug)]
enum Step {
    Payload(u8, Vec<u8>),
    Size(u8, u64),
}

fn data(bytes: &[u8]) -> Step {
    Step::Payload(0, bytes.to_vec())
}

fn open(path: &str) -> Step {
    Step::Payload(1, path.as_bytes().to_vec())
}

fn copy(size: u64) -> Step {
    Step::Size(2, size)
}

fn add(bytes: &[u8]) -> Step {
    Step::Payload(3, bytes.to_vec())
}

fn seek(to: u64) -> Step {
    Step::Size(4, to)
}

fn frame(content: &[u8], prefix: &[u8]) -> Step {
    let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), 3, prefix).unwrap();
    encoder.include_contentsize(true).unwrap();
    encoder.set_pledged_src_size(Some(content.len() as u64)).unwrap();
    encoder.window_log(22).unwrap();
    io::copy(&mut &content[..], &mut encoder).unwrap();
    Step::Payload(5, encoder.finish().unwrap())
}

fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap());
}

fn operations(steps: &[Step]) -> Vec<u8> {
    let mut out = Vec::new();
    for step in steps {
        match step {
            Step::Payload(op, payload) => {
                out.push(*op);
                write_varint(&mut out, payload.len() as u64);
                out.extend_from_slice(payload);
            }
            Step::Size(op, size) => {
                out.push(*op);
                write_varint(&mut out, *size);
            }
        }
    }
    out
}

fn pack(version: u8, operations: &[u8]) -> Vec<u8> {
    let mut diff = format!("tardf{version}\n\0").into_bytes();
    diff.extend(zstd::encode_all(operations, 3).unwrap());
    diff
}

/// The files of an old image, in memory.
struct Files(BTreeMap<Vec<u8>, Vec<u8>>);

impl OldRootFiles for Files {
    type File = Cursor<Vec<u8>>;

    fn open(&mut self, path: &[u8]) -> io::Result<Self::File> {
        self.0.get(path).cloned().map(Cursor::new).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn files() -> Files {
    let numbers: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    Files(BTreeMap::from([
        (b"etc/hello".to_vec(), b"hello world".to_vec()),
        (b"usr/numbers".to_vec(), numbers),
        (b"usr/large".to_vec(), vec![7; usize::try_from(MAX_WHOLE).unwrap() + 1]),
    ]))
}

fn try_apply(diff: &[u8], limit: u64) -> Result<(Applied, Vec<u8>), ApplyError> {
    let mut out = Vec::new();
    apply_diff(diff, &mut files(), &mut out, &ApplyLimits { output: limit }).map(|applied| (applied, out))
}

fn applied(version: u8, steps: &[Step]) -> Vec<u8> {
    let (applied, out) = try_apply(&pack(version, &operations(steps)), 1 << 30).unwrap();
    assert_eq!(applied.written, out.len() as u64);
    out
}

fn refused(version: u8, steps: &[Step]) -> String {
    try_apply(&pack(version, &operations(steps)), 1 << 20).unwrap_err().to_string()
}

#[test]
fn each_operation_does_what_it_should() {
    let steps = [
        data(b"head "),
        open("etc/hello"),
        copy(5),
        seek(6),
        copy(5),
        seek(0),
        // 'h' + 1, 'e' + 255, 'l' + 0, wrapping.
        add(&[1, 255, 0]),
        open("/usr/./numbers"),
        seek(254),
        add(&[2, 2, 0]),
        data(b""),
        copy(0),
        add(b""),
    ];
    let expected = b"head helloworldidl\x00\x01\x00";
    assert_eq!(applied(1, &steps), expected);
    assert_eq!(applied(2, &steps), expected, "tardf2 has the same operations");
    let (applied, _) = try_apply(&pack(1, &operations(&steps)), 100).unwrap();
    assert_eq!(applied, Applied { written: 21, reused: 16 });
}

/// Bytes that don't compress, the same ones for a seed.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let next = |state: &u64| {
        Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    };
    let states = std::iter::successors(next(&seed), next);
    states.take(count).map(|state| state.to_be_bytes()[0]).collect()
}

/// Its diff is by the tool itself, at commit f08980f, from a tar of these files to one in which the program has other bytes and
/// more of them, the words have another path, and a file is new. It has every operation of `tardf1`.
#[test]
fn a_diff_of_the_reference_tool_applies() {
    let diff = include_bytes!("../../testdata/reference.tardiff");
    let mut files = Files(BTreeMap::from([
        (b"usr/bin/program".to_vec(), noise(1, 20_000)),
        (b"usr/share/words".to_vec(), noise(2, 3_000)),
    ]));
    let mut out = Vec::new();
    apply_diff(&diff[..], &mut files, &mut out, &ApplyLimits { output: 30_720 }).unwrap();
    let digest = ring::digest::digest(&ring::digest::SHA256, &out);
    let expected = "78dfc35aeeb82e860a2c88321471e2185ae354827284d802c64a1bb8a8137ac5";
    assert_eq!(prepull_api::enroll::hex(digest.as_ref()), expected);
}

#[test]
fn a_frame_takes_its_file_as_prefix() {
    let old = &files().0[&b"usr/numbers"[..]];
    let mut new = old.clone();
    new[1000] = 9;
    new.extend_from_slice(b"tail");
    let packed = frame(&new, old);
    let Step::Payload(_, content) = &packed else { unreachable!() };
    assert!(content.len() < 300, "{}: it refers to the prefix", content.len());
    // The position of the file doesn't matter, and what follows in the payload is skipped.
    let padded = Step::Payload(5, [content.clone(), b"padding".to_vec()].concat());
    let steps = [open("usr/numbers"), seek(100), packed, padded, data(b"!")];
    assert_eq!(applied(2, &steps), [new.clone(), new, b"!".to_vec()].concat());
    assert!(refused(1, &steps).contains("operation 5 is unknown"));
}

#[test]
fn large_operations_stream() {
    let old = &files().0[&b"usr/numbers"[..]];
    let (zeros, text) = (vec![0; 200_000], vec![b'x'; 200_000]);
    let steps = [open("usr/numbers"), add(&zeros), seek(50_000), copy(200_000), data(&text)];
    assert_eq!(applied(1, &steps), [&old[..200_000], &old[50_000..250_000], &text].concat());
}

#[test]
fn an_empty_diff_makes_nothing() {
    assert_eq!(applied(1, &[]), b"");
}

#[test]
fn paths_outside_and_empty_are_refused() {
    for (path, problem) in [
        ("", "names no file"),
        ("/", "names no file"),
        ("./.", "names no file"),
        ("../etc/hello", "leads upwards"),
        ("etc/../etc/hello", "leads upwards"),
        ("etc/hello\0", "has a zero byte"),
    ] {
        let error = refused(1, &[open(path), copy(1)]);
        assert!(error.contains(problem), "{path:?}: {error}");
    }
    let error = refused(1, &[open(&"x".repeat(4097))]);
    assert!(error.contains("a path of 4097 bytes"), "{error}");
}

#[test]
fn a_source_that_is_missing_or_short_is_named() {
    for steps in [
        vec![open("etc/none")],
        vec![open("etc/hello"), copy(12)],
        vec![open("etc/hello"), seek(1 << 40), add(&[1])],
    ] {
        let error = try_apply(&pack(1, &operations(&steps)), 100).unwrap_err();
        assert!(matches!(&error, ApplyError::Source { path, .. } if path.starts_with("etc/")), "{error}");
    }
}

#[test]
fn malformed_diffs_are_refused() {
    for (steps, problem) in [
        (vec![copy(1)], "Copy before a file is open"),
        (vec![add(&[1])], "Add before a file is open"),
        (vec![seek(1)], "Seek before a file is open"),
        (vec![Step::Size(6, 0)], "operation 6 is unknown"),
        (vec![open("etc/hello"), seek(u64::MAX)], "a seek to 18446744073709551615"),
    ] {
        let error = refused(2, &steps);
        assert!(error.contains(problem), "{steps:?}: {error}");
    }
    for (operations, problem) in [
        (&b"\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02"[..], "more than 64 bits"),
        (b"\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 64 bits"),
        (b"\x00", "unexpected end of file"),
        (b"\x00\x05abc", "failed to fill whole buffer"),
        (b"\x01\x05abc", "failed to fill whole buffer"),
    ] {
        let error = try_apply(&pack(1, operations), 1 << 20).unwrap_err().to_string();
        assert!(error.contains(problem), "{operations:?}: {error}");
    }
    for diff in [&b""[..], b"tardf1", b"tardf3\n\0", b"tardf1\n\0not zstd"] {
        assert!(try_apply(diff, 100).is_err(), "{diff:?}");
    }
    let whole = pack(1, &operations(&[data(b"some bytes that fill a block")]));
    assert!(try_apply(&whole[..whole.len() - 1], 100).is_err(), "cut within the frame");
}

#[test]
fn output_ends_at_its_limit() {
    let large = 300_000;
    for steps in [
        vec![data(&[0; 101])],
        vec![open("usr/numbers"), copy(101)],
        vec![open("usr/numbers"), copy(large), copy(u64::MAX)],
        vec![open("usr/numbers"), add(&[0; 101])],
        vec![open("usr/numbers"), frame(&[1; 101], &files().0[&b"usr/numbers"[..]])],
    ] {
        let error = try_apply(&pack(2, &operations(&steps)), 100).unwrap_err();
        assert!(matches!(error, ApplyError::TooLarge(100)), "{error}");
    }
    assert_eq!(ApplyLimits::of_layer(5, 1).output, 5);
    assert_eq!(ApplyLimits::of_layer(u64::MAX, 1000).output, 1000 * 1032 + (1 << 20));
    assert_eq!(ApplyLimits::of_layer(u64::MAX, u64::MAX).output, u64::MAX);
}

#[test]
fn additions_are_bounded() {
    let operations = operations(&[open("usr/numbers"), Step::Size(3, MAX_ADD + 1)]);
    let error = try_apply(&pack(1, &operations), 1 << 30).unwrap_err().to_string();
    assert!(error.contains("an addition of"), "{error}");
}

#[test]
fn whole_files_in_memory_are_small() {
    let limit = usize::try_from(MAX_WHOLE).unwrap();
    let old = &files().0[&b"usr/numbers"[..]];
    for (steps, problem) in [
        (vec![open("usr/large"), frame(b"x", b"")], "has more than 4194304 bytes"),
        (vec![open("usr/numbers"), frame(&vec![1; limit + 1], old)], "a frame of more than 4194304 bytes"),
        (vec![open("usr/numbers"), Step::Size(5, 5 << 20)], "a frame of 5242880 bytes"),
    ] {
        let error = try_apply(&pack(2, &operations(&steps)), 1 << 30).unwrap_err();
        assert!(matches!(&error, ApplyError::Unsupported(_)), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
    }
}

#[test]
fn windows_above_8_mib_are_refused() {
    let content = operations(&[data(&[1; 100])]);
    let with_window = |log: u32| {
        let mut encoder = zstd::stream::write::Encoder::new(b"tardf1\n\0".to_vec(), 3).unwrap();
        encoder.window_log(log).unwrap();
        io::copy(&mut &content[..], &mut encoder).unwrap();
        encoder.finish().unwrap()
    };
    assert!(try_apply(&with_window(23), 100).is_ok());
    let error = try_apply(&with_window(24), 100).unwrap_err();
    assert!(matches!(error, ApplyError::Diff(_)), "{error}");
}

#[test]
fn operations_without_output_are_counted() {
    let count = usize::try_from(FREE_WORK - OPEN_WORK).unwrap();
    let mut seeks = vec![seek(0); count + 1];
    seeks[0] = open("etc/hello");
    assert!(try_apply(&pack(1, &operations(&seeks)), 100).is_ok());
    seeks.push(seek(0));
    let error = try_apply(&pack(1, &operations(&seeks)), 100).unwrap_err().to_string();
    assert!(error.contains("make next to nothing"), "{error}");
    // Opening and reading a dictionary is more work than a seek.
    let nothing = frame(b"", b"");
    let frames = |count| [vec![open("usr/numbers")], vec![nothing.clone(); count]].concat();
    for steps in [vec![open("etc/hello"); 8192], frames(223)] {
        let refusal = try_apply(&pack(2, &operations(&steps)), 100).map(|_| ());
        assert!(refusal.is_ok(), "{refusal:?}");
        let more = [steps, vec![open("usr/numbers")], vec![nothing.clone(); 2]].concat();
        let error = try_apply(&pack(2, &operations(&more)), 100).unwrap_err().to_string();
        assert!(error.contains("make next to nothing"), "{error}");
    }
}

#[test]
fn an_output_that_fails_is_its_own_error() {
    struct Full;
    impl io::Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let diff = pack(1, &operations(&[data(b"x")]));
    let error = apply_diff(&diff[..], &mut files(), &mut Full, &ApplyLimits { output: 1 }).unwrap_err();
    assert!(matches!(error, ApplyError::Output(_)), "{error}");
}

fn any_step() -> impl Strategy<Value = Step> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..50);
    prop_oneof![
        bytes().prop_map(|bytes| data(&bytes)),
        bytes().prop_map(|bytes| add(&bytes)),
        (0..400_000_u64).prop_map(copy),
        (0..400_000_u64).prop_map(seek),
        prop_oneof![Just("etc/hello"), Just("usr/numbers"), Just("none")].prop_map(open),
    ]
}

/// The same in memory, as the description has it.
fn model(steps: &[Step]) -> Option<Vec<u8>> {
    let (files, mut out) = (files(), Vec::new());
    let (mut file, mut at): (Option<&Vec<u8>>, usize) = (None, 0);
    for step in steps {
        match step {
            Step::Payload(0, payload) => out.extend_from_slice(payload),
            Step::Payload(1, path) => (file, at) = (Some(files.0.get(path)?), 0),
            Step::Payload(_, payload) => {
                let part = file?.get(at..at + payload.len()).or(payload.is_empty().then_some(&[]))?;
                out.extend(part.iter().zip(payload).map(|(old, new)| old.wrapping_add(*new)));
                at += payload.len();
            }
            Step::Size(2, size) => {
                let size = usize::try_from(*size).unwrap();
                out.extend_from_slice(file?.get(at..at + size).or((size == 0).then_some(&[]))?);
                at += size;
            }
            Step::Size(_, to) => {
                file?;
                at = usize::try_from(*to).unwrap();
            }
        }
    }
    Some(out)
}

proptest! {
    #[test]
    fn any_operations_follow_the_description(steps in prop::collection::vec(any_step(), 0..30)) {
        let made = try_apply(&pack(1, &operations(&steps)), 1 << 30).ok().map(|(_, out)| out);
        prop_assert_eq!(made, model(&steps));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = try_apply(&pack(2, &bytes), 1 << 20);
    }
}
