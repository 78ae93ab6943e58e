//! Reads the free space of a file system, and flushes it to disk.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use prepull_api::wire::Filesystem;

/// Reads capacity and free space for an unprivileged writer. May block on a dead file server.
pub(crate) fn read_filesystem(mountpoint: &Path) -> io::Result<Filesystem> {
    let stat = rustix::fs::statvfs(mountpoint)?;
    Ok(Filesystem {
        mountpoint: mountpoint.display().to_string(),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
        capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
    })
}

/// Reason why a file system wasn't flushed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum FlushError {
    /// The directory can't be opened: an agent in a container doesn't see all directories of the runtime.
    #[error("cannot open {}: {source} (if the agent runs in a container, mount it there at the same path)", path.display())]
    NotSeen {
        /// The directory.
        path: PathBuf,
        /// The error of opening it.
        source: Arc<io::Error>,
    },
    /// The flush failed.
    #[error("cannot flush the file system of {}: {source}", path.display())]
    Refused {
        /// A directory of the file system.
        path: PathBuf,
        /// The error of the kernel.
        source: Arc<io::Error>,
    },
}

/// A directory that is kept open.
pub(crate) type OpenDirectory = Arc<File>;

/// A directory that is open while someone keeps it so.
#[derive(Debug, Default)]
pub(crate) struct SharedDirectory(Mutex<Weak<File>>);

impl SharedDirectory {
    /// The directory at this path, which is opened unless the same one is already. May block on a dead file server.
    pub(crate) fn open(&self, path: &Path) -> io::Result<OpenDirectory> {
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let open = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held = open().upgrade();
        if let Some(held) = held
            && identity(held.metadata()?) == identity(std::fs::metadata(path)?)
        {
            return Ok(held);
        }
        let new = Arc::new(File::open(path)?);
        *open() = Arc::downgrade(&new);
        Ok(new)
    }

    #[cfg(test)]
    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }
}

/// Writes all cached data of the file system to its disk. May take minutes on a slow one.
pub(crate) fn flush_filesystem(path: &Path, held: &SharedDirectory) -> Result<(), FlushError> {
    flush_if(path, held, |_| true)
}

/// The same, unless the other directory is on that file system as well.
pub(crate) fn flush_other_filesystem(
    path: &Path,
    held: &SharedDirectory,
    other: &Path,
) -> Result<(), FlushError> {
    let other = std::fs::metadata(other).map(|other| other.dev()).ok();
    flush_if(path, held, |device| Some(device) != other)
}

fn flush_if(
    path: &Path,
    held: &SharedDirectory,
    is_wanted: impl FnOnce(u64) -> bool,
) -> Result<(), FlushError> {
    let path = path.to_owned();
    let flushed = held.open(&path).and_then(|directory| {
        if is_wanted(directory.metadata()?.dev()) {
            rustix::fs::syncfs(directory)?;
        }
        Ok(())
    });
    flushed.map_err(|error| {
        let kind = error.kind();
        let source = Arc::new(error);
        match kind {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => FlushError::NotSeen { path, source },
            _ => FlushError::Refused { path, source },
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_root_file_system_has_a_capacity() {
        assert!(read_filesystem(Path::new("/")).unwrap().capacity > 0);
    }

    #[test]
    fn any_directory_flushes_its_file_system() {
        let directory = tempfile::TempDir::new().unwrap();
        let held = SharedDirectory::default();
        flush_filesystem(directory.path(), &held).unwrap();
        let absent = flush_filesystem(&directory.path().join("absent"), &held);
        assert!(matches!(absent, Err(FlushError::NotSeen { .. })), "{absent:?}");
    }

    #[test]
    fn a_shared_file_system_is_flushed_once() {
        let wanted = |path: &str, other: &str| {
            let other = std::fs::metadata(other).unwrap().dev();
            let mut wanted = false;
            flush_if(Path::new(path), &SharedDirectory::default(), |device| {
                wanted = device != other;
                false
            })
            .unwrap();
            wanted
        };
        assert!(wanted("/proc", "/") && !wanted("/", "/"));
        flush_other_filesystem(Path::new("/"), &SharedDirectory::default(), Path::new("/absent")).unwrap();
    }
}
