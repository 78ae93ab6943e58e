//! What is kept of a token, and what it entitles to.

use std::fmt;
use std::time::SystemTime;

use prepull_api::enroll::JoinToken;
use prepull_api::task::NodeName;
use ring::digest::{SHA256, digest};

/// Whom a token lets in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This node, once.
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

/// Why a token does not let its holder in; for the operator on the edge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    /// Not the shape of a token.
    #[error("this is not a join token: check that it was copied whole")]
    Malformed,
    /// No such token, or not its secret.
    #[error(
        "unknown token: it was revoked, or it expired and was removed, or it is mistyped; ask for a new one"
    )]
    Unknown,
    /// Too late.
    #[error("the token expired at {}: ask for a new one", humantime::format_rfc3339_seconds(*.0))]
    Expired(SystemTime),
    /// Another node's.
    #[error("the token is for node {0}: give that name with --node-name, or ask for a token for this node")]
    OtherNode(NodeName),
    /// The node has joined already, with another key.
    #[error(
        "the token has been used with another key: if that was this node, its state directory was lost in between; \
         ask for a new token"
    )]
    UsedByOtherKey,
    /// No name that a node can have.
    #[error("{0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`")]
    NotANode(String),
}

/// What is kept of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) scope: Scope,
    pub(super) expires: SystemTime,
    /// SHA-256. The secret is 32 random bytes: there is nothing to guess that a slower hash would protect.
    pub(super) secret_hash: [u8; 32],
    /// SHA-256 of the public key that a node's token was used with.
    pub(super) used_by: Option<[u8; 32]>,
}

/// What a token entitles to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// In.
    Admit,
    /// In, once this is stored.
    AdmitOnceMarked(Record),
}

impl Record {
    pub(super) fn new(token: &JoinToken, scope: Scope, expires: SystemTime) -> Self {
        Self { scope, expires, secret_hash: hash(token.secret.expose()), used_by: None }
    }

    pub(super) fn redeem(
        &self,
        secret: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<Decision, RedeemError> {
        // First, so that whoever only guesses learns nothing.
        if !equal(&hash(secret), &self.secret_hash) {
            return Err(RedeemError::Unknown);
        }
        if self.expires <= now {
            return Err(RedeemError::Expired(self.expires));
        }
        if !node.is_valid() {
            return Err(RedeemError::NotANode(node.to_string()));
        }
        match (&self.scope, self.used_by) {
            (Scope::Fleet, _) => Ok(Decision::Admit),
            (Scope::Node(own), _) if own != node => Err(RedeemError::OtherNode(own.clone())),
            (Scope::Node(_), Some(used)) if used == key => Ok(Decision::Admit),
            (Scope::Node(_), Some(_)) => Err(RedeemError::UsedByOtherKey),
            (Scope::Node(_), None) => {
                Ok(Decision::AdmitOnceMarked(Self { used_by: Some(key), ..self.clone() }))
            }
        }
    }
}

fn hash(secret: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, secret.as_bytes()).as_ref());
    hash
}

/// Takes the same time wherever they differ.
fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_equal_only_in_every_byte() {
        assert!(equal(&[7; 32], &[7; 32]));
        for at in 0..32 {
            let mut other = [7; 32];
            other[at] ^= 0x80;
            assert!(!equal(&[7; 32], &other));
        }
    }
}
