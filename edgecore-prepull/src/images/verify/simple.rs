//! Signatures at the tag `sha256-….sig`: each layer is a small document, "simple signing", with its signature in an
//! annotation.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::Flaw;
use super::keys::SignerKeys;

/// Format of the document.
pub(super) const MEDIA_TYPE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// Annotation with the signature.
pub(super) const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// Accepted types of the document.
const TYPES: [&str; 2] = ["cosign container image signature", "atomic container signature"];
/// Longest signature in base64. ECDSA and Ed25519 take 96.
const MAX_SIGNATURE: usize = 1024;

#[derive(Deserialize)]
struct SignedDocument {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: SignedImage,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// Checks that one of the keys has signed the document, and that it's about the image. Returns the key's fingerprint.
pub(super) fn check(
    digest: &str,
    document: &[u8],
    signature: &str,
    keys: &SignerKeys,
) -> Result<String, Flaw> {
    let signer = keys.signer(document, &decode(signature)?).ok_or(Flaw::OtherKey)?;
    let document: SignedDocument = serde_json::from_slice(document)
        .map_err(|_| Flaw::Malformed("not a document of cosign".to_owned()))?;
    let Critical { image, kind } = document.critical;
    if !TYPES.contains(&kind.as_str()) {
        return Err(Flaw::OtherStatement(shorten(&kind)));
    }
    if image.digest == digest { Ok(signer.to_owned()) } else { Err(Flaw::OtherImage(shorten(&image.digest))) }
}

/// The bytes of a signature.
pub(super) fn decode(signature: &str) -> Result<Vec<u8>, Flaw> {
    if signature.len() > MAX_SIGNATURE {
        return Err(Flaw::TooLarge(signature.len() as u64));
    }
    STANDARD.decode(signature.trim()).map_err(|_| Flaw::Malformed("not base64".to_owned()))
}

/// A text of the signer, shortened for a message.
pub(super) fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}
