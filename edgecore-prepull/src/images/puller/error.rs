//! Errors of a pull: their class, which decides on the next attempt, their code, which groups them in tools, and a
//! message without secrets.

use std::io;
use std::path::Path;
use std::time::Duration;

use prepull_api::failure::FailureCode;
use prepull_api::wire::truncate_reason;
use prepull_registry::{ErrorKind, RegistryError};

pub use crate::error_class::ErrorClass;
use crate::images::filesystem::FlushError;
use crate::images::flushes::FlushMark;

/// Failure of a pull, or of a question to the container runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PullError {
    /// The consequence for the next attempt.
    pub class: ErrorClass,
    /// Name of the failure in the status, the metrics and the events.
    pub code: FailureCode,
    /// One line for a person, without secrets, of at most [`prepull_api::wire::MAX_REASON`] bytes.
    pub message: String,
    /// The wait that the registry asks for.
    pub retry_after: Option<Duration>,
}

impl PullError {
    /// An error with this message, from which secrets are removed, and with the usual code of the class.
    pub(crate) fn new(class: ErrorClass, message: impl AsRef<str>) -> Self {
        let message = redact(message.as_ref());
        Self { class, code: class.usual_code(), message, retry_after: None }
    }

    /// The kernel couldn't write an image to its disk, and has given up on what it couldn't write. Another attempt may write it
    /// again.
    pub(crate) fn of_flush(path: &Path, error: &io::Error) -> Self {
        let class = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorClass::NoSpace,
            _ => ErrorClass::Transient,
        };
        let path = path.display();
        let message = format!(
            "the image is fetched, and cannot be brought to the disk of {path}: {error} (look at the disk and at the kernel's log)"
        );
        Self::new(class, message)
    }

    /// What was refused since the mark, if anything was.
    pub(crate) fn of_mark(mark: &FlushMark) -> Option<Self> {
        match mark.check() {
            Err(FlushError::Refused { path, source }) => Some(Self::of_flush(&path, &source)),
            Ok(()) | Err(FlushError::NotSeen { .. }) => None,
        }
    }

    /// The same error with this code.
    #[must_use]
    pub(crate) fn with_code(self, code: FailureCode) -> Self {
        Self { code, ..self }
    }
}

impl From<RegistryError> for PullError {
    fn from(error: RegistryError) -> Self {
        let (class, code) = match error.kind {
            ErrorKind::Unauthorized => (ErrorClass::Auth, FailureCode::Unauthorized),
            ErrorKind::NotFound => (ErrorClass::NotFound, FailureCode::NotFound),
            ErrorKind::PlatformMismatch => (ErrorClass::Permanent, FailureCode::PlatformMismatch),
            ErrorKind::RateLimited { .. } => (ErrorClass::Transient, FailureCode::RateLimited),
            ErrorKind::NoConnection | ErrorKind::Unreachable | ErrorKind::TooSlow => {
                (ErrorClass::Transient, FailureCode::Unreachable)
            }
            // A registry's wrong answer may be right the next time.
            ErrorKind::Server { .. } | ErrorKind::Protocol | ErrorKind::DigestMismatch => {
                (ErrorClass::Transient, FailureCode::RegistryError)
            }
            ErrorKind::Unsupported => (ErrorClass::Permanent, FailureCode::Other),
        };
        // The class still has the other credentials tried. If they're refused too, the attempt may be repeated.
        let code = if error.undecided { FailureCode::Unreachable } else { code };
        let retry_after = error.kind.retry_after();
        Self { retry_after, ..Self::new(class, error.message).with_code(code) }
    }
}

/// Joins the message into one line of at most [`prepull_api::wire::MAX_REASON`] bytes, and removes user and query
/// from each URL: blob stores hand out signed URLs, and the address of a mirror may contain a password.
fn redact(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for word in message.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        match word.find("://") {
            None => line.push_str(word),
            Some(scheme) => {
                let (scheme, rest) = word.split_at(scheme + "://".len());
                let authority = rest.find(['/', '?', '#', '"']).unwrap_or(rest.len());
                let rest = rest[..authority].rfind('@').map_or(rest, |at| &rest[at + 1..]);
                line.push_str(scheme);
                match rest.split_once('?') {
                    None => line.push_str(rest),
                    Some((path, query)) => {
                        line.push_str(path);
                        line.push_str("?…");
                        line.push_str(&query[query.find('"').unwrap_or(query.len())..]);
                    }
                }
            }
        }
    }
    truncate_reason(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_users_and_queries_of_urls() {
        for (text, redacted) in [
            (
                "Get \"https://user:hunter2@mirror.example/v2/a\": EOF",
                "Get \"https://mirror.example/v2/a\": EOF",
            ),
            (
                "Get \"https://s3.example/b?X-Amz-Signature=hunter2&x=1\": 403 Forbidden",
                "Get \"https://s3.example/b?…\": 403 Forbidden",
            ),
            ("at http://a:hunter2@h, again", "at http://h, again"),
            ("https://u:p@ss@h/x@y", "https://h/x@y"),
            ("two\n lines\t and   more", "two lines and more"),
            ("://", "://"),
            ("", ""),
        ] {
            assert_eq!(redact(text), redacted);
        }
        assert!(redact(&"x".repeat(5000)).len() <= prepull_api::wire::MAX_REASON);
    }
}
