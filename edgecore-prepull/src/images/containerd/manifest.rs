//! The parts of an OCI manifest and of an OCI index that tell the size of an image.

use std::collections::HashSet;

use serde::Deserialize;

/// One layer of an image, as its manifest lists it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Layer {
    /// Digest of the compressed layer, `sha256:…`.
    pub(crate) digest: String,
    /// Compressed size in bytes.
    pub(crate) size: u64,
}

/// A manifest or an index, without what nobody here needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Document {
    /// An image manifest, by its layers.
    Manifest(Vec<Layer>),
    /// An index, by the digests of its manifests.
    Index(Vec<String>),
}

impl Document {
    /// Parses JSON of either kind. `None` if it is neither.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Child {
            digest: String,
        }
        #[derive(Deserialize)]
        struct Either {
            #[serde(default)]
            layers: Vec<Layer>,
            #[serde(default)]
            manifests: Vec<Child>,
        }
        let Either { layers, manifests } = serde_json::from_slice(text).ok()?;
        Some(if manifests.is_empty() {
            Self::Manifest(layers)
        } else {
            Self::Index(manifests.into_iter().map(|child| child.digest).collect())
        })
    }
}

/// Drops layers that the manifest lists again: each blob is fetched once.
pub(super) fn deduplicate(mut layers: Vec<Layer>) -> Vec<Layer> {
    let mut seen = HashSet::new();
    layers.retain(|layer| seen.insert(layer.digest.clone()));
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_with_manifests_is_an_index_and_any_other_a_manifest() {
        let manifest = br#"{"schemaVersion":2,"config":{"digest":"sha256:c","size":1},
            "layers":[{"mediaType":"x","digest":"sha256:a","size":10}]}"#;
        let layers = vec![Layer { digest: "sha256:a".to_owned(), size: 10 }];
        assert_eq!(Document::parse(manifest), Some(Document::Manifest(layers)));
        let index = br#"{"manifests":[{"digest":"sha256:m","size":1,"platform":{"os":"linux"}}]}"#;
        assert_eq!(Document::parse(index), Some(Document::Index(vec!["sha256:m".to_owned()])));
        assert_eq!(Document::parse(b"\xff"), None);
    }
}
