//! The download that deltas leave to nodes with an earlier image.

use std::collections::{BTreeSet, HashMap};

use prepull_delta::manifest::{DeltaManifest, MAX_OFFERS, Offer};
use prepull_registry::Repository;
use prepull_registry::manifest::Descriptor;

/// Bytes to download for each layer of an image, by the digest of the image that a node has.
pub(super) type Costs = HashMap<String, Vec<u64>>;

/// A delta in the list of a registry.
pub(super) struct Offered {
    offer: Offer,
    referrer: Descriptor,
}

/// The deltas to this manifest, the smallest first. None where the registry can't be asked: then the layers count.
pub(super) async fn find_offers(repository: &Repository, manifest: &str) -> Vec<Offered> {
    for place in repository.referrer_places() {
        let referrers = place.referrers(manifest).await.unwrap_or_default();
        let offered = referrers.iter().filter_map(|referrer| {
            let Descriptor { digest, size, artifact_type, annotations, .. } = referrer;
            let offer = Offer::of_referrer(digest, *size, artifact_type.as_deref(), annotations).ok()??;
            (offer.target == manifest).then(|| Offered { offer, referrer: referrer.clone() })
        });
        let mut offered: Vec<_> = offered.collect();
        if !offered.is_empty() {
            offered.sort_by_key(|offered| offered.offer.download.unwrap_or(u64::MAX));
            return offered;
        }
    }
    Vec::new()
}

/// The costs by the smallest delta from each of these images. `held`: their configurations, by the digest that a node lists.
pub(super) async fn costs(
    repository: &Repository,
    offers: &[Offered],
    layers: &[Descriptor],
    held: &HashMap<String, String>,
) -> Costs {
    let mut costs = Costs::new();
    for source in held.values().collect::<BTreeSet<_>>() {
        let mut best: Vec<u64> = layers.iter().map(|layer| layer.size).collect();
        for Offered { offer, referrer } in
            offers.iter().filter(|offered| offered.offer.source_config == *source).take(MAX_OFFERS)
        {
            let content = repository.fetch_manifest(referrer).await.unwrap_or_default();
            let Ok(delta) = DeltaManifest::parse(&content) else { continue };
            let each: Vec<_> = layers.iter().map(|layer| cost(&delta, layer)).collect();
            if delta.target == offer.target && sum(&each) < sum(&best) {
                best = each;
            }
        }
        let of_it = held.iter().filter(|(_, config)| *config == source);
        costs.extend(of_it.map(|(digest, _)| (digest.clone(), best.clone())));
    }
    costs
}

pub(super) fn sum(bytes: &[u64]) -> u64 {
    bytes.iter().copied().fold(0, u64::saturating_add)
}

/// The bytes to download for a layer.
fn cost(delta: &DeltaManifest, layer: &Descriptor) -> u64 {
    delta.diff_for(&layer.digest, layer.size).map_or(layer.size, |diff| diff.size)
}
