//! Application of a diff: its operations, and the files of the old image, make the tar of a layer, bit for bit.
//!
//! ```text
//!  diff ─▶ zstd ─▶ operations (input) ┐
//!  Sources: a file of the old image ──┴▶ pieces of 64 KiB ─▶ out
//! ```
//!
//! Everything streams, so memory doesn't grow with a file: one zstd window of at most 8 MiB and two pieces. An exception is
//! the operation of `tardf2` that takes a whole file as a dictionary, and is refused for files above 4 MiB. The diff may
//! come from anywhere: each length is checked against a limit before it's used.

mod input;
mod output;
mod path;
mod source;

use std::io::{self, Read, Seek, Write};

use input::{FormatVersion, OperationReader};
use output::BoundedOutput;
use source::OpenSource;

/// Bytes that are read and written at once.
const PIECE: usize = 64 << 10;
/// Logarithm of the largest zstd window that is accepted, 8 MiB: what level 19 takes. Our producer takes 2 MiB.
const WINDOW_LOG: u32 = 23;
/// Most bytes of one [`Op::Add`], as in the reference implementation.
const MAX_ADD: u64 = 100 << 20;
/// Largest file that serves as a dictionary, and largest file that is made with one. They take memory.
const MAX_WHOLE: u64 = 4 << 20;
/// Work that is accepted without output, where an operation is 1. After that we want two bytes of output for each: a stream of
/// seeks would compress so well that it kept a node at work for days.
const FREE_WORK: u64 = 1 << 20;
/// Work of [`Op::Open`]: a system call in each layer of the old image. A file has a header of 512 bytes in a tar.
const OPEN_WORK: u64 = 128;
/// Bytes of a dictionary that are read for the work of 1.
const BYTES_A_WORK: u64 = 64;

/// The files of the old image, by their path in its root file system.
pub trait OldRootFiles {
    /// A file that is open.
    type File: Read + Seek;

    /// Opens a regular file. The path is relative and normalized: no part of it is empty, `.` or `..`. It need not be UTF-8.
    ///
    /// # Errors
    /// The file isn't there, or isn't a regular one. Symbolic links must not be followed.
    fn open(&mut self, path: &[u8]) -> io::Result<Self::File>;
}

/// Limits of one application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApplyLimits {
    /// Most bytes that are written.
    pub output: u64,
}

impl ApplyLimits {
    /// The most that gzip can reach. The publisher of a delta may announce anything.
    const MOST_RATIO: u64 = 1032;
    /// The end of a tar, which is padded to 10 KiB, and a few small files.
    const SMALL: u64 = 1 << 20;

    /// The limit for a layer: the size of its tar that the delta announces, or that we count with, in bytes. It's bounded by the
    /// compressed layer in the image.
    pub fn of_layer(tar: u64, compressed: u64) -> Self {
        let most = compressed.saturating_mul(Self::MOST_RATIO).saturating_add(Self::SMALL);
        Self { output: tar.min(most) }
    }
}

/// A diff that was applied to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Bytes that were written.
    pub written: u64,
    /// Those that are from files of the old image, or are a sum with them.
    pub reused: u64,
}

/// Why a diff wasn't applied. What was written until then is worthless.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The diff can't be read, or isn't valid zstd, or wants a window of more than 8 MiB.
    #[error("cannot read the diff: {0}")]
    Diff(#[source] io::Error),
    /// The diff isn't in the format, or breaks one of its bounds.
    #[error("the diff is malformed: {0}")]
    Malformed(String),
    /// The format allows it, and we don't: it would take too much memory.
    #[error("the diff needs too much memory: {0}")]
    Unsupported(String),
    /// A file of the old image can't be opened or read, or is shorter than the diff expects: not the image that the diff
    /// was made from, or no longer whole.
    #[error("cannot read {path:?} of the old image: {error}")]
    Source {
        /// The path in the image.
        path: String,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// The result can't be written.
    #[error("cannot write the layer: {0}")]
    Output(#[source] io::Error),
    /// The result is larger than [`ApplyLimits::output`].
    #[error("the diff makes more than the {0} bytes that the layer may have")]
    TooLarge(u64),
}

impl ApplyError {
    fn malformed(problem: impl Into<String>) -> Self {
        Self::Malformed(problem.into())
    }
}

/// An operation; each is followed by a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Data,
    Open,
    Copy,
    Add,
    Seek,
    /// A zstd frame with the whole source file as prefix; of `tardf2` only.
    Frame,
}

impl Op {
    fn parse(byte: u8, version: FormatVersion) -> Result<Self, ApplyError> {
        Ok(match byte {
            0 => Self::Data,
            1 => Self::Open,
            2 => Self::Copy,
            3 => Self::Add,
            4 => Self::Seek,
            5 if version == FormatVersion::Two => Self::Frame,
            _ => return Err(ApplyError::malformed(format!("operation {byte} is unknown in this version"))),
        })
    }
}

/// Applies a diff, and writes the uncompressed tar of the layer. Blocking. It doesn't check the result: compare it with the
/// diff ID of the layer.
///
/// # Errors
/// See [`ApplyError`]. The way out is always the real layer.
pub fn apply_diff<S: OldRootFiles>(
    diff: impl Read,
    sources: &mut S,
    out: &mut impl Write,
    limits: &ApplyLimits,
) -> Result<Applied, ApplyError> {
    let mut input = OperationReader::new(diff)?;
    let mut output = BoundedOutput::new(out, limits.output);
    let mut source: Option<OpenSource<S::File>> = None;
    let (mut piece, mut summands) = (vec![0; PIECE], vec![0; PIECE]);
    let (mut reused, mut work) = (0, 0);
    while let Some(byte) = input.next_byte()? {
        let op = Op::parse(byte, input.version())?;
        work += if op == Op::Open { OPEN_WORK } else { 1 };
        if work > FREE_WORK + output.bytes_written() / 2 {
            return Err(ApplyError::malformed("its operations make next to nothing"));
        }
        let size = input.read_varint()?;
        if matches!(op, Op::Data | Op::Copy | Op::Add) {
            output.check_room(size)?;
        }
        let opened = || ApplyError::malformed(format!("{op:?} before a file is open"));
        match op {
            Op::Data => each_piece(size, &mut piece, |part| {
                input.fill_piece(part)?;
                output.write(part)
            })?,
            Op::Open => {
                // The old one first: no two files of an image are open at once.
                drop(source.take());
                let path = path::normalize_path(&input.read_path(size)?)?;
                source = Some(OpenSource::open(sources, path)?);
            }
            Op::Copy => {
                let source = source.as_mut().ok_or_else(opened)?;
                each_piece(size, &mut piece, |part| {
                    source.fill_piece(part)?;
                    output.write(part)
                })?;
                reused += size;
            }
            Op::Add => {
                let source = source.as_mut().ok_or_else(opened)?;
                if size > MAX_ADD {
                    return Err(ApplyError::malformed(format!("an addition of {size} bytes")));
                }
                each_piece(size, &mut piece, |part| {
                    let summands = &mut summands[..part.len()];
                    input.fill_piece(summands)?;
                    source.fill_piece(part)?;
                    for (byte, summand) in part.iter_mut().zip(summands) {
                        *byte = byte.wrapping_add(*summand);
                    }
                    output.write(part)
                })?;
                reused += size;
            }
            Op::Seek => source.as_mut().ok_or_else(opened)?.seek(size)?,
            Op::Frame => {
                let prefix = source.as_mut().ok_or_else(opened)?.read_whole(MAX_WHOLE)?;
                work += prefix.len() as u64 / BYTES_A_WORK;
                input.read_frame(size, &prefix, &mut piece, |part| output.write(part))?;
            }
        }
    }
    output.flush()?;
    Ok(Applied { written: output.bytes_written(), reused })
}

/// Does something for each piece of a size.
fn each_piece(
    size: u64,
    piece: &mut [u8],
    mut each: impl FnMut(&mut [u8]) -> Result<(), ApplyError>,
) -> Result<(), ApplyError> {
    let mut left = size;
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        each(&mut piece[..part])?;
        left -= part as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
