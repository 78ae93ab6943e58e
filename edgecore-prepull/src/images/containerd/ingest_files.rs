//! The files of containerd's content store. Its API reads whole blobs only, so we read what has arrived of a blob from its
//! file.
//!
//! ```text
//!  <root>/io.containerd.content.v1.content/ingest/<hash>/ref    k8s.io/12/layer-sha256:…
//!                                                       /data   the bytes
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::namespace::NAMESPACE;

/// Longest ref that we read: ours have some 80 bytes, and another client's may have any number.
const MAX_REF: u64 = 512;

/// The directory of all ingests of a containerd with this root.
pub(crate) fn ingests_dir(root: &Path) -> PathBuf {
    root.join("io.containerd.content.v1.content/ingest")
}

/// Opens a complete blob, `sha256:…`. `None` if its file can't be read.
pub(crate) fn open_blob(root: &Path, digest: &str) -> Option<File> {
    let (algorithm, hex) = digest.split_once(':')?;
    File::open(root.join("io.containerd.content.v1.content/blobs").join(algorithm).join(hex)).ok()
}

/// Opens the bytes of an ingest. `None` if its file can't be read, as in a container without that mount.
pub(super) fn open_ingest(root: &Path, name: &str) -> Option<File> {
    let (before, after) = (format!("{NAMESPACE}/"), format!("/{name}"));
    // The number behind the namespace grows with each ingest: an older one of this name is left for the garbage collection.
    let newest = fs::read_dir(ingests_dir(root)).ok()?.filter_map(|entry| {
        let dir = entry.ok()?.path();
        let file = dir.join("ref");
        let is_short = fs::metadata(&file).is_ok_and(|found| found.len() <= MAX_REF);
        let found = is_short.then(|| fs::read_to_string(&file).ok()).flatten()?;
        let number: u64 = found.strip_prefix(&before)?.strip_suffix(&after)?.parse().ok()?;
        Some((number, dir))
    });
    let (_, dir) = newest.max()?;
    File::open(dir.join("data")).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;

    use super::*;

    #[test]
    fn the_newest_ingest_of_a_ref_is_opened() {
        let root = tempfile::tempdir().unwrap();
        for (dir, of, data) in [
            ("a", "k8s.io/9/layer-sha256:1", "old"),
            ("b", "k8s.io/10/layer-sha256:1", "new"),
            ("c", "moby/11/layer-sha256:1", "another namespace"),
            ("d", "k8s.io/12/peer-sha256:1", "another ref"),
        ] {
            let dir = ingests_dir(root.path()).join(dir);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("ref"), of).unwrap();
            fs::write(dir.join("data"), data).unwrap();
        }
        fs::create_dir_all(ingests_dir(root.path()).join("without a ref")).unwrap();
        let read = |name| {
            let mut text = String::new();
            open_ingest(root.path(), name)?.read_to_string(&mut text).unwrap();
            Some(text)
        };
        assert_eq!(read("layer-sha256:1").as_deref(), Some("new"));
        assert_eq!(read("layer-sha256:2"), None);
        assert!(open_ingest(Path::new("/nowhere"), "layer-sha256:1").is_none());
    }
}
