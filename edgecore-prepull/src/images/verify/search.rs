//! The search for a signature that is valid: at the tag, then among the referrers.

use prepull_registry::manifest::{Descriptor, Manifest};
use prepull_registry::{RegistryError, Repository};

use super::bundle::{self, Bundle};
use super::keys::Keys;
use super::{Flaw, simple};

/// Most signatures of an image that are looked at, in each of the two places. An image is signed once or twice; whoever
/// could add hundreds of signatures could make each node fetch them.
pub(super) const MAX_SIGNATURES: usize = 16;
/// Largest document, bundle or manifest of a signature. They have less than 2 KiB; a bundle with a certificate 8 KiB.
pub(super) const MAX_DOCUMENT: u64 = 64 << 10;
/// Types of referrers that may be signatures. Registries that do not know the type of an artifact say the one of its empty
/// configuration.
const REFERRERS: [&str; 3] = [
    bundle::MEDIA_TYPE,
    "application/vnd.oci.empty.v1+json",
    "application/vnd.dev.cosign.artifact.sig.v1+json",
];

pub(super) struct Search<'a> {
    repository: &'a Repository,
    image: &'a Descriptor,
    keys: &'a Keys,
    /// The flaw that tells most, of those that were found.
    worst: Option<Flaw>,
    /// How many there were in a place, where not all of them were looked at.
    cut: Option<usize>,
}

impl<'a> Search<'a> {
    pub(super) fn new(repository: &'a Repository, image: &'a Descriptor, keys: &'a Keys) -> Self {
        Self { repository, image, keys, worst: None, cut: None }
    }

    /// Whether there is a valid signature.
    pub(super) async fn find(&mut self) -> Result<bool, RegistryError> {
        let tag = format!("{}.sig", self.image.digest.replace(':', "-"));
        if let Some(found) = self.repository.resolve_tag(&tag).await?
            && self.check_manifest(&found.descriptor, found.manifest).await?
        {
            return Ok(true);
        }
        let all = self.repository.referrers(&self.image.digest).await?;
        let signatures: Vec<Descriptor> = all.into_iter().filter(may_be_signature).collect();
        self.count(signatures.len());
        for signature in signatures.iter().take(MAX_SIGNATURES) {
            if self.check_manifest(signature, None).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Why there is none.
    pub(super) fn reason(&self) -> String {
        let flaw = match &self.worst {
            None => "the image is not signed".to_owned(),
            Some(flaw) => flaw.to_string(),
        };
        let cut = self.cut.map(|all| format!("; only the first {MAX_SIGNATURES} of {all} were looked at"));
        format!("{flaw}{}", cut.unwrap_or_default())
    }

    fn count(&mut self, all: usize) {
        if all > MAX_SIGNATURES {
            self.cut = Some(all);
        }
    }

    /// Whether one of the signatures in this manifest is valid.
    async fn check_manifest(
        &mut self,
        descriptor: &Descriptor,
        content: Option<Vec<u8>>,
    ) -> Result<bool, RegistryError> {
        if descriptor.size > MAX_DOCUMENT {
            self.note(Flaw::TooLarge(descriptor.size));
            return Ok(false);
        }
        let content = match content {
            Some(content) => content,
            None => self.repository.manifest(descriptor).await?,
        };
        let Ok(manifest) = Manifest::parse(&content) else {
            self.note(Flaw::Malformed("not a manifest".to_owned()));
            return Ok(false);
        };
        let is_signature = |layer: &&Descriptor| {
            layer.media_type == simple::MEDIA_TYPE || layer.media_type.starts_with(bundle::MEDIA_TYPE)
        };
        let layers: Vec<&Descriptor> = manifest.layers.iter().filter(is_signature).collect();
        self.count(layers.len());
        for layer in layers.into_iter().take(MAX_SIGNATURES) {
            match self.check_layer(layer).await? {
                Ok(()) => return Ok(true),
                Err(flaw) => self.note(flaw),
            }
        }
        Ok(false)
    }

    async fn check_layer(&self, layer: &Descriptor) -> Result<Result<(), Flaw>, RegistryError> {
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
        let manifest =
            if bundle.needs_manifest() { Some(self.repository.manifest(self.image).await?) } else { None };
        Ok(bundle.check(&self.image.digest, manifest.as_deref(), self.keys))
    }

    fn note(&mut self, flaw: Flaw) {
        if self.worst.as_ref().is_none_or(|worst| *worst < flaw) {
            self.worst = Some(flaw);
        }
    }
}

/// Whether a referrer may be a signature, as far as the list of referrers tells.
fn may_be_signature(referrer: &Descriptor) -> bool {
    let kind = referrer.artifact_type.as_deref().unwrap_or_default();
    let is_statement = referrer.annotations.get(bundle::PREDICATE).is_some_and(|kind| kind != bundle::SIGNED);
    referrer.is_manifest()
        && !is_statement
        && (kind.is_empty() || REFERRERS.iter().any(|known| kind.starts_with(known)))
}
