//! All blobs of one image.

use std::convert::Infallible;
use std::time::Duration;

use futures::future;
use futures::stream::{self, StreamExt, TryStreamExt};
use prepull_api::task::ByteProgress;
use tokio::time::sleep;

use super::ahead::{ArrivedBlobs, unpack_ahead};
use super::download::Download;
use super::downloads::Layer;
use super::fetcher::AHEAD;
use super::image::blob_to_write;
use super::stop::FetchStop;
use super::yielding::yield_to_others;
use crate::images::containerd::BlobKind;
use crate::images::puller::ProgressSink;

/// Interval of progress, which goes to the cloud at most once a second.
const PROGRESS: Duration = Duration::from_secs(1);

impl Download<'_> {
    /// Downloads an image into the content store, and unpacks it as the layers arrive. Returns the name of its snapshot
    /// if all of it is unpacked.
    pub(super) async fn fetch_blobs(&self, progress: ProgressSink<'_>) -> Result<Option<String>, FetchStop> {
        let (image, layers) = (self.image, self.layers);
        let report = || {
            let done = layers.iter().map(Layer::written_bytes).fold(0, u64::saturating_add);
            progress(ByteProgress { done, total: image.size() });
        };
        let wanted = layers.iter().filter(|layer| !layer.is_needless);
        let mut blobs: Vec<_> = wanted
            .map(|layer| {
                (
                    blob_to_write(BlobKind::Layer, layer.blob_to_fetch()),
                    layer.blob_to_fetch(),
                    layer.flight.clone(),
                )
            })
            .collect();
        // The largest first: then the last ones are small, and all streams end at about the same time.
        blobs.sort_by_key(|(layer, ..)| std::cmp::Reverse(layer.size));
        let config = &image.config;
        blobs.insert(
            0,
            (
                blob_to_write(BlobKind::Config, config),
                config,
                self.fetcher.flights.shared_value(&config.digest),
            ),
        );
        let arrived = ArrivedBlobs::default();
        let fetch = |index: usize| {
            let (arrived, (blob, descriptor, flight)) = (&arrived, &blobs[index]);
            async move {
                self.blob_or_layer(blob, descriptor, flight).await?;
                arrived.send_if_modified(|arrived| arrived.insert(blob.digest.clone()));
                // Immediately, and not with the next interval: after the last byte, a closing window stops nothing.
                report();
                Ok(())
            }
        };
        let all = stream::iter((0..blobs.len()).map(fetch))
            .buffer_unordered(AHEAD)
            .try_for_each(|()| std::future::ready(Ok(())));
        let documents =
            future::try_join_all(image.documents.iter().map(|document| self.write_document(document)));
        let all = future::try_join3(all, documents, unpack_ahead(self, &arrived));
        let keep_reporting = async {
            loop {
                report();
                sleep(PROGRESS).await;
            }
        };
        let manifest = image.documents.last().map_or(&image.target.digest, |document| &document.blob.digest);
        let others = async {
            // The pulls that wait for us wait no longer than if they downloaded by themselves. What neighbours wait for goes on:
            // they couldn't read the runtime's.
            let is_alone = self.shared.is_none();
            if self.buckets.limit().is_some() || (is_alone && self.buckets.are_limited()) {
                yield_to_others(self.fetcher, manifest, &blobs, &self.letting_go).await
            } else {
                std::future::pending().await
            }
        };
        let ended = tokio::select! {
            ended = all => ended,
            never = others => { let never: Infallible = never; match never {} }
            never = keep_reporting => { let never: Infallible = never; match never {} }
        };
        let ((), _, unpacked) = ended?;
        if let Err(unused) = &unpacked {
            // The runtime unpacks the rest, and must find the layers.
            let by_delta = layers.iter().filter(|layer| layer.delta.is_some() && layer.whole.get().is_none());
            for layer in by_delta.filter(|layer| !layer.is_needless) {
                self.fetch_whole(layer, unused.clone()).await?;
            }
        }
        report();
        Ok(unpacked.ok())
    }
}
