//! Errors of the identity's files.

use std::io;
use std::path::{Path, PathBuf};

/// The remedy if the operating system denies access to a file of the state directory.
pub(crate) const REMEDY_OF_DENIAL: &str =
    "permission denied: run edgecore-prepull as root, or give it a --state-dir of its own";

/// Why this node has no usable identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The state directory, which the field names, holds no certificate.
    #[error("{}: this node has not joined: run `edgecore-prepull join` first", .0.display())]
    NotJoined(PathBuf),
    /// A file cannot be read or written, for a reason other than permissions.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// What was attempted: `read`, `write`, …
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// This user may not read or write a file.
    #[error("cannot {operation} {}: {REMEDY_OF_DENIAL}", path.display())]
    Denied {
        /// What was attempted: `read`, `write`, …
        operation: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// A file has malformed or unexpected content.
    #[error("{}: {reason}: join again with a new token", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with its content.
        reason: &'static str,
    },
    /// rustls rejects the certificate or the key.
    #[error("the certificate in {} cannot be used: {reason}: join again with a new token", dir.display())]
    Unusable {
        /// The directory `DIR/pki`.
        dir: PathBuf,
        /// The error as rustls reports it.
        reason: String,
    },
}

impl IdentityError {
    pub(super) fn for_file(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Denied { operation, path },
            _ => Self::File { operation, path, source },
        }
    }
}
