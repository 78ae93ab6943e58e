//! A job's status and reports in the API server: when each is written, and what waits for that.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prepull_api::crd::report::MAX_NODES_IN_REPORT;
use prepull_api::image::MAX_REFERENCE;
use prepull_api::overriders::ImageRule;
use prepull_api::task::MAX_REMOVALS;

use super::super::{StatusOrReport, WriteEnd};
use super::shards::{DueReport, Shards};
use crate::prepull::aggregate;
use crate::prepull::rollout::Touched;
use crate::prepull::validate::{OverriderGroup, ValidatedJob};
use crate::shared::writes::{Deferred, PacedWrites, WritePace};

#[derive(Debug)]
pub(super) struct JobOutput {
    status: PacedWrites,
    /// As they were written last, so that a transition time changes only with its status.
    conditions: Vec<Condition>,
    /// The version of the status with the job's start and accepted spec. Reports and the end wait for it: without
    /// it another leader would choose the nodes again, and not know what those in the reports pull.
    beginning: u64,
    pub(super) shards: Shards,
    /// The resourceVersions of the objects in the API server, as far as they are known: the next write replaces that
    /// one, so that another writer, such as a deposed leader, cannot undo it without notice.
    versions: HashMap<StatusOrReport, String>,
    /// The indexes of reports of earlier runs that the API server has.
    earlier: Vec<u32>,
    /// Nodes in a report, where the rule of [`aggregate::nodes_in_report`] would allow more.
    report_capacity: usize,
}

impl JobOutput {
    pub(super) fn new(report_capacity: usize) -> Self {
        let shards = Shards::from_stored(&[], MAX_NODES_IN_REPORT);
        Self {
            status: PacedWrites::default(),
            conditions: Vec::new(),
            beginning: 0,
            shards,
            versions: HashMap::new(),
            earlier: Vec::new(),
            report_capacity,
        }
    }

    pub(super) fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    pub(super) fn set_conditions(&mut self, conditions: &[Condition]) {
        self.conditions = conditions.to_vec();
    }

    pub(super) fn note_version(&mut self, object: StatusOrReport, version: Option<String>) {
        self.versions.extend(version.map(|version| (object, version)));
    }

    /// The version that a write of the object replaces, if it is known.
    pub(super) fn stored_version(&self, object: StatusOrReport) -> Option<String> {
        self.versions.get(&object).cloned()
    }

    /// The API server has these reports of earlier runs of the job. Their nodes don't count.
    pub(super) fn set_earlier_reports(&mut self, indexes: Vec<u32>) {
        self.earlier = indexes;
    }

    /// The run is over, and another one begins: its reports no longer count.
    pub(super) fn end_run(&mut self) {
        self.earlier = self.shards.indexes().collect();
        self.shards = Shards::from_stored(&[], MAX_NODES_IN_REPORT);
    }

    /// The API server has these reports, by index and length; `job` decides how many nodes a further one holds.
    pub(super) fn restore_reports(&mut self, reports: &[(u32, usize)], job: Option<&ValidatedJob>) {
        self.shards = Shards::from_stored(reports, self.nodes_per_report(job));
        self.shards.empty_reports(std::mem::take(&mut self.earlier));
    }

    /// A run with this many nodes begins. Its reports take the places of those of earlier runs, and the remaining ones
    /// are emptied.
    pub(super) fn begin_reports_of_run(&mut self, nodes: usize, job: &ValidatedJob) {
        self.shards = Shards::from_stored(&[], self.nodes_per_report(Some(job)));
        self.shards.grow(nodes);
        self.shards.empty_reports(std::mem::take(&mut self.earlier));
    }

    fn nodes_per_report(&self, job: Option<&ValidatedJob>) -> usize {
        job.map_or(MAX_NODES_IN_REPORT, |job| {
            let removals = if job.removal.is_some() { MAX_REMOVALS } else { 0 };
            let names = bytes_of_names(job).chain(std::iter::repeat_n(0, removals));
            aggregate::nodes_in_report(names).min(self.report_capacity)
        })
    }

    pub(super) fn touch_status(&mut self, pace: WritePace) {
        self.status.note_change(pace);
    }

    /// The job begins: the status is to tell of that before anything else is written.
    pub(super) fn mark_beginning(&mut self) {
        self.status.note_change(WritePace::Now);
        self.beginning = self.status.version();
    }

    /// These records changed; the status shows them as well.
    pub(super) fn touch_records(&mut self, touched: &[Touched]) {
        for touched in touched {
            self.shards.touch(touched.at, if touched.phase { WritePace::Soon } else { WritePace::Slow });
        }
        if !touched.is_empty() {
            self.status.note_change(WritePace::Slow);
        }
    }

    /// Whether the job has begun by the status in the API server.
    pub(super) fn has_begun(&self) -> bool {
        self.status.has_stored(self.beginning)
    }

    /// Holds back until the API server has that. Returns what need not wait.
    pub(super) fn defer_to_beginning(&mut self, deferred: Deferred) -> Option<Deferred> {
        if self.has_begun() { Some(deferred) } else { self.status.hold_back(deferred) }
    }

    /// Begins the writes of reports that are due.
    pub(super) fn begin_reports(
        &mut self,
        now: Timestamp,
        any_in_progress: impl Fn(Range<usize>) -> bool,
    ) -> Vec<DueReport> {
        if self.has_begun() { self.shards.begin_writes(now, any_in_progress) } else { Vec::new() }
    }

    /// Begins a write of the status. Returns its version.
    pub(super) fn begin_status(&mut self, conditions: &[Condition], now: Timestamp) -> u64 {
        self.set_conditions(conditions);
        self.status.begin_next(now)
    }

    /// A write ended. Returns what waited for it.
    pub(super) fn finish_write(
        &mut self,
        WriteEnd { object, version, stored, done }: WriteEnd,
        now: Timestamp,
    ) -> Vec<Deferred> {
        self.note_version(object, stored);
        match object {
            StatusOrReport::Status if done => self.status.note_stored(version),
            StatusOrReport::Status => {
                self.status.note_failure(now);
                Vec::new()
            }
            StatusOrReport::Report(index) => self.shards.end_write(index, version, done, now),
        }
    }

    /// When a write is due. `is_over`: whether the job is.
    pub(super) fn next_write(&self, is_over: bool) -> Option<Timestamp> {
        let reports = self.shards.next_due().filter(|_| self.has_begun());
        reports.into_iter().chain(self.next_status(is_over)).min()
    }

    /// When the status is due. The end of a job is written after the reports with the ends of its nodes.
    pub(super) fn next_status(&self, is_over: bool) -> Option<Timestamp> {
        let may_follow = !is_over || self.shards.all_written();
        self.status.next_due((Duration::ZERO, Duration::ZERO)).filter(|_| may_follow)
    }

    /// Whether the API server has everything as it is in memory.
    pub(super) fn is_settled(&self) -> bool {
        self.shards.all_written() && self.status.is_clean()
    }

    /// Nothing will be written any more. Returns what waited.
    pub(super) fn abandon(&mut self) -> impl Iterator<Item = Deferred> {
        self.status.abandon().chain(self.shards.abandon())
    }
}

/// The bytes of JSON that the names of each image take in the record of a node, at most: the job's reference, what all
/// overriders together may make of it, and the name for people.
fn bytes_of_names(job: &ValidatedJob) -> impl Iterator<Item = usize> {
    let added = |group: &OverriderGroup| {
        group.image_rules.iter().map(ImageRule::added_bytes).fold(0, usize::saturating_add)
    };
    let added = job.overriders.iter().map(added).fold(0, usize::saturating_add);
    let name = |name: &String| serde_json::to_string(name).map_or(0, |json| json.len());
    job.images.iter().map(move |image| {
        let written = image.image.len();
        written + written.saturating_add(added).min(MAX_REFERENCE) + image.name.as_ref().map_or(0, name)
    })
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::job::ImagePrePullJob;
    use prepull_api::crd::status::{JobImageStatus, NodeStatus};
    use serde_json::json;

    use super::*;
    use crate::prepull::aggregate::{FIRST_ATTEMPT, REPORT_BUDGET, Rounds, make_report};
    use crate::prepull::validate::validate;

    /// A report as full as the rule of `job` allows; its images are those of the job, pulled as `pulled`.
    fn full_report(job: &ValidatedJob, pulled: &str) -> String {
        let images = job.images.iter().map(|image| JobImageStatus {
            image: image.image.clone(),
            name: image.name.clone(),
            pulled_image: pulled.to_owned(),
            digest: Some(format!("sha256:{}", "a".repeat(64))),
            ..JobImageStatus::default()
        });
        let image_status: Vec<_> = images.collect();
        let record = |n| NodeStatus {
            node_name: format!("n{n}"),
            image_status: image_status.clone(),
            ..Default::default()
        };
        let nodes: Vec<_> = (0..JobOutput::new(usize::MAX).nodes_per_report(Some(job))).map(record).collect();
        let report = make_report("job", 0, FIRST_ATTEMPT, Rounds::default(), nodes.iter());
        serde_json::to_string(&report).unwrap()
    }

    #[test]
    fn long_names_of_images_mean_smaller_reports() {
        let host = format!("{}example:5000", "registry.".repeat(22));
        let rule = json!({ "component": "Registry", "operator": "replace", "value": host });
        let sources = (0..20).map(|n| json!({ "repository": format!("a{n}"), "name": "\u{1}".repeat(8192) }));
        let job: ImagePrePullJob = serde_json::from_value(json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob", "metadata": { "name": "job" },
            "spec": {
                "imagePrePullTemplate": { "imageSources": sources.collect::<Vec<_>>(), "nodeNames": ["a"] },
                "imagePrePullOverriders": [{ "imagePrePullOverrider": {
                    "nodeLabel": "a=b", "overriders": { "imageOverriders": [rule] },
                } }],
            },
        }))
        .unwrap();
        let mut job = validate(&job).unwrap();
        let report = full_report(&job, &format!("{host}/a1:latest"));
        assert!(report.len() <= REPORT_BUDGET, "{}", report.len());
        // What no reference can be as long as means no smaller ones.
        let nodes = |job: &ValidatedJob| JobOutput::new(usize::MAX).nodes_per_report(Some(job));
        job.overriders = vec![job.overriders[0].clone(); 9];
        let longest = nodes(&job);
        job.overriders = vec![job.overriders[0].clone(); 900];
        assert_eq!(nodes(&job), longest);
    }
}
