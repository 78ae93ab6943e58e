//! The entries of a tar, with the position of their content.

use std::io::{self, BufReader, Read};

use super::tar_file::{Part, Tar};

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Relative to the root, without empty parts and `.`; empty for the root itself.
    pub(super) path: Vec<u8>,
    pub(super) kind: Kind,
    /// Position of the content in the tar.
    pub(super) offset: u64,
    /// Length of the content in the tar.
    pub(super) size: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File {
        /// Whether the content in the tar is the list of a sparse file's parts, and no file that could be read elsewhere.
        sparse: bool,
    },
    /// Another name of a file.
    HardLink(Vec<u8>),
    Directory,
    SymbolicLink,
    /// A device, a pipe, or a path that leads upwards.
    Other,
}

/// Calls a function for each entry, in order, with a reader of its content.
pub(super) fn walk(
    tar: &dyn Tar,
    mut each: impl FnMut(Entry, &mut dyn Read) -> io::Result<()>,
) -> io::Result<()> {
    let mut archive =
        tar::Archive::new(BufReader::with_capacity(super::PIECE, Part::new(tar, 0, tar.size())));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = normalize(&entry.path_bytes());
        let kind = entry.header().entry_type();
        let kind = if path.is_none() {
            Kind::Other
        } else if kind.is_file() || kind.is_contiguous() {
            Kind::File { sparse: is_sparse(&mut entry)? }
        } else if kind.is_hard_link() {
            let link = entry.link_name_bytes().and_then(|link| normalize(&link));
            link.map_or(Kind::Other, Kind::HardLink)
        } else if kind.is_dir() {
            Kind::Directory
        } else if kind.is_symlink() {
            Kind::SymbolicLink
        } else {
            Kind::Other
        };
        let (path, offset, size) = (path.unwrap_or_default(), entry.raw_file_position(), entry.size());
        each(Entry { path, kind, offset, size }, &mut entry)?;
    }
    Ok(())
}

/// Whether a file has holes, in one of the ways of GNU tar that stand beside an ordinary type.
fn is_sparse(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<bool> {
    let Some(extensions) = entry.pax_extensions()? else { return Ok(false) };
    for extension in extensions {
        if extension?.key_bytes().starts_with(b"GNU.sparse.") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `None` for a path that leads upwards.
fn normalize(path: &[u8]) -> Option<Vec<u8>> {
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    (!parts.contains(&&b".."[..])).then(|| parts.join(&b'/'))
}
