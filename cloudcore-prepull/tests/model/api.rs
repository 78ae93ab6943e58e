//! The API server: objects with versions, and the checks that it makes of a write.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use prepull_api::crd::job::{ImagePrePullJob, ImagePrePullJobSpec};
use prepull_api::crd::report::{ImagePrePullReport, ReportBody};
use prepull_api::crd::status::{ImagePrePullJobStatus, NodeStatus};
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::aggregate::FIRST_ATTEMPT;
use prepull_engine::prepull::controller::{Content, JobObject, StatusOrReport, UnreadableJob};

pub(crate) struct Stored<T> {
    pub(crate) version: u64,
    pub(crate) object: T,
}

/// Why a write was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There is no job of this UID.
    Gone,
    /// The object has another version than the write expects, exists although it should not, or is missing.
    Conflict,
}

#[derive(Default)]
pub(crate) struct Api {
    pub(crate) jobs: BTreeMap<JobUid, Stored<ImagePrePullJob>>,
    pub(crate) reports: BTreeMap<(JobUid, u32), Stored<ReportBody>>,
    /// Reports that a user has deleted, until they are written again.
    pub(crate) deleted_reports: BTreeMap<(JobUid, u32), ReportBody>,
    /// What the leader knows of a report that a late write of a killed cloudcore has replaced; `None` for a report that it
    /// does not know at all. Its next write of that report replaces it again, and the next leader reads it.
    pub(crate) overtaken: BTreeMap<(JobUid, u32), Option<ReportBody>>,
    /// `status.firstAttempt` as the leader knows it, for jobs with a status replaced by a killed cloudcore's late
    /// write.
    pub(crate) overtaken_runs: BTreeMap<JobUid, u32>,
    pub(crate) nodes: BTreeMap<NodeName, NodeView>,
    /// Jobs with a field of the wrong type, which an older definition let through.
    unreadable: BTreeSet<JobUid>,
    version: u64,
    uids: u64,
}

impl Api {
    pub(crate) fn create(&mut self, name: &str, spec: ImagePrePullJobSpec, now: Timestamp) -> JobUid {
        self.uids += 1;
        self.version += 1;
        let uid = JobUid(format!("uid-{}", self.uids));
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(uid.0.clone()),
            generation: Some(1),
            creation_timestamp: Some(Time(now)),
            ..ObjectMeta::default()
        };
        let object = ImagePrePullJob { metadata, spec, status: None };
        self.jobs.insert(uid.clone(), Stored { version: self.version, object });
        uid
    }

    /// Edits the spec of a job, as a user does. An edit makes an unreadable job readable.
    pub(crate) fn edit(&mut self, job: &JobUid, edit: impl FnOnce(&mut ImagePrePullJobSpec)) {
        let Some(stored) = self.jobs.get_mut(job) else { return };
        let before = stored.object.spec.clone();
        edit(&mut stored.object.spec);
        if self.unreadable.remove(job) || before != stored.object.spec {
            self.version += 1;
            stored.version = self.version;
            stored.object.metadata.generation = stored.object.metadata.generation.map(|g| g + 1);
        }
    }

    /// Edits a job so that it cannot be read any more.
    pub(crate) fn spoil(&mut self, job: &JobUid) {
        if self.unreadable.contains(job) {
            return;
        }
        let Some(stored) = self.jobs.get_mut(job) else { return };
        self.version += 1;
        stored.version = self.version;
        stored.object.metadata.generation = stored.object.metadata.generation.map(|g| g + 1);
        self.unreadable.insert(job.clone());
    }

    /// Makes a write if the object has the version that it expects. For a status, `None` stands for any version.
    pub(crate) fn write(
        &mut self,
        job: &JobUid,
        expected: Option<u64>,
        content: &Content,
    ) -> Result<u64, Refused> {
        let version = self.version + 1;
        match content {
            Content::Status(status) => {
                let stored = self.jobs.get_mut(job).ok_or(Refused::Gone)?;
                if expected.is_some_and(|expected| expected != stored.version) {
                    return Err(Refused::Conflict);
                }
                stored.version = version;
                stored.object.status = Some((**status).clone());
                self.overtaken_runs.remove(job);
            }
            Content::Report(body) => {
                let key = (job.clone(), body.index);
                if self.reports.get(&key).map(|stored| stored.version) != expected {
                    return Err(Refused::Conflict);
                }
                self.deleted_reports.remove(&key);
                self.overtaken.remove(&key);
                self.reports.insert(key, Stored { version, object: (**body).clone() });
            }
        }
        self.version = version;
        Ok(version)
    }

    /// All jobs, as a list shows them.
    pub(crate) fn list(&self) -> Vec<JobObject> {
        self.jobs.keys().filter_map(|job| self.read(job)).collect()
    }

    /// A job with its resourceVersion, or what can be read of it.
    pub(crate) fn read(&self, job: &JobUid) -> Option<JobObject> {
        let stored = self.jobs.get(job)?;
        let mut object = stored.object.clone();
        object.metadata.resource_version = Some(stored.version.to_string());
        if self.unreadable.contains(job) {
            object.spec = ImagePrePullJobSpec::default();
            let error = "spec.retry: not a number".to_owned();
            return Some(Err(UnreadableJob { rest: Box::new(object), error }));
        }
        Some(Ok(Box::new(object)))
    }

    /// The reports of a job.
    pub(crate) fn read_reports(&self, job: &JobUid) -> Vec<ImagePrePullReport> {
        let report = |(_, stored): (_, &Stored<ReportBody>)| {
            let owner = OwnerReference { uid: job.0.clone(), ..OwnerReference::default() };
            let resource_version = Some(stored.version.to_string());
            let metadata =
                ObjectMeta { owner_references: Some(vec![owner]), resource_version, ..ObjectMeta::default() };
            ImagePrePullReport { types: None, metadata, body: stored.object.clone() }
        };
        self.reports.range((job.clone(), 0)..=(job.clone(), u32::MAX)).map(report).collect()
    }

    /// The version of an object, if it exists.
    pub(crate) fn version(&self, (job, object): &(JobUid, StatusOrReport)) -> Option<u64> {
        match object {
            StatusOrReport::Status => self.jobs.get(job).map(|stored| stored.version),
            StatusOrReport::Report(index) => {
                self.reports.get(&(job.clone(), *index)).map(|stored| stored.version)
            }
        }
    }

    /// The jobs with reports of their run that were deleted by hand.
    pub(crate) fn lost_reports(&self) -> impl Iterator<Item = &JobUid> {
        let of_run = |job: &JobUid, report: &ReportBody| {
            report.first_attempt.unwrap_or(FIRST_ATTEMPT) == self.first_attempt(job)
        };
        let lost = self.deleted_reports.iter().filter(move |((job, _), report)| of_run(job, report));
        lost.map(|((job, _), _)| job)
    }

    /// Number of the first attempt in the run that a job is in, as the leader knows it.
    pub(crate) fn first_attempt(&self, job: &JobUid) -> u32 {
        let stored = || self.jobs.get(job).and_then(|stored| stored.object.status.as_ref());
        let known = self.overtaken_runs.get(job).copied();
        known.or_else(|| stored().map(first_attempt)).unwrap_or(FIRST_ATTEMPT)
    }

    /// The records of the nodes of a job in the reports of its run, as the leader knows them.
    pub(crate) fn records<'a>(&'a self, job: &JobUid) -> impl Iterator<Item = &'a NodeStatus> + use<'a> {
        let first = self.first_attempt(job);
        let range = (job.clone(), 0)..=(job.clone(), u32::MAX);
        let existing = self.reports.range(range.clone()).map(|(key, stored)| (key, &stored.object));
        // The leader knows what was in a deleted one, and is about to write it again.
        let existing = existing.chain(self.deleted_reports.range(range.clone()));
        let current = existing.filter(|(key, _)| !self.overtaken.contains_key(key)).map(|(_, report)| report);
        let overtaken = self.overtaken.range(range).filter_map(|(_, report)| report.as_ref());
        let of_run = move |report: &&ReportBody| report.first_attempt.unwrap_or(FIRST_ATTEMPT) == first;
        current.chain(overtaken).filter(of_run).flat_map(|report| report.node_status.iter())
    }

    pub(crate) fn record(&self, job: &JobUid, node: &NodeName) -> Option<&NodeStatus> {
        self.records(job).find(|record| record.node_name == node.0)
    }
}

/// Number of the first attempt in the run that this status is about.
pub(crate) fn first_attempt(status: &ImagePrePullJobStatus) -> u32 {
    status.first_attempt.unwrap_or(FIRST_ATTEMPT)
}
