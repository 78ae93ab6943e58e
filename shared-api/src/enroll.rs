//! The enrolment protocol, by which an edge gets its certificate, and the join token.
//!
//! Requests and responses are JSON over HTTPS. Any status but 2xx is an error and carries an [`ErrorBody`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::credentials::Sensitive;
use crate::task::NodeName;

/// Path that serves the CA certificate as PEM (`GET`). For people and scripts; joining does not need it.
pub const CA_PATH: &str = "/v1/ca";
/// Path that takes an [`EnrollRequest`] (`POST`) and answers with an [`IssuedCertificate`].
pub const ENROLL_PATH: &str = "/v1/enroll";
/// Path that takes a [`RenewRequest`] (`POST`) and answers with an [`IssuedCertificate`]. The certificate to renew is
/// the client certificate of the connection.
pub const RENEW_PATH: &str = "/v1/renew";
/// Largest body in bytes, enforced on both sides: a CSR is below 1 KiB, two certificates are below 4 KiB.
pub const MAX_BODY: usize = 16 * 1024;
/// Most CAs that an edge trusts. A rotation needs two; the rest is room for CAs of the user's own.
pub const MAX_TRUSTED_CAS: usize = 8;

/// The form of the subject of a node's certificate: an organisation, and a common name that begins with a prefix and ends
/// with the name of the node. Never both forms in one subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubjectForm {
    /// Of our own: it means nothing to anybody else, whichever CA has signed.
    Own,
    /// That of a kubelet, which agents of release 0.1 expect. Signed by the CA of a cluster, it would be a kubelet.
    Kubelet,
}

impl SubjectForm {
    /// All forms.
    pub const ALL: [Self; 2] = [Self::Own, Self::Kubelet];

    /// The organisation.
    pub fn organisation(self) -> &'static str {
        match self {
            Self::Own => "prepull:nodes",
            Self::Kubelet => "system:nodes",
        }
    }

    /// What the common name begins with.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Own => "prepull:node:",
            Self::Kubelet => "system:node:",
        }
    }

    /// The form that a request asks for. Agents of release 0.1 ask for none.
    pub fn from_request(organisation: Option<&str>) -> Self {
        if organisation == Some(Self::Own.organisation()) { Self::Own } else { Self::Kubelet }
    }
}

/// A request for a node's first certificate, authorised by a join token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EnrollRequest {
    /// Name of the node to certify.
    pub node: NodeName,
    /// Id and secret of the join token, as [`JoinToken::bearer`] returns them.
    pub token: Sensitive,
    /// PEM. Only its public key counts.
    pub csr: String,
    /// The organisation that the edge knows to be that of its certificate: [`SubjectForm::from_request`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
}

/// A request for another certificate, for the node that the client certificate names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenewRequest {
    /// PEM. Only its public key counts.
    pub csr: String,
    /// The organisation that the edge knows to be that of its certificate: [`SubjectForm::from_request`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
}

/// A certificate that was issued, with its CA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IssuedCertificate {
    /// The node's certificate as PEM.
    pub certificate: String,
    /// The CA certificate as PEM.
    pub ca: String,
    /// End of the certificate's validity, as RFC 3339.
    pub not_after: String,
}

/// The body of every response that refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// One sentence for the operator of the edge: what is wrong, and the remedy.
    pub error: String,
}

/// A join token: `<sha256 of the CA's certificate>.<id>.<secret>`, all lower-case hex.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// SHA-256 of the CA certificate in DER. The token may be shown only to a server with a certificate of this CA.
    pub ca: [u8; 32],
    /// Public id of the token.
    pub id: String,
    /// Secret that authorises the holder to join.
    pub secret: Sensitive,
}

/// Number of hex digits in the id of a token.
pub const TOKEN_ID_LEN: usize = 12;
/// Number of hex digits in the secret of a token, which is 32 random bytes.
pub const TOKEN_SECRET_LEN: usize = 64;

/// A text that is not a join token. The message never quotes it: most of a mistyped token is still secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a join token: expected three parts <CA hash>.<id>.<secret> of 64, 12 and 64 hex digits, as printed by \
     `kubectl prepull tokens create`; check that it was copied whole"
)]
pub struct JoinTokenError;

impl JoinToken {
    /// Id and secret, joined by a dot: the part of the token that is sent to cloudcore.
    pub fn bearer(&self) -> Sensitive {
        Sensitive::new(format!("{}.{}", self.id, self.secret.expose()))
    }

    /// Splits the text that [`Self::bearer`] returns into id and secret.
    pub fn split_bearer(bearer: &str) -> Result<(&str, &str), JoinTokenError> {
        match bearer.split_once('.') {
            Some((id, secret)) if is_hex(id, TOKEN_ID_LEN) && is_hex(secret, TOKEN_SECRET_LEN) => {
                Ok((id, secret))
            }
            _ => Err(JoinTokenError),
        }
    }

    /// The whole token as plain text, for the operator to pass to the edge.
    pub fn expose(&self) -> String {
        format!("{}.{}.{}", hex(&self.ca), self.id, self.secret.expose())
    }
}

impl FromStr for JoinToken {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let (ca, bearer) = text.trim().split_once('.').ok_or(JoinTokenError)?;
        let (id, secret) = Self::split_bearer(bearer)?;
        Ok(Self { ca: unhex(ca).ok_or(JoinTokenError)?, id: id.to_owned(), secret: Sensitive::new(secret) })
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id)
    }
}

/// Encodes a certificate as PEM (RFC 7468, lines of 64 characters).
pub fn certificate_pem(der: &[u8]) -> String {
    use base64::Engine as _;
    let base64 = base64::engine::general_purpose::STANDARD.encode(der);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, next) = rest.split_at(rest.len().min(64));
        pem.push_str(line);
        pem.push('\n');
        rest = next;
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Encodes bytes as lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        text
    })
}

/// Decodes 32 bytes from 64 lower-case hex digits; nothing for any other text.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if !is_hex(text, 2 * N) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).ok()?;
    }
    Some(bytes)
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn token() -> JoinToken {
        JoinToken { ca: [0xab; 32], id: "0123456789ab".into(), secret: Sensitive::new("5".repeat(64)) }
    }

    #[test]
    fn a_token_round_trips_and_hides_its_secret() {
        let text = token().expose();
        assert_eq!(format!("\n{text} \n").parse::<JoinToken>().unwrap(), token());
        assert_eq!(
            JoinToken::split_bearer(token().bearer().expose()).unwrap(),
            ("0123456789ab", &*"5".repeat(64))
        );
        assert_eq!(format!("{:?}", token()), "JoinToken(0123456789ab)");
    }

    #[test]
    fn an_error_about_a_token_never_quotes_it() {
        let good = token().expose();
        let cut = &good[..good.len() - 1];
        let upper = good.to_uppercase();
        let non_ascii = format!("{}é.{}", "a".repeat(62), &good[65..]);
        for bad in ["", ".", "..", cut, &upper, &good[1..], &format!("{good}.x"), &non_ascii] {
            let error = bad.parse::<JoinToken>().unwrap_err().to_string();
            assert!(!error.contains("555"), "{error}");
        }
    }
}
