//! Stops a limited download when the kubelet pulls the same image for a pod.
//!
//! A pull by the runtime uses the same names for partial blobs, and so waits for us, blob by blob. Under a limit that
//! would take long. So we stop: the runtime resumes from our bytes at the full speed of the link, and we use the blobs
//! that it has fetched.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prepull_registry::manifest::Descriptor;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::fetcher::Fetcher;
use super::flights::Flight;
use crate::images::containerd::BlobToWrite;

/// Interval of looking for other pulls and their progress.
const LOOK: Duration = Duration::from_secs(2);
/// Longest time without progress. After that, the other lease is no waiting pull. A pull by the runtime retries a
/// locked blob every two seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Yields the image to other pulls, in an endless loop. A pull by the runtime has a lease that holds the manifest of
/// its image from the start.
pub(super) async fn yield_to_others(
    fetcher: &Fetcher,
    manifest: &str,
    blobs: &[(BlobToWrite, &Descriptor, Arc<Flight>)],
    letting_go: &watch::Sender<bool>,
) -> Infallible {
    let mut ignored = HashSet::new();
    loop {
        sleep(LOOK).await;
        let Some(other) = fetcher.leases.other_holder(manifest, &ignored).await else { continue };
        tracing::info!(
            manifest,
            "the container runtime pulls the image as well: it downloads the rest, without the limit"
        );
        letting_go.send_replace(true);
        let (mut since, mut seen) = (Instant::now(), None);
        while fetcher.leases.other_holder(manifest, &ignored).await.is_some() {
            let ingests = fetcher.store.ingests().await.unwrap_or_default();
            let offset = |(blob, ..): &(BlobToWrite, _, _)| Some(ingests.get(&blob.digest)?.offset);
            let now: Vec<_> = blobs.iter().map(offset).collect();
            for ((.., flight), offset) in blobs.iter().zip(&now) {
                if let Some(offset) = offset {
                    flight.set_written(*offset);
                }
            }
            if seen.as_ref() != Some(&now) {
                (since, seen) = (Instant::now(), Some(now));
            } else if since.elapsed() > PATIENCE {
                ignored.insert(other.clone());
                break;
            }
            sleep(LOOK).await;
        }
        letting_go.send_replace(false);
    }
}
