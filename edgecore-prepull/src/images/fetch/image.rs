//! What an image consists of: the indexes and the manifest that lead to its layers.

use std::collections::HashSet;

use prepull_api::failure::FailureCode;
use prepull_registry::manifest::{Descriptor, Index, Manifest, Platform};
use prepull_registry::{Repository, Resolved};

use super::stop::Stop;
use crate::images::containerd::{Blob, BlobKind, ContentStore};
use crate::images::puller::{ErrorClass, PullError};

/// Deepest index within an index that is followed. One is known to exist.
const MAX_DEPTH: usize = 4;

/// An image for the platform of this machine.
#[derive(Debug)]
pub(super) struct ImageParts {
    /// What the reference points to.
    pub(super) target: Descriptor,
    /// The indexes and the manifest, each with its content, the manifest last.
    pub(super) documents: Vec<(Blob, Vec<u8>)>,
    pub(super) config: Descriptor,
    /// The layers, each once.
    pub(super) layers: Vec<Descriptor>,
    /// The digests of all layers from the lowest one on; the same one may be there several times.
    order: Vec<String>,
}

impl ImageParts {
    /// Reads what leads to the layers: from the content store what is there, from the registry the rest.
    pub(super) async fn read(
        store: &ContentStore,
        repository: &Repository,
        resolved: Resolved,
    ) -> Result<Self, Stop> {
        let Resolved { descriptor: target, manifest: mut known } = resolved;
        let platform = Platform::of_this_machine();
        let mut documents = Vec::new();
        let mut descriptor = target.clone();
        loop {
            let content = match known.take() {
                Some(content) => content,
                None => match store.read(&descriptor.digest).await {
                    Some(content) => content,
                    None => repository.manifest(&descriptor).await?,
                },
            };
            if descriptor.is_manifest() {
                let Manifest { config, layers, .. } = Manifest::parse(&content)?;
                documents.push((blob(BlobKind::Manifest, &descriptor), content));
                let order = layers.iter().map(|layer| layer.digest.clone()).collect();
                return Self { target, documents, config, layers: deduplicate(layers), order }.checked();
            }
            if !descriptor.is_index() || documents.len() == MAX_DEPTH {
                let kind = &descriptor.media_type;
                return Err(Stop::StepBack(format!(
                    "the agent does not know manifests of the kind {kind:?}"
                )));
            }
            let chosen = Index::parse(&content)?.select(&platform).cloned();
            documents.push((blob(BlobKind::Index, &descriptor), content));
            descriptor = chosen.ok_or_else(|| {
                let Platform { os, architecture, .. } = &platform;
                let message = format!("the image has no manifest for the platform {os}/{architecture}");
                PullError::new(ErrorClass::Permanent, message).with_code(FailureCode::PlatformMismatch)
            })?;
        }
    }

    fn checked(self) -> Result<Self, Stop> {
        match self.layers.iter().find(|layer| layer.is_foreign()) {
            Some(layer) => Err(Stop::StepBack(format!("layer {} is not in the registry", layer.digest))),
            None => Ok(self),
        }
    }

    /// The digests of the layers above so many of the lowest ones.
    pub(super) fn above(&self, lowest: usize) -> HashSet<&str> {
        self.order.iter().skip(lowest).map(String::as_str).collect()
    }

    /// Compressed size of all layers.
    pub(super) fn size(&self) -> u64 {
        self.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.size))
    }
}

/// The blob that a descriptor refers to.
pub(super) fn blob(kind: BlobKind, descriptor: &Descriptor) -> Blob {
    Blob { kind, digest: descriptor.digest.clone(), size: descriptor.size }
}

fn deduplicate(mut layers: Vec<Descriptor>) -> Vec<Descriptor> {
    let mut seen = HashSet::new();
    layers.retain(|layer| seen.insert(layer.digest.clone()));
    layers
}
