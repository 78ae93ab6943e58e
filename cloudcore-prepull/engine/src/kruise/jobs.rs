//! ImagePullJobs and ImageListPullJobs: which nodes get which tag when, and the statuses. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use prepull_api::task::{JobUid, NodeName};

use super::{Liveness, NodeImageUpdate, TagKey, TagRequest, TagState};
use crate::shared::objects::ObjectId;

mod finished;
mod fleet;
mod io;
mod kind;
mod lifecycle;
mod lists;
mod metadata;
mod pods;
mod pull_job;
mod registry;
mod roster;
mod run;
mod status;
mod tag_requests;
mod tally;
#[cfg(test)]
mod tests;

use fleet::{KruiseFleet, Presence, SharedName};
pub use io::{Action, ChildSpec, Input, JobWrite, Pod, WriteTarget};
use kind::KruiseJobObject;
use lists::Lists;
use pods::Pods;
use pull_job::RunningPullJob;
use registry::{JobRegistry, RegistryVerdict};
use run::PullJobRun;

/// States of tags for jobs that the watch has not delivered yet, or that cannot be read.
type EarlyTagStates = HashMap<(NodeName, TagKey), TagState>;

type Effects<'a> = crate::shared::effects::Effects<'a, Action>;

/// All jobs, and what they know of nodes and pods.
#[derive(Debug, Default)]
pub struct KruiseJobs {
    fleet: KruiseFleet,
    pods: Pods,
    /// Whether all pods are known. Until then jobs that select by them wait.
    knows_pods: bool,
    registry: JobRegistry<RunningPullJob>,
    lists: Lists,
    /// The running jobs that share one parallelism, by their list, or by the ImagePullJob itself.
    groups: HashMap<ObjectId, BTreeSet<JobUid>>,
    early_states: HashMap<JobUid, EarlyTagStates>,
    actions: Vec<Action>,
}

impl KruiseJobs {
    /// Takes an input in. The actions that follow from it come out of [`Self::flush`].
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        self.with_effects(now, |jobs, fx| jobs.apply_input(input, fx));
    }

    /// Reconciles the jobs that an input or the time has changed. Not to be called before nodes, NodeImages and jobs
    /// have all been listed.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        self.with_effects(now, |jobs, fx| {
            while let Some(node) = jobs.fleet.pop_offline(now) {
                jobs.set_presence(&node, Presence::Offline);
            }
            jobs.lists.flush(fx);
            jobs.registry.agenda.wake_up(now);
            jobs.advance_marked_jobs(fx);
        });
        std::mem::take(&mut self.actions)
    }

    /// When [`Self::flush`] must run next even without an input.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let jobs = self.registry.agenda.next_wakeup();
        [jobs, self.lists.next_wakeup(), self.fleet.next_wakeup()].into_iter().flatten().min()
    }

    /// What the job means for the tags that it owns. Not to be called before all ImagePullJobs have been listed.
    pub(crate) fn liveness(&self, job: &JobUid) -> Liveness {
        if self.registry.running.contains_key(job) {
            Liveness::Active
        } else if self.registry.is_finished(job) {
            Liveness::Finished
        } else {
            Liveness::Deleted
        }
    }

    pub(crate) fn needs_pods(&self) -> bool {
        self.registry.running.values().any(RunningPullJob::selects_by_pods)
    }

    fn mark_all_by_pods(&mut self) {
        for (uid, job) in &self.registry.running {
            if job.selects_by_pods() {
                self.registry.agenda.mark(uid);
            }
        }
    }

    /// What the job requests in NodeImages; `None` if it isn't running, or has not been valid since the start.
    pub(crate) fn request_of(&self, job: &JobUid) -> Option<Arc<TagRequest>> {
        Some(self.registry.running.get(job)?.run.as_ref()?.request().clone())
    }

    fn with_effects(&mut self, now: Timestamp, act: impl FnOnce(&mut Self, &mut Effects<'_>)) {
        let mut actions = std::mem::take(&mut self.actions);
        act(self, &mut Effects::new(now, &mut actions));
        self.actions = actions;
    }

    fn apply_input(&mut self, input: Input, fx: &mut Effects<'_>) {
        match input {
            Input::NodeImage(update) => self.observe_node_image(update, fx.now),
            Input::PullJobs(jobs) => self.replace_pull_jobs(jobs, fx),
            Input::PullJob(job) => self.observe_pull_job(job, fx),
            Input::PullJobGone(uid) => {
                self.registry.forget_deleted(&uid);
                self.remove_gone(&uid, fx);
            }
            Input::ListJobs(lists) => {
                let groups: Vec<ObjectId> = lists.iter().map(kind::id_of).collect();
                self.lists.replace(lists, fx);
                for group in &groups {
                    self.mark_group(group);
                }
            }
            Input::ListJob(list) => self.observe_list(list, fx),
            Input::ListJobGone(uid) => self.lists.remove(&uid),
            Input::Pods(pods) => {
                self.knows_pods = true;
                self.mark_all_by_pods();
                for (namespace, name) in self.pods.missing_from(&pods) {
                    self.remove_pod(&namespace, &name);
                }
                for pod in &pods {
                    self.observe_pod(pod);
                }
            }
            Input::PodsUnwatched => {
                self.knows_pods = false;
                for (namespace, name) in self.pods.missing_from(&[]) {
                    self.remove_pod(&namespace, &name);
                }
            }
            Input::Pod(pod) => self.observe_pod(&pod),
            Input::PodGone { namespace, name } => self.remove_pod(&namespace, &name),
            Input::Written { target: WriteTarget::PullJob(uid), outcome } => {
                let verdict = self.registry.end_write(&uid, outcome, fx.now);
                self.apply_verdict(&uid, verdict, fx);
            }
            Input::Written { target: WriteTarget::ListJob(uid), outcome } => {
                self.lists.end_write(&uid, outcome, fx.now);
            }
            Input::Written { target: WriteTarget::Child(list, image), outcome } => {
                self.lists.end_child_write(&list, &image, outcome, fx);
            }
        }
    }

    /// Lets the marked jobs go on, then fills the slots of their groups, and then writes the statuses.
    fn advance_marked_jobs(&mut self, fx: &mut Effects<'_>) {
        let (mut groups, mut changed) = (BTreeSet::new(), BTreeSet::new());
        while let Some(uid) = self.registry.agenda.next() {
            let Some(job) = self.registry.running.get(&uid) else {
                self.registry.delete_if_due(&uid, fx);
                continue;
            };
            if job.selects_by_pods() && !self.knows_pods {
                continue;
            }
            let group = job.group.clone();
            let is_paused = self.parallelism(&group) == 0;
            if let Some(job) = self.registry.running.get_mut(&uid) {
                job.advance(is_paused, fx);
            }
            groups.insert(group);
            changed.insert(uid);
        }
        for group in &groups {
            self.fill_slots(group, &mut changed, fx);
        }
        for uid in &changed {
            if let Some(job) = self.registry.running.get_mut(uid) {
                job.write_status_if_due(fx);
                self.registry.agenda.wake_at(uid, job.next_wakeup());
            }
        }
    }

    fn members(&self, group: &ObjectId) -> impl Iterator<Item = &JobUid> {
        self.groups.get(group).into_iter().flatten()
    }

    /// The runs of a group's jobs that may ask nodes.
    fn runs(&self, group: &ObjectId) -> impl Iterator<Item = &PullJobRun> {
        self.members(group).filter_map(|uid| self.registry.running.get(uid)?.valid_run())
    }

    /// How many nodes the jobs of a group may keep busy: the list's `parallelism`, or the least of the jobs' own while
    /// the list is unknown.
    fn parallelism(&self, group: &ObjectId) -> u32 {
        let own = || self.runs(group).map(PullJobRun::parallelism).min();
        self.lists.parallelism(group).or_else(own).unwrap_or_default()
    }

    /// Has the jobs of a group request their tags as long as slots are free. Parallelism bounds nodes, not pulls: a node
    /// that is busy with one image of a list is asked for the others too.
    fn fill_slots(&mut self, group: &ObjectId, changed: &mut BTreeSet<JobUid>, fx: &mut Effects<'_>) {
        let parallelism = self.parallelism(group) as usize;
        if parallelism == 0 || self.runs(group).all(|run| run.roster().wanted_nodes().is_empty()) {
            return;
        }
        let mut busy: HashSet<SharedName> =
            self.runs(group).flat_map(|run| run.roster().busy_nodes()).cloned().collect();
        let is_wanted =
            |node: &&SharedName| self.runs(group).any(|run| run.roster().wanted_nodes().contains(*node));
        let joining: BTreeSet<SharedName> = busy.iter().filter(is_wanted).cloned().collect();
        for node in joining {
            self.request_tags(group, &node, changed, fx);
        }
        // None of those that are still wanted is busy.
        while busy.len() < parallelism
            && let Some(node) =
                self.runs(group).filter_map(|run| run.roster().wanted_nodes().first()).min().cloned()
        {
            self.request_tags(group, &node, changed, fx);
            busy.insert(node);
        }
    }

    /// Has each of the jobs that want the node request its tag.
    fn request_tags(
        &mut self,
        group: &ObjectId,
        node: &NodeName,
        changed: &mut BTreeSet<JobUid>,
        fx: &mut Effects<'_>,
    ) {
        for uid in self.groups.get(group).into_iter().flatten() {
            let job = self.registry.running.get_mut(uid);
            if job.is_some_and(|job| job.request_tag(node, fx)) {
                changed.insert(uid.clone());
            }
        }
    }

    fn observe_node_image(&mut self, update: NodeImageUpdate, now: Timestamp) {
        match update {
            NodeImageUpdate::Exists { node, labels } => {
                let node = self.fleet.put(&node, labels, now);
                self.registry.change_runs(|run| run.observe_node(node));
            }
            NodeImageUpdate::Deleted(node) => {
                self.fleet.remove(&node);
                for states in self.early_states.values_mut() {
                    states.retain(|(known, _), _| *known != node);
                }
                self.registry.change_runs(|run| run.remove_node(&node));
            }
            NodeImageUpdate::Online(node, online) => {
                if let Some(presence) = self.fleet.set_online(&node, online, now) {
                    self.set_presence(&node, presence);
                }
            }
            NodeImageUpdate::Tag { job, node, key, state } => self.set_tag_state(&job, node, key, state),
        }
    }

    fn set_presence(&mut self, node: &NodeName, presence: Presence) {
        self.registry.change_runs(|run| run.set_presence(node, presence));
    }

    fn set_tag_state(&mut self, uid: &JobUid, node: NodeName, key: TagKey, state: TagState) {
        if let Some(run) = self.registry.running.get_mut(uid).and_then(|job| job.run.as_mut()) {
            let Some(known) = self.fleet.get(&node) else { return };
            if run.set_tag_state(known, &key, state) {
                self.registry.agenda.mark(uid);
            }
        } else if state == TagState::Absent {
            let Some(states) = self.early_states.get_mut(uid) else { return };
            states.remove(&(node, key));
            if states.is_empty() {
                self.early_states.remove(uid);
            }
        } else if !self.registry.is_finished(uid) && !self.registry.is_deleted(uid) {
            self.early_states.entry(uid.clone()).or_default().insert((node, key), state);
        }
    }

    fn observe_pod(&mut self, pod: &Pod) {
        let old = self.pods.put(pod.clone());
        self.propagate_pod(&pod.namespace, old.as_ref(), Some(pod));
    }

    fn remove_pod(&mut self, namespace: &str, name: &str) {
        let old = self.pods.remove(namespace, name);
        self.propagate_pod(namespace, old.as_ref(), None);
    }

    fn propagate_pod(&mut self, namespace: &str, old: Option<&Pod>, new: Option<&Pod>) {
        if old == new {
            return;
        }
        let jobs = self.registry.running.iter_mut();
        for (uid, job) in jobs.filter(|(_, job)| job.id().namespace == namespace) {
            if job.run.as_mut().is_some_and(|run| run.observe_pod(old, new, &self.fleet)) {
                self.registry.agenda.mark(uid);
            }
        }
    }

    fn replace_pull_jobs(&mut self, jobs: Vec<KruiseJobObject<ImagePullJob>>, fx: &mut Effects<'_>) {
        let existing: HashSet<JobUid> = jobs.iter().map(|job| kind::id_of(job).uid).collect();
        let known = self.registry.known_uids().chain(self.lists.children());
        let gone: Vec<JobUid> = known.filter(|uid| !existing.contains(uid)).cloned().collect();
        for uid in gone {
            self.remove_gone(&uid, fx);
        }
        for job in jobs {
            self.observe_pull_job(job, fx);
        }
        self.registry.retain_deleted(&existing);
        self.early_states.retain(|uid, _| existing.contains(uid));
    }

    fn observe_pull_job(&mut self, object: KruiseJobObject<ImagePullJob>, fx: &mut Effects<'_>) {
        self.lists.observe_child(&object);
        let uid = kind::id_of(&object).uid;
        let verdict = self.registry.observe(&object, fx.now);
        if matches!(verdict, RegistryVerdict::Run) {
            self.run(&uid, object, fx);
        }
        self.apply_verdict(&uid, verdict, fx);
    }

    fn run(&mut self, uid: &JobUid, object: KruiseJobObject<ImagePullJob>, fx: &mut Effects<'_>) {
        let group = kind::slot_group_of(&object);
        let job = self.registry.running.entry(uid.clone()).or_insert_with(|| RunningPullJob::new(&object));
        // One that can't be read holds no slot, and is in the group of its list again once it can be read.
        if job.group != group {
            let old = std::mem::replace(&mut job.group, group);
            self.registry.agenda.mark(uid);
            self.leave_group(uid, &old);
        }
        let Some(job) = self.registry.running.get_mut(uid) else { return };
        self.groups.entry(job.group.clone()).or_default().insert(uid.clone());
        if job.observe(object, &self.fleet, &self.pods, &mut self.early_states, fx) {
            self.registry.agenda.mark(uid);
        }
    }

    fn apply_verdict(&mut self, uid: &JobUid, verdict: RegistryVerdict, fx: &mut Effects<'_>) {
        match verdict {
            RegistryVerdict::Ignore | RegistryVerdict::Run => {}
            RegistryVerdict::Remove => self.remove_pull_job(uid, fx),
            RegistryVerdict::Finish(finished) => {
                self.early_states.remove(uid);
                if let Some(job) = self.registry.finish(uid, finished) {
                    self.leave_group(uid, &job.group);
                    fx.emit(Action::LivenessChanged(uid.clone()));
                }
            }
        }
    }

    /// Forgets a job that does not exist any more; a list may wait for its name.
    fn remove_gone(&mut self, uid: &JobUid, fx: &mut Effects<'_>) {
        let running = self.registry.running.get(uid).map(RunningPullJob::id);
        self.lists.retry_names(running.or_else(|| self.registry.finished_id(uid)));
        self.lists.remove_child(uid);
        self.remove_pull_job(uid, fx);
    }

    fn remove_pull_job(&mut self, uid: &JobUid, fx: &mut Effects<'_>) {
        self.early_states.remove(uid);
        let was_finished = self.registry.is_finished(uid);
        let running = self.registry.remove(uid);
        if was_finished || running.is_some() {
            fx.emit(Action::LivenessChanged(uid.clone()));
        }
        if let Some(job) = running {
            self.leave_group(uid, &job.group);
        }
    }

    /// Takes a job out of a group. The slots that it gives back are the others'.
    fn leave_group(&mut self, uid: &JobUid, group: &ObjectId) {
        let Some(members) = self.groups.get_mut(group) else { return };
        members.remove(uid);
        if members.is_empty() {
            self.groups.remove(group);
        }
        self.mark_group(group);
    }

    fn mark_group(&mut self, group: &ObjectId) {
        for member in self.groups.get(group).into_iter().flatten() {
            self.registry.agenda.mark(member);
        }
    }

    fn observe_list(&mut self, object: KruiseJobObject<ImageListPullJob>, fx: &mut Effects<'_>) {
        let group = kind::id_of(&object);
        self.lists.observe(object, fx);
        // The parallelism of a list is that of its jobs.
        self.mark_group(&group);
    }
}
