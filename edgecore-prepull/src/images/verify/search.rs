//! The search for a valid signature: at each endpoint, first at the tag, then among the referrers.

use std::collections::HashSet;

use prepull_registry::manifest::{Descriptor, Manifest};
use prepull_registry::{ErrorKind, ReferrerPlace, RegistryError, Repository, may_be_signature};

use super::bundle::{self, Bundle};
use super::keys::SignerKeys;
use super::{Flaw, simple};

/// Most signatures of an image that we check, in each of the two places. An image is signed once or twice; with
/// hundreds of signatures, an attacker could make each node fetch them.
pub(super) const MAX_SIGNATURES: usize = 16;
/// Most unreadable signatures before we stop reading: each may take the timeout of a dead connection.
const MAX_FAILURES: usize = 4;
/// Largest document, bundle or manifest of a signature. They have less than 2 KiB; a bundle with a certificate 8 KiB.
pub(super) const MAX_DOCUMENT: u64 = 64 << 10;

pub(super) struct SignatureSearch<'a> {
    repository: &'a Repository,
    image: &'a Descriptor,
    keys: &'a SignerKeys,
    /// The most informative flaw so far.
    worst: Option<Flaw>,
    /// The number of signatures in a place, if we didn't check all of them.
    cut: Option<usize>,
    /// Manifests of signatures that we checked at an earlier endpoint.
    seen: HashSet<String>,
    /// The failure to read something that may be the signature.
    failure: Option<RegistryError>,
    failures: usize,
}

impl<'a> SignatureSearch<'a> {
    pub(super) fn new(repository: &'a Repository, image: &'a Descriptor, keys: &'a SignerKeys) -> Self {
        let (worst, cut, seen, failure, failures) = (None, None, HashSet::new(), None, 0);
        Self { repository, image, keys, worst, cut, seen, failure, failures }
    }

    /// Fingerprint of the key of a valid signature. We ask the endpoints one after another, since a mirror may lack a signature
    /// that the registry has.
    ///
    /// # Errors
    /// None was found, and something that may have been one could not be read.
    pub(super) async fn find(&mut self) -> Result<Option<String>, RegistryError> {
        for place in self.repository.referrer_places() {
            let signer = self.find_at(place).await;
            if signer.is_some() {
                return Ok(signer);
            }
        }
        self.failure.take().map_or(Ok(None), Err)
    }

    async fn find_at(&mut self, place: ReferrerPlace<'_>) -> Option<String> {
        // Those of a mirror that's away don't count for the next endpoint.
        self.failures = 0;
        let tag = format!("{}.sig", self.image.digest.replace(':', "-"));
        match place.resolve_tag(&tag).await {
            Ok(Some(found)) => {
                let signer = self.signer_of(&found.descriptor, found.manifest).await;
                if signer.is_some() {
                    return signer;
                }
            }
            Ok(None) => {}
            Err(error) => {
                let is_away = matches!(error.kind, ErrorKind::NoConnection | ErrorKind::Unreachable);
                self.note_failure(error);
                if is_away {
                    return None;
                }
            }
        }
        let all = match place.referrers(&self.image.digest).await {
            Ok(all) => all,
            Err(error) => {
                self.note_failure(error);
                return None;
            }
        };
        let signatures: Vec<&Descriptor> = all.iter().filter(|one| may_be_signature(one)).collect();
        self.note_count(signatures.len());
        for signature in signatures.into_iter().take(MAX_SIGNATURES) {
            let signer = self.signer_of(signature, None).await;
            if signer.is_some() {
                return signer;
            }
        }
        None
    }

    /// Fingerprint of the key of a valid signature in this manifest. If one can't be read, we continue: the next may be
    /// valid.
    async fn signer_of(&mut self, descriptor: &Descriptor, content: Option<Vec<u8>>) -> Option<String> {
        if self.failures >= MAX_FAILURES || self.seen.contains(&descriptor.digest) {
            return None;
        }
        match self.check_manifest(descriptor, content).await {
            Ok(signer) => {
                self.seen.insert(descriptor.digest.clone());
                signer
            }
            // A referrers list may name a missing manifest.
            Err(error) if error.kind == ErrorKind::NotFound && !error.undecided => {
                self.note_flaw(Flaw::Missing);
                None
            }
            Err(error) => {
                self.note_failure(error);
                None
            }
        }
    }

    /// Keeps the failure for which a retry is most likely to help.
    fn note_failure(&mut self, error: RegistryError) {
        self.failures += 1;
        if self.failure.as_ref().is_none_or(|kept| !may_pass(kept) && may_pass(&error)) {
            self.failure = Some(error);
        }
    }

    /// Whether we found anything that may be a signature.
    pub(super) fn has_found_flaw(&self) -> bool {
        self.worst.is_some()
    }

    /// Reason why there's no valid signature.
    pub(super) fn reason(&self) -> String {
        let flaw = match &self.worst {
            None => "the image is not signed".to_owned(),
            Some(flaw) => flaw.to_string(),
        };
        let cut = self.cut.map(|all| format!("; only the first {MAX_SIGNATURES} of {all} were looked at"));
        format!("{flaw}{}", cut.unwrap_or_default())
    }

    fn note_count(&mut self, all: usize) {
        if all > MAX_SIGNATURES {
            self.cut = Some(all);
        }
    }

    /// Fingerprint of the key of a valid signature in this manifest.
    async fn check_manifest(
        &mut self,
        descriptor: &Descriptor,
        content: Option<Vec<u8>>,
    ) -> Result<Option<String>, RegistryError> {
        if descriptor.size > MAX_DOCUMENT {
            self.note_flaw(Flaw::TooLarge(descriptor.size));
            return Ok(None);
        }
        let content = match content {
            Some(content) => content,
            None => self.repository.fetch_manifest(descriptor).await?,
        };
        let Ok(manifest) = Manifest::parse(&content) else {
            self.note_flaw(Flaw::Malformed("not a manifest".to_owned()));
            return Ok(None);
        };
        let is_signature = |layer: &&Descriptor| {
            layer.media_type == simple::MEDIA_TYPE || layer.media_type.starts_with(bundle::MEDIA_TYPE)
        };
        let layers: Vec<&Descriptor> = manifest.layers.iter().filter(is_signature).collect();
        self.note_count(layers.len());
        for layer in layers.into_iter().take(MAX_SIGNATURES) {
            match self.check_layer(layer).await? {
                Ok(signer) => return Ok(Some(signer)),
                Err(flaw) => self.note_flaw(flaw),
            }
        }
        Ok(None)
    }

    async fn check_layer(&self, layer: &Descriptor) -> Result<Result<String, Flaw>, RegistryError> {
        if layer.size > MAX_DOCUMENT {
            return Ok(Err(Flaw::TooLarge(layer.size)));
        }
        let document = self.repository.small_blob(layer, MAX_DOCUMENT).await?;
        if layer.media_type == simple::MEDIA_TYPE {
            let Some(signature) = layer.annotations.get(simple::ANNOTATION) else {
                return Ok(Err(Flaw::Malformed("a document without its signature".to_owned())));
            };
            return Ok(simple::check(&self.image.digest, &document, signature, self.keys));
        }
        let bundle = match Bundle::parse(&document) {
            Ok(bundle) => bundle,
            Err(flaw) => return Ok(Err(flaw)),
        };
        let manifest = if bundle.needs_manifest() {
            Some(self.repository.fetch_manifest(self.image).await?)
        } else {
            None
        };
        Ok(bundle.check(&self.image.digest, manifest.as_deref(), self.keys))
    }

    fn note_flaw(&mut self, flaw: Flaw) {
        if self.worst.as_ref().is_none_or(|worst| *worst < flaw) {
            self.worst = Some(flaw);
        }
    }
}

/// Whether the same request may succeed later.
fn may_pass(error: &RegistryError) -> bool {
    match error.kind {
        ErrorKind::NoConnection
        | ErrorKind::Unreachable
        | ErrorKind::TooSlow
        | ErrorKind::Server { .. }
        | ErrorKind::RateLimited { .. } => true,
        ErrorKind::Unauthorized | ErrorKind::NotFound => error.undecided,
        ErrorKind::PlatformMismatch
        | ErrorKind::Protocol
        | ErrorKind::DigestMismatch
        | ErrorKind::Unsupported => false,
    }
}
