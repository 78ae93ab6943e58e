//! Connection failures explained to the operator, each with its remedy.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::text::is_display_control;
use prepull_program::errors::with_causes;
use rustls::{AlertDescription, CertificateError};
use rustls_pki_types::UnixTime;

/// Why a TLS connection could not be established.
#[derive(Debug, thiserror::Error)]
pub enum ConnectTrouble {
    /// The server's certificate is not valid yet.
    #[error(
        "the server's certificate is valid from {}, and this machine's clock says {}: set the clock",
        humantime::format_rfc3339_seconds(*not_before),
        humantime::format_rfc3339_seconds(*now)
    )]
    NotYetValid {
        /// The start of the certificate's validity.
        not_before: SystemTime,
        /// The time by this machine's clock.
        now: SystemTime,
    },
    /// The server's certificate has expired.
    #[error(
        "the server's certificate expired at {}, and this machine's clock says {}: set the clock, or restart cloudcore \
         if the clock is right",
        humantime::format_rfc3339_seconds(*not_after),
        humantime::format_rfc3339_seconds(*now)
    )]
    Expired {
        /// The end of the certificate's validity.
        not_after: SystemTime,
        /// The time by this machine's clock.
        now: SystemTime,
    },
    /// The server's certificate is for other names.
    #[error(
        "the server's certificate is not for {expected} but for {presented}: use one of those names, or start \
         cloudcore with --advertise {expected}"
    )]
    OtherName {
        /// The name that was dialled.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The server's certificate was issued by another CA.
    #[error(
        "the server's certificate is not from the CA that this node has joined: is it another installation? If it \
             is the right one, its CA was replaced: join again with a new token"
    )]
    OtherCa,
    /// No certificate in the server's chain has the hash in the token.
    #[error(
        "the server is not the one that the token is for (no certificate in its chain has the token's hash): check \
             the server's address, and that the token comes from its `token create`"
    )]
    OtherPin,
    /// The server refused this node's certificate.
    #[error(
        "the server refused this node's certificate ({0:?}): if it has expired, it is renewed as long as cloudcore \
             grants (`--renew-grace`); otherwise join again with a new token, unless this machine's or the server's clock \
             is wrong"
    )]
    Refused(AlertDescription),
    /// The server at the address doesn't speak TLS.
    #[error("what listens there does not speak TLS: check the port")]
    NotTls,
    /// The address has no listener.
    #[error("connection refused: is cloudcore running there, and is the port right?")]
    NoListener,
    /// The connection attempt timed out.
    #[error("no answer: is the address right, and does a firewall let this port through?")]
    NoAnswer,
    /// Any other failure, in the words of the operating system or of rustls.
    #[error("{0}")]
    Other(String),
}

/// The verifier's error for a chain without the pinned CA; becomes [`ConnectTrouble::OtherPin`].
#[derive(Debug, thiserror::Error)]
#[error("no certificate of the chain has the pinned hash")]
pub(crate) struct PinMismatch;

impl From<io::Error> for ConnectTrouble {
    fn from(error: io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return Self::from_tls(tls);
        }
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::NoListener,
            io::ErrorKind::TimedOut => Self::NoAnswer,
            _ => Self::Other(with_causes(&error)),
        }
    }
}

impl ConnectTrouble {
    fn from_tls(error: &rustls::Error) -> Self {
        let time = |at: &UnixTime| UNIX_EPOCH + Duration::from_secs(at.as_secs());
        match error {
            rustls::Error::InvalidCertificate(problem) => match problem {
                CertificateError::NotValidYetContext { time: now, not_before } => {
                    Self::NotYetValid { not_before: time(not_before), now: time(now) }
                }
                CertificateError::ExpiredContext { time: now, not_after } => {
                    Self::Expired { not_after: time(not_after), now: time(now) }
                }
                CertificateError::NotValidForNameContext { expected, presented } => Self::OtherName {
                    expected: expected.to_str().into_owned(),
                    presented: plain_names(presented),
                },
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::OtherCa,
                CertificateError::Other(other) if other.0.is::<PinMismatch>() => Self::OtherPin,
                _ => Self::Other(error.to_string()),
            },
            rustls::Error::AlertReceived(
                alert @ (AlertDescription::CertificateExpired
                | AlertDescription::CertificateRequired
                | AlertDescription::CertificateUnknown
                | AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied),
            ) => Self::Refused(*alert),
            rustls::Error::InvalidMessage(_) => Self::NotTls,
            _ => Self::Other(error.to_string()),
        }
    }
}

/// The names without webpki's decoration: it gives `DnsName("a")` and `IpAddress(192.0.2.1)`.
fn plain_names(presented: &[String]) -> String {
    let plain = |name: &String| {
        let inner = name.split_once('(').map_or(name.as_str(), |(_, inner)| inner);
        let inner = inner.trim_end_matches(')').trim_matches('"');
        inner.parse::<IpAddr>().map_or_else(|_| printable_start(inner), |address| address.to_string())
    };
    presented.iter().map(plain).collect::<Vec<_>>().join(", ")
}

/// The start of a text from a server, without control characters: it ends up in logs and on terminals.
pub(crate) fn printable_start(text: &str) -> String {
    text.chars().take(500).map(|c| if is_display_control(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_appears_once_without_control_characters() {
        let inner = io::Error::other("inner");
        assert_eq!(with_causes(&io::Error::other(inner)), "inner");
        assert_eq!(printable_start("a\nb\x1b[1m"), "a b [1m");
        assert_eq!(printable_start("a\u{202e}b"), "a b");
    }

    #[test]
    fn an_avoidable_failure_has_its_remedy() {
        let of = |kind: io::ErrorKind| ConnectTrouble::from(io::Error::from(kind)).to_string();
        assert!(of(io::ErrorKind::ConnectionRefused).starts_with("connection refused: is cloudcore running"));
        assert!(of(io::ErrorKind::TimedOut).contains("firewall"));
        let tls = |error| ConnectTrouble::from(io::Error::other::<rustls::Error>(error)).to_string();
        let expired = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
        assert!(tls(expired).contains("CertificateExpired): if it has expired, it is renewed"));
    }
}
