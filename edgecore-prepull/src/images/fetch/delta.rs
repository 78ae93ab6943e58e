//! Offers of a registry in place of layers: deltas, and the files of the image that they start from.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use prepull_api::task::NoDelta;
use prepull_delta::manifest::{DeltaManifest, TAR_DIFF};
use prepull_registry::manifest::Descriptor;

use crate::images::containerd::OpenView;

/// What the registry offers in place of layers.
#[derive(Debug, Default)]
pub(super) struct LayerDeltas {
    /// Deltas by the digest of the layer that they rebuild.
    by_layer: HashMap<String, Delta>,
    /// The files of the earlier image.
    pub(super) old: OldImage,
}

/// Why a delta of the registry isn't used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnusedDelta {
    pub(super) code: NoDelta,
    /// One sentence.
    pub(super) why: String,
}

impl UnusedDelta {
    pub(super) fn new(code: NoDelta, why: impl Into<String>) -> Self {
        Self { code, why: why.into() }
    }
}

/// A read-only view of the files of an image.
#[derive(Debug, Default)]
pub(super) struct OldImage {
    /// Name of its snapshot.
    pub(super) chain: String,
    /// The view, until the layers are rebuilt.
    pub(super) view: Option<OpenView>,
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

/// Sizes of a layer that is rebuilt, by the word of the delta's publisher.
#[derive(Clone, Copy, Debug)]
pub(super) struct RebuiltSizes {
    /// Most bytes of the tar, which is deleted once it's unpacked.
    pub(super) tar: u64,
    pub(super) unpacked: u64,
}

impl Delta {
    /// The sizes for the check of the room. Where the publisher announces none, we guess.
    pub(super) fn rebuilt_sizes(&self, layer: &Descriptor) -> RebuiltSizes {
        let unpacked = self.tar.unwrap_or_else(|| layer.guess_unpacked());
        RebuiltSizes { tar: self.most_tar(layer), unpacked }
    }

    /// Most bytes of the rebuilt tar. Without an announced size it's twice the guess, since a tar that's larger costs the delta
    /// and the layer.
    pub(super) fn most_tar(&self, layer: &Descriptor) -> u64 {
        self.tar.unwrap_or_else(|| layer.guess_unpacked().saturating_mul(2))
    }
}

/// A layer that has to be downloaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missing<'a> {
    pub(super) layer: &'a Descriptor,
    /// Those that an earlier attempt hasn't left.
    pub(super) bytes: u64,
}

/// Bound on the images with remembered deltas: a node pulls fewer at a time.
const MAX_REMEMBERED: usize = 64;

/// Deltas that were of no use in an earlier attempt, by the manifest of the image and their digest: a further attempt must not
/// pay for them again. They are forgotten once the image is pulled.
#[derive(Debug, Default)]
pub(super) struct RefusedDeltas(Mutex<HashMap<String, HashMap<String, UnusedDelta>>>);

impl RefusedDeltas {
    pub(super) fn add_refusal(&self, image: &str, delta: &str, unused: UnusedDelta) {
        let mut images = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if images.len() >= MAX_REMEMBERED && !images.contains_key(image) {
            images.clear();
        }
        images.entry(image.to_owned()).or_default().insert(delta.to_owned(), unused);
    }

    pub(super) fn refusal_reason(&self, image: &str, delta: &str) -> Option<UnusedDelta> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(image)?.get(delta).cloned()
    }

    pub(super) fn forget(&self, image: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(image);
    }
}

impl LayerDeltas {
    /// The delta in place of a layer.
    pub(super) fn delta_of(&self, layer: &str) -> Option<&Delta> {
        self.by_layer.get(layer)
    }

    /// The deltas for these missing layers, if they save anything. Those are left out that `may_use` doesn't accept by their
    /// digest, and those with the digest of a missing layer: one download can't have the sizes of both.
    pub(super) fn new(
        manifest: &DeltaManifest,
        chain: String,
        missing: &[Missing<'_>],
        mut may_use: impl FnMut(&str) -> bool,
    ) -> Option<Self> {
        let mut by_layer = HashMap::new();
        for Missing { layer, bytes } in missing {
            let Some(found) = manifest.diff_for(&layer.digest, *bytes) else { continue };
            let is_layer = missing.iter().any(|missing| missing.layer.digest == found.digest);
            if is_layer || !may_use(&found.digest) {
                continue;
            }
            let (digest, size, tar) = (found.digest.clone(), found.size, found.uncompressed);
            let blob = Descriptor { media_type: TAR_DIFF.to_owned(), digest, size, ..Descriptor::default() };
            by_layer.insert(layer.digest.clone(), Delta { blob, tar });
        }
        let old = OldImage { chain, ..OldImage::default() };
        (!by_layer.is_empty()).then_some(Self { by_layer, old })
    }

    /// Bytes to download for these layers.
    pub(super) fn cost(&self, missing: &[Missing<'_>]) -> u64 {
        let cost = |Missing { layer, bytes }: &Missing<'_>| {
            self.delta_of(&layer.digest).map_or(*bytes, |delta| delta.blob.size)
        };
        missing.iter().map(cost).fold(0, u64::saturating_add)
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
        let missing: Vec<_> = layers.iter().map(|layer| Missing { layer, bytes: layer.size }).collect();
        let deltas = LayerDeltas::new(&manifest, "chain".to_owned(), &missing, |_| true).unwrap();
        assert_eq!(deltas.by_layer.keys().collect::<Vec<_>>(), [&digest(1)]);
        assert_eq!(deltas.cost(&missing), 2010);
        let delta = deltas.delta_of(&digest(1)).unwrap();
        assert_eq!((delta.blob.digest.clone(), delta.most_tar(missing[0].layer)), (digest(101), 5_000));
        assert!(LayerDeltas::new(&manifest, "chain".to_owned(), &missing[1..], |_| true).is_none());
        assert!(
            LayerDeltas::new(&manifest, "chain".to_owned(), &missing, |delta| delta != digest(101)).is_none()
        );
        // One that is a layer of the image.
        let own = [missing[0], Missing { layer: &layer(101, 1000), bytes: 1000 }];
        assert!(LayerDeltas::new(&manifest, "chain".to_owned(), &own, |_| true).is_none());
        // Next to nothing is left of the layer.
        let almost = [Missing { bytes: 9, ..missing[0] }];
        assert!(LayerDeltas::new(&manifest, "chain".to_owned(), &almost, |_| true).is_none());
        // Others announce no size.
        let foreign = Delta { tar: None, ..delta.clone() };
        let gzip = Descriptor {
            media_type: "application/vnd.oci.image.layer.v1.tar+gzip".to_owned(),
            ..layer(1, 1000)
        };
        assert!(foreign.most_tar(&gzip) >= 2000, "{}", foreign.most_tar(&gzip));
    }

    #[test]
    fn a_refused_delta_is_remembered_until_the_end() {
        let refused = RefusedDeltas::default();
        let why = || UnusedDelta::new(NoDelta::WrongLayer, "another digest");
        refused.add_refusal("a", "sha256:1", why());
        assert_eq!(refused.refusal_reason("a", "sha256:1"), Some(why()));
        assert_eq!(
            (refused.refusal_reason("a", "sha256:2"), refused.refusal_reason("b", "sha256:1")),
            (None, None)
        );
        refused.forget("a");
        assert_eq!(refused.refusal_reason("a", "sha256:1"), None);
        for image in 0..MAX_REMEMBERED * 3 {
            refused.add_refusal(&image.to_string(), "sha256:1", why());
        }
        assert!(refused.0.lock().unwrap().len() <= MAX_REMEMBERED);
    }
}
