//! Tars that are read at any position, by several threads.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// An uncompressed tar.
pub trait Tar: Sync {
    /// Its length.
    fn size(&self) -> u64;

    /// Reads from a position on; 0 at the end.
    ///
    /// # Errors
    /// It can't be read.
    fn read_at(&self, piece: &mut [u8], at: u64) -> io::Result<usize>;
}

/// A tar in a file.
#[derive(Debug)]
pub struct TarFile {
    file: File,
    size: u64,
}

impl TarFile {
    /// The tar in a file, with its length of now.
    ///
    /// # Errors
    /// The length can't be read.
    pub fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl Tar for TarFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, piece: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(piece, at)
    }
}

impl Tar for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, piece: &mut [u8], at: u64) -> io::Result<usize> {
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(self.len());
        (&self[at..]).read(piece)
    }
}

/// A part of a tar, as a file of its own.
#[derive(Clone, Copy)]
pub struct TarPart<'a> {
    tar: &'a dyn Tar,
    begin: u64,
    size: u64,
    at: u64,
}

impl<'a> TarPart<'a> {
    pub(super) fn new(tar: &'a dyn Tar, begin: u64, size: u64) -> Self {
        Self { tar, begin, size, at: 0 }
    }
}

impl Read for TarPart<'_> {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = left.min(piece.len());
        let read = self.tar.read_at(&mut piece[..wanted], self.begin + self.at)?;
        if read == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for TarPart<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.size.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
