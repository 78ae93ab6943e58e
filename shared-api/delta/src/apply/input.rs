//! The stream of operations in a diff.

use std::io::{self, BufRead, BufReader, Read};

use zstd::stream::read::Decoder;

use super::{ApplyError, MAX_WHOLE, PIECE, WINDOW_LOG};

/// Length of the magic bytes, which name the version.
const MAGIC: usize = 8;
/// Longest path, as in the reference implementation: `PATH_MAX`.
const MAX_PATH: u64 = 4 << 10;
/// A frame that doesn't compress is a little longer than its content.
const MAX_FRAME: u64 = MAX_WHOLE + (64 << 10);

/// The version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormatVersion {
    One,
    Two,
}

pub(super) struct OperationReader<R: Read> {
    version: FormatVersion,
    reader: BufReader<Decoder<'static, BufReader<R>>>,
}

impl<R: Read> OperationReader<R> {
    /// Reads the magic bytes. The rest is one zstd stream.
    pub(super) fn new(mut diff: R) -> Result<Self, ApplyError> {
        let mut magic = [0; MAGIC];
        diff.read_exact(&mut magic).map_err(ApplyError::Diff)?;
        let version = match &magic {
            b"tardf1\n\0" => FormatVersion::One,
            b"tardf2\n\0" => FormatVersion::Two,
            _ => return Err(ApplyError::malformed("neither tardf1 nor tardf2")),
        };
        let mut decoder = Decoder::new(diff).map_err(ApplyError::Diff)?;
        decoder.window_log_max(WINDOW_LOG).map_err(ApplyError::Diff)?;
        Ok(Self { version, reader: BufReader::with_capacity(PIECE, decoder) })
    }

    pub(super) fn version(&self) -> FormatVersion {
        self.version
    }

    /// The next byte. `None` at the end of the stream.
    pub(super) fn next_byte(&mut self) -> Result<Option<u8>, ApplyError> {
        let byte = self.reader.fill_buf().map_err(ApplyError::Diff)?.first().copied();
        self.reader.consume(byte.iter().len());
        Ok(byte)
    }

    /// A number in pieces of seven bits, the lowest first.
    pub(super) fn read_varint(&mut self) -> Result<u64, ApplyError> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte =
                self.next_byte()?.ok_or_else(|| ApplyError::Diff(io::ErrorKind::UnexpectedEof.into()))?;
            let bits = u64::from(byte & 0x7f);
            if bits > u64::MAX >> shift {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(ApplyError::malformed("a size of more than 64 bits"))
    }

    pub(super) fn fill_piece(&mut self, piece: &mut [u8]) -> Result<(), ApplyError> {
        self.reader.read_exact(piece).map_err(ApplyError::Diff)
    }

    pub(super) fn read_path(&mut self, size: u64) -> Result<Vec<u8>, ApplyError> {
        if size > MAX_PATH {
            return Err(ApplyError::malformed(format!("a path of {size} bytes")));
        }
        let mut path = vec![0; usize::try_from(size).unwrap_or_default()];
        self.fill_piece(&mut path)?;
        Ok(path)
    }

    /// Decompresses a zstd frame of a size that refers to a prefix.
    pub(super) fn read_frame(
        &mut self,
        size: u64,
        prefix: &[u8],
        piece: &mut [u8],
        mut write: impl FnMut(&[u8]) -> Result<(), ApplyError>,
    ) -> Result<(), ApplyError> {
        if size > MAX_FRAME {
            return Err(ApplyError::Unsupported(format!("a frame of {size} bytes")));
        }
        let frame = BufReader::with_capacity(PIECE, (&mut self.reader).take(size));
        let decoder = Decoder::with_ref_prefix(frame, prefix).map_err(ApplyError::Diff)?;
        let mut decoder = decoder.single_frame();
        decoder.window_log_max(WINDOW_LOG).map_err(ApplyError::Diff)?;
        let mut made = 0;
        loop {
            let read = decoder.read(piece).map_err(ApplyError::Diff)?;
            if read == 0 {
                break;
            }
            made += read as u64;
            if made > MAX_WHOLE {
                return Err(ApplyError::Unsupported(format!("a frame of more than {MAX_WHOLE} bytes")));
            }
            write(&piece[..read])?;
        }
        // The next operation follows the frame, also if the frame ended earlier than its size.
        let mut rest = decoder.finish().into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(ApplyError::Diff)?;
        if rest.limit() > 0 {
            return Err(ApplyError::Diff(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }
}
