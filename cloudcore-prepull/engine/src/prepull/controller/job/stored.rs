//! What an earlier run of cloudcore has left in the reports of a job.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{NodePhase, NodeStatus};

use crate::prepull::rollout::begin_again;

/// The records of all reports of a job, each node once.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    /// The records, in the order of the job.
    pub(super) records: Vec<NodeStatus>,
    /// The index of each report, and how many of the records it holds.
    pub(super) reports: Vec<(u32, usize)>,
    /// The names of the nodes.
    pub(super) nodes: HashSet<String>,
    /// The indexes of reports that are to be written again: with a record that does not count, or one that has changed.
    pub(super) outdated: HashSet<u32>,
    /// The rounds of each report, and the range of its records.
    rounds: Vec<(Option<u32>, Range<usize>)>,
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
                if progress(record) > progress(known.0) {
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
            all.rounds.push((report.retry, before..all.records.len()));
            all.reports.push((report.index, all.records.len() - before));
        }
        all
    }

    /// How many rounds have begun, as far as the reports say.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds.iter().filter_map(|(rounds, _)| *rounds).max().unwrap_or(0)
    }

    /// The round of this number has begun: what was written of it in the status, or in another report, may not have been
    /// written in all of them. `may_take_part`: whether a node that has not succeeded does.
    pub(super) fn begin_round(&mut self, round: u32, may_take_part: impl Fn(&NodeStatus) -> bool) {
        for ((rounds, places), (index, _)) in self.rounds.iter().zip(&self.reports) {
            if rounds.is_none_or(|rounds| rounds >= round) {
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
fn progress(record: &NodeStatus) -> (u32, u8) {
    let phase = match record.phase {
        NodePhase::Pending => 0,
        NodePhase::InProgress => 1,
        // A late result may follow it.
        NodePhase::Unknown => 2,
        NodePhase::Failure | NodePhase::Successful => 3,
    };
    (record.attempt, phase)
}
