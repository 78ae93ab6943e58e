//! Content of unfinished pulls in the runtime: kept for tasks that want it, and released otherwise.

use std::convert::Infallible;
use std::time::Duration;

use prepull_api::wire::Filesystem;
use tokio::time::sleep;

use super::image::ImagePulls;
use crate::config::{Amount, CheckLimits};
use crate::images::puller::Puller;

/// Interval of looking for leftovers, while there may be any. The kubelet waits for minutes before it evicts pods from
/// a full disk.
const INTERVAL: Duration = Duration::from_secs(15);
/// Leftovers that no task wants are kept while this much of the disk is free. Below it, the kubelet begins to remove
/// images, and can't remove these.
const ROOM: Amount = Amount::Percent(15);

/// Releases leftovers that no task wants, in an endless loop: after the time that `kept` returns, or soon if the disk needs
/// the room.
pub(super) async fn keep_tidy<P: Puller>(
    images: &ImagePulls<P>,
    limits: &CheckLimits,
    kept: impl Fn() -> Duration,
) -> Infallible {
    loop {
        sleep(INTERVAL).await;
        if !images.may_have_leftovers() {
            continue;
        }
        // A pod may not have the disk mounted. What is old must go nevertheless.
        let is_short = images.puller.read_filesystem().await.is_ok_and(|disk| is_short(&disk, limits));
        images.begin_tidying();
        let least_age = if is_short { Duration::ZERO } else { kept() };
        if images.puller.release_unwanted(|| images.wanted.references(), least_age).await {
            images.note_leftovers();
        }
    }
}

fn is_short(disk: &Filesystem, limits: &CheckLimits) -> bool {
    let [room, least] = [ROOM, limits.disk_min_free].map(|amount| amount.in_bytes(disk.capacity));
    disk.available < room.max(least)
}
