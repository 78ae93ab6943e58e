//! Production of a diff: the files of the old image are indexed once, and each file of the new layer is shown as a copy, as
//! a change of an old file, or as it is.
//!
//! ```text
//!  tars of the old image ─▶ Root (walk: whiteouts, links) ─▶ OldFiles (by path, content, name)
//!                                                             │
//!  tar of the new layer ─▶ walk ─▶ plan, on all cores (pool) ─┴▶ DiffWriter ─▶ zstd ─▶ a diff ─▶ applied again, compared
//! ```
//!
//! A diff is returned only after [`apply`] has made the same tar from it. Tars are read at random positions, so they are
//! files as a rule. The memory has a bound: see [`Resources`].

mod chunks;
mod index;
mod plan;
mod pool;
mod reapply;
mod root;
mod tar_file;
mod unpack;
mod walk;
mod writer;

use std::io::{self, Read, Seek, Write};

use crate::apply::ApplyError;
use index::OldFileIndex;
pub use plan::{Cause, Unshrunk};
use plan::{FilePlan, Planner};
pub use root::Root;
pub use tar_file::{Tar, TarFile, TarPart};
pub use unpack::unpack;
use walk::{EntryKind, TarEntry, walk_tar};
use writer::DiffWriter;

/// A file this small is sent as it is: to open another and to copy from it takes as many bytes.
const MIN_COPY: u64 = 64;
/// Bytes that are read and written at once.
const PIECE: usize = 64 << 10;
/// Files in the report of a layer. The largest ones show the reason; the rest is a sum.
const MAX_UNSHRUNK: usize = 100;

/// Resources for the production.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    /// Threads that compare files, and that compress.
    pub threads: usize,
    /// Bytes for files that are compared at the same time, and for results that wait to be written. A single file of 64 MiB
    /// takes six times its size, regardless of this bound.
    pub memory: u64,
}

/// A diff that was made, and applied again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Length of the diff.
    pub size: u64,
    /// Length of the tar.
    pub uncompressed: u64,
    /// The files that take most of the diff, the largest part first.
    pub unshrunk: Vec<Unshrunk>,
}

/// Why no diff was made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// A tar can't be read, or is none.
    #[error("cannot read the tar of a layer: {0}")]
    Tar(#[source] io::Error),
    /// The diff can't be written.
    #[error("cannot write the diff: {0}")]
    Output(#[source] io::Error),
    /// Our own diff can't be applied.
    #[error("a diff that was made cannot be applied: {0}")]
    Reapply(#[source] ApplyError),
    /// Our own diff makes another tar.
    #[error("a diff that was made gives another tar, from byte {0} on")]
    Differs(u64),
}

/// Makes the diff of one layer, from the beginning of `out`, and applies it again. `progress` receives the bytes of the tar
/// that are done.
///
/// # Errors
/// See [`MakeError`].
pub fn make_diff(
    old: &Root<'_>,
    new: &dyn Tar,
    out: &mut (impl Read + Write + Seek),
    settings: &Resources,
    progress: &mut dyn FnMut(u64),
) -> Result<Made, MakeError> {
    let mut files = Vec::new();
    walk_tar(new, |entry, _| {
        if matches!(entry.kind, EntryKind::File { .. }) && entry.size >= MIN_COPY {
            files.push(entry);
        }
        Ok(())
    })
    .map_err(MakeError::Tar)?;
    let planner = Planner { old, new, index: OldFileIndex::new(old.files()) };
    let mut writer = DiffWriter::new(&mut *out, settings.threads).map_err(MakeError::Output)?;
    let (mut done, mut unshrunk) = (0, Vec::new());
    pool::in_order(
        &files,
        settings,
        |file| planner.estimate_cost(file),
        |file| planner.plan_file(file),
        |file: &TarEntry, planned: io::Result<(FilePlan, Option<Unshrunk>)>| {
            let (plan, report) = planned.map_err(MakeError::Tar)?;
            // Headers and small files come before it.
            writer.write_tar(new, done, file.offset - done)?;
            writer.write_plan(&planner, file, &plan)?;
            done = file.offset + file.size;
            unshrunk.extend(report);
            progress(done);
            Ok(())
        },
    )?;
    writer.write_tar(new, done, new.size() - done)?;
    let size = writer.finish().map_err(MakeError::Output)?;
    progress(new.size());
    scale(&mut unshrunk, size);
    unshrunk.sort_by_key(|file| std::cmp::Reverse(file.sent));
    unshrunk.truncate(MAX_UNSHRUNK);
    out.rewind().map_err(MakeError::Output)?;
    reapply::check_diff(old, new, out.take(size))?;
    Ok(Made { size, uncompressed: new.size(), unshrunk })
}

/// Brings estimates down to what the diff has become: its compression is better than theirs.
fn scale(files: &mut [Unshrunk], size: u64) {
    let estimated: u64 = files.iter().map(|file| file.sent).sum();
    if estimated > size {
        for file in files {
            let scaled = u128::from(file.sent) * u128::from(size) / u128::from(estimated);
            file.sent = u64::try_from(scaled).unwrap_or(file.sent);
        }
    }
}

#[cfg(test)]
mod tests;
