//! The writes of one object: their pace, and what waits for them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use prepull_api::task::{NodeName, TaskId};

use crate::shared::pacing::Backoff;

/// The time between two urgent writes of one object: too short for people to notice, long enough for a burst of changes
/// to share a write.
const URGENT_GAP: Duration = Duration::from_millis(200);
/// How many writes may follow each other that fast; then one a second. A short rollout, node by node, is not delayed, and
/// a long one does not keep etcd busy.
const BURST: u32 = 10;
/// The time between two writes of one object otherwise.
const GAP: Duration = Duration::from_secs(1);
/// The wait after a failed write: 250 ms, doubled up to 5 s. The API server may be restarting.
const WRITE_RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));

/// How soon a change must be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WritePace {
    /// For progress, which will change again.
    #[default]
    Slow,
    /// For a result: only its edge waits, for the acknowledgement.
    Soon,
    /// For a task that waits to be sent, or for the end of a job.
    Now,
    /// For urgent changes that are final: without any gap.
    AtOnce,
}

/// One start of a node in this run of cloudcore. A node that starts again after a withdrawal waits for another
/// record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartId {
    /// The place of the node.
    pub place: usize,
    /// Counts the starts.
    pub number: u64,
}

/// What waits until the API server has a version of the object.
#[derive(Debug)]
pub(crate) enum Deferred {
    /// This start of the node is recorded: its task may go out.
    Dispatch(NodeName, StartId),
    /// It is recorded that this start did not happen.
    Withdraw(StartId),
    /// The node's result is recorded: it may be forgotten.
    Ack(NodeName, TaskId),
}

/// Counts versions, paces the writes, and holds back what must not happen before one of them.
#[derive(Debug)]
pub(crate) struct PacedWrites {
    /// The version in memory.
    version: u64,
    /// The version that the API server has.
    written: u64,
    in_flight: bool,
    pace: WritePace,
    not_before: Option<Timestamp>,
    last: Option<Timestamp>,
    backoff: Backoff,
    burst: UsedBurst,
    deferred: VecDeque<(u64, Deferred)>,
    /// The acknowledgements that wait, by node and attempt: an edge may send results as often as it likes, of any attempt.
    acks: BTreeMap<(NodeName, u32), (u64, TaskId)>,
}

/// Acknowledgements that may wait for one node and object. An honest edge has one result, or two after a further attempt.
const MOST_ACKS: usize = 8;

/// Writes that count against [`BURST`]: one less for each whole second that passes.
#[derive(Debug, Default)]
struct UsedBurst {
    writes: u32,
    /// When whole seconds were counted last; `None` before the first write.
    counted: Option<Timestamp>,
}

impl UsedBurst {
    fn count_write(&mut self, now: Timestamp) {
        let passed =
            self.counted.map_or(SignedDuration::MAX, |counted| now.duration_since(counted)).as_secs();
        let passed = u32::try_from(passed.max(0)).unwrap_or(u32::MAX);
        if passed > 0 {
            (self.writes, self.counted) = (self.writes.saturating_sub(passed), Some(now));
        }
        self.writes = (self.writes + 1).min(BURST);
    }
}

impl Default for PacedWrites {
    /// The writes of an object that the API server does not have, and that has no content yet.
    fn default() -> Self {
        Self {
            version: 0,
            written: 0,
            in_flight: false,
            pace: WritePace::default(),
            not_before: None,
            last: None,
            backoff: WRITE_RETRY,
            burst: UsedBurst::default(),
            deferred: VecDeque::new(),
            acks: BTreeMap::new(),
        }
    }
}

impl PacedWrites {
    /// The writes of an object that the API server has as it is in memory.
    pub(crate) fn stored() -> Self {
        Self { version: 1, written: 1, ..Self::default() }
    }

    pub(crate) fn note_change(&mut self, pace: WritePace) {
        self.version += 1;
        self.pace = self.pace.max(pace);
    }

    /// Makes the next write, if there is one, at least this urgent.
    pub(crate) fn hurry(&mut self, pace: WritePace) {
        self.pace = self.pace.max(pace);
    }

    /// Results need not wait for others to share their write.
    pub(crate) fn hurry_results(&mut self) {
        if self.pace == WritePace::Soon {
            self.pace = WritePace::Now;
        }
    }

    /// Holds back until the state as it is now is written. Returns what need not wait.
    pub(crate) fn hold_back(&mut self, deferred: Deferred) -> Option<Deferred> {
        if self.is_clean() {
            return Some(deferred);
        }
        self.hurry(if matches!(deferred, Deferred::Dispatch(..)) { WritePace::Now } else { WritePace::Soon });
        match deferred {
            Deferred::Ack(node, task) => self.hold_back_ack(node, task),
            Deferred::Dispatch(..) | Deferred::Withdraw(_) => {
                self.deferred.push_back((self.version, deferred));
            }
        }
        None
    }

    /// A result is acknowledged once the last one of its task is written. Without a place it isn't, and the edge sends it
    /// again in its next session.
    fn hold_back_ack(&mut self, node: NodeName, task: TaskId) {
        let waiting = self.acks.range((node.clone(), 0)..=(node.clone(), u32::MAX)).count();
        let key = (node, task.attempt);
        if waiting < MOST_ACKS || self.acks.contains_key(&key) {
            self.acks.insert(key, (self.version, task));
        }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Whether the API server has this version, or a later one.
    pub(crate) fn has_stored(&self, version: u64) -> bool {
        self.written >= version
    }

    /// Whether the API server has the state as it is in memory.
    pub(crate) fn is_clean(&self) -> bool {
        self.written >= self.version
    }

    /// Whether the API server has the object, in any version.
    pub(crate) fn exists(&self) -> bool {
        self.written > 0
    }

    /// When the next write may be made; `None` where there is nothing to write, or one is under way. `soon` and
    /// `slow`: the gaps for results and for progress, where they are longer than a second.
    pub(crate) fn next_due(&self, (soon, slow): (Duration, Duration)) -> Option<Timestamp> {
        if self.in_flight || self.is_clean() {
            return None;
        }
        let gap = match self.pace {
            WritePace::Now if self.burst.writes < BURST => URGENT_GAP,
            WritePace::Now => GAP,
            WritePace::Soon => soon.max(GAP),
            WritePace::Slow => slow.max(GAP),
            WritePace::AtOnce => Duration::ZERO,
        };
        let paced = self.last.and_then(|last| last.checked_add(gap).ok()).unwrap_or(Timestamp::MIN);
        Some(paced.max(self.not_before.unwrap_or(Timestamp::MIN)))
    }

    /// A write begins; it carries the version that is returned.
    pub(crate) fn begin_next(&mut self, now: Timestamp) -> u64 {
        self.burst.count_write(now);
        self.in_flight = true;
        self.pace = WritePace::Slow;
        self.last = Some(now);
        self.version
    }

    /// The API server has what would be written: there is nothing to write.
    pub(crate) fn mark_clean(&mut self) {
        self.written = self.version;
        self.pace = WritePace::Slow;
    }

    /// The write failed: the next one is due after the backoff.
    pub(crate) fn note_failure(&mut self, now: Timestamp) {
        self.in_flight = false;
        self.not_before = now.checked_add(self.backoff.next_wait()).ok();
        self.pace = WritePace::Now;
    }

    /// Nothing will be written any more. Returns what waited.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = Deferred> {
        let acks = std::mem::take(&mut self.acks).into_iter();
        let acks = acks.map(|((node, _), (_, task))| Deferred::Ack(node, task));
        acks.chain(self.deferred.drain(..).map(|(_, deferred)| deferred))
    }

    /// The API server has the version. Returns what waited for it: acknowledgements, then the rest in order.
    pub(crate) fn note_stored(&mut self, version: u64) -> Vec<Deferred> {
        self.in_flight = false;
        self.backoff.reset();
        self.not_before = None;
        self.written = self.written.max(version);
        let acks = std::mem::take(&mut self.acks);
        let (acks, later) = acks.into_iter().partition(|(_, (needs, _))| *needs <= self.written);
        self.acks = later;
        let acks = BTreeMap::into_iter(acks).map(|((node, _), (_, task))| Deferred::Ack(node, task));
        let ready = self.deferred.iter().take_while(|(needs, _)| *needs <= self.written).count();
        acks.chain(self.deferred.drain(..ready).map(|(_, deferred)| deferred)).collect()
    }
}

#[cfg(test)]
mod tests {
    use prepull_api::task::JobUid;

    use super::*;

    const START: StartId = StartId { place: 0, number: 1 };

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(1_000_000_000 + millis).unwrap()
    }

    /// Writes what is due, every 10 ms, and returns the number of writes.
    fn writes(pace: WritePace, for_millis: i64) -> usize {
        let mut writes = PacedWrites::default();
        let mut count = 0;
        for now in (0..for_millis).step_by(10).map(at) {
            writes.note_change(pace);
            if writes.next_due((GAP, Duration::from_secs(5))).is_some_and(|due| due <= now) {
                count += 1;
                let version = writes.begin_next(now);
                writes.note_stored(version);
            }
        }
        count
    }

    #[test]
    fn the_pace_bounds_an_objects_writes() {
        assert_eq!(writes(WritePace::Slow, 20_000), 4);
        assert_eq!(writes(WritePace::Soon, 20_000), 20);
        // The burst, what comes back while it lasts, then about one a second.
        let urgent = writes(WritePace::Now, 20_000);
        assert!((25..=32).contains(&urgent), "{urgent}");
        assert_eq!(writes(WritePace::Now, 2_000), 10);
    }

    #[test]
    fn the_burst_refills_every_second() {
        let mut used = UsedBurst::default();
        (0..5).for_each(|_| used.count_write(at(0)));
        // Of four writes in two seconds two count, though none comes a second after the one before.
        let counted = [600, 1_200, 1_800, 2_200].map(|millis| {
            used.count_write(at(millis));
            used.writes
        });
        assert_eq!(counted, [6, 6, 7, 7]);
        used.count_write(at(2_200 + 1_000 * i64::from(BURST)));
        assert_eq!(used.writes, 1);
        used.count_write(at(0));
        assert_eq!(used.writes, 2, "a clock that is set back brings nothing back");
    }

    #[test]
    fn few_acknowledgements_wait_for_each_node() {
        let mut writes = PacedWrites::default();
        let ack = |attempt| TaskId { job: JobUid("job".to_owned()), attempt };
        writes.note_change(WritePace::Slow);
        let first = writes.begin_next(at(0));
        for attempt in (1..1_000).chain([1, 1]) {
            assert!(writes.hold_back(Deferred::Ack("a".into(), ack(attempt))).is_none());
        }
        assert!(writes.hold_back(Deferred::Ack("b".into(), ack(1))).is_none());
        assert_eq!((writes.acks.len(), writes.deferred.len()), (MOST_ACKS + 1, 0));
        // What it acknowledges now is in the second write.
        writes.note_change(WritePace::Slow);
        assert!(writes.hold_back(Deferred::Ack("b".into(), ack(1))).is_none());
        let stored = writes.note_stored(first);
        let of_a = |deferred: &Deferred| matches!(deferred, Deferred::Ack(node, _) if *node == "a".into());
        assert!(stored.len() == MOST_ACKS && stored.iter().all(of_a));
        let second = writes.begin_next(at(200));
        assert_eq!((writes.note_stored(second).len(), writes.acks.len()), (1, 0));
    }

    #[test]
    fn a_waiting_item_leaves_with_its_version() {
        let mut writes = PacedWrites::default();
        writes.note_change(WritePace::Slow);
        assert!(writes.hold_back(Deferred::Dispatch("a".into(), START)).is_none());
        let first = writes.begin_next(at(0));
        writes.note_change(WritePace::Slow);
        assert!(writes.hold_back(Deferred::Dispatch("b".into(), START)).is_none());
        assert_eq!(writes.note_stored(first).len(), 1);
        assert_eq!(writes.next_due((GAP, GAP)), Some(at(200)));
        let second = writes.begin_next(at(200));
        writes.note_failure(at(200));
        assert_eq!(writes.next_due((GAP, GAP)), Some(at(450)));
        assert_eq!(writes.note_stored(second).len(), 1);
        assert!(writes.is_clean() && writes.hold_back(Deferred::Dispatch("c".into(), START)).is_some());
    }
}
