//! The blobs that this node wants and has, as it reports them to the cloud, and the sources that the cloud names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prepull_api::sites::{
    BlobNews, BlobSources, BlobState, Blobs, From, LEAST_SHARED, MAX_BLOBS, PeerFailure,
};
use prepull_api::task::TaskId;
use prepull_api::wire::{EdgeMessage, Welcome};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::arrivals::Arrivals;
use super::order::CloudOrder;
use super::tickets::TicketKeys;
use crate::clock::CloudClock;
use crate::cloud::tunnel::TunnelSender;

/// Interval of telling how far what is under way has come. The cloud's leases are some times as long.
const PROGRESS: Duration = Duration::from_secs(5);
/// Shortest time between two messages, so that what happens at once is told at once.
const GATHER: Duration = Duration::from_millis(50);
/// Upper bound on blobs re-announced to a restarted cloud; the oldest are dropped first.
const REMEMBERED: usize = 1024;
/// Most messages about blobs that nobody seeks any more, and about failures, that wait for the link.
const WAITING: usize = 1024;
/// How long neighbours have tickets for a blob after the cloud has last sent them here.
const TICKET: Duration = Duration::from_secs(600);
/// Most unfulfilled wants with tickets that we remember.
const UNFULFILLED: usize = 4096;

/// A blob of a task.
pub(super) type BlobKey = (TaskId, String);

/// What the pulls of this node share with each other about the site.
#[derive(Debug)]
pub(crate) struct Hub {
    state: Mutex<HubState>,
    news: Notify,
    /// How long a pull waits without a word from the cloud until it downloads for itself.
    pub(super) patience: Duration,
    pub(super) keys: TicketKeys,
    pub(crate) arrivals: Arc<Arrivals>,
    pub(super) clock: Arc<CloudClock>,
}

#[derive(Debug, Default)]
struct HubState {
    /// Whether there is a session with a cloud that knows of sites.
    is_heard: bool,
    wants: BTreeMap<BlobKey, Want>,
    here: VecDeque<(BlobKey, u64)>,
    /// Blobs whose state must still be reported to the cloud.
    changed: BTreeSet<BlobKey>,
    dropped: VecDeque<(BlobKey, BlobNews)>,
    failures: VecDeque<(TaskId, PeerFailure)>,
    /// Wants that ended without the blob. Neighbours may have tickets.
    unfulfilled: VecDeque<Unfulfilled>,
}

/// A want that ended without the blob.
#[derive(Debug)]
struct Unfulfilled {
    digest: String,
    repository: String,
    /// When the last ticket expires, by the cloud's clock.
    until: Duration,
}

/// A blob that a pull seeks.
#[derive(Debug)]
pub(super) struct Want {
    /// The repository that the blob should come from.
    pub(super) repository: String,
    pub(super) size: u64,
    pub(super) done: u64,
    /// What was told last, to see whether there is anything new.
    pub(super) told: u64,
    pub(super) state: BlobState,
    pub(super) order: watch::Sender<CloudOrder>,
}

impl Hub {
    pub(crate) fn new(patience: Duration, clock: Arc<CloudClock>) -> Self {
        let (state, news, keys, arrivals) = Default::default();
        Self { state, news, patience, keys, arrivals, clock }
    }

    /// Wants a blob until [`Self::end_want`]. If it was here for an earlier task, it's gone: a new session that heard of both
    /// might end this want.
    pub(super) fn add_want(&self, key: BlobKey, want: Want) {
        self.change(|state| {
            state.here.retain(|((_, digest), _)| *digest != key.1);
            state.changed.insert(key.clone());
            state.wants.insert(key, want);
        });
    }

    /// The repository from which a pull of this node seeks a blob.
    pub(super) fn sought_from(&self, digest: &str) -> Option<String> {
        let state = self.lock();
        let want = state.wants.iter().find(|((_, sought), _)| sought == digest);
        want.map(|(_, want)| want.repository.clone())
    }

    /// Whether neighbours may read a blob that came from this repository. A ticket doesn't say for which image it is: one that
    /// was given while a pull sought the blob elsewhere, in vain, must not open it.
    pub(super) fn may_serve(&self, digest: &str, repository: &str) -> bool {
        let now = self.clock.now();
        let state = self.lock();
        let mut with_tickets =
            state.unfulfilled.iter().filter(|want| want.digest == digest && now < want.until);
        with_tickets.all(|want| want.repository == repository)
    }

    /// Tells the cloud that a blob is here, so that neighbours may have it.
    pub(crate) fn announce(&self, task: &TaskId, digest: &str, size: u64) {
        if size < LEAST_SHARED {
            return;
        }
        let key = (task.clone(), digest.to_owned());
        self.change(|state| state.note_here(key, size));
    }

    /// Reports to the cloud that blobs are no longer here, so that it sends no neighbour for them.
    pub(crate) fn forget(&self, digests: &BTreeSet<String>) {
        self.change(|state| {
            let (gone, here): (VecDeque<_>, VecDeque<_>) =
                state.here.drain(..).partition(|((_, digest), _)| digests.contains(digest));
            state.here = here;
            for (key, size) in gone {
                state.changed.remove(&key);
                push_bounded(&mut state.dropped, dropped_news(key, size, 0), WAITING);
            }
        });
    }

    pub(super) fn change_want(&self, key: &BlobKey, change: impl FnOnce(&mut Want) -> bool) {
        self.change(|state| {
            if let Some(want) = state.wants.get_mut(key)
                && change(want)
            {
                state.changed.insert(key.clone());
            }
        });
    }

    pub(super) fn note_failure(&self, task: &TaskId, failure: PeerFailure) {
        self.change(|state| push_bounded(&mut state.failures, (task.clone(), failure), WAITING));
    }

    /// Nobody seeks the blob any more. `is_here`: because it has arrived.
    pub(super) fn end_want(&self, key: &BlobKey, is_here: bool) {
        let until = self.clock.now() + TICKET;
        self.change(|state| {
            let Some(want) = state.wants.remove(key) else { return };
            state.changed.remove(key);
            if is_here {
                state.note_here(key.clone(), want.size);
            } else {
                let (digest, repository) = (key.1.clone(), want.repository);
                state.unfulfilled.retain(|old| (&old.digest, &old.repository) != (&digest, &repository));
                let unfulfilled = Unfulfilled { digest, repository, until };
                push_bounded(&mut state.unfulfilled, unfulfilled, UNFULFILLED);
                push_bounded(&mut state.dropped, dropped_news(key.clone(), want.size, want.done), WAITING);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut HubState)) {
        let mut state = self.lock();
        change(&mut state);
        let has_news = state.has_news();
        drop(state);
        if has_news {
            self.news.notify_one();
        }
    }

    /// The cloud's time.
    pub(crate) fn clock(&self) -> &Arc<CloudClock> {
        &self.clock
    }

    /// A session has begun: the cloud is told everything, for it may be another one.
    pub(crate) fn begin_session(&self, welcome: &Welcome) {
        if let Some(terms) = &welcome.tickets {
            self.keys.accept_key(&terms.key);
            self.clock.set(terms.now);
        }
        self.change(|state| {
            state.is_heard = welcome.tickets.is_some();
            let wanted = state.wants.keys().cloned();
            let here = state.here.iter().map(|(key, _)| key.clone());
            state.changed = wanted.chain(here).collect();
            state.dropped.clear();
        });
    }

    /// Reports the wants of a task again: a new leader accepts them only after it has sent the task with its keys.
    pub(crate) fn repeat_wants(&self, task: &TaskId) {
        self.change(|state| {
            let wanted = state.wants.keys().filter(|(of, _)| of == task).cloned();
            state.changed.extend(wanted);
        });
    }

    /// The session has ended.
    pub(crate) fn end_session(&self) {
        self.lock().is_heard = false;
    }

    /// The cloud says where to get blobs from.
    pub(crate) fn apply_sources(&self, BlobSources { task, blobs }: BlobSources) {
        let now = Instant::now();
        self.change(|state| {
            for blob in blobs.into_iter().take(MAX_BLOBS) {
                let key = (task.clone(), blob.digest);
                match state.wants.get(&key) {
                    Some(want) => _ = want.order.send_if_modified(|order| order.replace(blob.from, now)),
                    // The pull has ended since, or the agent was restarted.
                    None if state.here.iter().any(|(here, _)| *here == key) => _ = state.changed.insert(key),
                    None if blob.from != From::Wait => {
                        push_bounded(&mut state.dropped, dropped_news(key, 0, 0), WAITING);
                    }
                    None => {}
                }
            }
            // A reply about one blob shows that the cloud is alive, so restart the patience of every blob of the task.
            for (_, want) in state.wants.iter().filter(|((of, _), _)| *of == task) {
                want.order.send_if_modified(|order| {
                    order.heard = now;
                    false
                });
            }
        });
    }

    /// Tells the cloud what is new, for as long as the session lasts.
    pub(crate) async fn keep_telling(self: Arc<Self>, link: TunnelSender) {
        loop {
            for message in self.take_news() {
                link.send(message).await;
            }
            sleep(GATHER).await;
            tokio::select! {
                () = self.news.notified() => {}
                () = sleep(PROGRESS) => self.lock().note_progress(),
            }
        }
    }

    fn take_news(&self) -> Vec<EdgeMessage> {
        let mut state = self.lock();
        if state.is_heard { state.take_news() } else { Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HubState {
    fn has_news(&self) -> bool {
        self.is_heard && !(self.changed.is_empty() && self.dropped.is_empty() && self.failures.is_empty())
    }

    fn note_here(&mut self, key: BlobKey, size: u64) {
        if !self.here.iter().any(|(here, _)| *here == key) {
            push_bounded(&mut self.here, (key.clone(), size), REMEMBERED);
        }
        self.changed.insert(key);
    }

    /// What has come further is told.
    fn note_progress(&mut self) {
        let moved = self.wants.iter().filter(|(_, want)| want.done != want.told).map(|(key, _)| key.clone());
        self.changed.extend(moved);
    }

    fn take_news(&mut self) -> Vec<EdgeMessage> {
        let mut by_task: BTreeMap<TaskId, (Vec<BlobNews>, Vec<PeerFailure>)> = BTreeMap::new();
        for (task, failure) in std::mem::take(&mut self.failures) {
            by_task.entry(task).or_default().1.push(failure);
        }
        for ((task, _), news) in std::mem::take(&mut self.dropped) {
            by_task.entry(task).or_default().0.push(news);
        }
        for key in std::mem::take(&mut self.changed) {
            let news = if let Some(want) = self.wants.get_mut(&key) {
                want.told = want.done;
                BlobNews { digest: key.1, size: want.size, state: want.state, done: want.done }
            } else if let Some((_, size)) = self.here.iter().find(|(here, _)| *here == key) {
                BlobNews { digest: key.1, size: *size, state: BlobState::Here, done: *size }
            } else {
                continue;
            };
            by_task.entry(key.0).or_default().0.push(news);
        }
        let mut messages = Vec::new();
        for (task, (mut blobs, mut failures)) in by_task {
            while !blobs.is_empty() || !failures.is_empty() {
                let blobs = blobs.drain(..blobs.len().min(MAX_BLOBS)).collect();
                let failures = failures.drain(..failures.len().min(MAX_BLOBS)).collect();
                let news = Blobs { task: task.clone(), blobs, failures, reads_streams: true };
                messages.push(EdgeMessage::Blobs(news));
            }
        }
        messages
    }
}

fn dropped_news(key: BlobKey, size: u64, done: u64) -> (BlobKey, BlobNews) {
    let news = BlobNews { digest: key.1.clone(), size, state: BlobState::Dropped, done };
    (key, news)
}

fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(item);
}

#[cfg(test)]
mod tests;
