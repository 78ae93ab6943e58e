//! The hash of a public key, by which a key is known.

use std::fmt;

use prepull_api::enroll::{hex, unhex};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Hexadecimal digits that are shown to people: enough to tell the keys of one node apart.
const SHORT: usize = 16;

/// The SHA-256 of a public key (SubjectPublicKeyInfo, DER). It is no secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The hash itself.
    pub const fn new(sha256: [u8; 32]) -> Self {
        Self(sha256)
    }

    /// The hash of a SubjectPublicKeyInfo in DER.
    pub fn of_der(public_key: &[u8]) -> Self {
        Self(crate::sha256(public_key))
    }
}

/// The first digits.
impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(hex(&self.0).get(..SHORT).unwrap_or_default())
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({self})")
    }
}

impl Serialize for KeyHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        unhex(&text).map(Self).ok_or_else(|| serde::de::Error::custom("not a SHA-256 in hexadecimal"))
    }
}
