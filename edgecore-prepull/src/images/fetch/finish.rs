//! The end of a fetch: what is in the content store becomes an image.
//!
//! What is unpacked as a whole needs nobody any more: labels and records are written as the runtime's own pull writes them,
//! and a registry that is gone by now does no harm. Everything else is left to the runtime, which finds the blobs there.

use std::io;
use std::path::Path;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use prepull_api::image::NormalizedReference;
use prepull_api::task::Bytes;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::Fetching;
use super::blob::Download;
use super::image::ImageParts;
use super::runtime::Facts;
use super::stop::Stop;
use crate::images::containerd::{Labels, of_unpacked};
use crate::images::filesystem::FlushError;
use crate::images::puller::cri::{is_connection_failure, to_pull_error};
use crate::images::puller::{ErrorClass, PullError, PullRequest, PullTerms, Pulled, Puller};

/// Longest wait for the CRI to learn of a record that was written. It takes milliseconds.
const SEEN: Duration = Duration::from_secs(5);
/// Interval of asking whether it has.
const LOOK: Duration = Duration::from_millis(5);
/// Labels of so many blobs are written at the same time.
const AT_ONCE: usize = 4;

impl<P: Puller> Fetching<P> {
    /// Makes an image of what is there. `snapshot` is its name where all of it is unpacked.
    pub(super) async fn finish(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        image: &ImageParts,
        download: &Download<'_>,
        snapshot: Option<String>,
    ) -> Result<Pulled, Stop> {
        // What has a record counts as present, and a power cut may follow at once. Layers that we have unpacked are on the
        // disk. Blobs, and layers of another's pull, may not be.
        let is_flushed = match self.fetcher.flush(download.facts).await {
            Ok(()) => true,
            // The runtime goes on then, as it would without the agent.
            Err(FlushError::NotSeen { .. }) => false,
            Err(FlushError::Refused { path, source }) => return Err(unflushed(&path, &source).into()),
        };
        if let Some(snapshot) = snapshot.filter(|_| is_flushed && !needs_runtime(&request, download.facts)) {
            match self.record(request, reference, image, download, &snapshot).await {
                Ok(true) => {
                    let size = image.size();
                    return Ok(Pulled {
                        digest: Some(image.target.digest.clone()),
                        id: Some(image.config.digest.clone()),
                        bytes: Some(Bytes { done: size, total: size }),
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
        self.finish_by_runtime(request, reference, image).await
    }

    /// Records an image that is unpacked and on the disk. `false` if the runtime does not know it then.
    async fn record(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        image: &ImageParts,
        Download { facts, source, .. }: &Download<'_>,
        snapshot: &str,
    ) -> Result<bool, Status> {
        let fetcher = &self.fetcher;
        let of_config = of_unpacked(&facts.snapshotter, snapshot);
        let documents = image.documents.iter().map(|document| (&document.blob.digest, &document.labels));
        // A document that was there before lacks this repository among the places that it is from. Layers have all that
        // the runtime gives them.
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
        // The id first, as the runtime does it: whoever knows a name finds the image.
        let by_digest = format!("{}@{}", reference.name(), image.target.digest);
        let tag = reference.digest().is_none().then(|| reference.to_string());
        for name in [Some(&image.config.digest), tag.as_ref(), Some(&by_digest)].into_iter().flatten() {
            fetcher.records.point(name, &image.target).await?;
        }
        // What another image had unpacked may have gone with it meanwhile. From now on nobody removes it.
        let is_whole = fetcher.store.is_unpacked(&facts.snapshotter, snapshot).await;
        Ok(is_whole && self.is_known(request.reference, &image.config.digest).await.unwrap_or(false))
    }

    /// Has the runtime unpack what is there. It asks the registry once more what the reference points to: a tag may have
    /// moved, and the runtime would then download the other image by itself. So it is asked for the digest, and the tag's
    /// record is written here. It asks for a digest as well, so that a registry that is gone by now fails the attempt; the
    /// lease keeps all for the next one.
    async fn finish_by_runtime(
        &self,
        request: PullRequest<'_>,
        reference: &NormalizedReference,
        image: &ImageParts,
    ) -> Result<Pulled, Stop> {
        let by_digest = format!("{}@{}", reference.name(), image.target.digest);
        let has_digest = reference.digest().is_some();
        let reference = if has_digest { request.reference } else { &by_digest };
        let fetched_for = Some(request.reference);
        // Nothing is downloaded any more, so that no terms apply.
        let unpack = PullRequest { reference, fetched_for, terms: PullTerms::default(), ..request };
        let mut pulled = self.inner.pull(unpack, &|_| {}).await?;
        let size = image.size();
        pulled.bytes = pulled.bytes.or(Some(Bytes { done: size, total: size }));
        if has_digest {
            return Ok(pulled);
        }
        let fetcher = &self.fetcher;
        let written = fetcher.records.point(request.reference, &image.target).await;
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

    /// Whether the runtime knows an image by a name, which it does soon after its record was written.
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

/// Another attempt may find that the disk takes it: it has written off what it could not write, and that is fetched again.
fn unflushed(path: &Path, error: &io::Error) -> PullError {
    let class = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorClass::NoSpace,
        _ => ErrorClass::Transient,
    };
    let path = path.display();
    let message = format!(
        "the image is fetched, and cannot be brought to the disk of {path}: {error} (look at the disk and at the kernel's log)"
    );
    PullError::new(class, message)
}

/// Whether the runtime has to be asked for the image in any case: it removes the layers that it is told to discard, and
/// labels what is left accordingly; and what a task says of the pod is meant for the runtime and its plugins.
pub(super) fn needs_runtime(request: &PullRequest<'_>, facts: &Facts) -> bool {
    facts.discards_layers || request.sandbox.is_some()
}
