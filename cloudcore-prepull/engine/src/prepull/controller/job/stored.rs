//! What an earlier run of cloudcore has left in the reports of a job.

use std::collections::{HashMap, HashSet};

use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{NodePhase, NodeStatus};

/// The records of all reports of a job, each node once.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    /// The records, in the order of the job.
    pub(super) records: Vec<NodeStatus>,
    /// The index of each report, and how many of the records it holds.
    pub(super) reports: Vec<(u32, usize)>,
    /// The names of the nodes.
    pub(super) nodes: HashSet<String>,
    /// The indexes of reports with a record that does not count: they are to be written again, without it.
    pub(super) outdated: HashSet<u32>,
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
            all.reports.push((report.index, all.records.len() - before));
        }
        all
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
