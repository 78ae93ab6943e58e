//! How an edge gets its certificate: the bodies of cloudcore's enrolment endpoint, and the join token.
//!
//! All of it is JSON over HTTPS; an error is any status outside 2xx with an [`ErrorBody`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::credentials::Sensitive;
use crate::task::NodeName;

/// `GET`: the certificate of the CA, PEM. For people and scripts; joining does not need it.
pub const CA_PATH: &str = "/v1/ca";
/// `POST` [`EnrollRequest`], answered by [`Issued`].
pub const ENROLL_PATH: &str = "/v1/enroll";
/// `POST` [`RenewRequest`] with the certificate that is to be renewed as client certificate; answered by
/// [`Issued`].
pub const RENEW_PATH: &str = "/v1/renew";
/// A body is refused beyond this, on both sides: a CSR is below 1 KiB, two certificates below 4 KiB.
pub const MAX_BODY: usize = 16 * 1024;
/// The organisation of every node's certificate, as the kubelet has it.
pub const NODES_ORGANISATION: &str = "system:nodes";
/// What the common name of a node's certificate starts with; the node's name follows.
pub const NODE_PREFIX: &str = "system:node:";

/// A first certificate, against a token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EnrollRequest {
    /// Who the edge wants to be.
    pub node: NodeName,
    /// [`JoinToken::bearer`].
    pub token: Sensitive,
    /// PEM. Only its public key counts.
    pub csr: String,
}

/// Another certificate for the node of the client certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenewRequest {
    /// PEM. Only its public key counts.
    pub csr: String,
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Issued {
    /// PEM.
    pub certificate: String,
    /// The CA's certificate, PEM.
    pub ca: String,
    /// RFC 3339.
    pub not_after: String,
}

/// Why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// One sentence for the operator on the edge, with the remedy.
    pub error: String,
}

/// A join token: `<sha256 of the CA's certificate>.<id>.<secret>`, all lower-case hex.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// SHA-256 of the CA certificate's DER: which server the token may be shown to.
    pub ca: [u8; 32],
    /// Names the token; no secret.
    pub id: String,
    /// What proves that its holder may join.
    pub secret: Sensitive,
}

/// Hex digits of a token's id.
pub const TOKEN_ID_LEN: usize = 12;
/// Hex digits of a token's secret: 32 random bytes.
pub const TOKEN_SECRET_LEN: usize = 64;

/// A text that is no join token. It never quotes the text: most of a mistyped token is still secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a join token: expected three parts <CA hash>.<id>.<secret> of 64, 12 and 64 hex digits, as printed by \
     `cloudcore-prepull token create`; check that it was copied whole"
)]
pub struct NotAToken;

impl JoinToken {
    /// What is sent: the id and the secret.
    pub fn bearer(&self) -> Sensitive {
        Sensitive::new(format!("{}.{}", self.id, self.secret.expose()))
    }

    /// Reads what [`Self::bearer`] made: the id and the secret.
    pub fn split_bearer(bearer: &str) -> Result<(&str, &str), NotAToken> {
        match bearer.split_once('.') {
            Some((id, secret)) if is_hex(id, TOKEN_ID_LEN) && is_hex(secret, TOKEN_SECRET_LEN) => {
                Ok((id, secret))
            }
            _ => Err(NotAToken),
        }
    }

    /// The whole text, for the one who is to hand it to the edge.
    pub fn expose(&self) -> String {
        format!("{}.{}.{}", hex(&self.ca), self.id, self.secret.expose())
    }
}

impl FromStr for JoinToken {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let (ca, bearer) = text.trim().split_once('.').ok_or(NotAToken)?;
        let (id, secret) = Self::split_bearer(bearer)?;
        Ok(Self { ca: unhex(ca).ok_or(NotAToken)?, id: id.to_owned(), secret: Sensitive::new(secret) })
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id)
    }
}

/// A certificate as PEM (RFC 7468: lines of 64).
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

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        text
    })
}

/// 32 bytes from 64 lower-case hex digits.
pub fn unhex(text: &str) -> Option<[u8; 32]> {
    if !is_hex(text, 64) {
        return None;
    }
    let mut bytes = [0; 32];
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
    fn a_token_is_read_back_and_never_shown() {
        let text = token().expose();
        assert_eq!(format!("\n{text} \n").parse::<JoinToken>().unwrap(), token());
        assert_eq!(
            JoinToken::split_bearer(token().bearer().expose()).unwrap(),
            ("0123456789ab", &*"5".repeat(64))
        );
        assert_eq!(format!("{:?}", token()), "JoinToken(0123456789ab)");
    }

    #[test]
    fn what_is_no_token_is_refused_without_being_quoted() {
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
