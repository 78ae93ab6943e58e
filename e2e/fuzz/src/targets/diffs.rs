//! Diffs of layers, as any registry may serve them. An input has an operation on each line, since a byte that is flipped in
//! a zstd frame only gives another frame that is refused.

use std::io::{self, Cursor, Read, Seek, SeekFrom};

use prepull_delta::{ApplyLimits, OldRootFiles, apply_diff};

/// Most bytes that a diff may make here.
const OUTPUT: u64 = 1 << 20;

pub(crate) fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut lines = text.lines();
    let mut diff = format!("{}\n\0", lines.next().unwrap_or_default()).into_bytes();
    let mut operations = Vec::new();
    lines.for_each(|line| write_operation(&mut operations, line));
    diff.extend(zstd::bulk::compress(&operations, 1).expect("zstd compresses in memory"));
    let whole = play_diff(&diff[..]);
    assert_eq!(whole, play_diff(Slow(&diff)), "the pieces of the diff make no difference");
    // The bytes as they are, too.
    play_diff(input);
}

/// What a diff makes; `None` where it's refused.
fn play_diff(diff: impl Read) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let applied = apply_diff(diff, &mut FixtureFiles, &mut out, &ApplyLimits { output: OUTPUT });
    assert!(out.len() as u64 <= OUTPUT, "{} bytes", out.len());
    let applied = applied.ok()?;
    assert_eq!(applied.written, out.len() as u64);
    assert!(applied.reused <= applied.written);
    Some(out)
}

fn write_operation(out: &mut Vec<u8>, line: &str) {
    let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
    let number = || rest.parse().unwrap_or(u64::MAX);
    let (code, payload) = match name {
        "data" => (0, Ok(rest.as_bytes().to_vec())),
        "open" => (1, Ok(rest.as_bytes().to_vec())),
        "copy" => (2, Err(number())),
        "add" => (3, Ok(rest.as_bytes().to_vec())),
        "seek" => (4, Err(number())),
        // A frame that needs no prefix, and one of many bytes.
        "frame" => (5, Ok(zstd::bulk::compress(rest.as_bytes(), 1).expect("zstd compresses in memory"))),
        "zeros" => {
            let zeros = vec![0; usize::try_from(number()).unwrap_or_default().min(5 << 20)];
            (5, Ok(zstd::bulk::compress(&zeros, 1).expect("zstd compresses in memory")))
        }
        // An operation that may be unknown, or has no content.
        other => (other.parse().unwrap_or(9), Err(number())),
    };
    out.push(code);
    let mut size = payload.as_ref().map_or_else(|size| *size, |payload| payload.len() as u64);
    while size >= 0x80 {
        out.push(size.to_le_bytes()[0] | 0x80);
        size >>= 7;
    }
    out.push(size.to_le_bytes()[0]);
    out.extend(payload.unwrap_or_default());
}

/// Gives a byte at a time.
struct Slow<'a>(&'a [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let one = piece.len().min(1);
        self.0.read(&mut piece[..one])
    }
}

/// An old image: a small file, and a large one that takes no memory.
struct FixtureFiles;

impl OldRootFiles for FixtureFiles {
    type File = FixtureFile;

    fn open(&mut self, path: &[u8]) -> io::Result<FixtureFile> {
        let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        assert!(!parts.iter().any(|part| matches!(*part, b"" | b"." | b"..")), "{path:?}");
        match path {
            b"etc/hello" => Ok(FixtureFile::Small(Cursor::new(b"hello world"))),
            b"usr/large" => Ok(FixtureFile::Large { at: 0 }),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

enum FixtureFile {
    Small(Cursor<&'static [u8]>),
    Large { at: u64 },
}

/// Length of the large file, 5 MiB: more than may serve as a prefix.
const LARGE: u64 = 5 << 20;

impl Read for FixtureFile {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Small(cursor) => cursor.read(piece),
            Self::Large { at } => {
                let left = usize::try_from(LARGE.saturating_sub(*at)).unwrap_or(usize::MAX).min(piece.len());
                piece[..left].fill(7);
                *at += left as u64;
                Ok(left)
            }
        }
    }
}

impl Seek for FixtureFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::Small(cursor) => cursor.seek(to),
            Self::Large { at } => {
                let next = match to {
                    SeekFrom::Start(to) => Some(to),
                    SeekFrom::Current(by) => at.checked_add_signed(by),
                    SeekFrom::End(by) => LARGE.checked_add_signed(by),
                };
                *at = next.ok_or(io::ErrorKind::InvalidInput)?;
                Ok(*at)
            }
        }
    }
}
