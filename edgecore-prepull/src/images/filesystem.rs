//! Free space of the file system at a path.

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_root_file_system_has_a_capacity() {
        assert!(read_filesystem(Path::new("/")).unwrap().capacity > 0);
    }
}
