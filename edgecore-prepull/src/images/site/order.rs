//! The cloud's last word about the source of a blob.

use prepull_api::sites::From;
use tokio::time::Instant;

/// What the cloud has said of a blob.
#[derive(Clone, Debug)]
pub(super) struct CloudOrder {
    /// The last word about it.
    pub(super) from: Option<From>,
    /// When the cloud was last heard about the task.
    pub(super) heard: Instant,
}

impl CloudOrder {
    /// Takes in an order of the cloud. Returns whether it differs: a repetition must not interrupt a download.
    pub(super) fn replace(&mut self, from: From, now: Instant) -> bool {
        let is_same = match (&self.from, &from) {
            (Some(From::Registry { .. }), From::Registry { .. }) | (Some(From::Wait), From::Wait) => true,
            (Some(From::Peers { peers: before }), From::Peers { peers: after }) => {
                before.first().map(|peer| &peer.node) == after.first().map(|peer| &peer.node)
            }
            _ => false,
        };
        *self = Self { from: Some(from), heard: now };
        !is_same
    }
}
