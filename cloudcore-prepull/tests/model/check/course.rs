//! How a job may go on, end, and be deleted.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, Summary};
use prepull_api::task::{JobUid, NodeName};
use prepull_engine::prepull::controller::Content;
use prepull_engine::prepull::validate::Ratio;

use super::{Check, add_up};
use crate::api::Api;
use crate::world::millis;

impl Check {
    /// A write begins.
    pub(crate) fn emitted(&mut self, job: &JobUid, content: &Content, now: u64) {
        if let Content::Report(report) = content {
            self.emitted_report(job, report, now);
        }
    }

    pub(crate) fn expires(&self, api: &Api, job: &JobUid, now: u64) {
        let Some(stored) = api.jobs.get(job) else { return };
        let ended = stored.object.status.as_ref().and_then(|status| status.completion_time.as_ref());
        let ended = millis(ended.expect("deleted, and its end is not written").0);
        let ttl =
            |spec: &ImagePrePullJobSpec| spec.ttl_seconds_after_finished.map(|ttl| ttl.unsigned_abs() * 1000);
        let due = |spec| ttl(spec).is_some_and(|ttl| ended + ttl <= now);
        assert!(self.in_force(job, now).any(due), "{job} is deleted before its time");
    }

    pub(super) fn status(&mut self, job: &JobUid, status: &ImagePrePullJobStatus) {
        if let Some(start) = &status.start_time {
            let start = millis(start.0);
            let first = *self.start_times.entry(job.clone()).or_insert(start);
            assert_eq!(first, start, "{job} has another startTime");
        } else {
            assert!(!self.start_times.contains_key(job), "{job} has lost its startTime");
            if self.delivered.contains_key(job) && self.accepted(job).is_none() {
                assert_eq!(status.phase, JobPhase::Failure, "(7) {job} is no valid job");
            }
        }
        let Some(ended) = &status.completion_time else {
            if let Some((ended, rounds)) = self.over.remove(job) {
                assert!(status.retry > rounds, "(8) {job} had ended and continues without a further round");
                self.asks_again(job, ended);
            }
            return;
        };
        let ended_at = millis(ended.0);
        let before = self.over.insert(job.clone(), (ended_at, status.retry));
        assert_eq!(status.summary.in_progress, 0, "{job} has ended and nodes are in progress");
        if before.is_some_and(|(_, rounds)| rounds == status.retry) {
            return;
        }
        if let Some((ended, _)) = before {
            self.asks_again(job, ended);
        }
        let bad = status.summary.failure + status.summary.unknown;
        let late = self.late.get(job).copied().unwrap_or_default();
        let mut rules = self.in_force(job, ended_at);
        let exceeded = |spec: &ImagePrePullJobSpec, bad| {
            let tolerance = Ratio::parse(&spec.image_pre_pull_template.failure_tolerate);
            tolerance.is_ok_and(|tolerance| tolerance.exceeded_by(bad, status.summary.desired))
        };
        match status.phase {
            JobPhase::Completed => {
                assert_eq!(status.summary.pending, 0, "{job} is Completed and nodes wait");
                assert!(rules.any(|spec| !exceeded(spec, bad)), "{job} is Completed with {bad} bad nodes");
            }
            JobPhase::Failure => assert!(
                rules.any(|spec| {
                    status.summary.desired == 0
                        || spec.active_deadline_seconds.is_some()
                        || spec.rollout.is_some()
                        || exceeded(spec, bad + late)
                }),
                "{job} is a Failure with {bad} bad nodes"
            ),
            JobPhase::Init | JobPhase::InProgress => panic!("{job} has an end and is {:?}", status.phase),
        }
    }

    /// A job that had ended continues only if somebody has raised `retry` since.
    fn asks_again(&self, job: &JobUid, ended: u64) {
        let asked: Vec<i64> = self.in_force_since(job, ended, u64::MAX).map(|spec| spec.retry).collect();
        let is_raised = asked.windows(2).any(|pair| pair[1] > pair[0]);
        assert!(is_raised, "{job} had ended at {ended} and continues, and nobody has raised retry");
    }

    /// Every job has ended, and its status agrees with its reports.
    pub(crate) fn settled(api: &Api) {
        for (uid, stored) in &api.jobs {
            let status = stored.object.status.clone().unwrap_or_default();
            let over = matches!(status.phase, JobPhase::Completed | JobPhase::Failure);
            assert!(over, "{uid} does not end: {:?} {:?} {}", status.phase, status.summary, status.reason);
            assert_eq!(status.observed_generation, stored.object.metadata.generation, "{uid}");
            if status.start_time.is_none() {
                continue;
            }
            let mut names: Vec<_> = api.records(uid).map(|record| &record.node_name).collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "(8) a node of {uid} is in two reports");
            add_up(&Summary { skipped: 0, ..status.summary }, api.records(uid));
            for shown in &status.node_status {
                let record = api.record(uid, &NodeName(shown.node_name.clone()));
                assert_eq!(record.map(|r| (r.phase, r.attempt)), Some((shown.phase, shown.attempt)), "{uid}");
            }
        }
    }
}
