//! Unpacks during the download: each layer as soon as it and all layers below it have arrived.
//!
//! The runtime would unpack all of them after the last byte. On a box with a slow processor that takes a good part of
//! the time of the download, with an idle link.

use std::collections::HashSet;

use prepull_registry::manifest::Descriptor;
use tokio::sync::watch;
use tonic::Status;

use super::download::Download;
use super::stop::Stop;
use super::unpacked::{Diff, diffs};
use crate::images::containerd::Unpack;
use crate::images::puller::cri::{is_connection_failure, to_pull_error};

/// The digests of the blobs of an image that have arrived in the content store.
pub(super) type Arrived = watch::Sender<HashSet<String>>;

/// Unpacks the layers of an image as they arrive, until the last one or until a failure. The runtime then continues,
/// and reports the failure better. Returns the snapshot name of the whole image.
///
/// # Errors
/// The runtime ended. Left to it, such an image would make it end for ever: each attempt after that would find only that
/// nothing listens, which costs no try.
pub(super) async fn unpack_ahead(download: &Download<'_>, arrived: &Arrived) -> Result<Option<String>, Stop> {
    let image = download.image;
    wait_for(arrived, &image.config).await;
    let config = download.fetcher.store.read(&image.config.digest).await.unwrap_or_default();
    let diffs = diffs(&config);
    let layers: Vec<_> = image.stacked().collect();
    if diffs.len() != layers.len() {
        return Ok(None);
    }
    let mut parent = None;
    for (layer, diff) in layers.into_iter().zip(&diffs) {
        if let Err(status) = unpack(download, arrived, layer, diff, parent).await {
            if is_connection_failure(&status) {
                return Err(to_pull_error(&status, download.reference, &download.fetcher.endpoint).into());
            }
            tracing::debug!(layer = layer.digest, %status, "not unpacked ahead; the runtime unpacks the rest");
            return Ok(None);
        }
        parent = Some(diff.chain_id.as_str());
    }
    Ok(parent.map(str::to_owned))
}

async fn unpack(
    Download { fetcher, lease, facts, unpacking, .. }: &Download<'_>,
    arrived: &Arrived,
    layer: &Descriptor,
    Diff { diff_id, chain_id }: &Diff,
    parent: Option<&str>,
) -> Result<(), Status> {
    let is_unpacked = || fetcher.store.is_unpacked(&facts.snapshotter, chain_id);
    if is_unpacked().await {
        return Ok(());
    }
    wait_for(arrived, layer).await;
    let chain = fetcher.chains.of(chain_id);
    let _turn = chain.lock().await;
    if is_unpacked().await {
        return Ok(());
    }
    let unpack = Unpack { snapshotter: &facts.snapshotter, layer, parent, diff_id, chain_id, lease };
    let flush = async {
        if facts.flushes_layers {
            return Ok(());
        }
        fetcher.flush(facts).await.map_err(|error| Status::failed_precondition(error.to_string()))
    };
    unpacking.set(Some(&layer.digest));
    match fetcher.unpacker.unpack(unpack, flush).await {
        // It stays the layer that was being unpacked when the runtime ended.
        Err(status) if is_connection_failure(&status) => return Err(status),
        // Another process with the same lease was faster and has released it, which removed our snapshot.
        Err(status) if !is_unpacked().await => return Err(status),
        _ => {}
    }
    unpacking.set(None);
    Ok(())
}

async fn wait_for(arrived: &Arrived, blob: &Descriptor) {
    // This can't fail: the sender is borrowed here.
    let _ = arrived.subscribe().wait_for(|arrived| arrived.contains(&blob.digest)).await;
}
