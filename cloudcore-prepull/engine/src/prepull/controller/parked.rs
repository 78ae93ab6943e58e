//! Parked jobs: they have been over for long, and their records are in the reports but no longer in memory. Jobs pile up
//! in a cluster unless somebody deletes them.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

use super::job::is_end_unknown;
use super::{JobObject, rest_of};

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
    /// Whether the job wants its images pinned.
    pub(super) pins: bool,
    /// While the job and its reports are being read, the newest object that is known: it may be edited in that time.
    pub(super) recalled: Option<JobObject>,
}

impl Parked {
    /// Parks a job that had ended long before this run of cloudcore and is asked for nothing.
    pub(super) fn settled(object: &JobObject, now: Timestamp) -> Option<Self> {
        let job = rest_of(object);
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref()?.0;
        // What cannot be read asks for nothing.
        let is_seen = object.is_err() || status.observed_generation == job.metadata.generation;
        let is_settled = is_seen && (object.is_err() || !is_end_unknown(status));
        (is_settled && parks_at(ended) <= now).then(|| Self::over(object, status, ended))
    }

    /// Parks a job that is over and whose reports are needed now but have not been read: it was edited between the list
    /// of reports and that of jobs.
    pub(super) fn without_reports(object: &JobObject, reports: &[ReportBody]) -> Option<Self> {
        let job = rest_of(object);
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref()?.0;
        let of_run = reports.iter().filter(|report| report.first_attempt == status.first_attempt);
        let known: usize = of_run.map(|report| report.node_status.len()).sum();
        (known < status.summary.desired as usize).then(|| Self::over(object, status, ended))
    }

    fn over(object: &JobObject, status: &ImagePrePullJobStatus, ended: Timestamp) -> Self {
        let job = rest_of(object);
        // The spec may say something that was refused.
        let accepted = serde_json::from_str::<ImagePrePullJobSpec>(&status.started_spec).ok();
        let ttl = accepted.as_ref().unwrap_or(&job.spec).ttl_seconds_after_finished;
        let ttl = ttl.and_then(|ttl| u64::try_from(ttl).ok());
        Self {
            name: job.metadata.name.clone().unwrap_or_default(),
            generation: job.metadata.generation.unwrap_or_default(),
            phase: status.phase,
            delete_at: ttl.and_then(|ttl| ended.checked_add(Duration::from_secs(ttl)).ok()),
            // Where nobody can tell, they stay.
            pins: accepted.map_or(object.is_err() || job.spec.pin, |accepted| accepted.pin),
            recalled: None,
        }
    }

    /// Whether somebody has edited the job. An object that cannot be read any more asks for nothing.
    pub(super) fn is_edited(&self, object: &JobObject) -> bool {
        matches!(object, Ok(job) if job.metadata.generation.unwrap_or_default() != self.generation)
    }
}

/// Whether the reports of this job are needed to go on with it.
pub fn needs_reports(job: &JobObject, now: Timestamp) -> bool {
    Parked::settled(job, now).is_none()
}

/// When a job that ended then is parked.
pub(super) fn parks_at(ended: Timestamp) -> Timestamp {
    ended.checked_add(PARK_AFTER).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::prepull::controller::UnreadableJob;

    #[test]
    fn a_job_that_has_been_over_for_long_needs_its_reports_once_it_is_edited() {
        let object = |generation: i64| {
            let object = json!({
                "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
                "metadata": {"name": "job", "generation": generation},
                "spec": {"imagePrePullTemplate": {"images": ["app:1"]}},
                "status": {"observedGeneration": 1, "completionTime": "2026-01-01T00:00:00Z"},
            });
            JobObject::Ok(Box::new(serde_json::from_value(object).unwrap()))
        };
        let ended: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let (at, before) = (parks_at(ended), parks_at(ended) - Duration::from_secs(1));
        assert!(needs_reports(&object(1), before) && !needs_reports(&object(1), at));
        assert!(needs_reports(&object(2), at));
        let parked = Parked::settled(&object(1), at).unwrap();
        let unreadable = |object: JobObject| {
            JobObject::Err(UnreadableJob { rest: object.unwrap(), error: "spec: a number".to_owned() })
        };
        let edited = [object(1), object(2), unreadable(object(2))].map(|object| parked.is_edited(&object));
        assert_eq!(edited, [false, true, false]);
    }
}
