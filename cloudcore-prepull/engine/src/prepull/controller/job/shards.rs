//! The reports of a job: which nodes each holds, and when it is written.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::report::MAX_NODES_IN_REPORT;

use crate::shared::pacing::TokenBucket;
use crate::shared::writes::{Deferred, PacedWrites, WritePace};

/// Writes of reports per second of one job, and at once: 10,000 nodes that start together make 40 reports, and
/// a fleet that reports at leisure keeps the API server at a few writes a second.
fn report_budget() -> TokenBucket<Timestamp> {
    TokenBucket::new(20.0, 60.0)
}
/// Reports per second of one job that are written for results while more results of the same report are to come, and
/// those that are written for progress alone. A report of 250 nodes takes 100 KiB and more: such writes are the largest
/// load on an API server, and they aren't urgent.
const TRICKLE: (f64, f64) = (10.0, 4.0);

#[derive(Debug)]
pub(super) struct Shards {
    list: Vec<ReportShard>,
    /// The indexes in `list` of the reports that have something to write.
    dirty: BTreeSet<usize>,
    /// How many nodes a new report holds.
    capacity: usize,
    budget: TokenBucket<Timestamp>,
}

#[derive(Debug)]
struct ReportShard {
    index: u32,
    nodes: Range<usize>,
    writes: PacedWrites,
}

impl Shards {
    /// The reports that the API server has, by index and length, in the order of their nodes. `capacity`: nodes
    /// in a further one.
    pub(super) fn from_stored(reports: &[(u32, usize)], capacity: usize) -> Self {
        let mut end = 0;
        let list = reports.iter().map(|&(index, length)| {
            let start = end;
            end += length;
            ReportShard { index, nodes: start..end, writes: PacedWrites::stored() }
        });
        Self {
            list: list.collect(),
            dirty: BTreeSet::new(),
            capacity: capacity.clamp(1, MAX_NODES_IN_REPORT),
            budget: report_budget(),
        }
    }

    pub(super) fn indexes(&self) -> impl Iterator<Item = u32> {
        self.list.iter().map(|shard| shard.index)
    }

    /// The API server has reports of these indexes too, with nodes that don't count: those that hold no nodes now are written
    /// without any.
    pub(super) fn empty_reports(&mut self, indexes: Vec<u32>) {
        for index in indexes {
            if self.indexes().all(|known| known != index) {
                let end = self.list.last().map_or(0, |shard| shard.nodes.end);
                self.list.push(ReportShard { index, nodes: end..end, writes: PacedWrites::default() });
                self.touch_shard(self.list.len() - 1, WritePace::Now);
            }
        }
    }

    /// Nodes have been added at the end of the job, which has this many now.
    pub(super) fn grow(&mut self, nodes: usize) {
        loop {
            let covered = self.list.last().map_or(0, |shard| shard.nodes.end);
            if covered >= nodes {
                return;
            }
            let last = self.list.len().checked_sub(1);
            let room = last.filter(|&at| self.list[at].nodes.len() < self.capacity);
            let at = room.unwrap_or_else(|| {
                // One that was lost is made again under its index: should a write of an earlier life of cloudcore
                // land late, it meets ours instead of standing beside it.
                let taken: BTreeSet<u32> = self.list.iter().map(|shard| shard.index).collect();
                let index = (0..u32::MAX).find(|index| !taken.contains(index)).unwrap_or(u32::MAX);
                self.list.push(ReportShard {
                    index,
                    nodes: covered..covered,
                    writes: PacedWrites::default(),
                });
                self.list.len() - 1
            });
            let shard = &mut self.list[at];
            shard.nodes.end = nodes.min(shard.nodes.start + self.capacity);
            self.touch_shard(at, WritePace::Now);
        }
    }

    pub(super) fn touch(&mut self, place: usize, pace: WritePace) {
        let shard = self.shard_of(place);
        self.touch_shard(shard, pace);
    }

    fn touch_shard(&mut self, shard: usize, pace: WritePace) {
        if let Some(known) = self.list.get_mut(shard) {
            known.writes.note_change(pace);
            self.dirty.insert(shard);
        }
    }

    /// Writes those again that the API server had, and that are gone or hold what does not count.
    pub(super) fn rewrite(&mut self, is_wrong: impl Fn(u32) -> bool) {
        for at in 0..self.list.len() {
            let shard = &self.list[at];
            if shard.writes.exists() && is_wrong(shard.index) {
                self.touch_shard(at, WritePace::Now);
            }
        }
    }

    /// Holds back until the record at this place is written as it is now. Returns what need not wait.
    pub(super) fn defer_until_written(&mut self, place: usize, deferred: Deferred) -> Option<Deferred> {
        let shard = self.shard_of(place);
        match self.list.get_mut(shard) {
            Some(shard) => shard.writes.hold_back(deferred),
            None => Some(deferred),
        }
    }

    /// Whether the API server has every report as it is now.
    pub(super) fn all_written(&self) -> bool {
        self.dirty.is_empty()
    }

    /// When the next write may be made.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        let due =
            self.dirty.iter().filter_map(|&shard| self.list[shard].writes.next_due(self.gaps())).min()?;
        Some(due.max(self.budget.ready_at(1.0).unwrap_or(Timestamp::MIN)))
    }

    /// The reports to write now, and the version of each, the longest wait first. `any_in_progress`: whether results
    /// are still to come for these places.
    pub(super) fn begin_writes(
        &mut self,
        now: Timestamp,
        any_in_progress: impl Fn(Range<usize>) -> bool,
    ) -> Vec<DueReport> {
        let gaps = self.gaps();
        let mut due = Vec::new();
        for &at in &self.dirty {
            let shard = &mut self.list[at];
            if !any_in_progress(shard.nodes.clone()) {
                // Nothing more will come that this write could be shared with.
                shard.writes.hurry_results();
            }
            if let Some(since) = shard.writes.next_due(gaps).filter(|due| *due <= now) {
                due.push((since, at));
            }
        }
        due.sort_unstable();
        let mut reports = Vec::new();
        for (_, at) in due {
            if self.budget.try_take(1.0, now).is_err() {
                break;
            }
            let shard = &mut self.list[at];
            let version = shard.writes.begin_next(now);
            reports.push(DueReport { index: shard.index, nodes: shard.nodes.clone(), version });
        }
        reports
    }

    /// A write ended. Returns what waited for it.
    pub(super) fn end_write(
        &mut self,
        index: u32,
        version: u64,
        done: bool,
        now: Timestamp,
    ) -> Vec<Deferred> {
        let Some(at) = self.list.iter().position(|shard| shard.index == index) else { return Vec::new() };
        let writes = &mut self.list[at].writes;
        if !done {
            writes.note_failure(now);
            return Vec::new();
        }
        let ready = writes.note_stored(version);
        if writes.is_clean() {
            self.dirty.remove(&at);
        }
        ready
    }

    /// Nothing will be written any more. Returns what waited.
    pub(super) fn abandon(&mut self) -> impl Iterator<Item = Deferred> {
        self.list.iter_mut().flat_map(|shard| shard.writes.abandon())
    }

    /// All reports are written as soon as may be: the job is over.
    pub(super) fn hurry(&mut self) {
        for &at in &self.dirty {
            self.list[at].writes.hurry(WritePace::Now);
        }
    }

    /// The gaps for results and for progress: longer, the more reports there are.
    fn gaps(&self) -> (Duration, Duration) {
        // A few thousand at most.
        #[allow(clippy::cast_precision_loss)]
        let reports = self.list.len() as f64;
        (Duration::from_secs_f64(reports / TRICKLE.0), Duration::from_secs_f64(reports / TRICKLE.1))
    }

    fn shard_of(&self, place: usize) -> usize {
        self.list.partition_point(|shard| shard.nodes.end <= place)
    }
}

#[derive(Debug)]
pub(super) struct DueReport {
    pub(super) index: u32,
    pub(super) nodes: Range<usize>,
    pub(super) version: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(1_000_000_000 + millis).unwrap()
    }

    fn ranges(shards: &Shards) -> Vec<(u32, Range<usize>)> {
        shards.list.iter().map(|shard| (shard.index, shard.nodes.clone())).collect()
    }

    #[test]
    fn joining_nodes_fill_the_last_report_first() {
        let mut shards = Shards::from_stored(&[], 250);
        shards.grow(600);
        assert_eq!(ranges(&shards), [(0, 0..250), (1, 250..500), (2, 500..600)]);
        assert!(!shards.all_written());
        let mut shards = Shards::from_stored(&[(0, 250), (5, 100)], 250);
        assert!(shards.all_written());
        shards.grow(351);
        shards.grow(501);
        assert_eq!(ranges(&shards), [(0, 0..250), (5, 250..500), (1, 500..501)]);
        assert_eq!(
            (shards.shard_of(0), shards.shard_of(249), shards.shard_of(250), shards.shard_of(500)),
            (0, 0, 1, 2)
        );
    }

    #[test]
    fn the_budget_bounds_a_jobs_report_writes() {
        let mut shards = Shards::from_stored(&[], 1);
        shards.grow(200);
        assert_eq!(shards.begin_writes(at(0), |_| true).len(), 60);
        assert_eq!(shards.next_due(), Some(at(50)));
        assert_eq!(shards.begin_writes(at(500), |_| true).len(), 10);
    }

    #[test]
    fn more_reports_mean_rarer_writes_of_each() {
        for (nodes, gaps) in [(1, (100, 250)), (40, (4_000, 10_000))] {
            let mut shards = Shards::from_stored(&[], 1);
            shards.grow(nodes);
            assert_eq!(shards.gaps(), (Duration::from_millis(gaps.0), Duration::from_millis(gaps.1)));
        }
    }

    #[test]
    fn only_the_last_result_is_written_immediately() {
        let mut shards = Shards::from_stored(&[], 250);
        shards.grow(2);
        let write = |shards: &mut Shards, millis, running: bool| {
            let reports = shards.begin_writes(at(millis), |_| running);
            for report in &reports {
                shards.end_write(report.index, report.version, true, at(millis));
            }
            reports.len()
        };
        assert_eq!(write(&mut shards, 0, true), 1);
        shards.touch(0, WritePace::Soon);
        assert_eq!((write(&mut shards, 300, true), write(&mut shards, 1000, true)), (0, 1));
        shards.touch(1, WritePace::Soon);
        assert_eq!(write(&mut shards, 1300, false), 1);
        assert!(shards.all_written());
        // The end of the job waits for progress as well.
        shards.touch(0, WritePace::Slow);
        shards.hurry();
        assert_eq!(write(&mut shards, 1600, false), 1);
    }
}
