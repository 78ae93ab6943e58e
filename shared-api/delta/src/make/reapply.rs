//! Application of a diff that was just made: a wrong one would only waste the time of all nodes.

use std::io::{self, Read, Write};

use super::MakeError;
use super::root::Root;
use super::tar_file::{Tar, TarPart};
use crate::apply::{ApplyError, ApplyLimits, apply_diff};

pub(super) fn check_diff(old: &Root<'_>, new: &dyn Tar, diff: impl Read) -> Result<(), MakeError> {
    let mut compared = Compared { expected: TarPart::new(new, 0, new.size()), done: 0, differs: false };
    let limits = ApplyLimits { output: new.size() };
    let applied = apply_diff(diff, &mut &*old, &mut compared, &limits);
    let Compared { done, differs, .. } = compared;
    match applied {
        _ if differs => Err(MakeError::Differs(done)),
        Err(ApplyError::Output(error)) => Err(MakeError::Tar(error)),
        Err(error) => Err(MakeError::Reapply(error)),
        Ok(applied) if applied.written != new.size() => Err(MakeError::Differs(done)),
        Ok(_) => Ok(()),
    }
}

/// A writer that expects the bytes of a tar.
struct Compared<'a> {
    expected: TarPart<'a>,
    done: u64,
    differs: bool,
}

impl Write for Compared<'_> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let mut expected = vec![0; piece.len()];
        self.expected.read_exact(&mut expected)?;
        if let Some(at) = piece.iter().zip(&expected).position(|(one, other)| one != other) {
            self.done += at as u64;
            self.differs = true;
            return Err(io::Error::other("it differs"));
        }
        self.done += piece.len() as u64;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
