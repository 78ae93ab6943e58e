//! Parked jobs: they have begun, and their records are in the reports but not in memory. Most have been over for long: jobs
//! pile up in a cluster unless they are deleted. A job that an earlier run of cloudcore has begun is parked too while
//! it is being read.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};

use super::{JobObject, UnreadableJob, rest_of};
use crate::prepull::aggregate::FINISHED;

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

/// Whether the job has ended with another spec than its present one: see `SpecState::is_other`.
pub(super) fn is_end_unknown(status: &ImagePrePullJobStatus) -> bool {
    let is_it = |condition: &Condition| condition.type_ == FINISHED && condition.status == "Unknown";
    status.conditions.iter().any(is_it)
}

impl Parked {
    /// Parks a job that an earlier run of cloudcore has begun. A further run that only waits has the reports of the run
    /// before.
    pub(super) fn from_begun(object: &JobObject) -> Option<Self> {
        let job = rest_of(object);
        let status = job.status.as_ref()?;
        let ended = status.completion_time.as_ref().map(|time| time.0);
        if status.start_time.is_none() && ended.is_none() && status.first_attempt.is_none() {
            return None;
        }
        let accepted = accepted_spec(status);
        let ttl = accepted.as_ref().unwrap_or(&job.spec).ttl_seconds_after_finished;
        let ttl = ttl.and_then(|ttl| u64::try_from(ttl).ok());
        let after_end = |ttl| ended?.checked_add(Duration::from_secs(ttl)).ok();
        Some(Self {
            name: job.metadata.name.clone().unwrap_or_default(),
            generation: job.metadata.generation.unwrap_or_default(),
            phase: status.phase,
            delete_at: ttl.and_then(after_end),
            // If that is unknown, they stay.
            pins: accepted.map_or(object.is_err() || job.spec.pin, |accepted| accepted.pin),
            recalled: None,
        })
    }

    /// Whether a user has edited the job. An object that has become unreadable asks for nothing.
    pub(super) fn is_edited(&self, object: &JobObject) -> bool {
        matches!(object, Ok(job) if job.metadata.generation.unwrap_or_default() != self.generation)
    }
}

/// Whether the job had ended long ago, and is asked for nothing.
pub(super) fn is_settled(object: &JobObject, now: Timestamp) -> bool {
    let job = rest_of(object);
    let Some(status) = &job.status else { return false };
    // What cannot be read asks for nothing.
    let is_seen = status.observed_generation == job.metadata.generation && !is_end_unknown(status);
    let is_over_for_long = |time: &Time| parks_at(time.0) <= now;
    (object.is_err() || is_seen) && status.completion_time.as_ref().is_some_and(is_over_for_long)
}

/// What the job carried out, if that is known: its spec may say something that was refused.
fn accepted_spec(status: &ImagePrePullJobStatus) -> Option<ImagePrePullJobSpec> {
    serde_json::from_str(&status.started_spec).ok()
}

/// Drops what the controller doesn't read of a job in a list or a watch: a leader that starts gets all jobs at once, and old
/// ones may have 100 KiB each. A job that has begun is read by its name before it goes on, so no status is made from what is
/// left here.
pub fn drop_unread_fields(object: &mut JobObject, now: Timestamp) {
    let is_short = object.is_err() || !is_settled(object, now);
    let (Ok(job) | Err(UnreadableJob { rest: job, .. })) = object;
    (job.metadata.managed_fields, job.metadata.annotations) = (None, None);
    let Some(status) = &mut job.status else { return };
    (status.node_status, status.skipped_nodes) = (Vec::new(), Vec::new());
    if is_short {
        return;
    }
    let ImagePrePullJobSpec { ttl_seconds_after_finished, pin, .. } =
        accepted_spec(status).unwrap_or_else(|| std::mem::take(&mut job.spec));
    job.spec = ImagePrePullJobSpec { ttl_seconds_after_finished, pin, ..ImagePrePullJobSpec::default() };
    (status.started_spec, status.reason) = (String::new(), String::new());
}

/// When a job that ended then is parked.
pub(super) fn parks_at(ended: Timestamp) -> Timestamp {
    ended.checked_add(PARK_AFTER).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const ENDED: &str = "2026-01-01T00:00:00Z";

    #[allow(clippy::unnecessary_wraps, reason = "as lists have it")]
    fn object(generation: i64, status: &Value) -> JobObject {
        let object = json!({
            "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
            "metadata": {"name": "job", "generation": generation, "annotations": {"a": "b"}},
            "spec": {"imagePrePullTemplate": {"images": ["app:1"]}, "pin": true},
            "status": status,
        });
        Ok(Box::new(serde_json::from_value(object).unwrap()))
    }

    fn ended(generation: i64) -> JobObject {
        let status = json!({
            "observedGeneration": 1, "completionTime": ENDED, "nodeStatus": [{"nodeName": "a", "phase": "Successful"}],
            "startedSpec": r#"{"imagePrePullTemplate": {"images": ["app:0"]}, "ttlSecondsAfterFinished": 60}"#,
        });
        object(generation, &status)
    }

    fn unreadable(object: JobObject) -> JobObject {
        Err(UnreadableJob { rest: object.unwrap(), error: "spec: a number".to_owned() })
    }

    #[test]
    fn a_job_stays_settled_until_edited() {
        let at = parks_at(ENDED.parse().unwrap());
        let before = at - Duration::from_secs(1);
        assert!(!is_settled(&ended(1), before) && is_settled(&ended(1), at));
        assert!(!is_settled(&ended(2), at) && is_settled(&unreadable(ended(2)), at));
        let finished = |status| {
            let condition = json!({"type": FINISHED, "status": status, "reason": "", "message": "", "lastTransitionTime": ENDED});
            object(1, &json!({"observedGeneration": 1, "completionTime": ENDED, "conditions": [condition]}))
        };
        assert!(is_settled(&finished("True"), at) && !is_settled(&finished("Unknown"), at));
        let parked = Parked::from_begun(&ended(1)).unwrap();
        let edited = [ended(1), ended(2), unreadable(ended(2))].map(|object| parked.is_edited(&object));
        assert_eq!(edited, [false, true, false]);
    }

    #[test]
    fn only_what_has_begun_is_parked() {
        for (status, begun) in [
            (json!(null), false),
            (json!({"phase": "Failure", "reason": "refused"}), false),
            (json!({"phase": "InProgress", "startTime": ENDED}), true),
            (json!({"phase": "Init", "firstAttempt": 2}), true),
        ] {
            assert_eq!(Parked::from_begun(&object(1, &status)).is_some(), begun, "{status}");
        }
    }

    #[test]
    fn lean_and_full_jobs_park_alike() {
        let at = parks_at(ENDED.parse().unwrap());
        for object in [ended(1), ended(2), unreadable(ended(1)), object(1, &json!({"completionTime": ENDED}))]
        {
            let mut leaner = object.clone();
            drop_unread_fields(&mut leaner, at);
            assert_eq!(is_settled(&leaner, at), is_settled(&object, at));
            let [whole, lean] = [&object, &leaner].map(|object| Parked::from_begun(object).unwrap());
            assert_eq!(format!("{whole:?}"), format!("{lean:?}"));
        }
    }

    #[test]
    fn the_accepted_spec_decides_pins_and_deletion() {
        let at = parks_at(ENDED.parse().unwrap());
        for (started, pins, lasts) in [
            (
                r#"{"imagePrePullTemplate": {"images": ["app:0"]}, "ttlSecondsAfterFinished": 60}"#,
                false,
                Some(60),
            ),
            (r#"{"imagePrePullTemplate": {"images": ["app:0"]}, "pin": true}"#, true, None),
            // Not known: the spec, which pins.
            ("", true, None),
        ] {
            let status = json!({"observedGeneration": 1, "completionTime": ENDED, "startedSpec": started});
            let whole = object(1, &status);
            let mut leaner = whole.clone();
            drop_unread_fields(&mut leaner, at);
            let deletion =
                lasts.map(|seconds| ENDED.parse::<Timestamp>().unwrap() + Duration::from_secs(seconds));
            for object in [whole, leaner] {
                let parked = Parked::from_begun(&object).unwrap();
                assert_eq!((parked.pins, parked.delete_at), (pins, deletion), "{started}");
            }
        }
    }

    #[test]
    fn of_a_settled_job_little_is_left() {
        let at = parks_at(ENDED.parse().unwrap());
        let bytes = |mut object: JobObject| {
            drop_unread_fields(&mut object, at);
            let job = rest_of(&object);
            let status = job.status.as_ref().unwrap();
            let lists = status.node_status.len() + job.metadata.annotations.iter().len();
            (lists, job.spec.image_pre_pull_template.images.len(), status.started_spec.is_empty())
        };
        assert_eq!(bytes(ended(1)), (0, 0, true));
        // What goes on keeps its spec.
        assert_eq!(bytes(ended(2)), (0, 1, false));
    }
}
