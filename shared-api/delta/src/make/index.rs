//! The files of the old image by path, by content and by name: to find the one that a new file is made from.

use std::collections::HashMap;

use super::root::{Hash, OldFile, split_path};

/// Most files of one name that are looked at. There are thousands of `__init__.py`, and the path of the right one is
/// nearly always the same.
const MAX_CANDIDATES: usize = 64;
/// Digits and letters of a hexadecimal number in a name from which on it's taken for a digest that changes.
const DIGEST: usize = 8;

pub(super) struct OldFileIndex<'a> {
    files: Vec<(&'a [u8], OldFile)>,
    by_hash: HashMap<Hash, usize>,
    /// By name without its numbers: `libssl.so.3.0.1` and `libssl.so.3.0.2` are the same here.
    by_shape: HashMap<Vec<u8>, Vec<usize>>,
}

impl<'a> OldFileIndex<'a> {
    /// The files must be in the order of their paths.
    pub(super) fn new(files: Vec<(&'a [u8], OldFile)>) -> Self {
        let (mut by_hash, mut by_shape) = (HashMap::new(), HashMap::<_, Vec<_>>::new());
        for (number, (path, file)) in files.iter().enumerate() {
            by_hash.entry(file.hash).or_insert(number);
            by_shape.entry(shape_of(split_path(path).1)).or_default().push(number);
        }
        Self { files, by_hash, by_shape }
    }

    /// A file with this content; the one with this path if it has it.
    pub(super) fn find_same(&self, path: &[u8], hash: &Hash) -> Option<(&'a [u8], OldFile)> {
        let at_path = self.find_at(path).filter(|(_, file)| file.hash == *hash);
        at_path.or_else(|| self.by_hash.get(hash).map(|number| self.files[*number]))
    }

    /// The file that is probably an older version: of the same path, or else of the same name but for its numbers, with as
    /// many directories in common as possible, and then with the nearest size.
    pub(super) fn find_similar(&self, path: &[u8], size: u64) -> Option<(&'a [u8], OldFile)> {
        if let Some(found) = self.find_at(path) {
            return Some(found);
        }
        let named = self.by_shape.get(&shape_of(split_path(path).1))?;
        let wanted = shape_of(path);
        let candidates = named.iter().take(MAX_CANDIDATES).map(|number| self.files[*number]);
        candidates.max_by_key(|(path, file)| {
            (common_parts(&wanted, &shape_of(path)), std::cmp::Reverse(file.size.abs_diff(size)))
        })
    }

    fn find_at(&self, path: &[u8]) -> Option<(&'a [u8], OldFile)> {
        let found = self.files.binary_search_by(|(other, _)| (*other).cmp(path)).ok()?;
        Some(self.files[found])
    }
}

/// A path with a `#` for each number, and for each digest.
fn shape_of(path: &[u8]) -> Vec<u8> {
    let mut shape = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(first) = rest.first() {
        let hexadecimal = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = if hexadecimal >= DIGEST { hexadecimal } else { digits };
        shape.push(if number > 0 { b'#' } else { *first });
        rest = &rest[number.max(1)..];
    }
    shape
}

/// The parts that two paths have in common at their beginning and at their end.
fn common_parts(one: &[u8], other: &[u8]) -> usize {
    let parts = |path| <[u8]>::split(path, |byte: &u8| *byte == b'/');
    let first = parts(one).zip(parts(other)).take_while(|(one, other)| one == other).count();
    let last = parts(one).rev().zip(parts(other).rev()).take_while(|(one, other)| one == other).count();
    first + last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_leave_out_numbers_and_digests() {
        for (path, expected) in [
            ("usr/lib/libssl.so.3.0.15", "usr/lib/libssl.so.#.#.#"),
            ("static/main-0a1b2c3d4e.js", "static/main-#.js"),
            ("pandas-2.2.3.dist-info/RECORD", "pandas-#.#.#.dist-info/RECORD"),
            ("facade/bad.py", "facade/bad.py"),
            ("", ""),
        ] {
            assert_eq!(shape_of(path.as_bytes()), expected.as_bytes());
        }
    }

    #[test]
    fn an_older_version_is_found_by_name() {
        let file = |size| OldFile {
            layer: 0,
            offset: 0,
            size,
            hash: [u8::try_from(size).unwrap_or(0); 32],
            is_open: true,
        };
        let files = vec![
            (&b"a/__init__.py"[..], file(10)),
            (b"lib/libssl.so.3.0.1", file(20)),
            (b"pandas-2.2.2.dist-info/METADATA", file(30)),
            (b"pip-23.0.dist-info/METADATA", file(40)),
        ];
        let index = OldFileIndex::new(files);
        let similar = |path: &str, size| index.find_similar(path.as_bytes(), size).map(|(_, file)| file.size);
        assert_eq!(similar("a/__init__.py", 1), Some(10));
        assert_eq!(similar("b/__init__.py", 1), Some(10));
        assert_eq!(similar("lib/libssl.so.3.0.2", 1), Some(20));
        assert_eq!(similar("pandas-2.2.3.dist-info/METADATA", 40), Some(30), "more of its path is the same");
        assert_eq!(similar("django-5.0.dist-info/METADATA", 39), Some(40), "nearer in size");
        assert_eq!(similar("lib/libz.so", 1), None);
        assert_eq!(
            index.find_same(b"other", &[20; 32]).map(|(path, _)| path),
            Some(&b"lib/libssl.so.3.0.1"[..])
        );
        assert_eq!(index.find_same(b"other", &[21; 32]), None);
    }
}
