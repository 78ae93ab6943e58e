//! The download that a delta leaves to a node with the earlier image. The plan doesn't know which nodes have it.

use prepull_delta::manifest::{DeltaManifest, MAX_OFFERS, Offer, WORTHWHILE};
use prepull_registry::manifest::Descriptor;
use prepull_registry::{RegistryError, Repository};

/// The delta to this manifest that leaves the least to download. `None` if there's none, or the registry can't be asked: then
/// the layers count.
pub(super) async fn smallest(
    repository: &Repository,
    manifest: &str,
    layers: &[Descriptor],
) -> Option<DeltaManifest> {
    let whole = layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
    if whole < WORTHWHILE {
        return None;
    }
    let mut best: Option<(u64, DeltaManifest)> = None;
    for place in repository.places() {
        let Ok(referrers) = place.referrers(manifest).await else { continue };
        let offer = |referrer: Descriptor| {
            let Descriptor { digest, size, artifact_type, annotations, .. } = &referrer;
            let offer = Offer::of_referrer(digest, *size, artifact_type.as_deref(), annotations).ok()??;
            (offer.target == manifest).then_some((offer.download, referrer))
        };
        let mut offers: Vec<_> = referrers.into_iter().filter_map(offer).collect();
        offers.sort_by_key(|(download, _)| download.unwrap_or(u64::MAX));
        for (_, referrer) in offers.into_iter().take(MAX_OFFERS) {
            let Ok(Some(delta)) = read(repository, &referrer, manifest).await else { continue };
            let cost = layers.iter().map(|layer| cost(&delta, layer)).fold(0, u64::saturating_add);
            if cost < best.as_ref().map_or(whole, |(least, _)| *least) {
                best = Some((cost, delta));
            }
        }
        if best.is_some() {
            break;
        }
    }
    best.map(|(_, delta)| delta)
}

/// The bytes to download for a layer.
pub(super) fn cost(delta: &DeltaManifest, layer: &Descriptor) -> u64 {
    delta.diff_for(&layer.digest, layer.size).map_or(layer.size, |diff| diff.size)
}

async fn read(
    repository: &Repository,
    referrer: &Descriptor,
    manifest: &str,
) -> Result<Option<DeltaManifest>, RegistryError> {
    let content = repository.manifest(referrer).await?;
    Ok(DeltaManifest::parse(&content).ok().filter(|delta| delta.target == manifest))
}
