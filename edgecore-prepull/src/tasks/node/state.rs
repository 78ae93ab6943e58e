//! What the cloud is told of the node while a session lasts: its disk and its runtime, for people.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::wire::{EdgeMessage, Filesystem, NodeState};
use tokio::time::{sleep, timeout};

use super::hello::PATIENCE;
use crate::cloud::tunnel::Link;
use crate::images::puller::Puller;

/// A change of the free space by less than this part of the disk is not worth a message: nobody would see it.
const PARTS: u64 = 100;
/// The shortest time between two messages, whatever the cloud says: each asks the runtime twice.
const SHORTEST: Duration = Duration::from_secs(1);

/// Tells the cloud of changes, at most so often, until dropped. The first time it tells what there is: `Hello` may have been
/// too early for the runtime.
pub(super) async fn keep_told(puller: Arc<impl Puller>, link: Link, every: Duration) {
    let mut told = None;
    loop {
        sleep(every.max(SHORTEST)).await;
        let (runtime, image_filesystem) = tokio::join!(
            timeout(PATIENCE, puller.read_version()),
            timeout(PATIENCE, puller.read_filesystem())
        );
        let runtime = runtime.ok().and_then(Result::ok);
        let image_filesystem = image_filesystem.ok().and_then(Result::ok);
        let state = NodeState { runtime, image_filesystem };
        if told.as_ref().is_none_or(|told| differs(told, &state)) {
            // Where it is dropped, because the link is full of results, the next session tells.
            link.offer(EdgeMessage::State(state.clone()));
            told = Some(state);
        }
    }
}

/// Whether people should hear of the change.
fn differs(told: &NodeState, now: &NodeState) -> bool {
    let differs = |told: &Filesystem, now: &Filesystem| {
        (&told.mountpoint, told.capacity) != (&now.mountpoint, now.capacity)
            || told.available.abs_diff(now.available) > now.capacity / PARTS
    };
    told.runtime != now.runtime
        || match (&told.image_filesystem, &now.image_filesystem) {
            (Some(told), Some(now)) => differs(told, now),
            (told, now) => told != now,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_told_that_somebody_would_see() {
        let state = |runtime: &str, available| NodeState {
            runtime: Some(runtime.to_owned()),
            image_filesystem: Some(Filesystem { mountpoint: "/".to_owned(), available, capacity: 1000 }),
        };
        let told = state("containerd 1", 500);
        assert!(!differs(&told, &state("containerd 1", 510)));
        assert!(!differs(&told, &state("containerd 1", 490)));
        assert!(differs(&told, &state("containerd 1", 489)));
        assert!(differs(&told, &state("containerd 1", 511)));
        assert!(differs(&told, &state("containerd 2", 500)));
        assert!(differs(&told, &NodeState::default()));
        assert!(!differs(&NodeState::default(), &NodeState::default()));
    }
}
