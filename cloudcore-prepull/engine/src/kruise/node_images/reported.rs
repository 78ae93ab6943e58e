//! The last tag states that the jobs received.

use std::collections::BTreeMap;
use std::sync::Arc;

use prepull_api::crd::kruise::PullPhase;
use prepull_api::task::JobUid;

use super::compact::{CompactNodeImage, CompactTag};
use super::effects::NodeEffects;
use super::owners::{job_of, jobs_of, round_jobs};
use super::shared_parts::SharedParts;
use crate::kruise::{NodeImageUpdate, TagKey, TagRequest, TagState};

type Owned = (Arc<JobUid>, Arc<TagKey>);

/// Sorted: a map would take twice the room, on each of ten thousand nodes.
#[derive(Debug, Default)]
pub(super) struct ReportedStates(Vec<(Owned, TagState)>);

impl ReportedStates {
    /// Reports to the jobs the tag states that changed since the last report.
    pub(super) fn report(
        &mut self,
        object: &CompactNodeImage,
        parts: &mut SharedParts,
        fx: &mut NodeEffects<'_>,
    ) {
        let mut states: BTreeMap<Owned, TagState> = BTreeMap::new();
        for (image, _, tags) in object.images() {
            for tag in tags {
                let key = parts.key(&TagKey::new(image, &tag.name));
                let owners = &tag.terms.owner_references;
                // Of a job of another namespace than the round's nothing is known but what was before.
                for job in jobs_of(owners) {
                    if let Some(state) = self.get(&job, &key) {
                        states.insert((parts.job(&job), key.clone()), state);
                    }
                }
                let state = tag_state(object, image, tag);
                for job in round_jobs(owners).filter_map(job_of) {
                    states.insert((parts.job(&job), key.clone()), state);
                }
            }
        }
        for (owned, _) in &self.0 {
            if !states.contains_key(owned) {
                notify_tag_state(&owned.0, &owned.1, TagState::Absent, fx);
            }
        }
        for (owned, state) in &states {
            if self.get(&owned.0, &owned.1) != Some(*state) {
                notify_tag_state(&owned.0, &owned.1, *state, fx);
            }
        }
        self.0 = states.into_iter().collect();
    }

    fn find_index(&self, job: &JobUid, key: &TagKey) -> Result<usize, usize> {
        self.0.binary_search_by(|((known_job, known_key), _)| (&**known_job, &**known_key).cmp(&(job, key)))
    }

    fn get(&self, job: &JobUid, key: &TagKey) -> Option<TagState> {
        self.find_index(job, key).ok().map(|at| self.0[at].1)
    }

    /// Has the next report answer the request even if the state has not changed.
    pub(super) fn forget(&mut self, request: &TagRequest) {
        let at = job_of(&request.owner).map(|job| self.find_index(&job, &request.key));
        if let Some(Ok(at)) = at {
            self.0.remove(at);
        }
    }

    /// Answers a request that changes nothing with the state that was reported last.
    pub(super) fn answer(&self, request: &TagRequest, fx: &mut NodeEffects<'_>) {
        let Some(job) = job_of(&request.owner) else { return };
        notify_tag_state(&job, &request.key, self.get(&job, &request.key).unwrap_or(TagState::Absent), fx);
    }

    /// Answers a request that cannot be written: the tag has failed.
    pub(super) fn answer_failed(request: &TagRequest, fx: &mut NodeEffects<'_>) {
        if let Some(job) = job_of(&request.owner) {
            notify_tag_state(&job, &request.key, TagState::Failed(fx.now), fx);
        }
    }

    /// Reports all tags as absent: the NodeImage is gone, and will be created again.
    pub(super) fn take_back(&mut self, fx: &mut NodeEffects<'_>) {
        for ((job, key), _) in self.0.drain(..) {
            notify_tag_state(&job, &key, TagState::Absent, fx);
        }
    }
}

fn notify_tag_state(job: &JobUid, key: &TagKey, state: TagState, fx: &mut NodeEffects<'_>) {
    let (job, node, key) = (job.clone(), fx.node.clone(), key.clone());
    fx.notify_jobs(NodeImageUpdate::Tag { job, node, key, state });
}

fn tag_state(object: &CompactNodeImage, image: &str, tag: &CompactTag) -> TagState {
    let status = object.status_of(image, &tag.name);
    let ended = status.and_then(|status| Some((status.phase, status.ended_at(tag.version)?)));
    match ended {
        None => TagState::Pending,
        Some((PullPhase::Succeeded, at)) => TagState::Succeeded(at),
        Some((_, at)) => TagState::Failed(at),
    }
}
