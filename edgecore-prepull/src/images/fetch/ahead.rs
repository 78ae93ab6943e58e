//! Unpacks during the download: each layer as soon as it and all layers below it have arrived.
//!
//! The runtime would unpack all of them after the last byte. On a box with a slow processor that takes a good part of
//! the time of the download, with an idle link.

use std::collections::HashSet;
use std::sync::OnceLock;

use prepull_api::failure::FailureCode;
use prepull_api::task::NoDelta;
use prepull_registry::manifest::Descriptor;
use tokio::sync::watch;
use tonic::{Code, Status};

use super::delta::{Delta, OldImage, UnusedDelta};
use super::deltas::no_given_delta;
use super::download::Download;
use super::downloads::Layer;
use super::flights::Flight;
use super::image::blob_to_write;
use super::rebuild::{RebuildFailure, RebuiltTar};
use super::stop::FetchStop;
use super::unpacked::{Diff, parse_diffs};
use crate::images::containerd::{BlobKind, BlobToWrite, Unpack};
use crate::images::filesystem::FlushError;
use crate::images::puller::cri::{is_connection_failure, to_pull_error};
use crate::images::puller::{ErrorClass, PullError};

/// The digests of the blobs of an image that have arrived in the content store.
pub(super) type ArrivedBlobs = watch::Sender<HashSet<String>>;

/// Unpacks the layers of an image as they arrive, until the last one or until a failure. Returns the snapshot name of the
/// whole image, or why the rest of its deltas is of no use: the runtime continues, and reports the failure better.
///
/// # Errors
/// The runtime ended. Left to it, such an image would make it end for ever: each attempt after that would find only that
/// nothing listens, which costs no try.
pub(super) async fn unpack_ahead(
    download: &Download<'_>,
    arrived: &ArrivedBlobs,
) -> Result<Result<String, UnusedDelta>, FetchStop> {
    let not_layer_by_layer =
        || UnusedDelta::new(NoDelta::NotUnpacked, "the image couldn't be unpacked layer by layer");
    let image = download.image;
    wait_for(arrived, &image.config).await;
    let config = download.fetcher.store.read(&image.config.digest).await.unwrap_or_default();
    let diffs = parse_diffs(&config);
    if diffs.len() != image.stacked_layers().count() {
        return Ok(Err(not_layer_by_layer()));
    }
    let mut parent = None;
    for (stacked, diff) in image.stacked_layers().zip(&diffs) {
        let Some(layer) = download.layers.iter().find(|layer| layer.descriptor.digest == stacked.digest)
        else {
            return Ok(Err(not_layer_by_layer()));
        };
        match (UnpackStep { download, arrived, layer, diff, parent }).unpack().await {
            Ok(()) => {}
            Err(RebuildFailure::Stop(stop)) => return Err(stop),
            Err(RebuildFailure::Useless(why)) => {
                tracing::debug!(
                    layer = stacked.digest,
                    why = why.why,
                    "not unpacked ahead; the runtime unpacks the rest"
                );
                // The layer's other faults are no fault of the deltas of others.
                let is_full = why.code == NoDelta::NoRoom;
                return Ok(Err(if is_full { why } else { not_layer_by_layer() }));
            }
        }
        parent = Some(diff.chain_id.as_str());
    }
    Ok(parent.map(str::to_owned).ok_or_else(not_layer_by_layer))
}

/// A layer to unpack on top of its parent.
#[derive(Clone, Copy)]
struct UnpackStep<'a> {
    download: &'a Download<'a>,
    arrived: &'a ArrivedBlobs,
    layer: &'a Layer,
    diff: &'a Diff,
    parent: Option<&'a str>,
}

impl UnpackStep<'_> {
    async fn unpack(self) -> Result<(), RebuildFailure> {
        let Self { download, arrived, layer, .. } = self;
        if self.is_unpacked().await {
            return Ok(());
        }
        if layer.is_needless {
            // Its image was removed since, and this pull doesn't fetch it. `check_whole` fails the attempt, and the next one
            // fetches it.
            let why = "it's no longer unpacked, as it was when the pull began";
            return Err(RebuildFailure::Useless(UnusedDelta::new(NoDelta::NotUnpacked, why)));
        }
        wait_for(arrived, layer.blob_to_fetch()).await;
        if let (Some(delta), Some(deltas)) = (&layer.delta, &download.deltas)
            && layer.whole.get().is_none()
        {
            match self.unpack_rebuilt(delta, &deltas.old).await {
                Err(RebuildFailure::Useless(unused)) => {
                    download.fetch_whole(layer, unused).await?;
                }
                unpacked => return unpacked,
            }
        }
        let chain = download.fetcher.chains.shared_value(&self.diff.chain_id);
        let _turn = chain.lock().await;
        self.unpack_blob(&layer.descriptor).await
    }

    /// Rebuilds the layer as a tar, which is deleted once it's unpacked.
    async fn unpack_rebuilt(self, delta: &Delta, old: &OldImage) -> Result<(), RebuildFailure> {
        let Self { download, layer, diff, .. } = self;
        let chain = download.fetcher.chains.shared_value(&diff.chain_id);
        let _turn = chain.lock().await;
        if self.is_unpacked().await {
            return Ok(());
        }
        let RebuiltTar { tar, is_ours } =
            download.rebuild(&layer.descriptor, delta, old, &diff.diff_id).await?;
        let unpacked = self.unpack_blob(&tar).await;
        if is_ours {
            // If that fails, it goes with the lease.
            let _ = download.fetcher.writer.delete(&tar.digest).await;
        }
        unpacked
    }

    /// Unpacks a blob of the content store: the layer, or its tar.
    async fn unpack_blob(self, blob: &Descriptor) -> Result<(), RebuildFailure> {
        let Self { download, diff: Diff { diff_id, chain_id }, parent, .. } = self;
        let Download { fetcher, lease, facts, unpacking, .. } = download;
        if self.is_unpacked().await {
            return Ok(());
        }
        let unpack =
            Unpack { snapshotter: &facts.snapshotter, layer: blob, parent, diff_id, chain_id, lease };
        let unflushed = OnceLock::new();
        let flush = async {
            if facts.flushes_layers {
                return Ok(());
            }
            fetcher.flush_unpacked(facts, download.since).await.map_err(|error| {
                let status = Status::failed_precondition(error.to_string());
                let _ = unflushed.set(error);
                status
            })
        };
        unpacking.set(Some(&self.layer.descriptor.digest));
        let unpacked = fetcher.unpacker.unpack(unpack, flush).await;
        if let Some(FlushError::Refused { path, source }) = unflushed.get() {
            // It says nothing of the delta.
            unpacking.set(None);
            return Err(RebuildFailure::Stop(download.stop_refused(path, source)));
        }
        match unpacked {
            // It stays the layer that was being unpacked when the runtime ended.
            Err(status) if is_connection_failure(&status) => {
                return Err(RebuildFailure::Stop(
                    to_pull_error(&status, download.reference, &fetcher.endpoint).into(),
                ));
            }
            // Another process with the same lease was faster and has released it, which removed our snapshot.
            Err(status) if !self.is_unpacked().await => {
                let class = to_pull_error(&status, download.reference, &fetcher.endpoint).class;
                return Err(RebuildFailure::Useless(not_unpacked(&status, class)));
            }
            _ => {}
        }
        unpacking.set(None);
        Ok(())
    }

    async fn is_unpacked(self) -> bool {
        let Download { fetcher, facts, .. } = self.download;
        fetcher.store.is_unpacked(&facts.snapshotter, &self.diff.chain_id).await
    }
}

/// Why a layer isn't unpacked. Only another digest is a fault of its delta.
fn not_unpacked(status: &Status, class: ErrorClass) -> UnusedDelta {
    let code = match (status.code(), class) {
        (Code::DataLoss, _) => NoDelta::WrongLayer,
        (_, ErrorClass::NoSpace) => NoDelta::NoRoom,
        _ => NoDelta::NotUnpacked,
    };
    UnusedDelta::new(code, status.to_string())
}

impl Download<'_> {
    /// Keeps the deltas of this image for the neighbours, if the task shares layers.
    pub(super) async fn keep_deltas(&self) {
        let used = self.layers.iter().filter(|layer| layer.delta.is_some() && layer.lacks_blob());
        let digests: Vec<_> = used.map(|layer| layer.blob_to_fetch().digest.as_str()).collect();
        if self.shared.is_some() && !digests.is_empty() {
            self.fetcher.leases.keep_for_neighbours(self.reference, &digests).await;
        }
    }

    /// Downloads a blob; or the layer, in place of a delta that the registry lists and doesn't give.
    pub(super) async fn blob_or_layer(
        &self,
        blob: &BlobToWrite,
        descriptor: &Descriptor,
        flight: &Flight,
    ) -> Result<(), FetchStop> {
        let fetched = self.fetch_blob(blob, descriptor, flight).await;
        let is_rebuilt =
            |layer: &&Layer| layer.delta.is_some() && layer.blob_to_fetch().digest == blob.digest;
        let Some(layer) = self.layers.iter().find(is_rebuilt) else { return fetched };
        let error = match fetched {
            Err(FetchStop::Failed(error)) if is_of_registry(&error) => error,
            Err(FetchStop::StepBack(why)) => {
                PullError::new(ErrorClass::Transient, why).with_code(FailureCode::NoDelta)
            }
            fetched => return fetched,
        };
        if self.needs_deltas {
            // The next attempt asks again.
            return Err(no_given_delta(&error).into());
        }
        self.fetch_whole(layer, UnusedDelta::new(NoDelta::Undelivered, error.message)).await
    }

    /// Downloads a layer, since its delta is of no use for this reason.
    pub(super) async fn fetch_whole(&self, layer: &Layer, unused: UnusedDelta) -> Result<(), FetchStop> {
        let (image, delta) = (self.image.manifest_digest(), &layer.blob_to_fetch().digest);
        self.fetcher.refuse_delta(image, delta, &unused, self.needs_deltas)?;
        let digest = &layer.descriptor.digest;
        tracing::warn!(
            image = self.reference,
            layer = digest,
            code = unused.code.as_str(),
            why = unused.why,
            "not rebuilt from its delta; it's downloaded"
        );
        let _ = self.no_delta.set(unused);
        let flight = layer.whole.get_or_init(|| self.fetcher.flights.shared_value(digest));
        self.fetch_blob(&blob_to_write(BlobKind::Layer, &layer.descriptor), &layer.descriptor, flight).await
    }
}

/// Whether the registry has refused a blob, so that another one may be had. A link that is down is none of its faults: the next
/// attempt goes on with what has arrived.
fn is_of_registry(error: &PullError) -> bool {
    // By the class as well: a mirror's refusal has another code while the registry is silent.
    matches!(error.class, ErrorClass::NotFound | ErrorClass::Auth) || error.code == FailureCode::RegistryError
}

async fn wait_for(arrived: &ArrivedBlobs, blob: &Descriptor) {
    // This can't fail: the sender is borrowed here.
    let _ = arrived.subscribe().wait_for(|arrived| arrived.contains(&blob.digest)).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_another_digest_is_the_deltas_fault() {
        let endpoint = "unix:///run/containerd.sock".parse().unwrap();
        for (status, code) in [
            (Status::data_loss("layer sha256:a unpacks to sha256:b"), NoDelta::WrongLayer),
            (Status::unknown("write /var/lib/x: no space left on device"), NoDelta::NoRoom),
            (Status::deadline_exceeded("no answer within 60s"), NoDelta::NotUnpacked),
            (Status::failed_precondition("cannot open /var/lib/x: not found"), NoDelta::NotUnpacked),
        ] {
            let class = to_pull_error(&status, "r.io/a:1", &endpoint).class;
            let unused = not_unpacked(&status, class);
            assert_eq!(unused.code, code, "{status}");
            assert!(unused.why.contains(status.message()), "{unused:?}");
        }
    }
}
