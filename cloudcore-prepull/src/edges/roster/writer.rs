//! Writing of the shards: one request at a time per shard. Changes that arrive during a request go with the next one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::task::NodeName;
use prepull_engine::shared::pacing::{Backoff, TokenBucket};
use prepull_program::errors::with_causes;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::view::RosterView;
use prepull_admission::records::record::{HeldKey, NodeRefusal, RecordChange};
use prepull_admission::records::shard::ShardId;
use prepull_admission::records::store::{ATTEMPTS, RosterError, ShardStore};

/// Writes of one shard for edges that wait, at once and per second. A ConfigMap of 10,000 nodes' records has up to 140 KB,
/// and etcd keeps every version until it compacts, after five minutes: 16 shards at this pace fill a third of its usual
/// 2 GiB at most.
const WRITES: (f64, f64) = (4.0, 1.0);
/// How long keys that were seen in use are gathered before they are written; no edge waits for that.
const SEEN_PAUSE: Duration = Duration::from_secs(2);
/// Writes for seen keys alone, at once and per second. After an upgrade from a release without records, a whole fleet is
/// seen for the first time within a minute, and each write costs all records of the shard.
const SEEN_WRITES: (f64, f64) = (2.0, 0.1);
/// The backoff after a failed write when no edge waits for the outcome.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// The limit for one attempt. The edge that waits gives up after 20 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(8);

/// The outcome of a change for the edge that waits: refused, or `None` if the API server did not take the write.
pub(super) type ChangeAnswer = Result<(), Option<NodeRefusal>>;

/// The writer of one shard. It works while there is something to write.
#[derive(Debug)]
pub(super) struct ShardWriter {
    id: ShardId,
    store: ShardStore,
    view: Arc<RosterView>,
    queue: Mutex<ShardQueue>,
    arrived: Notify,
}

/// What is to be written. Changes are bounded by the connections of the enrolment endpoint, seen keys by the nodes.
#[derive(Debug)]
struct ShardQueue {
    changes: Vec<WaitingChange>,
    seen: HashMap<NodeName, HeldKey>,
    is_lost: bool,
    is_at_work: bool,
    writes: TokenBucket<std::time::Instant>,
    seen_writes: TokenBucket<std::time::Instant>,
}

impl Default for ShardQueue {
    fn default() -> Self {
        Self {
            changes: Vec::new(),
            seen: HashMap::new(),
            is_lost: false,
            is_at_work: false,
            writes: TokenBucket::new(WRITES.1, WRITES.0),
            seen_writes: TokenBucket::new(SEEN_WRITES.1, SEEN_WRITES.0),
        }
    }
}

impl ShardQueue {
    fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.seen.is_empty() && !self.is_lost
    }

    /// How long the next write has to wait. The paces are kept here, and not by the task that writes: that ends
    /// whenever nothing is left to write, which is after every request of an edge that asks again and again.
    fn next_write_delay(&mut self, now: Instant) -> Duration {
        let wait = self.writes.wait_for(1.0, now.into_std());
        if self.changes.is_empty() {
            wait.max(SEEN_PAUSE).max(self.seen_writes.wait_for(1.0, now.into_std()))
        } else {
            wait
        }
    }
}

#[derive(Debug)]
struct WaitingChange {
    node: NodeName,
    change: RecordChange,
    answer: oneshot::Sender<ChangeAnswer>,
}

impl ShardWriter {
    pub(super) fn new(id: ShardId, store: ShardStore, view: Arc<RosterView>) -> Arc<Self> {
        Arc::new(Self { id, store, view, queue: Mutex::default(), arrived: Notify::new() })
    }

    /// Makes a change, and returns once it is stored.
    pub(super) async fn store_change(self: &Arc<Self>, node: NodeName, change: RecordChange) -> ChangeAnswer {
        let (answer, answered) = oneshot::channel();
        self.queue.lock().changes.push(WaitingChange { node, change, answer });
        self.start_writing();
        answered.await.unwrap_or(Err(None))
    }

    /// Records soon that the key was seen in use.
    pub(super) fn note_use(self: &Arc<Self>, node: NodeName, used: HeldKey) {
        self.queue.lock().seen.insert(node, used);
        self.start_writing();
    }

    /// Writes the shard again after its ConfigMap was deleted.
    pub(super) fn restore(self: &Arc<Self>) {
        self.queue.lock().is_lost = true;
        self.start_writing();
    }

    fn start_writing(self: &Arc<Self>) {
        self.arrived.notify_one();
        if !std::mem::replace(&mut self.queue.lock().is_at_work, true) {
            tokio::spawn(Arc::clone(self).write_all());
        }
    }

    async fn write_all(self: Arc<Self>) {
        let (mut backoff, mut seen_due) = (RETRY, None);
        loop {
            let due = {
                let mut queue = self.queue.lock();
                if queue.is_empty() {
                    queue.is_at_work = false;
                    return;
                }
                let now = Instant::now();
                let due = now + queue.next_write_delay(now);
                // Keys that are seen in the interval don't put the write off.
                if queue.changes.is_empty() { *seen_due.get_or_insert(due) } else { due }
            };
            tokio::select! {
                biased;
                () = sleep_until(due) => seen_due = None,
                // A new change has arrived, perhaps with an edge that waits: don't wait longer.
                () = self.arrived.notified() => continue,
            }
            let (changes, seen, is_lost) = {
                let mut queue = self.queue.lock();
                if queue.changes.is_empty() {
                    queue.seen_writes.take(1.0, Instant::now().into_std());
                }
                (
                    std::mem::take(&mut queue.changes),
                    std::mem::take(&mut queue.seen),
                    std::mem::take(&mut queue.is_lost),
                )
            };
            match self.commit(&changes, &seen, is_lost).await {
                Ok(answers) => {
                    backoff.reset();
                    for (waiting, answer) in changes.into_iter().zip(answers) {
                        // If the receiver was dropped, the edge will reconnect and ask again.
                        let _ = waiting.answer.send(answer.map_err(Some));
                    }
                }
                Err(error) => {
                    let error = with_causes(&error);
                    tracing::warn!(error, "the keys of nodes were not recorded");
                    for waiting in changes {
                        let _ = waiting.answer.send(Err(None));
                    }
                    {
                        let mut queue = self.queue.lock();
                        for (node, used) in seen {
                            queue.seen.entry(node).or_insert(used);
                        }
                        queue.is_lost |= is_lost;
                    }
                    let _ = timeout(backoff.next_wait(), self.arrived.notified()).await;
                }
            }
        }
    }

    /// Applies the changes to the stored shard, and reads it again after a conflict.
    async fn commit(
        &self,
        changes: &[WaitingChange],
        seen: &HashMap<NodeName, HeldKey>,
        is_lost: bool,
    ) -> Result<Vec<Result<(), NodeRefusal>>, RosterError> {
        let mut base = self.view.shard(self.id);
        for _ in 0..ATTEMPTS {
            let mut shard = base.clone();
            let mut is_changed = is_lost && shard.version.is_none() && !shard.records.is_empty();
            for (node, used) in seen {
                if let Ok(after) = shard.record(node).with_change(node, &RecordChange::Seen(*used)) {
                    is_changed |= shard.put(node, after);
                }
            }
            let mut answers = Vec::with_capacity(changes.len());
            for WaitingChange { node, change, answer: _ } in changes {
                let after = shard.record(node).with_change(node, change);
                answers.push(after.map(|after| is_changed |= shard.put(node, after)));
            }
            if !is_changed {
                return Ok(answers);
            }
            // Only what is written counts: requests that are refused must not slow down others.
            self.queue.lock().writes.take(1.0, Instant::now().into_std());
            let slow = |_| RosterError::TooSlow(self.id.name());
            if let Some(version) =
                timeout(ANSWER_LIMIT, self.store.write(self.id, &shard)).await.map_err(slow)??
            {
                shard.version = Some(version);
                self.view.take_over(self.id, shard);
                return Ok(answers);
            }
            let stored = timeout(ANSWER_LIMIT, self.store.read(self.id)).await.map_err(slow)??;
            if stored.version.is_some() {
                self.view.take_over(self.id, stored.clone());
                base = stored;
            } else {
                // Deleted: what is in memory is written again.
                base.version = None;
            }
        }
        Err(RosterError::Contended(self.id.name()))
    }
}
