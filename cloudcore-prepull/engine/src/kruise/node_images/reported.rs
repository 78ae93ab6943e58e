//! The states of tags that the jobs were told last.

use std::collections::HashMap;

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageTagSpec, NodeImageStatus, PullPhase};
use prepull_api::task::JobUid;

use super::effects::NodeEffects;
use super::object::Observed;
use super::spec_edit::{job_of, jobs_of, round_jobs};
use super::status::find;
use crate::kruise::{NodeImageUpdate, TagKey, TagRequest, TagState};

#[derive(Debug, Default)]
pub(super) struct ReportedStates(HashMap<(JobUid, TagKey), TagState>);

impl ReportedStates {
    /// Tells the jobs the states of their tags where they are not those that were reported last.
    pub(super) fn report(&mut self, object: &Observed, fx: &mut NodeEffects<'_>) {
        let mut states: HashMap<(JobUid, TagKey), TagState> = HashMap::new();
        for (image, spec) in &object.spec.images {
            for tag in &spec.tags {
                let owned = |job| (job, TagKey::new(image, &tag.tag));
                // Of a job of another namespace than the round's nothing is known but what was before.
                let before = jobs_of(tag).filter_map(|job| self.0.get_key_value(&owned(job)));
                states.extend(before.map(|(owned, state)| (owned.clone(), *state)));
                let state = tag_state(object.status.as_ref(), image, tag);
                states.extend(round_jobs(tag).filter_map(job_of).map(|job| (owned(job), state)));
            }
        }
        self.0.retain(|owned, _| {
            let is_owned = states.contains_key(owned);
            if !is_owned {
                notify(&owned.0, &owned.1, TagState::Absent, fx);
            }
            is_owned
        });
        for (owned, state) in states {
            if self.0.get(&owned) != Some(&state) {
                notify(&owned.0, &owned.1, state, fx);
                self.0.insert(owned, state);
            }
        }
    }

    /// Has the next report answer the request even if the state has not changed.
    pub(super) fn forget(&mut self, request: &TagRequest) {
        if let Some(job) = job_of(&request.owner) {
            self.0.remove(&(job, request.key.clone()));
        }
    }

    /// Answers a request that changes nothing with the state that was reported last.
    pub(super) fn answer(&self, request: &TagRequest, fx: &mut NodeEffects<'_>) {
        let Some(job) = job_of(&request.owner) else { return };
        let owned = (job, request.key.clone());
        notify(&owned.0, &owned.1, self.0.get(&owned).copied().unwrap_or(TagState::Absent), fx);
    }

    /// Answers a request that cannot be written: the tag has failed.
    pub(super) fn answer_failed(request: &TagRequest, fx: &mut NodeEffects<'_>) {
        if let Some(job) = job_of(&request.owner) {
            notify(&job, &request.key, TagState::Failed(fx.now), fx);
        }
    }

    /// Forgets everything: there is no NodeImage any more.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn notify(job: &JobUid, key: &TagKey, state: TagState, fx: &mut NodeEffects<'_>) {
    let (job, node, key) = (job.clone(), fx.node.clone(), key.clone());
    fx.notify_jobs(NodeImageUpdate::Tag { job, node, key, state });
}

/// The state of a tag as the API server has it.
fn tag_state(status: Option<&NodeImageStatus>, image: &str, tag: &ImageTagSpec) -> TagState {
    let ended =
        status.and_then(|status| find(status, image, &tag.tag)).filter(|found| found.has_ended(tag.version));
    let Some(ended) = ended else { return TagState::Pending };
    let at = ended.completion_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
    match ended.phase {
        PullPhase::Succeeded => TagState::Succeeded(at),
        _ => TagState::Failed(at),
    }
}
