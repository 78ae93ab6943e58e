//! Errors of the registry's side: their kind, which decides what happens next, and one line without secrets.

use std::time::Duration;

use prepull_api::wire::truncate_reason;

/// The meaning of a failure for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The registry refuses this credential, or asks for one.
    Unauthorized,
    /// The registry has no such manifest or blob, or hides it from this credential.
    NotFound,
    /// The image has no manifest for the platform.
    PlatformMismatch,
    /// The registry has had too many requests.
    RateLimited {
        /// The wait that it asks for.
        retry_after: Option<Duration>,
    },
    /// There is no connection: no address for the name, nothing that listens, a proxy or a certificate in the way. Asking
    /// again may help, and so may asking from another place.
    NoConnection,
    /// A connection broke off, or nothing came over it in time. Asking again may help.
    Unreachable,
    /// The endpoint sends next to nothing, and there is another one.
    TooSlow,
    /// The registry, or the storage to which it redirects, answers with an error of its own.
    Server {
        /// The wait that it asks for.
        retry_after: Option<Duration>,
    },
    /// The registry does not keep to the protocol: a wrong length or range, an answer that is too large, a redirect to where
    /// none may lead.
    Protocol,
    /// The content doesn't match its digest.
    DigestMismatch,
    /// Not done here, although the runtime may be able to: something of hosts.toml, of a proxy, of a certificate.
    Unsupported,
}

impl ErrorKind {
    /// The wait that the registry asks for.
    pub fn retry_after(self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after } | Self::Server { retry_after } => retry_after,
            _ => None,
        }
    }

    /// The same in words, to follow the status.
    pub(crate) fn asked_wait(self) -> String {
        match self.retry_after().map_or(0, |wait| wait.as_secs()) {
            0 => String::new(),
            seconds => format!(" and asks to wait {seconds} s"),
        }
    }
}

/// Failure of a request to a registry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RegistryError {
    /// What the failure means.
    pub kind: ErrorKind,
    /// One line for a person, without secrets and without queries of URLs.
    pub message: String,
    /// One endpoint refuses or has nothing, and another one hasn't answered, or not to the question. Another credential may
    /// help, and so may asking again. Only with [`ErrorKind::Unauthorized`] and [`ErrorKind::NotFound`].
    pub undecided: bool,
}

impl RegistryError {
    /// An error with this message, joined into one line of bounded length. The message must not have a URL with a query.
    pub(crate) fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        let words: Vec<&str> =
            message.as_ref().split(|c: char| c.is_whitespace() || c.is_control()).collect();
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        Self { kind, message: truncate_reason(&words.join(" ")), undecided: false }
    }

    /// Whether it's a "no" that asking the same endpoint again doesn't change.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.kind, ErrorKind::Unauthorized | ErrorKind::NotFound)
    }

    /// Whether the same endpoint may answer later.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::NoConnection
                | ErrorKind::Unreachable
                | ErrorKind::TooSlow
                | ErrorKind::RateLimited { .. }
                | ErrorKind::Server { .. }
        )
    }

    /// The rank of the error when several endpoints have failed: an answer is more useful than silence, and any other
    /// answer more than "not found".
    pub(crate) fn weight(&self) -> u8 {
        match self.kind {
            ErrorKind::NoConnection | ErrorKind::Unreachable | ErrorKind::TooSlow => 0,
            ErrorKind::NotFound => 1,
            ErrorKind::Unauthorized
            | ErrorKind::RateLimited { .. }
            | ErrorKind::Server { .. }
            | ErrorKind::Unsupported => 2,
            ErrorKind::Protocol | ErrorKind::DigestMismatch | ErrorKind::PlatformMismatch => 3,
        }
    }
}

/// An error and its causes, joined by colons. Leaves out repetitions: some libraries repeat the cause in the error.
pub(crate) fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}
