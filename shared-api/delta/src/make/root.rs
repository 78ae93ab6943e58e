//! The root file system of the old image, as its layers make it: the files that a node can read by their path.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Bound;

use ring::digest::{Context, SHA256};

use super::tar_file::{Tar, TarPart};
use super::walk::{EntryKind, TarEntry, walk_tar};
use crate::apply::OldRootFiles;

/// Prefix of an entry that removes another of a lower layer.
const WHITEOUT: &[u8] = b".wh.";
/// Name of an entry that removes the content of its directory in lower layers.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Longest path that a diff may open.
const MAX_PATH: usize = 4 << 10;

/// The digest of a file's content.
pub(super) type Hash = [u8; 32];

/// The files of the old image, and the tars that hold them.
pub struct Root<'a> {
    tars: Vec<&'a dyn Tar>,
    nodes: BTreeMap<Vec<u8>, RootNode>,
}

struct RootNode {
    /// The layer that the entry is from.
    layer: usize,
    what: What,
}

enum What {
    File(OldFile),
    Directory {
        /// Whether root may pass it without a capability.
        is_open: bool,
    },
    SymbolicLink,
    Other,
}

/// The content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OldFile {
    pub(super) layer: usize,
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) hash: Hash,
    /// Whether root may read it without a capability, as the agent has to.
    pub(super) is_open: bool,
}

impl<'a> Root<'a> {
    /// Walks the layers, the lowest one first.
    ///
    /// # Errors
    /// One can't be read, or is no tar.
    pub fn read(tars: Vec<&'a dyn Tar>) -> io::Result<Self> {
        let mut nodes = BTreeMap::new();
        for (layer, tar) in tars.iter().enumerate() {
            walk_tar(*tar, |entry, content| add_entry(&mut nodes, layer, entry, content))?;
        }
        Ok(Self { tars, nodes })
    }

    /// The files that the agent can read, in the order of their paths. Those below a symbolic link are left out: runtimes differ
    /// in where they put them.
    pub(super) fn files(&self) -> Vec<(&[u8], OldFile)> {
        let files = self.nodes.iter().filter_map(|(path, node)| match node.what {
            What::File(file) if path.len() <= MAX_PATH => Some((path.as_slice(), file)),
            _ => None,
        });
        files.filter(|(path, file)| file.is_open && self.is_reachable(path)).collect()
    }

    /// Whether there is a file at this path that the agent can't read.
    pub(super) fn is_closed(&self, path: &[u8]) -> bool {
        let what = self.nodes.get(path).map(|node| &node.what);
        matches!(what, Some(What::File(file)) if !file.is_open || !self.is_reachable(path))
    }

    /// Whether each directory above a path may be passed, and none is a symbolic link. One without an entry is made by the
    /// runtime, and open.
    fn is_reachable(&self, path: &[u8]) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(end, _)| end);
        ends.into_iter().all(|end| match self.nodes.get(&path[..end]).map(|node| &node.what) {
            None => true,
            Some(What::Directory { is_open }) => *is_open,
            Some(_) => false,
        })
    }

    pub(super) fn content(&self, file: &OldFile) -> TarPart<'a> {
        TarPart::new(self.tars[file.layer], file.offset, file.size)
    }
}

/// The content as a node would find it.
impl<'a> OldRootFiles for &Root<'a> {
    type File = TarPart<'a>;

    fn open(&mut self, path: &[u8]) -> io::Result<TarPart<'a>> {
        match self.nodes.get(path).map(|node| &node.what) {
            Some(What::File(file)) if !self.is_closed(path) => Ok(self.content(file)),
            Some(What::File(_)) => Err(io::ErrorKind::PermissionDenied.into()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

fn add_entry(
    nodes: &mut BTreeMap<Vec<u8>, RootNode>,
    layer: usize,
    entry: TarEntry,
    content: &mut dyn Read,
) -> io::Result<()> {
    let TarEntry { path, kind, offset, size, is_open } = entry;
    let (directory, name) = split_path(&path);
    if name == OPAQUE {
        remove_below(nodes, directory, |node| node.layer < layer);
        return Ok(());
    }
    if let Some(name) = name.strip_prefix(WHITEOUT) {
        let hidden = if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() };
        if nodes.get(&hidden).is_some_and(|node| node.layer < layer) {
            nodes.remove(&hidden);
        }
        remove_below(nodes, &hidden, |node| node.layer < layer);
        return Ok(());
    }
    let what = match kind {
        EntryKind::Directory => What::Directory { is_open },
        EntryKind::SymbolicLink => What::SymbolicLink,
        EntryKind::File { sparse: true } | EntryKind::Other => What::Other,
        EntryKind::File { sparse: false } => {
            What::File(OldFile { layer, offset, size, hash: hash_content(content)?, is_open })
        }
        // A target in a lower layer is nothing that a runtime could link to.
        EntryKind::HardLink(target) => match nodes.get(&target) {
            Some(RootNode { layer: same, what: What::File(file) }) if *same == layer => What::File(*file),
            _ => What::Other,
        },
    };
    if path.is_empty() {
        return Ok(());
    }
    if !matches!(what, What::Directory { .. }) {
        remove_below(nodes, &path, |_| true);
    }
    nodes.insert(path, RootNode { layer, what });
    Ok(())
}

fn remove_below(
    nodes: &mut BTreeMap<Vec<u8>, RootNode>,
    directory: &[u8],
    is_gone: impl Fn(&RootNode) -> bool,
) {
    let prefix = if directory.is_empty() { Vec::new() } else { [directory, b"/"].concat() };
    let from = (Bound::Included(prefix.clone()), Bound::Unbounded);
    let below = nodes.range(from).take_while(|(path, _)| path.starts_with(&prefix));
    let gone: Vec<Vec<u8>> = below.filter(|(_, node)| is_gone(node)).map(|(path, _)| path.clone()).collect();
    for path in gone {
        nodes.remove(&path);
    }
}

/// The directory of a path, and its last part.
pub(super) fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// The digest of a content.
pub(super) fn hash_content(content: &mut (impl Read + ?Sized)) -> io::Result<Hash> {
    let (mut context, mut piece) = (Context::new(&SHA256), vec![0; super::PIECE]);
    loop {
        let read = content.read(&mut piece)?;
        if read == 0 {
            let mut hash = Hash::default();
            hash.copy_from_slice(context.finish().as_ref());
            return Ok(hash);
        }
        context.update(&piece[..read]);
    }
}
