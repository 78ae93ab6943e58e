//! The file of the old image that is open.

use std::io::{self, BufReader, Read, Seek};

use super::{ApplyError, OldRootFiles};

/// Bytes that are read ahead. After a relinked program the pieces in use are short and near to each other.
const AHEAD: usize = 8 << 10;

pub(super) struct OpenSource<F> {
    path: Vec<u8>,
    file: BufReader<F>,
    /// The position of the next byte.
    at: i64,
}

impl<F: Read + Seek> OpenSource<F> {
    pub(super) fn open(sources: &mut impl OldRootFiles<File = F>, path: Vec<u8>) -> Result<Self, ApplyError> {
        match sources.open(&path) {
            Ok(file) => Ok(Self { path, file: BufReader::with_capacity(AHEAD, file), at: 0 }),
            Err(error) => Err(source_error(&path, error)),
        }
    }

    pub(super) fn fill_piece(&mut self, piece: &mut [u8]) -> Result<(), ApplyError> {
        self.file.read_exact(piece).map_err(|error| source_error(&self.path, error))?;
        // At most 64 KiB at a time of a file that is there: it doesn't overflow.
        self.at = self.at.saturating_add_unsigned(piece.len() as u64);
        Ok(())
    }

    /// Goes to a position. One beyond the end is an error only where something is read there.
    pub(super) fn seek(&mut self, to: u64) -> Result<(), ApplyError> {
        let to = i64::try_from(to)
            .map_err(|_| ApplyError::malformed(format!("a seek to {to}, beyond any file")))?;
        // Relative, since that keeps what was read ahead. Both positions are positive, so it doesn't overflow.
        self.file.seek_relative(to - self.at).map_err(|error| source_error(&self.path, error))?;
        self.at = to;
        Ok(())
    }

    /// The whole file, of at most a length. The position is its end then.
    pub(super) fn read_whole(&mut self, limit: u64) -> Result<Vec<u8>, ApplyError> {
        self.seek(0)?;
        let mut content = Vec::new();
        let read = (&mut self.file).take(limit + 1).read_to_end(&mut content);
        let read = read.map_err(|error| source_error(&self.path, error))? as u64;
        if read > limit {
            let path = String::from_utf8_lossy(&self.path);
            return Err(ApplyError::Unsupported(format!("{path:.100?} has more than {limit} bytes")));
        }
        self.at = self.at.saturating_add_unsigned(read);
        Ok(content)
    }
}

fn source_error(path: &[u8], error: io::Error) -> ApplyError {
    ApplyError::Source { path: String::from_utf8_lossy(path).into_owned(), error }
}
