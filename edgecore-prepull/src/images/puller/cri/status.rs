//! Translation of the container runtime's gRPC errors into pull errors.
//!
//! CRI reports nearly every failure as `Unknown`, so we find class and code in the text. The needles are from the texts
//! of containerd 1.6 to 2.x, CRI-O and the registries behind them.

use std::error::Error;

use prepull_api::failure::FailureCode;
use tonic::{Code, Status};

use crate::images::puller::{ErrorClass, PullError};
use crate::images::runtime::{RuntimeEndpoint, was_not_connected};

/// Translates the answer to a question about `reference`.
pub(in crate::images) fn to_pull_error(
    status: &Status,
    reference: &str,
    endpoint: &RuntimeEndpoint,
) -> PullError {
    let Some(mut cause) = status.source().filter(|_| is_connection_failure(status)) else {
        let (class, code) = classify(status.code(), status.message(), reference);
        let message = without_image(status.message(), reference);
        let error = match class {
            ErrorClass::RuntimeDown => PullError::new(class, format!("{message} ({endpoint})")),
            _ => PullError::new(class, message),
        };
        return error.with_code(code);
    };
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let message = format!("the container runtime does not answer: {cause} ({endpoint})");
    PullError::new(ErrorClass::RuntimeDown, message)
}

/// Whether the connection to the runtime failed, so that the status isn't the runtime's answer. Only statuses that
/// tonic makes itself have a source.
pub(in crate::images) fn is_connection_failure(status: &Status) -> bool {
    status.source().is_some()
}

/// Translates the answer to a pull of `reference`: a runtime that ended before it answered may have crashed because of
/// the image.
pub(super) fn to_error_of_pull(status: &Status, reference: &str, endpoint: &RuntimeEndpoint) -> PullError {
    let error = to_pull_error(status, reference, endpoint);
    if is_connection_failure(status) && !was_not_connected(status) {
        return PullError { class: ErrorClass::RuntimeLost, ..error };
    }
    error
}

/// Prefixes of containerd and CRI-O before the cause, each followed by the image in quotes and a colon. Each reason
/// already has the image beside it, so they add nothing.
const PREAMBLES: &[&str] =
    &["failed to pull and unpack image ", "failed to resolve reference ", "failed to pull image "];

/// Removes the [`PREAMBLES`] and the name of the image from the beginning of a message.
fn without_image<'a>(message: &'a str, reference: &str) -> &'a str {
    let without_preamble = |text: &'a str| {
        let quoted = PREAMBLES.iter().find_map(|preamble| text.strip_prefix(preamble)?.strip_prefix('"'));
        let (_, rest) = quoted?.split_once("\": ")?;
        Some(rest)
    };
    let mut rest = message;
    while let Some(cause) =
        without_preamble(rest).or_else(|| rest.strip_prefix(reference)?.strip_prefix(": "))
    {
        rest = cause;
    }
    if rest.is_empty() { message } else { rest }
}

/// Searched in this order; the first match decides. Transient needles come before those of refusals, because the text
/// of a failed login may end in "connection refused" by the token server. Among them, an answer of a registry comes
/// before a broken connection: a gateway's answer may quote the error behind it.
const NEEDLES: &[(ErrorClass, FailureCode, &[&str])] = &[
    // containerd's CRI during its start; cri-dockerd without its dockerd.
    (
        ErrorClass::RuntimeDown,
        FailureCode::RuntimeDown,
        &["server is not initialized yet", "cannot connect to the docker daemon"],
    ),
    (ErrorClass::NoSpace, FailureCode::NoSpace, &["no space left on device", "disk quota exceeded"]),
    (
        ErrorClass::Permanent,
        FailureCode::PlatformMismatch,
        &[
            "no match for platform",
            "no matching manifest for",
            "no image found in image index for architecture",
            "no image found in manifest list for architecture",
        ],
    ),
    (
        ErrorClass::Permanent,
        FailureCode::InvalidImage,
        &[
            "invalid reference format",
            "failed to parse image",
            "couldn't parse image",
            "invalid image reference",
            "signaturevalidationfailed",
            "schema 1",
            "schema1",
            "unsupported manifest media type",
            "unsupported media type",
        ],
    ),
    (
        ErrorClass::Transient,
        FailureCode::RateLimited,
        &["toomanyrequests", "too many requests", "statuscode: 429"],
    ),
    (
        ErrorClass::Transient,
        FailureCode::RegistryError,
        &[
            "request timeout",
            "internal server error",
            "bad gateway",
            "service unavailable",
            "gateway timeout",
            // Codes without a name, such as a proxy's own.
            "unexpected http status: 5",
        ],
    ),
    (
        ErrorClass::Transient,
        FailureCode::Unreachable,
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
            "x509: ",
            "server gave http response to https client",
            "deadline exceeded",
            "unexpected eof",
            ": eof",
        ],
    ),
    // cri-dockerd puts it before a gateway's answer, and CRI-O before a refused connection.
    (ErrorClass::Transient, FailureCode::RegistryError, &["registryunavailable"]),
    (
        ErrorClass::Transient,
        FailureCode::Other,
        &[
            "unexpected commit digest",
            "failed size validation",
            // containerd lacks content of its own: it was garbage collected during the pull, or the lease has expired.
            // The next attempt fetches it again.
            "failed to extract layer",
            "lease does not exist",
            "parent snapshot",
            "extraction snapshot",
            "failed to stat snapshot",
            "content digest",
        ],
    ),
    (
        ErrorClass::Auth,
        FailureCode::Unauthorized,
        &[
            "401 unauthorized",
            "403 forbidden",
            "status: 401",
            "status: 403",
            "status code 401",
            "status code 403",
            "statuscode: 401",
            "statuscode: 403",
            "http 401 response",
            "http 403 response",
            "unauthorized:",
            "unauthorized;",
            "authentication required",
            "authorization failed",
            "no basic auth credentials",
            "access denied",
            "access to the resource is denied",
            "insufficient_scope",
            "invalid username/password",
            "incorrect username or password",
            "denied:",
            "denied;",
        ],
    ),
    (
        ErrorClass::NotFound,
        FailureCode::NotFound,
        &[
            "404 not found",
            "status: 404",
            "status code 404",
            "statuscode: 404",
            "http 404 response",
            "manifest unknown",
            "name unknown",
            // A repository or a blob in the words of CRI-O, without the registry's code.
            "not known to registry",
            "unknown to registry",
            "not found",
            "repository does not exist",
        ],
    ),
];

/// Finds the class and the code of an answer. Names are removed before the search: an image may be called `eof`.
fn classify(code: Code, message: &str, reference: &str) -> (ErrorClass, FailureCode) {
    let text = remove_quoted(message).replace(reference, "").to_lowercase();
    let found = NEEDLES.iter().find(|(.., needles)| needles.iter().any(|needle| text.contains(needle)));
    if let Some((class, code, _)) = found {
        return (*class, *code);
    }
    // A registry's error code without its text.
    if ["denied", "unauthorized"].iter().any(|word| text.trim_end().ends_with(word)) {
        return (ErrorClass::Auth, FailureCode::Unauthorized);
    }
    match code {
        // The runtime answers so during its start and stop.
        Code::Unavailable => (ErrorClass::RuntimeDown, FailureCode::RuntimeDown),
        Code::Unauthenticated | Code::PermissionDenied => (ErrorClass::Auth, FailureCode::Unauthorized),
        Code::NotFound => (ErrorClass::NotFound, FailureCode::NotFound),
        Code::InvalidArgument => (ErrorClass::Permanent, FailureCode::InvalidImage),
        Code::Unimplemented => (ErrorClass::Permanent, FailureCode::Other),
        _ => (ErrorClass::Transient, FailureCode::Other),
    }
}

fn remove_quoted(text: &str) -> String {
    // Every second part is within quotes. The text after an unclosed quote is kept: it may hold the needle.
    let parts: Vec<_> = text.split('"').collect();
    let unclosed = parts.len().is_multiple_of(2);
    let last = parts.len() - 1;
    let keep = |index: &usize| index.is_multiple_of(2) || (unclosed && *index == last);
    (0..parts.len()).filter(keep).map(|index| parts[index]).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
