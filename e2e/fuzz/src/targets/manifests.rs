//! Manifests and indexes, as a registry may send them.

use std::collections::HashSet;

use prepull_registry::digest::is_digest;
use prepull_registry::manifest::{Descriptor, Index, Manifest, Platform};

/// Platforms with variants, without, and with other names.
const PLATFORMS: [(&str, &str, &str); 4] =
    [("linux", "amd64", ""), ("linux", "arm64", "v8"), ("linux", "arm", "v7"), ("linux", "x86_64", "v3")];

pub(crate) fn run(input: &[u8]) {
    if let Ok(manifest) = Manifest::parse(input) {
        let distinct = manifest.distinct_layers();
        let digests: HashSet<&str> = manifest.layers.iter().map(|layer| layer.digest.as_str()).collect();
        assert_eq!(distinct.len(), digests.len(), "each layer once");
        check_descriptors(manifest.layers.iter().chain([&manifest.config]).chain(&manifest.subject));
    }
    let Ok(index) = Index::parse(input) else { return };
    check_descriptors(index.manifests.iter());
    for (os, architecture, variant) in PLATFORMS {
        let [os, architecture, variant] = [os, architecture, variant].map(str::to_owned);
        let platform = Platform { os, architecture, variant };
        let fits = |entry: &&Descriptor| entry.is_manifest() || entry.is_index();
        let exact =
            index.manifests.iter().filter(fits).find(|entry| entry.platform.as_ref() == Some(&platform));
        match index.select(&platform) {
            None => assert_eq!(exact, None, "a manifest for {platform:?} is there"),
            Some(selected) => {
                assert!(fits(&selected) && index.manifests.contains(selected), "{selected:?}");
                // One without a platform is selected only if nothing else fits.
                assert!(exact.is_none() || selected.platform.is_some(), "{selected:?} for {platform:?}");
            }
        }
    }
}

fn check_descriptors<'a>(descriptors: impl Iterator<Item = &'a Descriptor>) {
    for descriptor in descriptors {
        assert!(is_digest(&descriptor.digest), "{descriptor:?}");
        assert!(descriptor.guess_unpacked() >= descriptor.size, "{descriptor:?}");
        let text = serde_json::to_string(descriptor).expect("a descriptor is JSON");
        assert_eq!(serde_json::from_str::<Descriptor>(&text).ok().as_ref(), Some(descriptor), "{text}");
    }
}
