//! The file system at a path: its free space, and flushing it to the disk.

use std::path::Path;

use prepull_api::wire::Filesystem;

/// Reads capacity and free space. Free is what an unprivileged writer may use. May block on a dead file server.
pub(crate) fn read_filesystem(mountpoint: &Path) -> std::io::Result<Filesystem> {
    let stat = rustix::fs::statvfs(mountpoint)?;
    Ok(Filesystem {
        mountpoint: mountpoint.display().to_string(),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
        capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
    })
}

/// Writes everything that the file system has in memory to its disk. May take minutes on a slow one.
pub(crate) fn flush_filesystem(mountpoint: &Path) -> std::io::Result<()> {
    let directory = std::fs::File::open(mountpoint)?;
    Ok(rustix::fs::syncfs(directory)?)
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
    fn a_file_system_can_be_flushed_by_one_of_its_directories() {
        let directory = tempfile::TempDir::new().unwrap();
        flush_filesystem(directory.path()).unwrap();
        flush_filesystem(&directory.path().join("absent")).unwrap_err();
    }
}
