//! The stored record of a token, and the decision whom it admits.

use std::fmt;
use std::time::SystemTime;

use prepull_api::enroll::JoinToken;
use prepull_api::task::NodeName;

use crate::sha256;

/// Which nodes may join with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This node, with one key.
    Node(NodeName),
    /// Any node, any number of times.
    Fleet,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node {node}"),
            Self::Fleet => f.write_str("fleet"),
        }
    }
}

/// Why a token does not admit its holder. The text is for the operator of the edge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    /// The text does not have the form of a token.
    #[error("this is not a join token: check that it was copied whole")]
    Malformed,
    /// The id or the secret is wrong. Which one is not revealed.
    #[error(
        "unknown token: it was revoked, or it expired and was removed, or it is mistyped; ask for a new one"
    )]
    Unknown,
    /// The token has expired.
    #[error("the token expired at {}: ask for a new one", humantime::format_rfc3339_seconds(*.0))]
    Expired(SystemTime),
    /// The token is for another node.
    #[error("the token is for node {0}: give that name with --node-name, or ask for a token for this node")]
    OtherNode(NodeName),
    /// The node has already joined with another key.
    #[error("the token has been used with another key: it lets the node join once; ask for a new token")]
    UsedByOtherKey,
    /// The requested node name is not valid.
    #[error("{0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`")]
    NotANode(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenRecord {
    pub(super) scope: Scope,
    pub(super) expires: SystemTime,
    pub(super) secret_hash: SecretHash,
    /// The SHA-256 of the public key that has redeemed a node's token.
    pub(super) used_by: Option<[u8; 32]>,
    /// The revocation of the token's node that stood when the token was made.
    pub(super) after_revocation: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenDecision {
    /// The node may join.
    Admit,
    /// The node may join once this record is stored.
    AdmitOnceMarked(TokenRecord),
}

impl TokenRecord {
    pub(super) fn new(
        token: &JoinToken,
        scope: Scope,
        expires: SystemTime,
        after_revocation: Option<String>,
    ) -> Self {
        Self {
            scope,
            expires,
            secret_hash: SecretHash::from_secret(token.secret.expose()),
            used_by: None,
            after_revocation,
        }
    }

    /// Decides whether the holder of `secret` may join as `node` with this key.
    pub(super) fn decide_join(
        &self,
        secret: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<TokenDecision, RedeemError> {
        // The secret first, so that a wrong guess reveals nothing else.
        if !self.secret_hash.is_of(secret) {
            return Err(RedeemError::Unknown);
        }
        if self.expires <= now {
            return Err(RedeemError::Expired(self.expires));
        }
        if !node.is_valid() {
            return Err(RedeemError::NotANode(node.to_string()));
        }
        match (&self.scope, self.used_by) {
            (Scope::Fleet, _) => Ok(TokenDecision::Admit),
            (Scope::Node(own), _) if own != node => Err(RedeemError::OtherNode(own.clone())),
            (Scope::Node(_), Some(used)) if used == key => Ok(TokenDecision::Admit),
            (Scope::Node(_), Some(_)) => Err(RedeemError::UsedByOtherKey),
            (Scope::Node(_), None) => {
                Ok(TokenDecision::AdmitOnceMarked(Self { used_by: Some(key), ..self.clone() }))
            }
        }
    }
}

/// The SHA-256 of a token's secret. A slower hash would add nothing: 32 random bytes cannot be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretHash(pub(super) [u8; 32]);

impl SecretHash {
    /// The hash of a secret.
    pub fn from_secret(secret: &str) -> Self {
        Self(sha256(secret.as_bytes()))
    }

    /// Whether it is the hash of this secret, in constant time.
    pub fn is_of(&self, secret: &str) -> bool {
        constant_time_eq(&Self::from_secret(secret).0, &self.0)
    }
}

/// Compares in constant time.
fn constant_time_eq(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_differ_if_any_byte_differs() {
        assert!(constant_time_eq(&[7; 32], &[7; 32]));
        for at in 0..32 {
            let mut other = [7; 32];
            other[at] ^= 0x80;
            assert!(!constant_time_eq(&[7; 32], &other));
        }
    }
}
