//! Letting go of an image that somebody else wants now: the kubelet, for a pod.
//!
//! A pull by the runtime uses our names for what is half done, and so waits for us, blob by blob. Under a limit that
//! would be a long wait. So we let go: the runtime goes on with what is there, as fast as the link is, and we take what
//! it has fetched.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prepull_registry::manifest::Descriptor;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::Fetcher;
use super::flights::Flight;
use crate::images::containerd::Blob;

/// Interval of looking for others, and at how far they are.
const LOOK: Duration = Duration::from_secs(2);
/// Longest time without progress after which somebody is not waiting for the image, but holds it for another reason. A
/// pull by the runtime asks for a blob that is locked every two seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Lets go of the image while somebody else pulls it, for ever. A pull by the runtime has a lease, which holds the
/// manifest of its image from its beginning on.
pub(super) async fn yield_to_others(
    fetcher: &Fetcher,
    manifest: &str,
    blobs: &[(Blob, &Descriptor, Arc<Flight>)],
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
            let offset = |(blob, ..): &(Blob, _, _)| Some(ingests.get(&blob.digest)?.offset);
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
