//! The way in which one file of the new layer is made.

use std::io::{self, Read};

use bidiff::{DiffParams, Match};

use super::MIN_COPY;
use super::chunks::{self, Segment};
use super::index::OldFileIndex;
use super::root::{Root, hash_content};
use super::tar_file::{Tar, TarPart};
use super::walk::TarEntry;

/// Largest file that is compared byte by byte. The suffix array takes four times the size of the old file.
const MAX_COMPARED: u64 = 64 << 20;
/// Level of the compression that estimates what a file adds to the diff: fast, and its order is right.
const ESTIMATE: i32 = 1;
/// Bytes that an operation takes in the diff beside its content, for the estimate.
const OPERATION: usize = 4;
/// A file that adds less isn't reported.
const MIN_REPORTED: u64 = 4 << 10;

/// The way in which a file is made. The paths are those of old files.
pub(super) enum FilePlan<'a> {
    Data,
    Copy(&'a [u8]),
    /// Additions to the old file, with data between them.
    Changes {
        path: &'a [u8],
        old: Vec<u8>,
        new: Vec<u8>,
        matches: Vec<Match>,
    },
    Chunks(&'a [u8], Vec<Segment>),
}

/// A file that takes a part of the diff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unshrunk {
    /// Its path in the new image.
    pub path: String,
    /// Its length.
    pub size: u64,
    /// The bytes that it adds to the diff, roughly.
    pub sent: u64,
    /// The reason.
    pub cause: Cause,
}

/// Why a file takes a part of the diff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The old image has no file of this name.
    New,
    /// The old file can only be read by its owner, and the agent isn't that: it runs as root without capabilities.
    Closed,
    /// Parts of the old file are used.
    Changed,
    /// There is an old file, and next to nothing of it can be used: it's compressed, or from another compiler.
    Unlike,
    /// It's above 64 MiB, so only what moved as a whole was looked for.
    Large,
}

pub(super) struct Planner<'a> {
    pub(super) old: &'a Root<'a>,
    pub(super) new: &'a dyn Tar,
    pub(super) index: OldFileIndex<'a>,
}

impl<'a> Planner<'a> {
    /// Most bytes that the plan of a file takes while it's made.
    pub(super) fn estimate_cost(&self, file: &TarEntry) -> u64 {
        if file.size > MAX_COMPARED {
            return MAX_COMPARED;
        }
        let old =
            self.index.find_similar(&file.path, file.size).map_or(0, |(_, old)| old.size.min(MAX_COMPARED));
        // The file and its changes; the old file and its suffix array.
        2 * file.size + 5 * old
    }

    pub(super) fn plan_file(&self, file: &TarEntry) -> io::Result<(FilePlan<'a>, Option<Unshrunk>)> {
        let (plan, sent, cause) =
            if file.size > MAX_COMPARED { self.plan_large(file)? } else { self.plan_small(file)? };
        let path = || String::from_utf8_lossy(&file.path).into_owned();
        let report = (sent >= MIN_REPORTED).then(|| Unshrunk { path: path(), size: file.size, sent, cause });
        Ok((plan, report))
    }

    /// Why there is no old file for it.
    fn why_nothing(&self, file: &TarEntry) -> Cause {
        if self.old.is_closed(&file.path) { Cause::Closed } else { Cause::New }
    }

    fn content(&self, file: &TarEntry) -> TarPart<'a> {
        TarPart::new(self.new, file.offset, file.size)
    }

    fn plan_small(&self, file: &TarEntry) -> io::Result<(FilePlan<'a>, u64, Cause)> {
        let new = read_exactly(self.content(file), file.size)?;
        if let Some((path, _)) = self.index.find_same(&file.path, &hash_content(&mut &new[..])?) {
            return Ok((FilePlan::Copy(path), 0, Cause::Changed));
        }
        let whole = estimate_size(&new)?;
        let similar = self.index.find_similar(&file.path, file.size);
        let Some((path, old)) = similar.filter(|(_, old)| old.size >= MIN_COPY) else {
            return Ok((FilePlan::Data, whole, self.why_nothing(file)));
        };
        if old.size > MAX_COMPARED {
            return Ok((FilePlan::Data, whole, Cause::Large));
        }
        let old = read_exactly(self.old.content(&old), old.size)?;
        let matches = find_matches(&old, &new)?;
        let changes = collect_changes(&old, &new, &matches);
        let changed = estimate_size(&changes)? + (3 * OPERATION * matches.len()) as u64;
        if changed >= whole {
            return Ok((FilePlan::Data, whole, Cause::Unlike));
        }
        // A changelog in gzip has its first bytes in common with the old one.
        let cause = if changed * 10 < whole * 9 { Cause::Changed } else { Cause::Unlike };
        Ok((FilePlan::Changes { path, old, new, matches }, changed, cause))
    }

    fn plan_large(&self, file: &TarEntry) -> io::Result<(FilePlan<'a>, u64, Cause)> {
        if let Some((path, _)) = self.index.find_same(&file.path, &hash_content(&mut self.content(file))?) {
            return Ok((FilePlan::Copy(path), 0, Cause::Changed));
        }
        let Some((path, old)) = self.index.find_similar(&file.path, file.size) else {
            return Ok((FilePlan::Data, file.size, self.why_nothing(file)));
        };
        let segments = chunks::compare_files(self.old.content(&old), self.content(file))?;
        let sent =
            segments.iter().map(|segment| if let Segment::New { size } = segment { *size } else { 0 }).sum();
        Ok((FilePlan::Chunks(path, segments), sent, Cause::Large))
    }
}

fn read_exactly(mut content: impl Read, size: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    content.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn estimate_size(content: &[u8]) -> io::Result<u64> {
    Ok(zstd::bulk::compress(content, ESTIMATE)?.len() as u64)
}

fn find_matches(old: &[u8], new: &[u8]) -> io::Result<Vec<Match>> {
    let mut matches = Vec::new();
    bidiff::diff(old, new, &DiffParams::default(), |found| -> io::Result<()> {
        matches.push(found);
        Ok(())
    })?;
    Ok(matches)
}

/// What the diff has of the file: differences, and data.
fn collect_changes(old: &[u8], new: &[u8], matches: &[Match]) -> Vec<u8> {
    let mut changes = Vec::with_capacity(new.len());
    for found in matches {
        changes.extend(differences(old, new, found));
        changes.extend_from_slice(&new[found.copy_start()..found.copy_end]);
    }
    changes
}

/// The differences to the bytes of the old file.
pub(super) fn differences<'a>(
    old: &'a [u8],
    new: &'a [u8],
    found: &Match,
) -> impl Iterator<Item = u8> + use<'a> {
    let old = &old[found.add_old_start..][..found.add_length];
    let new = &new[found.add_new_start..][..found.add_length];
    new.iter().zip(old).map(|(new, old)| new.wrapping_sub(*old))
}
