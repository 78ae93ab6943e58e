//! Reports on the node during a session: its disk and its runtime, for people.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::wire::{EdgeMessage, Filesystem, NodeState};
use tokio::time::{sleep, timeout};

use super::hello::PATIENCE;
use crate::cloud::tunnel::TunnelSender;
use crate::images::puller::Puller;

/// Changes of the free space below this fraction of the disk aren't worth a message.
const PARTS: u64 = 100;
/// The shortest time between two reports, even if the cloud asks for more: each needs two requests to the runtime.
const SHORTEST: Duration = Duration::from_secs(1);

/// Reports changes to the cloud, at most once in each interval, until dropped. The first report is complete, because
/// `Hello` may have been too early for the runtime.
pub(super) async fn report_state(puller: Arc<impl Puller>, link: TunnelSender, every: Duration) {
    let mut reported = None;
    loop {
        sleep(every.max(SHORTEST)).await;
        let (runtime, image_filesystem) = tokio::join!(
            timeout(PATIENCE, puller.read_version()),
            timeout(PATIENCE, puller.read_filesystem())
        );
        let runtime = runtime.ok().and_then(Result::ok);
        let image_filesystem = image_filesystem.ok().and_then(Result::ok);
        let state = NodeState { runtime, image_filesystem };
        if reported.as_ref().is_none_or(|reported| is_worth_report(reported, &state)) {
            // If it's dropped because the link is full of results, the next session reports it.
            link.try_send(EdgeMessage::State(state.clone()));
            reported = Some(state);
        }
    }
}

/// Whether the change is worth a report.
fn is_worth_report(reported: &NodeState, now: &NodeState) -> bool {
    let differs = |reported: &Filesystem, now: &Filesystem| {
        (&reported.mountpoint, reported.capacity) != (&now.mountpoint, now.capacity)
            || reported.available.abs_diff(now.available) > now.capacity / PARTS
    };
    reported.runtime != now.runtime
        || match (&reported.image_filesystem, &now.image_filesystem) {
            (Some(reported), Some(now)) => differs(reported, now),
            (reported, now) => reported != now,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_changes_are_reported() {
        let state = |runtime: &str, available| NodeState {
            runtime: Some(runtime.to_owned()),
            image_filesystem: Some(Filesystem { mountpoint: "/".to_owned(), available, capacity: 1000 }),
        };
        let reported = state("containerd 1", 500);
        assert!(!is_worth_report(&reported, &state("containerd 1", 510)));
        assert!(!is_worth_report(&reported, &state("containerd 1", 490)));
        assert!(is_worth_report(&reported, &state("containerd 1", 489)));
        assert!(is_worth_report(&reported, &state("containerd 1", 511)));
        assert!(is_worth_report(&reported, &state("containerd 2", 500)));
        assert!(is_worth_report(&reported, &NodeState::default()));
        assert!(!is_worth_report(&NodeState::default(), &NodeState::default()));
    }
}
