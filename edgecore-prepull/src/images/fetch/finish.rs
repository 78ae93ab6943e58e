//! The end of a fetch, which turns the blobs in the content store into an image.
//!
//! If everything is unpacked, we write labels and records as the runtime's own pull does, and don't need the registry
//! any more. Otherwise the runtime continues, and finds the blobs in the store.

use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use prepull_api::image::NormalizedReference;
use prepull_api::task::ByteProgress;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::Fetching;
use super::download::Download;
use super::downloads::Layer;
use super::image::ImageParts;
use super::runtime::RuntimeFacts;
use super::stop::FetchStop;
use crate::images::containerd::{Labels, of_rebuilt, of_snapshot, of_unpacked};
use crate::images::filesystem::FlushError;
use crate::images::puller::cri::{is_connection_failure, to_pull_error};
use crate::images::puller::{ErrorClass, PullError, PullRequest, PullTerms, Pulled, Puller};

/// Longest wait for the CRI to notice a new record. It takes milliseconds.
const SEEN: Duration = Duration::from_secs(5);
/// Interval of checking whether it has.
const LOOK: Duration = Duration::from_millis(5);
/// Number of blobs that get their labels at the same time.
const AT_ONCE: usize = 4;

impl<P: Puller> Fetching<P> {
    /// Creates the image. `snapshot` is its name if all of it is unpacked.
    pub(super) async fn finish(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        download: &Download<'_>,
        snapshot: Option<String>,
    ) -> Result<Pulled, FetchStop> {
        let image = download.image;
        if let Some(snapshot) = &snapshot {
            // It may be another image's, which is removed while we wait for the disk.
            let held = of_snapshot(&download.facts.snapshotter, snapshot);
            self.fetcher.leases.add_resources(download.lease, std::iter::once(held)).await;
        }
        // An image with a record counts as present, and a power cut may follow immediately. Layers that we have
        // unpacked are on disk; blobs, and layers of another pull, may not be.
        let is_flushed = match self.fetcher.flush(download.facts, download.since).await {
            Ok(()) => true,
            // Then the runtime continues, as it would without the agent.
            Err(FlushError::NotSeen { .. }) => false,
            Err(FlushError::Refused { path, source }) => return Err(download.stop_refused(&path, &source)),
        };
        if let Some(snapshot) = snapshot.filter(|_| is_flushed && !needs_runtime(&request, download.facts)) {
            match self.record(request, reference, download, &snapshot).await {
                Ok(true) => {
                    let size = image.size();
                    return Ok(Pulled {
                        digest: Some(image.target.digest.clone()),
                        id: Some(image.config.digest.clone()),
                        bytes: Some(ByteProgress { done: size, total: size }),
                        is_flushed: true,
                        ..Pulled::default()
                    });
                }
                Ok(false) => {}
                Err(status) if is_connection_failure(&status) => {
                    return Err(to_pull_error(&status, request.reference, &self.fetcher.endpoint).into());
                }
                Err(status) => {
                    tracing::debug!(image = request.reference, %status, "cannot be recorded; the runtime is asked");
                }
            }
        }
        self.finish_by_runtime(request, reference, image, &download.facts.snapshotter).await
    }

    /// Records an image that is unpacked and on disk. `false` if the runtime doesn't know it afterwards.
    async fn record(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        Download { image, layers, facts, source, .. }: &Download<'_>,
        snapshot: &str,
    ) -> Result<bool, Status> {
        let fetcher = &self.fetcher;
        if !fetcher.store.is_unpacked(&facts.snapshotter, snapshot).await {
            return Ok(false);
        }
        let mut of_config = of_unpacked(&facts.snapshotter, snapshot);
        if layers.iter().any(Layer::lacks_blob) {
            of_config.extend(of_rebuilt());
        }
        let documents = image.documents.iter().map(|document| (&document.blob.digest, &document.labels));
        // A document that was already there lacks this repository among its sources. Layers already have all the labels
        // that the runtime would set.
        let content: Vec<(&String, &Labels)> =
            documents.chain([(&image.config.digest, &of_config)]).collect();
        let add = |index: usize| {
            let (digest, labels) = content[index];
            fetcher.labels.add(digest, source, labels)
        };
        stream::iter((0..content.len()).map(add))
            .buffer_unordered(AT_ONCE)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await?;
        // The id first, like the runtime: a name must always lead to the image.
        let by_digest = format!("{}@{}", reference.name(), image.target.digest);
        let tag = reference.digest().is_none().then(|| reference.to_string());
        for name in [Some(&image.config.digest), tag.as_ref(), Some(&by_digest)].into_iter().flatten() {
            fetcher.records.set_target(name, &image.target).await?;
        }
        // Snapshots that came from another image may have been removed with it. From now on they stay.
        let is_whole = fetcher.store.is_unpacked(&facts.snapshotter, snapshot).await;
        Ok(is_whole && self.is_known(request.reference, &image.config.digest).await.unwrap_or(false))
    }

    /// Has the runtime unpack the content. With a tag, the runtime would resolve the reference again, and download
    /// another image by itself if the tag has moved. So we pull by digest, and write the record of the tag here. The
    /// runtime resolves a digest as well, so an unreachable registry fails the attempt; the lease keeps everything for
    /// the next one.
    pub(super) async fn finish_by_runtime(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        image: &ImageParts,
        snapshotter: &str,
    ) -> Result<Pulled, FetchStop> {
        self.fetcher.check_whole(request.reference, image, snapshotter).await?;
        let by_digest = format!("{}@{}", reference.name(), image.target.digest);
        let has_digest = reference.digest().is_some();
        let reference = if has_digest { request.reference } else { &by_digest };
        let fetched_for = Some(request.reference);
        // Nothing is downloaded any more, so no terms apply.
        let unpack = PullRequest { reference, fetched_for, terms: PullTerms::default(), ..request };
        let mut pulled = self.inner.pull(unpack, &|_| {}).await?;
        let size = image.size();
        pulled.bytes = pulled.bytes.or(Some(ByteProgress { done: size, total: size }));
        if has_digest {
            return Ok(pulled);
        }
        let fetcher = &self.fetcher;
        let written = fetcher.records.set_target(request.reference, &image.target).await;
        written.map_err(|status| to_pull_error(&status, request.reference, &fetcher.endpoint))?;
        if let Some(id) = &pulled.id
            && !self.is_known(request.reference, id).await?
        {
            let message = format!(
                "the runtime does not know {} yet, although its record is written",
                request.reference
            );
            return Err(PullError::new(ErrorClass::Transient, message).into());
        }
        Ok(pulled)
    }

    /// Whether the runtime knows an image by a name. It does so shortly after the record is written.
    async fn is_known(&self, reference: &str, id: &str) -> Result<bool, PullError> {
        let begun = Instant::now();
        while begun.elapsed() < SEEN {
            let seen = self.inner.look_up(reference).await?;
            if seen.is_some_and(|present| present.id.as_deref() == Some(id)) {
                return Ok(true);
            }
            sleep(LOOK).await;
        }
        Ok(false)
    }
}

/// Whether the runtime must pull the image in any case. It removes layers that it's configured to discard, and labels
/// the rest accordingly. And a task's sandbox metadata is meant for the runtime and its plugins.
pub(super) fn needs_runtime(request: &PullRequest<'_>, facts: &RuntimeFacts) -> bool {
    facts.discards_layers || request.sandbox.is_some()
}
