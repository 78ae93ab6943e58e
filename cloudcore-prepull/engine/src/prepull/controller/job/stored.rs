//! What an earlier run of cloudcore has left in the reports of a job.

use std::collections::HashSet;

use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::NodeStatus;

/// The records of all reports of a job, each node once.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    /// The records, in the order of the job.
    pub(super) records: Vec<NodeStatus>,
    /// The index of each report, and how many of the records it holds.
    pub(super) reports: Vec<(u32, usize)>,
    /// The names of the nodes.
    pub(super) nodes: HashSet<String>,
}

impl StoredRecords {
    pub(super) fn new(mut reports: Vec<ReportBody>) -> Self {
        reports.sort_by_key(|report| report.index);
        let mut all = Self::default();
        for report in reports {
            let before = all.records.len();
            let new = report.node_status.into_iter().filter(|node| all.nodes.insert(node.node_name.clone()));
            all.records.extend(new);
            all.reports.push((report.index, all.records.len() - before));
        }
        all
    }
}
