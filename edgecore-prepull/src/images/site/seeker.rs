//! A pull that seeks one blob: it does as the cloud says, and helps itself where the cloud is silent.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::sites::{BlobState, From, Peer, PeerFailure, PeerFault};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::hub::{Hub, Key};
use crate::images::rate::Bucket;

/// What the cloud has said of a blob.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// The last word about it.
    pub(super) from: Option<From>,
    /// When the cloud was last heard about the task.
    pub(super) heard: Instant,
}

impl Order {
    /// Takes in what the cloud says. Returns whether it is something else: what is under way must not be broken off for a
    /// repetition.
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

/// Where to get a blob from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The registry. With the reason, if it is not because the node carries the blob into its site.
    Registry(Option<String>),
    /// A neighbour.
    Peer(Peer),
}

/// See the module. When it is dropped, the cloud is told that the blob is not wanted any more.
#[derive(Debug)]
pub(crate) struct Seeker {
    hub: Arc<Hub>,
    key: Key,
    order: watch::Receiver<Order>,
    since: Instant,
    patience: Duration,
    /// This node's part of the site's limit.
    bucket: Bucket,
    is_here: bool,
}

impl Seeker {
    pub(super) fn new(hub: Arc<Hub>, key: Key, order: watch::Receiver<Order>, patience: Duration) -> Self {
        Self { hub, key, order, since: Instant::now(), patience, bucket: Bucket::new(None), is_here: false }
    }

    /// Takes bytes that have arrived from the registry, and returns when the site's limit has allowed them.
    pub(crate) async fn take(&self, bytes: usize) {
        let rate = match &self.order.borrow().from {
            Some(From::Registry { max_rate, .. }) => *max_rate,
            _ => None,
        };
        self.bucket.set_rate(rate);
        self.bucket.take(bytes).await;
    }

    /// Waits until it is said where the blob is to be had. Without a word for the whole patience, it is the registry.
    pub(crate) async fn way(&mut self) -> Way {
        loop {
            let Order { from, heard } = self.order.borrow_and_update().clone();
            match from {
                Some(From::Registry { alone, max_rate: _ }) => {
                    self.set_state(BlobState::Carrying);
                    return Way::Registry((!alone.is_empty()).then_some(alone));
                }
                Some(From::Peers { peers }) if !peers.is_empty() => {
                    self.set_state(BlobState::Fetching);
                    // It is not empty.
                    if let Some(peer) = peers.into_iter().next() {
                        return Way::Peer(peer);
                    }
                }
                _ => {}
            }
            self.set_state(BlobState::Wanted);
            let patience = self.patience;
            let end = heard.max(self.since) + patience;
            tokio::select! {
                changed = self.order.changed() => if changed.is_err() { return Way::Registry(None) },
                () = sleep_until(end) => {
                    // It may have been heard meanwhile without saying anything new.
                    if self.order.borrow().heard.max(self.since) + patience <= Instant::now() {
                        self.set_state(BlobState::Carrying);
                        return Way::Registry(Some(silence(patience)));
                    }
                }
            }
        }
    }

    /// Whether the cloud has said something else since [`Self::way`].
    pub(crate) fn is_redirected(&self) -> bool {
        self.order.has_changed().unwrap_or(false)
    }

    fn set_state(&self, state: BlobState) {
        self.hub.change_want(&self.key, |want| std::mem::replace(&mut want.state, state) != state);
    }

    /// Says how many bytes are there. The cloud is told now and then.
    pub(crate) fn set_done(&self, done: u64) {
        self.hub.change_want(&self.key, |want| {
            want.done = done;
            false
        });
    }

    /// The neighbour did not deliver. The next one that the cloud has named is asked, or the cloud.
    pub(crate) fn fail(&mut self, peer: &Peer, fault: PeerFault) {
        let (task, digest) = &self.key;
        let failure = PeerFailure { digest: digest.clone(), peer: peer.node.clone(), fault };
        self.hub.note_failure(task, failure);
        self.hub.change_want(&self.key, |want| {
            want.order.send_if_modified(|order| {
                if let Some(From::Peers { peers }) = &mut order.from {
                    peers.retain(|other| other.node != peer.node);
                }
                order.heard = Instant::now();
                false
            });
            false
        });
    }

    /// The blob has arrived.
    pub(crate) fn finish(mut self) {
        self.is_here = true;
    }
}

impl Drop for Seeker {
    fn drop(&mut self) {
        self.hub.end(&self.key, self.is_here);
    }
}

fn silence(patience: Duration) -> String {
    format!("the cloud has said nothing of its site for {} s", patience.as_secs())
}
