//! Manifests of deltas, and their entries in a list of referrers.

use std::collections::HashSet;

use prepull_delta::manifest::{DeltaManifest, Offer};
use prepull_registry::digest::is_digest;
use prepull_registry::manifest::Index;

pub(crate) fn run(input: &[u8]) {
    match DeltaManifest::parse(input) {
        Ok(DeltaManifest { target, source, source_config, layers }) => {
            assert!([&target, &source_config].into_iter().chain(&source).all(|digest| is_digest(digest)));
            let to: HashSet<&str> = layers.iter().map(|layer| layer.to.as_str()).collect();
            assert_eq!(to.len(), layers.len(), "each layer once");
            for layer in &layers {
                assert!(is_digest(&layer.to) && is_digest(&layer.digest), "{layer:?}");
                assert!(layer.size <= 1 << 40 && layer.uncompressed.is_none_or(|size| size <= 1 << 40));
            }
        }
        Err(error) => assert!(!error.field.is_empty() && !error.problem.is_empty(), "{error}"),
    }
    for entry in Index::parse(input).map(|index| index.manifests).unwrap_or_default() {
        let kind = entry.artifact_type.as_deref();
        if let Ok(Some(offer)) = Offer::of_referrer(&entry.digest, entry.size, kind, &entry.annotations) {
            assert!(
                [&offer.digest, &offer.target, &offer.source_config]
                    .into_iter()
                    .all(|digest| is_digest(digest))
            );
        }
    }
}
