//! The expected state of the jobs after their inputs and actions: simple, and without any index.

use std::collections::{BTreeMap, BTreeSet};

use prepull_api::crd::kruise::ImagePullJobSpec;

use super::super::super::*;
use super::world::World;
use crate::kruise::TagState;
use crate::kruise::rules::{self, Completion, NodeChoice, ValidPullJob};

/// The state that a node must have for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedState {
    Waiting,
    /// The image was changed, and the node has not been asked since.
    Reset,
    Pending,
    Ended(bool, Timestamp),
}

#[derive(Debug, Default)]
pub(super) struct ExpectedJob {
    pub(super) valid: Option<ValidPullJob>,
    pub(super) refused: bool,
    pub(super) spec: Option<ImagePullJobSpec>,
    /// It has published an event that it has ended.
    pub(super) ended: bool,
    pub(super) gave_up: bool,
    /// Of its nodes, and of nodes that reported tags.
    pub(super) states: BTreeMap<String, ExpectedState>,
    /// States of tags from before its spec was valid.
    pub(super) early_states: BTreeMap<(String, TagKey), TagState>,
}

impl ExpectedJob {
    /// `is_over`: the API server has its end.
    pub(super) fn observe_spec(&mut self, spec: &ImagePullJobSpec, is_over: bool) {
        if is_over || self.spec.as_ref() == Some(spec) {
            return;
        }
        self.spec = Some(spec.clone());
        (self.ended, self.gave_up) = (false, false);
        let Ok(valid) = rules::pull_job(spec) else {
            self.refused = true;
            return;
        };
        if self.valid.as_ref().is_some_and(|known| known.image != valid.image) {
            self.states.values_mut().for_each(|state| *state = ExpectedState::Reset);
        }
        (self.refused, self.valid) = (false, Some(valid));
        for ((node, key), state) in std::mem::take(&mut self.early_states) {
            self.observe(&node, &key, state);
        }
    }

    pub(super) fn is_never(&self) -> bool {
        self.valid.as_ref().is_some_and(|valid| valid.template.completion == Completion::Never)
    }

    pub(super) fn state(&self, node: &str) -> ExpectedState {
        self.states.get(node).copied().unwrap_or(ExpectedState::Waiting)
    }

    pub(super) fn observe(&mut self, node: &str, key: &TagKey, state: TagState) {
        match &self.valid {
            None => {
                self.early_states.insert((node.to_owned(), key.clone()), state);
                return;
            }
            Some(valid) if valid.image != *key => return,
            Some(_) => {}
        }
        let never = self.is_never();
        let state = match (self.state(node), state) {
            (state @ ExpectedState::Reset, _) => state,
            (state @ ExpectedState::Ended(..), TagState::Absent | TagState::Pending) if !never => state,
            (state @ ExpectedState::Ended(true, _), TagState::Failed(_)) if !never => state,
            (_, TagState::Absent) => ExpectedState::Waiting,
            (_, TagState::Pending) => ExpectedState::Pending,
            (_, TagState::Succeeded(at)) => ExpectedState::Ended(true, at),
            (_, TagState::Failed(at)) => ExpectedState::Ended(false, at),
        };
        self.states.insert(node.to_owned(), state);
    }
}

impl World {
    /// Updates which nodes each job has.
    pub(super) fn sync(&mut self) {
        for job in self.api.keys().cloned().collect::<Vec<_>>() {
            if !self.expected.contains_key(&job) {
                continue;
            }
            let selected = self.selected(&job);
            let states = &mut self.expected.get_mut(&job).unwrap().states;
            states.retain(|node, state| *state != ExpectedState::Waiting || selected.contains(node));
            for node in selected {
                states.entry(node).or_insert(ExpectedState::Waiting);
            }
        }
    }

    /// The job's nodes.
    pub(super) fn selected(&self, job: &JobUid) -> BTreeSet<String> {
        let Some(valid) = &self.expected[job].valid else { return BTreeSet::new() };
        let selects = |node: &str| match &valid.template.nodes {
            NodeChoice::All => true,
            NodeChoice::Names(names) => names.contains(&NodeName::from(node)),
            NodeChoice::Labels(selector) => selector.matches(&self.labels(node)),
            NodeChoice::Pods(selector) => self
                .pods
                .values()
                .any(|pod| pod.node.as_ref().is_some_and(|at| at.0 == node) && selector.matches(&pod.labels)),
        };
        self.nodes.keys().filter(|node| selects(node)).cloned().collect()
    }

    /// Whether the node holds a slot for the job.
    pub(super) fn holds_slot(&self, job: &JobUid, node: &str) -> bool {
        let (job, at) = (&self.expected[job], &self.nodes[node]);
        let is_near = at.online || self.now.duration_since(at.since).as_secs() < 60;
        !job.ended && !job.refused && job.state(node) == ExpectedState::Pending && is_near
    }

    /// The nodes that are busy with any job of the group.
    pub(super) fn busy(&self, group: &JobUid) -> BTreeSet<String> {
        let members = self.api.iter().filter(|(_, job)| &super::world::group(job) == group);
        let busy = members.flat_map(|(uid, _)| {
            self.selected(uid).into_iter().filter(move |node| self.holds_slot(uid, node))
        });
        busy.collect()
    }

    /// How many nodes the jobs of a group may keep busy.
    pub(super) fn parallelism(&self, group: &JobUid) -> u32 {
        if let Some(valid) = self.expected_lists.get(group).and_then(Option::as_ref) {
            return valid.template.parallelism;
        }
        let members = self.api.iter().filter(|(_, job)| &super::world::group(job) == group);
        let jobs = members.map(|(uid, _)| &self.expected[uid]).filter(|job| !job.refused && !job.ended);
        jobs.filter_map(|job| Some(job.valid.as_ref()?.template.parallelism)).min().unwrap_or(0)
    }

    /// How many nodes are desired, active and succeeded, and the names of those that failed.
    pub(super) fn counts(&self, job: &JobUid) -> (i32, i32, i32, Vec<String>) {
        let job_state = &self.expected[job];
        let nodes = self.selected(job);
        let count = |what: &dyn Fn(&String) -> bool| {
            i32::try_from(nodes.iter().filter(|node| what(node)).count()).unwrap()
        };
        let succeeded = count(&|node| matches!(job_state.state(node), ExpectedState::Ended(true, _)));
        let failed =
            nodes.iter().filter(|node| matches!(job_state.state(node), ExpectedState::Ended(false, _)));
        let active = count(&|node| self.holds_slot(job, node));
        (count(&|_| true), active, succeeded, failed.cloned().collect())
    }
}
