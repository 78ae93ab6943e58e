//! The agent's view of containerd's file system: complete on the node itself, and only the mounts in a container.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The agent's view of containerd's file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FilesystemView {
    /// Complete: the agent runs on the node, like containerd.
    Whole,
    /// Only the mounts at these paths, which must be the same as on the node.
    Mounts(Vec<PathBuf>),
}

/// The result of looking at a path of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    There,
    /// The path doesn't exist on the node either.
    Absent,
    /// The path may exist on the node.
    Hidden,
}

impl FilesystemView {
    /// The view of an agent that sees the process at the other end of containerd's socket under this id.
    pub(super) fn of_peer(peer: Option<u32>) -> Self {
        // A process of another pid namespace has no id: we're in a container.
        if peer != Some(0) {
            return Self::Whole;
        }
        // Without this file, no path counts as visible.
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self::Mounts(mount_points(&mounts))
    }

    /// Looks at a path of the node.
    pub(super) fn look_at(&self, path: &Path) -> Sight {
        for ancestor in path.ancestors() {
            match ancestor.symlink_metadata() {
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                Err(_) => return Sight::Hidden,
                Ok(_) => {
                    // An error means a dangling link.
                    let real = ancestor.canonicalize();
                    let is_seen = match self {
                        Self::Whole => true,
                        Self::Mounts(points) => {
                            real.as_ref().is_ok_and(|real| points.iter().any(|point| real.starts_with(point)))
                        }
                    };
                    return match real {
                        _ if !is_seen => Sight::Hidden,
                        Ok(_) if ancestor == path => Sight::There,
                        _ => Sight::Absent,
                    };
                }
            }
        }
        Sight::Hidden
    }
}

/// The mount points in the text of /proc/self/mountinfo, except for the root, which is the container's own.
fn mount_points(mountinfo: &str) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| *point != "/").map(|point| PathBuf::from(unescape(point))).collect()
}

/// The kernel writes white space and backslashes as three octal digits.
fn unescape(point: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(point.to_owned(), |point, (escaped, plain)| point.replace(escaped, plain))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn mounts_are_read_without_the_root() {
        let text = "1503 1342 0:266 / / ro,relatime master:5 - overlay overlay rw,lowerdir=/a\n\
                    1504 1503 0:268 / /proc rw,nosuid - proc proc rw\n\
                    1510 1503 8:1 /etc/containerd /etc/containerd ro - ext4 /dev/sda1 rw\n\
                    1511 1503 8:1 /x /a\\040b ro - ext4 /dev/sda1 rw\n";
        let points = ["/proc", "/etc/containerd", "/a b"].map(PathBuf::from);
        assert_eq!(mount_points(text), points);
    }

    #[test]
    fn a_container_sees_what_is_mounted() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let at = |path: &str| root.join(path);
        for dir in ["mounted/certs.d", "own/certs.d"] {
            std::fs::create_dir_all(at(dir)).unwrap();
        }
        symlink("certs.d", at("mounted/link")).unwrap();
        symlink(at("nowhere"), at("mounted/dangling")).unwrap();
        symlink(at("own/certs.d"), at("mounted/out")).unwrap();
        let mounts = FilesystemView::Mounts(vec![at("mounted")]);
        for (path, on_node, in_container) in [
            ("mounted/certs.d", Sight::There, Sight::There),
            ("mounted/certs.d/r.example/x", Sight::Absent, Sight::Absent),
            ("mounted/link", Sight::There, Sight::There),
            ("mounted/link/r.example", Sight::Absent, Sight::Absent),
            ("mounted/dangling", Sight::Absent, Sight::Hidden),
            ("mounted/dangling/r.example", Sight::Absent, Sight::Hidden),
            ("mounted/out", Sight::There, Sight::Hidden),
            ("own/certs.d", Sight::There, Sight::Hidden),
            ("own/other", Sight::Absent, Sight::Hidden),
            ("none/certs.d", Sight::Absent, Sight::Hidden),
        ] {
            assert_eq!(FilesystemView::Whole.look_at(&at(path)), on_node, "{path}");
            assert_eq!(mounts.look_at(&at(path)), in_container, "{path}");
        }
        assert_eq!(FilesystemView::of_peer(Some(std::process::id())), FilesystemView::Whole);
        assert!(
            matches!(FilesystemView::of_peer(Some(0)), FilesystemView::Mounts(points) if points.contains(&"/proc".into()))
        );
    }
}
