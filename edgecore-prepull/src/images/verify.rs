//! Verifies signatures of `cosign sign --key` with the public keys of a job.
//!
//! cosign stores them beside the image, in the same repository. They are either at the tag `sha256-….sig`, with a small
//! signed document that names the image, or, since version 3, referrers of the image with a sigstore bundle. We read
//! both. We don't ask a transparency log: the keys are the trust, and a node may not reach a log.
//!
//! Anyone with write access to the repository can write these documents. So nothing in a document counts before its
//! signature is verified, and each place has a bound.

mod bundle;
mod keys;
mod search;
mod simple;
#[cfg(test)]
mod tests;

use prepull_api::download::{Verification, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::wire::truncate_reason;
use prepull_registry::Repository;
use prepull_registry::manifest::Descriptor;

use self::keys::SignerKeys;
use self::search::SignatureSearch;
use super::puller::{ErrorClass, PullError};

/// The signature state of an image that may be pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignatureVerdict {
    /// It has a valid signature by one of the keys.
    Signed {
        /// Fingerprint of the key, in the form of [`prepull_api::task::ImageFacts::signed_by`].
        by: String,
    },
    /// It has no valid signature, or we couldn't check. The mode is Warn.
    Unsigned {
        /// Why, for a person.
        reason: String,
    },
}

/// The flaw of one signature. If there are several, we report the last one in this order, which is the most
/// informative.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
enum Flaw {
    #[error("a signature is listed beside it that the registry doesn't have")]
    Missing,
    #[error("its signature is malformed: {0}")]
    Malformed(String),
    #[error("its signature has {0} bytes, which is more than any needs")]
    TooLarge(u64),
    #[error("it is signed with a certificate and not with a key")]
    Keyless,
    #[error("it is signed, but by none of the keys of the job")]
    OtherKey,
    #[error("one of the keys has signed something else about it ({0}), and not the image itself")]
    OtherStatement(String),
    #[error("the signature beside it is that of another image, {0}")]
    OtherImage(String),
}

/// Checks that each of these texts has public keys in PEM which signatures can be verified with.
///
/// # Errors
/// A text has none, or one of another kind.
pub(crate) fn check_keys(texts: &[String]) -> Result<(), String> {
    SignerKeys::parse(texts).map(drop)
}

/// Verifies that an image, by its resolved digest, has the signatures that a job requires. Pull exactly this digest
/// afterwards. In the mode Warn this never fails.
pub async fn verify(
    repository: &Repository,
    image: &Descriptor,
    verification: &Verification,
) -> Result<SignatureVerdict, PullError> {
    match (find_signer(repository, image, verification).await, verification.mode) {
        (Ok(by), _) => Ok(SignatureVerdict::Signed { by }),
        (Err(error), VerificationMode::Enforce) => Err(error),
        (Err(error), VerificationMode::Warn) => Ok(SignatureVerdict::Unsigned { reason: error.message }),
    }
}

async fn find_signer(
    repository: &Repository,
    image: &Descriptor,
    verification: &Verification,
) -> Result<String, PullError> {
    let unusable =
        |reason: &str| PullError::new(ErrorClass::Permanent, reason).with_code(FailureCode::SecretUnusable);
    if let Some(reason) = &verification.unavailable {
        return Err(unusable(&format!("no signature can be verified: {reason}")));
    }
    let keys = SignerKeys::parse(&verification.keys).map_err(|reason| unusable(&reason))?;
    let mut search = SignatureSearch::new(repository, image, &keys);
    match search.find().await {
        Ok(Some(signer)) => return Ok(signer),
        Ok(None) => {}
        Err(error) => {
            let error = PullError::from(error);
            let elsewhere =
                search.has_found_flaw().then(|| format!("; and of what was read: {}", search.reason()));
            let message =
                format!("signatures cannot be read: {}{}", error.message, elsewhere.unwrap_or_default());
            return Err(PullError { message: truncate_reason(&message), ..error });
        }
    }
    let reason = format!("{} ({})", search.reason(), image.digest);
    Err(PullError::new(ErrorClass::Permanent, reason).with_code(FailureCode::SignatureInvalid))
}
