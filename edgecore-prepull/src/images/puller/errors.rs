//! What a failed pull means, and how it reads.
//!
//! CRI has one error for everything (`Unknown`, mostly), so that the text must tell. The needles are taken from
//! what containerd 1.6 to 2.x, CRI-O and the registries behind them write.

use prepull_api::wire::bounded_reason;

/// What to do about a failed pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// May pass by itself: a broken link, a busy registry, a full disk. Anything unknown is taken for this.
    Transient,
    /// The runtime itself does not answer. Passes when it is back, and is no try: nothing was asked of a
    /// registry.
    RuntimeDown,
    /// The registry does not let us in with this credential. Another one may do.
    Auth,
    /// The registry has no such image, or denies that it has one. Another credential may show it.
    NotFound,
    /// Will be the same tomorrow: no valid reference, no image for this platform.
    Permanent,
}

impl ErrorClass {
    /// For metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::RuntimeDown => "runtime_down",
            Self::Auth => "auth",
            Self::NotFound => "not_found",
            Self::Permanent => "permanent",
        }
    }
}

/// Why a pull, or a question to the runtime, failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PullError {
    /// What to do about it.
    pub class: ErrorClass,
    /// The runtime's words. At most [`prepull_api::wire::MAX_REASON`] bytes, without anything secret.
    pub message: String,
}

impl PullError {
    /// An error of our own making.
    pub fn new(class: ErrorClass, message: impl AsRef<str>) -> Self {
        Self { class, message: clean(message.as_ref()) }
    }

    /// What the runtime answered to a question about this reference.
    pub fn from_status(status: &tonic::Status, reference: &str) -> Self {
        use std::error::Error;

        // Statuses that tonic makes itself have a source: the connection failed, not the pull.
        if status.source().is_some() {
            let mut message = "the container runtime does not answer".to_owned();
            let mut source = status.source();
            let mut last = String::new();
            while let Some(error) = source {
                last = error.to_string();
                source = error.source();
            }
            message.push_str(": ");
            message.push_str(&last);
            return Self::new(ErrorClass::RuntimeDown, message);
        }
        Self { class: classify(status.code(), status.message(), reference), message: clean(status.message()) }
    }
}

/// In this order: the first needle that is found decides. What can pass comes first, since the text of a
/// failed login may end in "connection refused" by the token server.
const NEEDLES: &[(ErrorClass, &[&str])] = &[
    (
        ErrorClass::Permanent,
        &[
            "invalid reference format",
            "failed to parse image",
            "couldn't parse image",
            "invalid image reference",
            "no match for platform",
            "no matching manifest for",
            "no image found in image index for architecture",
            "no image found in manifest list for architecture",
            "signaturevalidationfailed",
            "schema 1",
            "schema1",
            "unsupported manifest media type",
            "unsupported media type",
        ],
    ),
    (
        ErrorClass::Transient,
        &[
            "connection refused",
            "connection reset",
            "broken pipe",
            "no such host",
            "temporary failure in name resolution",
            "server misbehaving",
            "no route to host",
            "network is unreachable",
            "i/o timeout",
            "timed out",
            "tls handshake timeout",
            "deadline exceeded",
            "unexpected eof",
            ": eof",
            "toomanyrequests",
            "too many requests",
            "request timeout",
            "internal server error",
            "bad gateway",
            "service unavailable",
            "gateway timeout",
            "registryunavailable",
            "no space left on device",
            "unexpected commit digest",
            "failed size validation",
            // The content was removed under the pull's hands; it is fetched again.
            "failed to extract layer",
        ],
    ),
    (
        ErrorClass::Auth,
        &[
            "401 unauthorized",
            "403 forbidden",
            "status: 401",
            "status: 403",
            "status code 401",
            "status code 403",
            "unauthorized:",
            "authentication required",
            "authorization failed",
            "no basic auth credentials",
            "access denied",
            "access to the resource is denied",
            "insufficient_scope",
            "invalid username/password",
            "incorrect username or password",
            "denied:",
        ],
    ),
    (
        ErrorClass::NotFound,
        &[
            "404 not found",
            "status: 404",
            "status code 404",
            "manifest unknown",
            "name unknown",
            "not found",
            "repository does not exist",
        ],
    ),
];

/// What an answer of the runtime means. Names are taken out before the text is searched: an image may be called
/// `eof`.
pub(super) fn classify(code: tonic::Code, message: &str, reference: &str) -> ErrorClass {
    use tonic::Code;

    let text = without_quoted(message).replace(reference, "").to_lowercase();
    let found = NEEDLES.iter().find(|(_, needles)| needles.iter().any(|needle| text.contains(needle)));
    if let Some((class, _)) = found {
        return *class;
    }
    match code {
        // Sent by the runtime while it starts or stops.
        Code::Unavailable => ErrorClass::RuntimeDown,
        Code::Unauthenticated | Code::PermissionDenied => ErrorClass::Auth,
        Code::NotFound => ErrorClass::NotFound,
        Code::InvalidArgument | Code::Unimplemented => ErrorClass::Permanent,
        _ => ErrorClass::Transient,
    }
}

fn without_quoted(text: &str) -> String {
    // Every second part stands within quotes. An odd one out keeps its text: better one word too many.
    let parts: Vec<_> = text.split('"').collect();
    let unclosed = parts.len().is_multiple_of(2);
    let last = parts.len() - 1;
    let keep = |index: &usize| index.is_multiple_of(2) || (unclosed && *index == last);
    (0..parts.len()).filter(keep).map(|index| parts[index]).collect::<Vec<_>>().join(" ")
}

/// One line of at most [`prepull_api::wire::MAX_REASON`] bytes, in which no URL has a user or a query left:
/// blob stores hand out signed URLs, and a mirror's address may have a password in it.
pub(super) fn clean(message: &str) -> String {
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
    bounded_reason(&line)
}

#[cfg(test)]
mod tests;
