//! Parked jobs: they have been over for long, and their records are in the reports but no longer in memory. Jobs pile up
//! in a cluster unless somebody deletes them.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

use super::JobObject;

/// How long after its end a job still records late results. A later result is acknowledged, and written nowhere: its
/// images concern the next job.
pub const PARK_AFTER: Duration = Duration::from_secs(3600);

/// What is kept in memory of a parked job.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) name: String,
    /// The generation of the spec that the job ended with. Another one brings the job back, for it may ask for a further
    /// round.
    pub(super) generation: i64,
    pub(super) phase: JobPhase,
    /// When ttlSecondsAfterFinished are over, or when a deletion without effect is asked for again.
    pub(super) delete_at: Option<Timestamp>,
    /// Whether the job and its reports are being read.
    pub(super) recalled: bool,
}

impl Parked {
    /// Parks a job that had ended long before this run of cloudcore and is asked for nothing.
    pub(super) fn settled(job: &ImagePrePullJob, now: Timestamp) -> Option<Self> {
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref()?.0;
        let settled = status.observed_generation == job.metadata.generation && parks_at(ended) <= now;
        let asks_again = i64::from(status.retry) < job.spec.retry;
        (settled && !asks_again).then(|| Self::over(job, status, ended))
    }

    /// Parks a job that is over and whose reports are needed now but have not been read: it was edited between the list
    /// of reports and that of jobs.
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
