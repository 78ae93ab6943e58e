//! Offers of a registry in place of layers: deltas, and the files of the image that they start from.

use std::collections::HashMap;
use std::path::PathBuf;

use prepull_api::task::NoDelta;
use prepull_delta::manifest::{DeltaManifest, TAR_DIFF};
use prepull_registry::manifest::Descriptor;

/// The rebuilt tar and the unpacked files, as multiples of the tar's size.
const COPIES: u64 = 2;

/// What the registry offers in place of layers.
#[derive(Debug, Default)]
pub(super) struct Deltas {
    /// Deltas by the digest of the layer that they rebuild.
    by_layer: HashMap<String, Delta>,
    /// The files of the earlier image.
    pub(super) old: OldImage,
}

/// Why a delta of the registry isn't used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unused {
    pub(super) code: NoDelta,
    /// One sentence.
    pub(super) why: String,
}

impl Unused {
    pub(super) fn new(code: NoDelta, why: impl Into<String>) -> Self {
        Self { code, why: why.into() }
    }
}

/// A read-only view of the files of an image.
#[derive(Clone, Debug, Default)]
pub(super) struct OldImage {
    /// Name of its snapshot.
    pub(super) chain: String,
    /// Name of the view.
    pub(super) view: String,
    /// The directories of its layers, the highest first.
    pub(super) directories: Vec<PathBuf>,
}

/// A blob from which a layer is rebuilt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Delta {
    pub(super) blob: Descriptor,
    /// Size of the rebuilt tar, if the publisher announces it.
    pub(super) tar: Option<u64>,
}

impl Delta {
    /// Bytes on the disk while the layer is rebuilt and unpacked, as far as the publisher has announced them.
    pub(super) fn room(&self) -> Option<u64> {
        self.tar.map(|tar| tar.saturating_mul(COPIES))
    }
}

impl Deltas {
    /// The delta in place of a layer.
    pub(super) fn of(&self, layer: &str) -> Option<&Delta> {
        self.by_layer.get(layer)
    }

    /// The deltas for these missing layers, if they save anything.
    pub(super) fn new(manifest: &DeltaManifest, chain: String, missing: &[&Descriptor]) -> Option<Self> {
        let mut by_layer = HashMap::new();
        for layer in missing {
            let Some(found) = manifest.diff_for(&layer.digest, layer.size) else { continue };
            let (digest, size, tar) = (found.digest.clone(), found.size, found.uncompressed);
            let blob = Descriptor { media_type: TAR_DIFF.to_owned(), digest, size, ..Descriptor::default() };
            by_layer.insert(layer.digest.clone(), Delta { blob, tar });
        }
        let old = OldImage { chain, ..OldImage::default() };
        (!by_layer.is_empty()).then_some(Self { by_layer, old })
    }

    /// Bytes to download for these layers.
    pub(super) fn cost(&self, missing: &[&Descriptor]) -> u64 {
        let size = |layer: &&Descriptor| self.of(&layer.digest).map_or(layer.size, |delta| delta.blob.size);
        missing.iter().map(size).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn digest(number: u64) -> String {
        format!("sha256:{number:064x}")
    }

    fn layer(number: u64, size: u64) -> Descriptor {
        Descriptor { digest: digest(number), size, ..Descriptor::default() }
    }

    fn manifest(layers: &[(u64, u64, &str)]) -> DeltaManifest {
        let entry = |(to, size, media_type): &(u64, u64, &str)| {
            json!({
                "mediaType": media_type, "digest": digest(to + 100), "size": size,
                "annotations": {
                    "io.github.containers.delta.content": "image-layer",
                    "io.github.containers.delta.to": digest(*to),
                    "prepull.kubeedge.io/uncompressed-size": "5000",
                },
            })
        };
        let target = json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(9), "size": 7,
            "annotations": { "io.github.containers.delta.content": "image-manifest" },
        });
        let layers: Vec<_> = std::iter::once(target).chain(layers.iter().map(entry)).collect();
        let text = json!({
            "artifactType": prepull_delta::manifest::ARTIFACT_TYPE,
            "layers": layers,
            "annotations": {
                "io.github.containers.delta.target": digest(9),
                "io.github.containers.delta.source-config": digest(8),
            },
        });
        DeltaManifest::parse(&serde_json::to_vec(&text).unwrap()).unwrap()
    }

    #[test]
    fn only_smaller_diffs_of_missing_layers_count() {
        let manifest = manifest(&[
            (1, 10, TAR_DIFF),
            (2, 1000, TAR_DIFF),
            (3, 10, "application/vnd.oci.image.layer.v1.tar+gzip"),
            (4, 10, TAR_DIFF),
        ]);
        let layers = [1, 2, 3].map(|number| layer(number, 1000));
        let missing: Vec<_> = layers.iter().collect();
        let deltas = Deltas::new(&manifest, "chain".to_owned(), &missing).unwrap();
        assert_eq!(deltas.by_layer.keys().collect::<Vec<_>>(), [&digest(1)]);
        assert_eq!(deltas.cost(&missing), 2010);
        let delta = deltas.of(&digest(1)).unwrap();
        assert_eq!((delta.blob.digest.clone(), delta.room()), (digest(101), Some(10_000)));
        assert!(Deltas::new(&manifest, "chain".to_owned(), &missing[1..]).is_none());
    }
}
