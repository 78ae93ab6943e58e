//! The files of an earlier image, which layers are rebuilt from.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use prepull_delta::OldRootFiles;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

/// The files of an image, by the directories of its layers, the highest first.
pub(super) struct OldImageFiles(Vec<OwnedFd>);

impl OldImageFiles {
    pub(super) fn in_directories(directories: &[PathBuf]) -> io::Result<Self> {
        let open = |path: &PathBuf| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(rustix::fs::CWD, path, flags, Mode::empty())
                .map_err(|error| io::Error::other(format!("cannot open {}: {error}", path.display())))
        };
        directories.iter().map(open).collect::<Result<_, _>>().map(Self)
    }
}

/// Reads a regular file of at most `most` bytes.
pub(super) fn read_file(directories: &[PathBuf], path: &str, most: u64) -> io::Result<Vec<u8>> {
    let file = match OldRootFiles::open(&mut OldImageFiles::in_directories(directories)?, path.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(io::Error::other("the image has no such file"));
        }
        file => file?,
    };
    let size = file.metadata()?.len();
    if size > most {
        return Err(io::Error::other(format!("{path} has {size} bytes, more than {most}")));
    }
    let mut content = Vec::new();
    file.take(most).read_to_end(&mut content)?;
    Ok(content)
}

impl OldRootFiles for OldImageFiles {
    type File = File;

    fn open(&mut self, path: &[u8]) -> io::Result<File> {
        for directory in &self.0 {
            match open_beneath(directory.as_fd(), path) {
                Ok(file) => return Ok(File::from(file)),
                Err(NOT_REGULAR) => {
                    return Err(io::Error::new(
                        io::ErrorKind::NotFound,
                        "not a regular file in the old image",
                    ));
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "not in the old image"))
    }
}

/// The error of [`open_beneath`] for a directory, a device, a socket or a pipe; open(2) has it for a socket.
const NOT_REGULAR: Errno = Errno::NXIO;

/// Opens a regular file below the directory, without following links. Not by openat2(2): RestrictSUIDSGID of a systemd
/// unit, ours too, answers that with ENOSYS, as kernels before 5.6 do.
fn open_beneath(directory: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let parts: Vec<_> = path.split(|byte| *byte == b'/').collect();
    let Some((name, parents)) = parts.split_last() else { return Err(Errno::NOENT) };
    if parts.iter().any(|part| matches!(*part, b"" | b"." | b"..")) {
        return Err(Errno::XDEV);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let through = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut parent: Option<OwnedFd> = None;
    for part in parents {
        parent = Some(openat(parent.as_ref().map_or(directory, AsFd::as_fd), *part, through, Mode::empty())?);
    }
    let parent = parent.as_ref().map_or(directory, AsFd::as_fd);
    // Opening a device has effects: a watchdog starts. A whiteout is a device, too.
    match FileType::from_raw_mode(statat(parent, *name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
        // NOFOLLOW refuses a link.
        FileType::RegularFile | FileType::Symlink => openat(parent, *name, flags, Mode::empty()),
        _ => Err(NOT_REGULAR),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(files: &mut OldImageFiles, path: &str) -> Result<String, io::ErrorKind> {
        let file = files.open(path.as_bytes()).map_err(|error| error.kind())?;
        Ok(io::read_to_string(file).unwrap())
    }

    #[test]
    fn the_highest_layer_wins() {
        let dir = tempfile::tempdir().unwrap();
        let [upper, lower, outside] = ["upper", "lower", "outside"].map(|name| dir.path().join(name));
        for path in [&upper, &lower, &outside] {
            fs::create_dir_all(path.join("etc")).unwrap();
        }
        fs::write(upper.join("etc/a"), "new").unwrap();
        fs::write(lower.join("etc/a"), "old").unwrap();
        fs::write(lower.join("etc/b"), "below").unwrap();
        fs::write(outside.join("secret"), "secret").unwrap();
        fs::create_dir(upper.join("etc/c")).unwrap();
        fs::write(lower.join("etc/c"), "hidden by a directory").unwrap();
        // It can't be opened, so an attempt would have another error.
        let _socket = std::os::unix::net::UnixListener::bind(upper.join("etc/socket")).unwrap();
        symlink(outside.join("secret"), lower.join("etc/link")).unwrap();
        symlink(&outside, lower.join("dir")).unwrap();
        let mut files = OldImageFiles::in_directories(&[upper, lower]).unwrap();
        assert_eq!(read(&mut files, "etc/a").as_deref(), Ok("new"));
        assert_eq!(read(&mut files, "etc/b").as_deref(), Ok("below"));
        for hidden in ["etc/c", "etc/none", "etc/socket"] {
            assert_eq!(read(&mut files, hidden), Err(io::ErrorKind::NotFound), "{hidden}");
        }
        for outside in
            ["../outside/secret", "/etc/passwd", "etc/link", "dir/secret", "etc/../../outside/secret"]
        {
            assert!(read(&mut files, outside).is_err(), "{outside}");
        }
    }
}
