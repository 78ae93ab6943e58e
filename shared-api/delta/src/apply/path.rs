//! Paths of files in the old image.

use super::ApplyError;

/// The path relative to the root, without empty parts and `.`. One with `..` is refused: no producer writes it, and it
/// could lead out of the image.
pub(super) fn normalize_path(path: &[u8]) -> Result<Vec<u8>, ApplyError> {
    let refuse = |problem: &str| {
        let path = String::from_utf8_lossy(path);
        Err(ApplyError::Malformed(format!("the path {path:.100?} {problem}")))
    };
    if path.contains(&0) {
        return refuse("has a zero byte");
    }
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    if parts.contains(&&b".."[..]) {
        return refuse("leads upwards");
    }
    if parts.is_empty() {
        return refuse("names no file");
    }
    Ok(parts.join(&b'/'))
}
