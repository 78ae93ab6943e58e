//! Digests of content, as OCI writes them: `sha256:` and hexadecimal digits.

use prepull_api::enroll::hex;
use ring::digest::{Algorithm, Context, SHA256, SHA384, SHA512};

use crate::error::{ErrorKind, RegistryError};

/// The computation of a digest while the content arrives.
pub struct Hasher {
    context: Context,
    expected: String,
}

impl Hasher {
    /// Begins to compute the digest that is expected to be this one. `None` if it is none, or of an algorithm that OCI does
    /// not register.
    pub fn expecting(digest: &str) -> Option<Self> {
        let (algorithm, hex) = digest.split_once(':')?;
        let (algorithm, digits): (&'static Algorithm, usize) = match algorithm {
            "sha256" => (&SHA256, 64),
            "sha384" => (&SHA384, 96),
            "sha512" => (&SHA512, 128),
            _ => return None,
        };
        let is_hex = hex.len() == digits && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_hex.then(|| Self { context: Context::new(algorithm), expected: digest.to_owned() })
    }

    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// Whether all that was taken in has the digest that was expected.
    pub fn matches(self) -> bool {
        let (_, expected) = self.expected.split_once(':').unwrap_or_default();
        hex(self.context.finish().as_ref()) == expected
    }
}

/// The SHA-256 of some content, as a digest.
pub fn sha256(content: &[u8]) -> String {
    format!("sha256:{}", hex(ring::digest::digest(&SHA256, content).as_ref()))
}

/// Whether a text is a digest that can be computed here.
pub fn is_digest(text: &str) -> bool {
    Hasher::expecting(text).is_some()
}

/// Refuses content that does not have the digest.
pub(crate) fn check_digest(content: &[u8], digest: &str, of: &str) -> Result<(), RegistryError> {
    let malformed = || {
        RegistryError::new(ErrorKind::Protocol, format!("{of} has the digest {digest:.100?}, which is none"))
    };
    let mut hasher = Hasher::expecting(digest).ok_or_else(malformed)?;
    hasher.update(content);
    if hasher.matches() {
        return Ok(());
    }
    Err(RegistryError::new(ErrorKind::DigestMismatch, format!("{of} does not have the digest {digest}")))
}
