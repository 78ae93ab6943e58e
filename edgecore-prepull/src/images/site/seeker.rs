//! A pull that seeks one blob: it does as the cloud says, and helps itself where the cloud is silent, or when half of its
//! time is over.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prepull_api::sites::{BlobPeer, BlobState, From, LEAST_SHARED, PeerFailure, PeerFault, split_ticket};
use prepull_api::task::{NodeName, TaskId};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::hub::{BlobKey, Hub, Want};
use super::order::CloudOrder;
use crate::images::rate::Bucket;

/// Interval of looking whether a pull will be late, a ticket has expired, or the part of a site's limit has changed.
const LOOK: Duration = Duration::from_secs(1);
/// Why a pull helps itself in its second half.
const LATE: &str = "half of its time was over, and at the pace so far it would have been late";

/// The patience of a pull that must not help itself: longer than any task.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// A blob that a pull wants.
#[derive(Clone, Debug)]
pub(crate) struct Sought<'a> {
    pub(crate) task: &'a TaskId,
    /// The repository of the image, with its host.
    pub(crate) repository: &'a str,
    pub(crate) digest: &'a str,
    pub(crate) size: u64,
    /// Bytes that are there.
    pub(crate) done: u64,
    /// Whether the site has a limit, so that the pull must not help itself just because the cloud is silent.
    pub(crate) site_limited: bool,
    /// When the pull fails. After half of the time from now until then it helps itself. From the beginning of the task, a blob
    /// that is sought in its second half would be late before its first byte.
    pub(crate) deadline: Option<Instant>,
}

/// Where to get a blob from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlobOrigin {
    /// The registry. With the reason, if it is not because the node carries the blob into its site.
    Registry(Option<String>),
    /// A neighbour.
    Peer(BlobPeer),
}

/// The time of a pull. Once half of it is over, the pull helps itself, unless it will be in time anyway.
#[derive(Clone, Copy, Debug)]
struct Late {
    begin: Instant,
    end: Instant,
    size: u64,
    had: u64,
}

impl Late {
    fn new(end: Instant, size: u64, had: u64) -> Self {
        Self { begin: Instant::now(), end, size, had }
    }

    /// Whether half of the time is over, and the blob would be late at the pace so far.
    fn is_late(&self, done: u64, now: Instant) -> bool {
        let (spent, left) = (now - self.begin, self.end.saturating_duration_since(now));
        let came = u128::from(done.saturating_sub(self.had));
        let missing = u128::from(self.size.saturating_sub(done));
        spent >= left && missing * spent.as_millis() > came * left.as_millis()
    }
}

/// See the module. When it is dropped, the cloud is told that the blob is not wanted any more.
#[derive(Debug)]
pub(crate) struct Seeker {
    hub: Arc<Hub>,
    key: BlobKey,
    order: watch::Receiver<CloudOrder>,
    since: Instant,
    patience: Duration,
    late: Option<Late>,
    done: AtomicU64,
    /// Why the pull helps itself, once it does.
    alone: Option<String>,
    /// This node's part of the site's limit.
    bucket: Bucket,
    is_here: bool,
}

impl Hub {
    /// Asks the cloud where to get a blob of a task, until the seeker is dropped. `None`: it's too small.
    pub(crate) fn seek(self: &Arc<Self>, sought: &Sought<'_>) -> Option<Seeker> {
        let &Sought { task, repository, digest, size, done, site_limited, deadline } = sought;
        if size < LEAST_SHARED {
            return None;
        }
        let key = (task.clone(), digest.to_owned());
        let since = Instant::now();
        let (order, receiver) = watch::channel(CloudOrder { from: None, heard: since });
        let repository = repository.to_owned();
        let want = Want { repository, size, done, told: done, state: BlobState::Wanted, order };
        self.add_want(key.clone(), want);
        Some(Seeker {
            hub: Arc::clone(self),
            key,
            order: receiver,
            since,
            patience: if site_limited { UNLIMITED } else { self.patience },
            late: deadline.map(|end| Late::new(end, size, done)),
            done: AtomicU64::new(done),
            alone: None,
            bucket: Bucket::new(None),
            is_here: false,
        })
    }
}

impl Seeker {
    /// Takes bytes that have arrived from the registry, and returns when the site's limit has allowed them. `whole` is that
    /// limit: a pull that helps itself has no part of it from the cloud.
    pub(crate) async fn take_bytes(&self, bytes: usize, whole: Option<&Bucket>) {
        if self.alone.is_some() {
            if let Some(whole) = whole {
                whole.take(bytes).await;
            }
            return;
        }
        let mut taken = pin!(self.bucket.take(bytes));
        loop {
            let rate = match &self.order.borrow().from {
                Some(From::Registry { max_rate, .. }) => *max_rate,
                _ => None,
            };
            self.bucket.set_rate(rate);
            // A small part may take a minute for these bytes, and a larger one holds at once. It wakes no receiver.
            if timeout(LOOK, taken.as_mut()).await.is_ok() {
                return;
            }
        }
    }

    /// From now on the pull helps itself and ignores the cloud.
    pub(crate) fn go_alone(&mut self, why: &str) {
        self.alone.get_or_insert_with(|| why.to_owned());
    }

    /// Waits until it is known where the blob is to be had. Without a word for the whole patience, it is the registry.
    pub(crate) async fn wait_for_origin(&mut self) -> BlobOrigin {
        loop {
            if self.alone.is_none() && self.is_late() {
                self.go_alone(LATE);
            }
            if self.alone.is_some() {
                self.set_state(BlobState::Carrying);
                return BlobOrigin::Registry(self.alone.clone());
            }
            let CloudOrder { from, heard } = self.order.borrow_and_update().clone();
            match from {
                Some(From::Registry { alone, max_rate: _ }) => {
                    self.set_state(BlobState::Carrying);
                    return BlobOrigin::Registry((!alone.is_empty()).then_some(alone));
                }
                Some(From::Peers { peers }) => {
                    let now = self.hub.clock.now().as_secs();
                    let is_good =
                        |peer: &BlobPeer| split_ticket(&peer.ticket).is_some_and(|(end, _)| now < end);
                    if let Some(peer) = peers.into_iter().find(is_good) {
                        self.set_state(BlobState::Fetching);
                        return BlobOrigin::Peer(peer);
                    }
                }
                Some(From::Wait) | None => {}
            }
            if self.set_state(BlobState::Wanted) {
                // While a neighbour delivered, the cloud had no reason to say anything.
                self.since = Instant::now();
            }
            let patience = self.patience;
            let end = heard.max(self.since) + patience;
            tokio::select! {
                changed = self.order.changed() => if changed.is_err() { return BlobOrigin::Registry(None) },
                () = sleep_until(end.min(Instant::now() + LOOK)) => {
                    // The cloud may have repeated itself in this time.
                    if self.order.borrow().heard.max(self.since) + patience <= Instant::now() {
                        self.set_state(BlobState::Carrying);
                        return BlobOrigin::Registry(Some(silence_reason(patience)));
                    }
                }
            }
        }
    }

    /// Whether the bytes should come from elsewhere since [`Self::wait_for_origin`].
    pub(crate) fn is_redirected(&self) -> bool {
        self.alone.is_none() && (self.order.has_changed().unwrap_or(false) || self.is_late())
    }

    /// Waits until the bytes should come from elsewhere.
    pub(crate) async fn wait_for_redirect(&self) {
        let mut order = self.order.clone();
        while !self.is_redirected() {
            // The sender lives as long as this.
            let _ = timeout(LOOK, order.changed()).await;
        }
    }

    fn is_late(&self) -> bool {
        self.late.is_some_and(|late| late.is_late(self.done.load(Ordering::Relaxed), Instant::now()))
    }

    /// Returns whether the state was another one.
    fn set_state(&self, state: BlobState) -> bool {
        let mut is_new = false;
        self.hub.change_want(&self.key, |want| {
            is_new = std::mem::replace(&mut want.state, state) != state;
            is_new
        });
        is_new
    }

    /// Says how many bytes are there. The cloud is told now and then.
    pub(crate) fn set_done(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.hub.change_want(&self.key, |want| {
            want.done = done;
            false
        });
    }

    /// The neighbour did not deliver. The next one that the cloud has named is asked, or the cloud.
    pub(crate) fn note_fault(&mut self, peer: &NodeName, fault: PeerFault) {
        let (task, digest) = &self.key;
        let failure = PeerFailure { digest: digest.clone(), peer: peer.clone(), fault };
        self.hub.note_failure(task, failure);
        self.hub.change_want(&self.key, |want| {
            want.order.send_if_modified(|order| {
                if let Some(From::Peers { peers }) = &mut order.from {
                    peers.retain(|other| other.node != *peer);
                }
                order.heard = Instant::now();
                false
            });
            false
        });
    }

    /// The blob has arrived.
    pub(crate) fn note_arrived(mut self) {
        self.is_here = true;
    }
}

impl Drop for Seeker {
    fn drop(&mut self) {
        self.hub.end_want(&self.key, self.is_here);
    }
}

fn silence_reason(patience: Duration) -> String {
    format!("the cloud has said nothing of its site for {} s", patience.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pull_that_would_be_late_helps_itself() {
        let begin = Instant::now();
        let late = Late { begin, end: begin + Duration::from_secs(1000), size: 1000, had: 0 };
        for (second, done, expected) in [
            (499, 0, false),
            (500, 0, true),
            (500, 499, true),
            (500, 500, false),
            (900, 899, true),
            (900, 900, false),
        ] {
            let now = begin + Duration::from_secs(second);
            assert_eq!(late.is_late(done, now), expected, "{done} bytes after {second} s");
        }
        let resumed = Late { had: 900, ..late };
        assert!(resumed.is_late(900, begin + Duration::from_secs(500)), "nothing has come since");
    }
}
