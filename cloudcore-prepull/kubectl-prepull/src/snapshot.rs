//! Texts that are compared with what they were: files beside the tests, which `PREPULL_WRITE_SNAPSHOTS=1` writes.
#![allow(clippy::unwrap_used)]

use std::path::Path;

/// Asserts that the text is that of the file `src/FILE`.
#[track_caller]
pub(crate) fn assert_snapshot(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    if std::env::var_os("PREPULL_WRITE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, before, "{file} is to be like this; PREPULL_WRITE_SNAPSHOTS=1 writes it\n{text}");
}
