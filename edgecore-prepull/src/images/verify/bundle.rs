//! Sigstore bundles, version 0.3, as referrers of an image: an in-toto statement about the image in a signed envelope
//! (DSSE), or a signature of the image's manifest itself.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Flaw;
use super::keys::SignerKeys;
use super::simple::{decode, shorten};

pub(super) use prepull_registry::{BUNDLE_TYPE as MEDIA_TYPE, SIGNED};

const IN_TOTO: &str = "application/vnd.in-toto+json";
const STATEMENTS: [&str; 2] = ["https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1"];
/// Most signatures of one envelope that we check. cosign makes one.
const MAX_SIGNATURES: usize = 4;

/// The fields of a bundle that we use.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Bundle {
    verification_material: Material,
    dsse_envelope: Option<Envelope>,
    message_signature: Option<MessageSignature>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    certificate: Option<IgnoredAny>,
    x509_certificate_chain: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Deserialize)]
struct Signature {
    sig: String,
}

#[derive(Deserialize)]
struct MessageSignature {
    signature: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    predicate_type: String,
}

#[derive(Deserialize)]
struct Subject {
    digest: std::collections::BTreeMap<String, String>,
}

impl Bundle {
    pub(super) fn parse(content: &[u8]) -> Result<Self, Flaw> {
        serde_json::from_slice(content).map_err(|_| Flaw::Malformed("not a bundle of sigstore".to_owned()))
    }

    /// Whether checking it needs the manifest of the image.
    pub(super) fn needs_manifest(&self) -> bool {
        self.dsse_envelope.is_none() && self.message_signature.is_some()
    }

    /// Checks that one of the keys has signed it, and that it's about the image. `manifest` is the content of the
    /// image's manifest, if [needed](Self::needs_manifest). Returns the key's fingerprint.
    pub(super) fn check(
        &self,
        digest: &str,
        manifest: Option<&[u8]>,
        keys: &SignerKeys,
    ) -> Result<String, Flaw> {
        let by_other = || {
            let Material { certificate, x509_certificate_chain } = &self.verification_material;
            let keyless = certificate.is_some() || x509_certificate_chain.is_some();
            if keyless { Flaw::Keyless } else { Flaw::OtherKey }
        };
        match (&self.dsse_envelope, &self.message_signature, manifest) {
            (Some(envelope), None, _) => {
                let (payload, signer) = envelope.verified_payload(keys)?.ok_or_else(by_other)?;
                check_statement(digest, &payload)?;
                Ok(signer)
            }
            (None, Some(message), Some(manifest)) => {
                let signer = keys.signer(manifest, &decode(&message.signature)?);
                signer.map(str::to_owned).ok_or_else(by_other)
            }
            _ => Err(Flaw::Malformed("a bundle without the one signature that it is for".to_owned())),
        }
    }
}

impl Envelope {
    /// The payload and the key's fingerprint, if one of the keys has signed it. The signature covers the type and the lengths as well as the
    /// payload, so that no envelope passes for another.
    fn verified_payload(&self, keys: &SignerKeys) -> Result<Option<(Vec<u8>, String)>, Flaw> {
        let payload = STANDARD.decode(&self.payload);
        let payload = payload.map_err(|_| Flaw::Malformed("not base64".to_owned()))?;
        let kind = &self.payload_type;
        let mut message = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
        message.extend_from_slice(&payload);
        for Signature { sig } in self.signatures.iter().take(MAX_SIGNATURES) {
            if let Some(signer) = keys.signer(&message, &decode(sig)?) {
                return if kind == IN_TOTO {
                    Ok(Some((payload, signer.to_owned())))
                } else {
                    Err(Flaw::OtherStatement(shorten(kind)))
                };
            }
        }
        Ok(None)
    }
}

fn check_statement(digest: &str, payload: &[u8]) -> Result<(), Flaw> {
    let malformed = || Flaw::Malformed("not a statement of in-toto".to_owned());
    let statement: Statement = serde_json::from_slice(payload).map_err(|_| malformed())?;
    let Statement { kind, subject, predicate_type } = statement;
    if !STATEMENTS.contains(&kind.as_str()) {
        return Err(malformed());
    }
    if predicate_type != SIGNED {
        return Err(Flaw::OtherStatement(shorten(&predicate_type)));
    }
    let named = |subject: &Subject| {
        let (algorithm, hex) = digest.split_once(':')?;
        (subject.digest.get(algorithm)? == hex).then_some(())
    };
    if subject.iter().any(|subject| named(subject).is_some()) {
        return Ok(());
    }
    let other = subject.first().and_then(|subject| subject.digest.iter().next());
    let other = other.map(|(algorithm, hex)| format!("{algorithm}:{hex}")).unwrap_or_default();
    Err(Flaw::OtherImage(shorten(&other)))
}
