//! The page's state of jobs and nodes, fed by watches. Pure: the time is an argument.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::ImagePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};

use super::rows::{JobRow, NodeRow};
use crate::hearing::Hearing;
use crate::jobs;
use crate::kruise::row_name;
use crate::listing::{ListChange, Listing};
use crate::progress::pace::PaceMeter;
use crate::progress::tally::Tally;
use crate::progress::view::JobView;

/// A row as it is sent, with a number that grows with each change of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) change: u64,
    pub(crate) json: Arc<str>,
}

type Reports = HashMap<String, BTreeMap<String, ReportRows>>;

/// Everything that is known.
#[derive(Debug, Default)]
pub(crate) struct PageState {
    jobs: BTreeMap<String, Tracked>,
    listed_jobs: Listing<String>,
    /// Whether all jobs are known.
    has_jobs: bool,
    /// By the UID of their job, and by name.
    reports: Reports,
    listed_reports: Listing<(String, String)>,
    /// Whether all reports are known: what a list brings in is no download.
    has_reports: bool,
    /// Those of OpenKruise, by namespace and name, each with its row.
    pull_jobs: BTreeMap<(String, String), (ImagePullJob, Option<Sent>)>,
    listed_pull_jobs: Listing<(String, String)>,
    labels: HashMap<String, BTreeMap<String, String>>,
    listed_nodes: Listing<String>,
    /// Whether the cluster is heard.
    hearing: Hearing,
    changes: u64,
}

#[derive(Debug)]
struct Tracked {
    job: ImagePrePullJob,
    pace: PaceMeter,
    row: Option<Sent>,
    is_dirty: bool,
}

#[derive(Debug)]
struct ReportRows {
    /// The first attempt of its run: a new run replaces the reports of the last one by and by.
    first_attempt: Option<u32>,
    tally: Tally,
    nodes: Vec<Arc<NodeRow>>,
}

impl PageState {
    /// Takes a change of a job.
    pub(crate) fn take_job(&mut self, event: Event<ImagePrePullJob>) {
        match self.listed_jobs.take_event(event, ResourceExt::name_any) {
            Some(ListChange::Put(job)) => self.put_job(job),
            Some(ListChange::Remove(job)) => {
                self.jobs.remove(&job.name_any());
                self.changes += 1;
            }
            Some(ListChange::Retain(names)) => {
                self.jobs.retain(|name, _| names.contains(name));
                self.has_jobs = true;
                self.changes += 1;
            }
            None => {}
        }
    }

    fn put_job(&mut self, job: ImagePrePullJob) {
        let known = self.jobs.get_mut(&job.name_any());
        if let Some(known) = known.filter(|known| known.job.metadata.uid == job.metadata.uid) {
            // Other reports count from here on.
            self.changes += u64::from(jobs::run_of(&known.job) != jobs::run_of(&job));
            (known.job, known.is_dirty) = (job, true);
            return;
        }
        let fresh = Tracked { pace: PaceMeter::default(), row: None, is_dirty: true, job };
        self.jobs.insert(fresh.job.name_any(), fresh);
    }

    /// Takes a change of a report.
    pub(crate) fn take_report(&mut self, event: Event<ImagePrePullReport>) {
        let key = |report: &ImagePrePullReport| (uid_of_job(report), report.name_any());
        match self.listed_reports.take_event(event, key) {
            Some(ListChange::Put(report)) => self.put_report(&report),
            Some(ListChange::Remove(report)) => {
                let uid = uid_of_job(&report);
                if let Some(reports) = self.reports.get_mut(&uid) {
                    reports.remove(&report.name_any());
                }
                self.mark_changed(&uid);
            }
            Some(ListChange::Retain(listed)) => {
                for (uid, reports) in &mut self.reports {
                    reports.retain(|name, _| listed.contains(&(uid.clone(), name.clone())));
                }
                self.reports.retain(|_, reports| !reports.is_empty());
                self.has_reports = true;
                self.changes += 1;
            }
            None => {}
        }
    }

    fn put_report(&mut self, report: &ImagePrePullReport) {
        let uid = uid_of_job(report);
        let reports = self.reports.entry(uid.clone()).or_default();
        let before = reports.remove(&report.name_any());
        let mut before: HashMap<String, Arc<NodeRow>> = before
            .map(|before| before.nodes.into_iter().map(|node| (node.name.clone(), node)).collect())
            .unwrap_or_default();
        let nodes = report.body.node_status.iter().map(|node| {
            let row = NodeRow::from_status(node);
            // What has not changed stays the same, so that it is not sent again.
            before.remove(&row.name).filter(|before| **before == row).unwrap_or_else(|| Arc::new(row))
        });
        let report_now = ReportRows {
            first_attempt: report.body.first_attempt,
            tally: Tally::of_report(report),
            nodes: nodes.collect(),
        };
        reports.insert(report.name_any(), report_now);
        self.mark_changed(&uid);
    }

    fn mark_changed(&mut self, uid: &str) {
        self.changes += 1;
        if let Some(tracked) = self.jobs.values_mut().find(|known| known.job.uid().as_deref() == Some(uid)) {
            tracked.is_dirty = true;
        }
    }

    /// Takes a change of a job of OpenKruise.
    pub(crate) fn take_pull_job(&mut self, event: Event<ImagePullJob>) {
        let key = |job: &ImagePullJob| (job.namespace().unwrap_or_default(), job.name_any());
        match self.listed_pull_jobs.take_event(event, key) {
            Some(ListChange::Put(job)) => {
                self.pull_jobs.insert(key(&job), (job, None));
            }
            Some(ListChange::Remove(job)) => {
                self.pull_jobs.remove(&key(&job));
                self.changes += 1;
            }
            Some(ListChange::Retain(listed)) => {
                self.pull_jobs.retain(|key, _| listed.contains(key));
                self.changes += 1;
            }
            None => {}
        }
    }

    /// Takes a change of a node's labels.
    pub(crate) fn take_node(&mut self, event: Event<PartialObjectMeta<Node>>) {
        match self.listed_nodes.take_event(event, ResourceExt::name_any) {
            Some(ListChange::Put(node)) => {
                // Most changes of a Node are of other things.
                let before = self.labels.insert(node.name_any(), node.labels().clone());
                self.changes += u64::from(before.as_ref() != Some(node.labels()));
            }
            Some(ListChange::Remove(node)) => {
                self.labels.remove(&node.name_any());
                self.changes += 1;
            }
            Some(ListChange::Retain(names)) => {
                self.labels.retain(|name, _| names.contains(name));
                self.changes += 1;
            }
            None => {}
        }
    }

    /// Whether the cluster is heard.
    pub(crate) fn hearing(&self) -> &Hearing {
        &self.hearing
    }

    /// Changes what is known about the connection. The pages learn of it if it's news.
    pub(crate) fn update_hearing(&mut self, change: impl FnOnce(&mut Hearing)) {
        let before = self.hearing.clone();
        change(&mut self.hearing);
        self.changes += u64::from(self.hearing.state() != before.state());
    }

    /// Rebuilds the rows of jobs that have changed or run; `passed` is the time since the start. Returns a number that
    /// grows with each change.
    pub(crate) fn refresh_rows(&mut self, now: Timestamp, passed: Duration) -> u64 {
        for Tracked { job, pace, row, is_dirty } in self.jobs.values_mut() {
            if !std::mem::take(is_dirty) && row.is_some() && jobs::is_over(job) {
                continue;
            }
            let tally = Tally::sum(reports_of(&self.reports, job).map(|report| &report.tally));
            let mut view = JobView::new(job, &tally, None, now);
            let observed =
                self.has_reports.then(|| pace.observe(passed, view.bytes.done, view.done)).flatten();
            if let Some(pace) = observed {
                view = JobView::new(job, &tally, Some(pace), now);
            }
            put_row(row, &JobRow::new(job, view), &mut self.changes);
        }
        for (job, row) in self.pull_jobs.values_mut() {
            let is_over = job.status.as_ref().is_some_and(|status| status.completion_time.is_some());
            if row.is_none() || !is_over {
                put_row(row, &JobRow::of_kruise(job, now), &mut self.changes);
            }
        }
        self.changes
    }

    /// Whether all jobs are known, with their rows: until then one that is missing may exist.
    pub(crate) fn has_jobs(&self) -> bool {
        self.has_jobs && self.jobs.values().all(|job| job.row.is_some())
    }

    /// The rows of all jobs.
    pub(crate) fn jobs(&self) -> BTreeMap<String, Sent> {
        let rows = self.jobs.iter().filter_map(|(name, job)| Some((name.clone(), job.row.clone()?)));
        let of_kruise = self.pull_jobs.values().filter_map(|(job, row)| Some((row_name(job), row.clone()?)));
        rows.chain(of_kruise).collect()
    }

    /// The nodes of a job, by name.
    pub(crate) fn nodes(&self, job: &str) -> BTreeMap<String, Arc<NodeRow>> {
        let reports = self.jobs.get(job).into_iter().flat_map(|known| reports_of(&self.reports, &known.job));
        let nodes = reports.flat_map(|report| &report.nodes);
        nodes.map(|node| (node.name.clone(), Arc::clone(node))).collect()
    }

    /// The name of the report of a job that has a node.
    pub(crate) fn report_of(&self, job: &str, node: &str) -> Option<String> {
        let job = &self.jobs.get(job)?.job;
        let run = jobs::run_of(job);
        let has_node = |report: &ReportRows| report.nodes.iter().any(|row| row.name == node);
        let mut reports = self.reports.get(&job.uid()?)?.iter();
        let found = reports.find(|(_, report)| report.first_attempt == run && has_node(report));
        found.map(|(name, _)| name.clone())
    }

    /// The jobs of a node, by name, each with its row there.
    pub(crate) fn jobs_of(&self, node: &str) -> BTreeMap<&str, &NodeRow> {
        let row = |job: &Tracked| {
            let nodes = reports_of(&self.reports, &job.job).flat_map(|report| &report.nodes);
            nodes.map(Arc::as_ref).find(|row| row.name == node)
        };
        self.jobs.iter().filter_map(|(name, job)| Some((name.as_str(), row(job)?))).collect()
    }

    /// The value of a label, of all nodes that have it.
    pub(crate) fn label_values(&self, label: &str) -> BTreeMap<&str, &str> {
        let labelled = self.labels.iter();
        labelled.filter_map(|(node, labels)| Some((node.as_str(), labels.get(label)?.as_str()))).collect()
    }
}

/// The reports of a job's current run.
fn reports_of<'a>(
    reports: &'a Reports,
    job: &ImagePrePullJob,
) -> impl Iterator<Item = &'a ReportRows> + use<'a> {
    let run = jobs::run_of(job);
    let all = job.uid().and_then(|uid| reports.get(&uid));
    all.into_iter().flat_map(BTreeMap::values).filter(move |report| report.first_attempt == run)
}

/// Puts a row in place of the one before, if it is another one.
fn put_row(row: &mut Option<Sent>, now: &JobRow, changes: &mut u64) {
    let json = serde_json::to_string(now).unwrap_or_default();
    if row.as_ref().is_none_or(|row| *row.json != *json) {
        *changes += 1;
        *row = Some(Sent { change: *changes, json: json.into() });
    }
}

fn uid_of_job(report: &ImagePrePullReport) -> String {
    report.labels().get(JOB_UID_LABEL).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests;
