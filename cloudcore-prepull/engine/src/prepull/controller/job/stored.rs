//! A job's reports from earlier runs of cloudcore.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, NodePhase, NodeStatus};

use crate::prepull::aggregate::Rounds;
use crate::prepull::rollout::{begin_again, begin_recheck, is_rechecking, keep_result};

/// The records of all reports of a job, each node once.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    /// The records, in the order of the job.
    pub(super) records: Vec<NodeStatus>,
    /// The index of each report, and how many of the records it holds.
    pub(super) reports: Vec<(u32, usize)>,
    pub(super) nodes: HashSet<String>,
    /// The indexes of reports to write again: with a record that does not count, or that has changed.
    pub(super) outdated: HashSet<u32>,
    /// The rounds of each report, and the range of its records.
    rounds: Vec<(ReportRounds, Range<usize>)>,
}

/// The rounds in a report. Reports of version 0.1 do not say how many of `spec.retry` had begun.
#[derive(Clone, Copy, Debug)]
struct ReportRounds {
    retry: Option<u32>,
    rounds: Rounds,
}

/// What people ask a job for that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundRequest {
    Nothing,
    /// Another round of `spec.retry`.
    Retry,
    Recheck,
}

/// How a job goes on that an earlier run of cloudcore has begun.
#[derive(Debug)]
pub(super) struct Resumed {
    /// The rounds that have begun. `rechecking`: a re-check runs.
    pub(super) rounds: Rounds,
    pub(super) is_over: bool,
}

pub(super) fn known_rounds(status: &ImagePrePullJobStatus) -> Rounds {
    let recheck = status.recheck.as_ref();
    Rounds {
        retry: status.retry,
        recheck: recheck.map_or(0, |recheck| recheck.rounds),
        rechecking: recheck.is_some_and(|recheck| recheck.completion_time.is_none()),
    }
}

impl StoredRecords {
    /// A node is in two reports if a write of a cloudcore that was killed has arrived late: its successor had read the
    /// reports without it, and had put the node elsewhere. What got further counts.
    pub(super) fn new(mut reports: Vec<ReportBody>) -> Self {
        reports.sort_by_key(|report| report.index);
        let mut furthest: HashMap<&str, (&NodeStatus, u32)> = HashMap::new();
        for report in &reports {
            for record in &report.node_status {
                let known = furthest.entry(&record.node_name).or_insert((record, report.index));
                if progress_rank(record) > progress_rank(known.0) {
                    *known = (record, report.index);
                }
            }
        }
        let places = furthest.into_iter().map(|(node, (_, index))| (node.to_owned(), index));
        let places: HashMap<String, u32> = places.collect();
        let mut all = Self::default();
        for report in reports {
            let before = all.records.len();
            for record in report.node_status {
                if places.get(&record.node_name) == Some(&report.index)
                    && all.nodes.insert(record.node_name.clone())
                {
                    all.records.push(record);
                } else {
                    all.outdated.insert(report.index);
                }
            }
            let (retry, recheck, rechecking) = (report.retry, report.recheck, report.rechecking);
            let rounds = Rounds { retry: retry.unwrap_or(0), recheck, rechecking };
            all.rounds.push((ReportRounds { retry, rounds }, before..all.records.len()));
            all.reports.push((report.index, all.records.len() - before));
        }
        all
    }

    /// The number of rounds that have begun, by the reports. The report with the most has the kind of the last one.
    fn rounds(&self) -> Rounds {
        let all = || self.rounds.iter().map(|(stored, _)| stored.rounds);
        Rounds {
            retry: all().map(|rounds| rounds.retry).max().unwrap_or(0),
            recheck: all().map(|rounds| rounds.recheck).max().unwrap_or(0),
            rechecking: all().max_by_key(|rounds| rounds.total()).is_some_and(|rounds| rounds.rechecking),
        }
    }

    /// What has begun, by the status and the reports together. `has_ended`: the job had ended, by its status.
    pub(super) fn resume(&self, known: Rounds, has_ended: bool, asked: RoundRequest) -> Resumed {
        let written = self.rounds();
        // Nodes are in progress again: the earlier run had begun a further round, and not written so in the status. It
        // goes on as it is, unless it is begun again.
        let is_in_progress = |record: &NodeStatus| record.phase == NodePhase::InProgress;
        let is_ahead = written.total() > known.total() || self.records.iter().any(is_in_progress);
        let has_round = has_ended && asked == RoundRequest::Nothing && is_ahead;
        if has_ended && !has_round {
            // What is asked for now is begun under the number that the status knows. Of the other kind none is forgotten.
            let retry =
                if asked == RoundRequest::Recheck { known.retry.max(written.retry) } else { known.retry };
            let recheck =
                if asked == RoundRequest::Retry { known.recheck.max(written.recheck) } else { known.recheck };
            return Resumed { rounds: Rounds { retry, recheck, rechecking: false }, is_over: true };
        }
        let rechecking = match written.total().cmp(&known.total()) {
            Ordering::Greater => written.rechecking,
            _ if has_ended => self.any_rechecking(),
            _ => known.rechecking,
        };
        let rounds = Rounds {
            retry: written.retry.max(known.retry + u32::from(has_round && !rechecking)),
            recheck: written.recheck.max(known.recheck + u32::from(has_round && rechecking)),
            rechecking,
        };
        Resumed { rounds, is_over: false }
    }

    /// Whether nodes were being checked when the reports were written.
    fn any_rechecking(&self) -> bool {
        self.records.iter().any(is_rechecking)
    }

    /// The re-check of this number has begun, as [`Self::begin_round`] has it.
    pub(super) fn begin_recheck(&mut self, recheck: u32, may_be_asked: impl Fn(&NodeStatus) -> bool) {
        for ((stored, places), (index, _)) in self.rounds.iter().zip(&self.reports) {
            if stored.rounds.recheck >= recheck {
                continue;
            }
            let is_due =
                |record: &&mut NodeStatus| record.phase == NodePhase::Successful && may_be_asked(record);
            for record in self.records[places.clone()].iter_mut().filter(is_due) {
                begin_recheck(record);
                self.outdated.insert(*index);
            }
        }
    }

    /// The round of this number has begun: what was written of it in the status, or in another report, may not have been
    /// written in all of them. `may_take_part`: whether a node that has not succeeded does.
    pub(super) fn begin_round(&mut self, round: u32, may_take_part: impl Fn(&NodeStatus) -> bool) {
        for ((stored, places), (index, _)) in self.rounds.iter().zip(&self.reports) {
            // What had not answered before the round began was left as it was.
            for record in self.records[places.clone()].iter_mut().filter(|record| is_rechecking(record)) {
                keep_result(record);
                self.outdated.insert(*index);
            }
            if stored.retry.is_none_or(|rounds| rounds >= round) {
                continue;
            }
            let is_due =
                |record: &&mut NodeStatus| record.phase != NodePhase::Successful && may_take_part(record);
            for record in self.records[places.clone()].iter_mut().filter(is_due) {
                begin_again(record);
                self.outdated.insert(*index);
            }
        }
    }
}

/// How far a node has got, to compare two records of it: by attempt, then by phase.
fn progress_rank(record: &NodeStatus) -> (u32, u8) {
    let phase = match record.phase {
        NodePhase::Pending => 0,
        NodePhase::InProgress => 1,
        // A late result may follow it.
        NodePhase::Unknown => 2,
        NodePhase::Failure | NodePhase::Successful => 3,
    };
    (record.attempt, phase)
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::status::NodeRecheck;

    use super::*;

    fn record(phase: NodePhase, is_rechecking: bool) -> NodeStatus {
        let recheck = is_rechecking.then(NodeRecheck::default);
        NodeStatus { node_name: "n".to_owned(), phase, attempt: 2, recheck, ..NodeStatus::default() }
    }

    fn report(retry: u32, recheck: u32, rechecking: bool, record: NodeStatus) -> ReportBody {
        let node_status = vec![record];
        ReportBody { retry: Some(retry), recheck, rechecking, node_status, ..ReportBody::default() }
    }

    #[test]
    fn a_missed_round_ends_a_recheck() {
        let asked = record(NodePhase::InProgress, true);
        let mut stored = StoredRecords::new(vec![report(0, 1, true, asked)]);
        stored.begin_round(1, |_| true);
        let left = &stored.records[0];
        assert_eq!((left.phase, left.attempt), (NodePhase::Successful, 2));
        assert!(stored.outdated.contains(&0));
    }

    #[test]
    fn a_missed_recheck_asks_successful_nodes_with_a_node() {
        for (phase, may_be_asked, is_asked) in [
            (NodePhase::Successful, true, true),
            (NodePhase::Successful, false, false),
            (NodePhase::Failure, true, false),
        ] {
            let mut stored = StoredRecords::new(vec![report(0, 0, false, record(phase, false))]);
            stored.begin_recheck(1, |_| may_be_asked);
            assert_eq!((stored.outdated.len() == 1, is_rechecking(&stored.records[0])), (is_asked, is_asked));
        }
    }

    #[test]
    fn reports_name_the_last_rounds_kind() {
        let known = |retry, recheck| Rounds { retry, recheck, rechecking: false };
        let written = |retry, recheck, rechecking, phase| {
            StoredRecords::new(vec![report(retry, recheck, rechecking, record(phase, rechecking))])
        };
        let at_work = NodePhase::InProgress;
        for (stored, known, asked, (retry, recheck, rechecking, is_over)) in [
            // The status is as the reports are.
            (
                written(1, 1, true, NodePhase::Successful),
                known(1, 1),
                RoundRequest::Nothing,
                (1, 1, false, true),
            ),
            // A re-check had begun, or a round.
            (written(0, 1, true, at_work), known(0, 0), RoundRequest::Nothing, (0, 1, true, false)),
            (written(1, 1, false, at_work), known(0, 1), RoundRequest::Nothing, (1, 1, false, false)),
            // Its report is written, and every node of it has answered.
            (
                written(0, 1, true, NodePhase::Successful),
                known(0, 0),
                RoundRequest::Nothing,
                (0, 1, true, false),
            ),
            // The reports do not say which one had begun: it is the next of its kind.
            (written(0, 0, false, at_work), known(1, 0), RoundRequest::Nothing, (2, 0, false, false)),
            (written(0, 1, true, at_work), known(0, 1), RoundRequest::Nothing, (0, 2, true, false)),
            // What is asked for begins again, under the same number; the other kind keeps its own.
            (written(0, 1, true, at_work), known(0, 0), RoundRequest::Recheck, (0, 0, false, true)),
            (written(0, 1, true, at_work), known(0, 0), RoundRequest::Retry, (0, 1, false, true)),
            (written(1, 0, false, at_work), known(0, 0), RoundRequest::Retry, (0, 0, false, true)),
        ] {
            let Resumed { rounds, is_over: over } = stored.resume(known, true, asked);
            let expected = (Rounds { retry, recheck, rechecking }, is_over);
            assert_eq!((rounds, over), expected, "{known:?} {asked:?}");
        }
    }
}
