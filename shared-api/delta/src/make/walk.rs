//! The entries of a tar, with the position of their content.

use std::io::{self, BufReader, Read};

use super::tar_file::{Tar, TarPart};

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TarEntry {
    /// Relative to the root, without empty parts and `.`; empty for the root itself.
    pub(super) path: Vec<u8>,
    pub(super) kind: EntryKind,
    /// Position of the content in the tar.
    pub(super) offset: u64,
    /// Length of the content in the tar.
    pub(super) size: u64,
    /// Whether root may read the file, or pass the directory, without a capability.
    pub(super) is_open: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
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
pub(super) fn walk_tar(
    tar: &dyn Tar,
    mut each: impl FnMut(TarEntry, &mut dyn Read) -> io::Result<()>,
) -> io::Result<()> {
    let mut archive =
        tar::Archive::new(BufReader::with_capacity(super::PIECE, TarPart::new(tar, 0, tar.size())));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = normalize_path(&entry.path_bytes());
        let kind = entry.header().entry_type();
        let kind = if path.is_none() {
            EntryKind::Other
        } else if kind.is_file() || kind.is_contiguous() {
            EntryKind::File { sparse: is_sparse(&mut entry)? }
        } else if kind.is_hard_link() {
            let link = entry.link_name_bytes().and_then(|link| normalize_path(&link));
            link.map_or(EntryKind::Other, EntryKind::HardLink)
        } else if kind.is_dir() {
            EntryKind::Directory
        } else if kind.is_symlink() {
            EntryKind::SymbolicLink
        } else {
            EntryKind::Other
        };
        let needed = if kind == EntryKind::Directory { 0o1 } else { 0o4 };
        let is_open = is_open_to_root(entry.header(), needed);
        let (path, offset, size) = (path.unwrap_or_default(), entry.raw_file_position(), entry.size());
        each(TarEntry { path, kind, offset, size, is_open }, &mut entry)?;
    }
    Ok(())
}

/// Whether root has a permission without a capability: the agent's unit has none, and `CAP_DAC_OVERRIDE` is what else makes root
/// read everything. A header that isn't readable opens nothing.
fn is_open_to_root(header: &tar::Header, needed: u32) -> bool {
    let Ok(mode) = header.mode() else { return false };
    // An empty field is 0, as for Go.
    let (uid, gid) = (header.uid().unwrap_or_default(), header.gid().unwrap_or_default());
    let shift = match (uid, gid) {
        (0, _) => 6,
        (_, 0) => 3,
        _ => 0,
    };
    mode >> shift & needed != 0
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
fn normalize_path(path: &[u8]) -> Option<Vec<u8>> {
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    (!parts.contains(&&b".."[..])).then(|| parts.join(&b'/'))
}
