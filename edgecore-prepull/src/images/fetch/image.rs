//! The parts of an image: the indexes and the manifest that lead to its layers.

use std::collections::HashSet;

use prepull_delta::manifest::MAX_LAYERS;
use prepull_registry::manifest::{Descriptor, Index, MAX_MANIFEST, Manifest, Platform};
use prepull_registry::{Chosen, Contents, Repository, ResolvedReference};

use super::stop::FetchStop;
use crate::images::containerd::{BlobKind, BlobToWrite, ContentStore, Labels, of_index, of_manifest};
use crate::images::puller::{ErrorClass, PullError};

/// An index or a manifest.
#[derive(Debug)]
pub(super) struct ImageDocument {
    pub(super) blob: BlobToWrite,
    pub(super) content: Vec<u8>,
    /// The labels for its references.
    pub(super) labels: Labels,
}

/// An image for the platform of this machine.
#[derive(Debug)]
pub(super) struct ImageParts {
    /// The descriptor that the reference resolves to.
    pub(super) target: Descriptor,
    /// The indexes and the manifest, which is the last one.
    pub(super) documents: Vec<ImageDocument>,
    pub(super) config: Descriptor,
    /// The layers, each once.
    pub(super) layers: Vec<Descriptor>,
    /// The digests of all layers from the lowest one on, possibly with duplicates.
    order: Vec<String>,
}

impl ImageParts {
    /// The digest of its manifest, for the node's platform.
    pub(super) fn manifest_digest(&self) -> &str {
        self.documents.last().map_or("", |document| document.blob.digest.as_str())
    }

    /// Reads the documents that lead to the layers, from the content store if possible and else from the registry.
    ///
    /// # Errors
    /// A document can't be read, or is invalid; or the image has more than [`MAX_LAYERS`] layers, or a configuration of more
    /// than [`MAX_MANIFEST`] bytes.
    pub(super) async fn read(
        store: &ContentStore,
        repository: &Repository,
        resolved: ResolvedReference,
    ) -> Result<Self, FetchStop> {
        let target = resolved.descriptor.clone();
        let chosen = repository.choose(resolved, &Platform::of_this_machine(), store).await?;
        let Chosen { indexes, manifest: (descriptor, content) } = chosen;
        let manifest = Manifest::parse(&content)?;
        let refuse = |what: String| {
            let message = format!("{} has {what}", repository.reference());
            Err(PullError::new(ErrorClass::Permanent, message).into())
        };
        let (count, size) = (manifest.layers.len(), manifest.config.size);
        if count > MAX_LAYERS {
            return refuse(format!("{count} layers, of at most {MAX_LAYERS}"));
        }
        // We read it whole, and the room for it isn't checked.
        if size > MAX_MANIFEST {
            return refuse(format!("a configuration of {size} bytes, of at most {MAX_MANIFEST}"));
        }
        let digests = |descriptors: &[Descriptor]| -> Vec<String> {
            descriptors.iter().map(|descriptor| descriptor.digest.clone()).collect()
        };
        let mut documents = Vec::new();
        for (index, content) in indexes {
            let labels = of_index(&digests(&Index::parse(&content)?.manifests));
            documents.push(ImageDocument { blob: blob_to_write(BlobKind::Index, &index), content, labels });
        }
        let layers = manifest.distinct_layers();
        let order = digests(&manifest.layers);
        let labels = of_manifest(&manifest.config.digest, &order);
        documents.push(ImageDocument {
            blob: blob_to_write(BlobKind::Manifest, &descriptor),
            content,
            labels,
        });
        Self { target, documents, config: manifest.config, layers, order }.refuse_foreign_layers()
    }

    fn refuse_foreign_layers(self) -> Result<Self, FetchStop> {
        match self.layers.iter().find(|layer| layer.is_foreign()) {
            Some(layer) => Err(FetchStop::StepBack(format!("layer {} is not in the registry", layer.digest))),
            None => Ok(self),
        }
    }

    /// The layers from the lowest one on, possibly with duplicates.
    pub(super) fn stacked_layers(&self) -> impl Iterator<Item = &Descriptor> {
        self.order.iter().filter_map(|digest| self.layers.iter().find(|layer| layer.digest == *digest))
    }

    /// The digests of the layers above the `lowest` ones.
    pub(super) fn digests_above(&self, lowest: usize) -> HashSet<&str> {
        self.order.iter().skip(lowest).map(String::as_str).collect()
    }

    /// Compressed size of all layers.
    pub(super) fn size(&self) -> u64 {
        self.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.size))
    }
}

impl Contents for ContentStore {
    async fn read(&self, digest: &str) -> Option<Vec<u8>> {
        self.read(digest).await
    }
}

/// The blob that a descriptor refers to.
pub(super) fn blob_to_write(kind: BlobKind, descriptor: &Descriptor) -> BlobToWrite {
    BlobToWrite { kind, digest: descriptor.digest.clone(), size: descriptor.size }
}
