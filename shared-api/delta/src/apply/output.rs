//! The tar that is written, up to its limit.

use std::io::Write;

use super::ApplyError;

pub(super) struct BoundedOutput<'a, W> {
    out: &'a mut W,
    written: u64,
    limit: u64,
}

impl<'a, W: Write> BoundedOutput<'a, W> {
    pub(super) fn new(out: &'a mut W, limit: u64) -> Self {
        Self { out, written: 0, limit }
    }

    pub(super) fn bytes_written(&self) -> u64 {
        self.written
    }

    /// Refuses an operation that would write beyond the limit, before it reads anything.
    pub(super) fn check_room(&self, size: u64) -> Result<(), ApplyError> {
        let end = self.written.checked_add(size);
        if end.is_some_and(|end| end <= self.limit) { Ok(()) } else { Err(ApplyError::TooLarge(self.limit)) }
    }

    pub(super) fn write(&mut self, piece: &[u8]) -> Result<(), ApplyError> {
        self.check_room(piece.len() as u64)?;
        self.out.write_all(piece).map_err(ApplyError::Output)?;
        self.written += piece.len() as u64;
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<(), ApplyError> {
        self.out.flush().map_err(ApplyError::Output)
    }
}
