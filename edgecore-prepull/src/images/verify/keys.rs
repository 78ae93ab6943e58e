//! The public keys of a job.

use ed25519_dalek::{Digest, Sha512, VerifyingKey};
use prepull_registry::digest::sha256;
use ring::signature::{ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey};
use rustls_pki_types::SubjectPublicKeyInfoDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_SIG_ED25519};
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;

/// Most keys of a job: the texts that it may have, each with a successor.
const MAX_KEYS: usize = 16;
/// Bytes of a fingerprint: the algorithm and 12 hexadecimal digits. It only distinguishes the keys of a job for a person;
/// signatures are verified with whole keys.
const FINGERPRINT: usize = "sha256:".len() + 12;

/// Keys. A signature by any of them is sufficient.
pub(super) struct SignerKeys(Vec<SignerKey>);

struct SignerKey {
    /// Fingerprint of its SubjectPublicKeyInfo, in the form of [`prepull_api::task::ImageFacts::signed_by`].
    fingerprint: String,
    public: UnparsedPublicKey<Vec<u8>>,
    /// The same key for signatures of the message's SHA-512, only for Ed25519: cosign 2 signs the message, and cosign 3
    /// its hash (Ed25519ph).
    of_hash: Option<VerifyingKey>,
}

impl SignerKeys {
    /// Parses PEM texts. A key that can't be read is an error, because its author expects it to count.
    pub(super) fn parse(texts: &[String]) -> Result<Self, String> {
        let mut keys = Vec::new();
        for (number, text) in texts.iter().enumerate() {
            let of = |what: &str| format!("key {} of {} for signatures {what}", number + 1, texts.len());
            let before = keys.len();
            for der in SubjectPublicKeyInfoDer::pem_slice_iter(text.as_bytes()) {
                let der = der.map_err(|_| of("is malformed PEM"))?;
                if keys.len() == MAX_KEYS {
                    return Err(of(&format!("is more than the {MAX_KEYS}th: leave out old ones")));
                }
                keys.push(read_key(&der).map_err(of)?);
            }
            if keys.len() == before {
                return Err(of("has no PUBLIC KEY in PEM, as `cosign generate-key-pair` writes it"));
            }
        }
        if keys.is_empty() { Err("there is no key for signatures".to_owned()) } else { Ok(Self(keys)) }
    }

    /// Fingerprint of the key that has made the signature of this message.
    pub(super) fn signer(&self, message: &[u8], signature: &[u8]) -> Option<&str> {
        let signer = self.0.iter().find(|SignerKey { public, of_hash, .. }| {
            let of_hash = || of_hash.as_ref().is_some_and(|key| has_signed_hash(key, message, signature));
            public.verify(message, signature).is_ok() || of_hash()
        });
        signer.map(|key| key.fingerprint.as_str())
    }
}

fn has_signed_hash(key: &VerifyingKey, message: &[u8], signature: &[u8]) -> bool {
    let Ok(signature) = ed25519_dalek::Signature::from_slice(signature) else { return false };
    key.verify_prehashed_strict(Sha512::new_with_prefix(message), None, &signature).is_ok()
}

fn read_key(der: &[u8]) -> Result<SignerKey, &'static str> {
    let (rest, key) = SubjectPublicKeyInfo::from_der(der).map_err(|_| "is malformed")?;
    if !rest.is_empty() {
        return Err("is malformed");
    }
    let curve = key.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
    let fingerprint = sha256(der).chars().take(FINGERPRINT).collect();
    let bytes = key.subject_public_key.data.as_ref();
    if key.algorithm.algorithm == OID_SIG_ED25519 {
        let of_hash = VerifyingKey::try_from(bytes).map_err(|_| "is malformed")?;
        let public = UnparsedPublicKey::new(&ED25519, bytes.to_vec());
        Ok(SignerKey { fingerprint, public, of_hash: Some(of_hash) })
    } else if key.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve == Some(OID_EC_P256) {
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, bytes.to_vec());
        Ok(SignerKey { fingerprint, public, of_hash: None })
    } else {
        Err("is neither ECDSA on P-256 nor Ed25519")
    }
}
