//! Jobs that are over for long: their records are in the reports, and not in memory any more. A fleet's jobs pile up
//! in the cluster unless somebody deletes them.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

use super::JobObject;

/// How long after its end a job takes late results: a node that was away comes back within the hour, or its images
/// concern the next job. What comes later is acknowledged, and written nowhere.
pub const PARK_AFTER: Duration = Duration::from_secs(3600);

/// What is kept of such a job.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) name: String,
    /// Of the spec that it ended with: another one brings it back, for it may ask for another round.
    pub(super) generation: i64,
    pub(super) phase: JobPhase,
    /// By ttlSecondsAfterFinished.
    pub(super) delete_at: Option<Timestamp>,
    /// It and its reports are being read.
    pub(super) recalled: bool,
}

impl Parked {
    /// A job that was over long before this life of cloudcore, and of which nothing is asked.
    pub(super) fn settled(job: &ImagePrePullJob, now: Timestamp) -> Option<Self> {
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref()?.0;
        let settled = status.observed_generation == job.metadata.generation && parks_at(ended) <= now;
        let asks_again = i64::from(status.retry) < job.spec.retry;
        (settled && !asks_again).then(|| Self::over(job, status, ended))
    }

    /// A job that is over, and whose reports have not been read although they are needed by now: it was edited
    /// between the two lists.
    pub(super) fn without_reports(job: &ImagePrePullJob, reports: &[ReportBody]) -> Option<Self> {
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref()?.0;
        let known: usize = reports.iter().map(|report| report.node_status.len()).sum();
        (known < status.summary.desired as usize).then(|| Self::over(job, status, ended))
    }

    fn over(job: &ImagePrePullJob, status: &ImagePrePullJobStatus, ended: Timestamp) -> Self {
        let ttl = job.spec.ttl_seconds_after_finished.and_then(|ttl| u64::try_from(ttl).ok());
        Self {
            name: job.metadata.name.clone().unwrap_or_default(),
            generation: job.metadata.generation.unwrap_or_default(),
            phase: status.phase,
            delete_at: ttl.and_then(|ttl| ended.checked_add(Duration::from_secs(ttl)).ok()),
            recalled: false,
        }
    }

    /// Whether somebody has edited the job. An object that cannot be read any more asks for nothing.
    pub(super) fn is_edited(&self, object: &JobObject) -> bool {
        matches!(object, Ok(job) if job.metadata.generation.unwrap_or_default() != self.generation)
    }
}

/// Whether the reports of this job are needed to go on with it.
pub fn needs_reports(job: &ImagePrePullJob, now: Timestamp) -> bool {
    Parked::settled(job, now).is_none()
}

/// When a job that ended then is parked.
pub(super) fn parks_at(ended: Timestamp) -> Timestamp {
    ended.checked_add(PARK_AFTER).unwrap_or(Timestamp::MAX)
}
