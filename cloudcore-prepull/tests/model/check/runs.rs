//! The runs of a job: a further one begins each time a job that has ended is asked for other images, nodes or overriders.

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{ImagePrePullJobStatus, NodePhase};
use prepull_api::task::JobUid;
use prepull_engine::prepull::aggregate::FIRST_ATTEMPT;
use prepull_engine::shared::reasons;

use super::Check;
use super::specs::{Delivered, is_same_run, is_valid};
use crate::api::{Api, first_attempt};

/// The spec without what a cancelled job ignores, so that it is no mistake there either: another round, or a re-check.
fn without_ignored(spec: &ImagePrePullJobSpec, is_cancelled: bool) -> ImagePrePullJobSpec {
    let most = |asked: i64| if is_cancelled { asked.min(0) } else { asked };
    ImagePrePullJobSpec { retry: most(spec.retry), recheck: most(spec.recheck), ..spec.clone() }
}

impl Check {
    /// What the run of this job began with.
    pub(crate) fn beginning(&self, job: &JobUid) -> Option<&ImagePrePullJobSpec> {
        self.beginnings.get(job)
    }

    /// A job that is over begins the run that it was asked for. `has_begun`: nodes were chosen for it.
    pub(super) fn begin_run(&mut self, job: &JobUid, has_begun: bool, now: u64) {
        let next = self.next.remove(job);
        let next = next.unwrap_or_else(|| panic!("{job} begins again, and is asked for nothing else"));
        self.ended.remove(job);
        self.exceeded.remove(job);
        self.rechecks.remove(job);
        self.active_since.remove(job);
        self.emitted.retain(|(of, _), _| of != job);
        self.run_since.insert(job.clone(), now);
        if has_begun {
            self.beginnings.insert(job.clone(), next.clone());
        } else {
            self.beginnings.remove(job);
        }
        let known = self.delivered.entry(job.clone()).or_default();
        let generation = known.last().map_or(0, |last| last.generation);
        known.push(Delivered { at: now, generation, accepted: Some(next) });
    }

    /// The leader knows that the API server has this status.
    pub(crate) fn confirm_run(&mut self, job: &JobUid, status: &ImagePrePullJobStatus) {
        let begun = status.start_time.as_ref().map(|_| first_attempt(status));
        self.confirmed.insert(job.clone(), begun);
    }

    /// The API server has the job in this run, and its leader knows that.
    pub(super) fn enter_run(&mut self, job: &JobUid, first: u32) {
        let before = self.runs.insert(job.clone(), first).unwrap_or(FIRST_ATTEMPT);
        assert!(first >= before, "{job} goes back from the run of attempt {before} to that of {first}");
        if first == before {
            return;
        }
        let has_ended = self.over.contains_key(job) || !self.start_times.contains_key(job);
        assert!(has_ended, "{job} begins a run, and that it had ended is not written");
        let used = self.recorded.iter().find(|(of, _, attempt)| of == job && *attempt >= first);
        assert_eq!(used, None, "an attempt of an earlier run could be taken for one of this");
        self.start_times.remove(job);
        self.over.remove(job);
        self.late.remove(job);
        self.rounds.remove(job);
        self.nodes.retain(|(of, _), _| of != job);
    }

    /// The end of a job is reported only for the generation with the pulled images.
    pub(super) fn conditions(&self, api: &Api, job: &JobUid, status: &ImagePrePullJobStatus) {
        let observed = status.observed_generation;
        for condition in &status.conditions {
            assert_eq!(condition.observed_generation, observed, "{job}: {}", condition.type_);
            let is_end = ["Complete", "Failed", "Finished"].contains(&condition.type_.as_str());
            let has_begun = status.start_time.is_some();
            // A cancelled job is over, even if it asks for more.
            let is_said =
                is_end && has_begun && condition.status == "True" && condition.reason != reasons::CANCELLED;
            if !is_said {
                continue;
            }
            let asked = observed.and_then(|observed| self.asked.get(&(job.clone(), observed)));
            let is_cancelled = self.is_cancelled(job);
            let asked = asked.and_then(Option::as_ref).map(|asked| without_ignored(asked, is_cancelled));
            let asked = asked.filter(is_valid);
            let begun = self.begun.get(&(job.clone(), first_attempt(status)));
            let (Some(asked), Some(begun)) = (asked, begun) else {
                panic!("{job} is {} of generation {observed:?}, which makes no sense", condition.type_)
            };
            assert!(
                is_same_run(begun, &asked),
                "{job} is {} of generation {observed:?}, which was not carried out",
                condition.type_
            );
            let done = api.records(job).filter(|record| record.phase == NodePhase::Successful);
            for record in done.filter(|_| condition.type_ == "Complete") {
                let names: Vec<_> = record.image_status.iter().map(|image| image.image.clone()).collect();
                let mut wanted: Vec<_> = Vec::new();
                for image in &asked.image_pre_pull_template.images {
                    // One that is named twice is pulled once.
                    if !wanted.contains(image) {
                        wanted.push(image.clone());
                    }
                }
                assert_eq!(names, wanted, "{job} is Complete, and {} pulled others", record.node_name);
            }
        }
    }
}
