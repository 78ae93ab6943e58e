//! ImagePullJobs and ImageListPullJobs: which nodes are asked when, and what the status says. Pure.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use prepull_api::task::{JobUid, NodeName};

use super::{Liveness, News, Standing};
use crate::shared::agenda::Agenda;
use crate::shared::outcomes::WriteOutcome;

mod fleet;
mod group;
mod io;
mod lists;
mod objects;
mod over;
mod pods;
mod pull;
mod roster;
mod status;
#[cfg(test)]
mod tests;
mod wishes;
mod writing;

use fleet::{Fleet, Presence};
use group::Group;
pub use io::{Action, Input, Object, Pod};
use lists::Lists;
use objects::{ListJobObject, PullJobObject};
use over::Over;
use pods::Pods;
use pull::{Early, Job};

/// See the module.
#[derive(Debug, Default)]
pub struct Jobs {
    fleet: Fleet,
    pods: Pods,
    /// Those that are not over.
    running: HashMap<JobUid, Job>,
    /// Never in `running` as well.
    over: HashMap<JobUid, Over>,
    /// By a list, or by the job itself.
    groups: HashMap<JobUid, Group>,
    lists: Lists,
    /// Of jobs that have not come yet.
    early: HashMap<JobUid, Early>,
    /// Jobs that a write did not find. The watch may still tell of their last changes.
    gone: HashSet<JobUid>,
    agenda: Agenda,
    actions: Vec<Action>,
}

impl Jobs {
    /// Takes in what happened. What follows from it comes out of [`Self::flush`].
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        match input {
            Input::News(news) => self.news(news, now),
            Input::PullJobs(jobs) => {
                let listed: HashSet<JobUid> = jobs.iter().map(|job| objects::pull_job_id(job).uid).collect();
                let known = self.running.keys().chain(self.over.keys()).chain(self.lists.children());
                let gone: Vec<JobUid> = known.filter(|uid| !listed.contains(uid)).cloned().collect();
                for uid in gone {
                    self.pull_job_gone(&uid);
                }
                for job in jobs {
                    self.pull_job(job, now);
                }
                self.gone.retain(|uid| listed.contains(uid));
                self.early.retain(|uid, _| listed.contains(uid));
            }
            Input::PullJob(job) => self.pull_job(job, now),
            Input::PullJobGone(uid) => {
                self.gone.remove(&uid);
                self.pull_job_gone(&uid);
            }
            Input::ListJobs(lists) => {
                for uid in self.lists.not_among(&lists) {
                    self.lists.gone(&uid);
                }
                for list in lists {
                    self.list_job(list, now);
                }
            }
            Input::ListJob(list) => self.list_job(list, now),
            Input::ListJobGone(uid) => self.lists.gone(&uid),
            Input::Pods(pods) => {
                for (namespace, name) in self.pods.others(&pods) {
                    self.pod_gone(&namespace, &name);
                }
                for pod in pods {
                    self.pod(&pod);
                }
            }
            Input::Pod(pod) => self.pod(&pod),
            Input::PodGone { namespace, name } => self.pod_gone(&namespace, &name),
            Input::Written { object: Object::PullJob(uid), outcome } => self.written(&uid, outcome, now),
            Input::Written { object: Object::ListJob(uid), outcome } => {
                self.lists.written(&uid, outcome, now);
            }
            Input::Written { object: Object::Child(list, image), outcome } => {
                self.lists.child_written(&list, &image, outcome, now, &mut self.actions);
            }
        }
    }

    /// Lets every job go on as far as it can. Not called before all lists have come: nodes, NodeImages, pods, jobs.
    pub fn flush(&mut self, now: Timestamp) -> Vec<Action> {
        while let Some(node) = self.fleet.next_away(now) {
            self.presence(&node, Presence::Away);
        }
        self.lists.flush(now, &mut self.actions);
        self.agenda.wake_up(now);
        while let Some(uid) = self.agenda.next() {
            let Some(job) = self.running.get_mut(&uid) else {
                self.delete(&uid, now);
                continue;
            };
            let id = job.group.clone();
            let Some(group) = self.groups.get_mut(&id) else { continue };
            let parallelism = parallelism(&self.lists, &self.running, &id, group);
            let Some(job) = self.running.get_mut(&uid) else { continue };
            job.advance(group, parallelism == 0, now, &mut self.actions);
            self.ask(&id, parallelism);
            if let Some(job) = self.running.get_mut(&uid) {
                job.write_if_due(now, &mut self.actions);
                self.agenda.wake(&uid, job.next_wakeup());
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// When [`Self::flush`] is to be called although nothing happened.
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        [self.agenda.wakeup(), self.lists.wakeup(), self.fleet.wakeup()].into_iter().flatten().min()
    }

    /// Whether tags stay for the sake of this job. Not asked before all ImagePullJobs have come.
    pub fn liveness(&self, job: &JobUid) -> Liveness {
        match () {
            () if self.running.contains_key(job) => Liveness::Active,
            () if self.over.contains_key(job) => Liveness::Over,
            () => Liveness::Gone,
        }
    }

    /// Fills the slots of a group.
    fn ask(&mut self, id: &JobUid, parallelism: u32) {
        let Some(group) = self.groups.get_mut(id) else { return };
        let mut members = Vec::new();
        while let Some(node) = group.next(parallelism) {
            if members.is_empty() {
                members = group.members.iter().cloned().collect();
            }
            let mut asked = false;
            for uid in &members {
                if self.running.get_mut(uid).is_some_and(|job| job.ask(&node, group, &mut self.actions)) {
                    asked = true;
                    self.agenda.mark(uid);
                }
            }
            debug_assert!(asked, "{node} is wanted by nobody");
            if !asked {
                return;
            }
        }
    }

    fn news(&mut self, news: News, now: Timestamp) {
        match news {
            News::Node { node, labels } => {
                let known = self.fleet.add(&node, labels, now);
                for (uid, job) in &mut self.running {
                    let group = self.groups.entry(job.group.clone()).or_default();
                    if job.node(known, group) {
                        self.agenda.mark(uid);
                    }
                }
            }
            News::NodeGone(node) => {
                self.fleet.remove(&node);
                self.early.values_mut().for_each(|early| early.retain(|(known, ..), _| *known != node));
                for (uid, job) in &mut self.running {
                    let group = self.groups.entry(job.group.clone()).or_default();
                    if job.node_gone(&node, group) {
                        self.agenda.mark(uid);
                    }
                }
            }
            News::Online(node, online) => {
                if let Some(presence) = self.fleet.online(&node, online, now) {
                    self.presence(&node, presence);
                }
            }
            News::Standing { job: uid, node, image, tag, standing } => {
                if let Some(job) = self.running.get_mut(&uid) {
                    let Some(known) = self.fleet.get(&node) else { return };
                    let group = self.groups.entry(job.group.clone()).or_default();
                    if job.standing(known, standing, (image, tag), group) {
                        self.agenda.mark(&uid);
                    }
                } else if standing == Standing::Absent {
                    // The last that is heard of a job that was deleted.
                    let Some(early) = self.early.get_mut(&uid) else { return };
                    early.remove(&(node, image, tag));
                    if early.is_empty() {
                        self.early.remove(&uid);
                    }
                } else if !self.over.contains_key(&uid) && !self.gone.contains(&uid) {
                    let early = self.early.entry(uid.clone()).or_default();
                    early.insert((node, image, tag), standing);
                }
            }
        }
    }

    fn presence(&mut self, node: &NodeName, presence: Presence) {
        for (uid, job) in &mut self.running {
            let group = self.groups.entry(job.group.clone()).or_default();
            if job.presence(node, presence, group) {
                self.agenda.mark(uid);
            }
        }
    }

    fn pod(&mut self, pod: &Pod) {
        let old = self.pods.put(pod.clone());
        self.pod_changed(&pod.namespace, old.as_ref(), Some(pod));
    }

    fn pod_gone(&mut self, namespace: &str, name: &str) {
        let old = self.pods.remove(namespace, name);
        self.pod_changed(namespace, old.as_ref(), None);
    }

    fn pod_changed(&mut self, namespace: &str, old: Option<&Pod>, new: Option<&Pod>) {
        if old == new {
            return;
        }
        for (uid, job) in self.running.iter_mut().filter(|(_, job)| job.id.namespace == namespace) {
            let group = self.groups.entry(job.group.clone()).or_default();
            if job.pod(old, new, &self.fleet, group) {
                self.agenda.mark(uid);
            }
        }
    }

    fn pull_job(&mut self, object: PullJobObject, now: Timestamp) {
        let uid = objects::pull_job_id(&object).uid;
        if let Ok(job) = &object {
            self.lists.child(job);
        }
        if self.gone.contains(&uid) {
            return;
        }
        if object.as_ref().is_ok_and(|job| objects::is_being_deleted(&job.metadata)) {
            return self.forget(&uid);
        }
        let ended = object.as_ref().ok().and_then(|job| Over::of(job));
        if let Some(over) = self.over.get_mut(&uid) {
            if let Ok(job) = &object {
                over.keep_for(job.spec.template.completion_policy.ttl_seconds_after_finished);
                self.agenda.mark(&uid);
            }
            return;
        }
        let new = !self.running.contains_key(&uid);
        if new {
            let metadata = object.as_ref().ok().map(|job| &job.metadata);
            self.agenda.add(&uid, objects::created(metadata, now));
        }
        if let Some(over) = ended {
            self.early.remove(&uid);
            return if new { self.keep(uid, over) } else { self.park(&uid, over) };
        }
        if new {
            let early = self.early.remove(&uid).unwrap_or_default();
            let job = Job::new(&object, early);
            self.groups.entry(job.group.clone()).or_default().members.insert(uid.clone());
            self.running.insert(uid.clone(), job);
        }
        if object.is_ok() {
            self.regroup(&uid, objects::group(&object));
        }
        let Some(job) = self.running.get_mut(&uid) else { return };
        let group = self.groups.entry(job.group.clone()).or_default();
        if job.changed(object, &self.fleet, &self.pods, group, &mut self.actions) {
            self.agenda.mark(&uid);
        }
    }

    /// The job shares its slots with others than before.
    fn regroup(&mut self, uid: &JobUid, id: JobUid) {
        let Some(job) = self.running.get_mut(uid).filter(|job| job.group != id) else { return };
        let old = std::mem::replace(&mut job.group, id.clone());
        if let Some(group) = self.groups.get_mut(&old) {
            job.leave(group);
        }
        let group = self.groups.entry(id).or_default();
        group.members.insert(uid.clone());
        job.join(group);
        self.leave_group(uid, &old);
        self.agenda.mark(uid);
    }

    fn leave_group(&mut self, uid: &JobUid, id: &JobUid) {
        let Some(group) = self.groups.get_mut(id) else { return };
        group.members.remove(uid);
        if group.members.is_empty() {
            self.groups.remove(id);
            return;
        }
        // The slots that it gives back are the others'.
        group.members.iter().for_each(|member| self.agenda.mark(member));
    }

    fn list_job(&mut self, object: ListJobObject, now: Timestamp) {
        let uid = objects::list_job_id(&object).uid;
        self.lists.changed(object, now, &mut self.actions);
        // Its parallelism is that of its jobs.
        for member in self.groups.get(&uid).into_iter().flat_map(|group| &group.members) {
            self.agenda.mark(member);
        }
    }

    fn written(&mut self, uid: &JobUid, outcome: WriteOutcome, now: Timestamp) {
        if outcome == WriteOutcome::Gone {
            // Where the watch has told of it, it will not tell again.
            if self.running.contains_key(uid) || self.over.contains_key(uid) {
                self.gone.insert(uid.clone());
            }
            return self.forget(uid);
        }
        self.agenda.mark(uid);
        if let Some(over) = self.over.get_mut(uid) {
            over.written();
        } else if let Some(over) = self.running.get_mut(uid).and_then(|job| job.written(outcome, now)) {
            self.park(uid, over);
        }
    }

    /// The job is over, and the API server knows.
    fn park(&mut self, uid: &JobUid, mut over: Over) {
        if let Some(mut job) = self.running.remove(uid) {
            if job.is_being_written() {
                over.wait_for_status();
            }
            if let Some(group) = self.groups.get_mut(&job.group) {
                job.leave(group);
            }
            self.leave_group(uid, &job.group);
            self.actions.push(Action::Liveness(uid.clone()));
        }
        self.keep(uid.clone(), over);
    }

    fn keep(&mut self, uid: JobUid, over: Over) {
        self.agenda.mark(&uid);
        self.over.insert(uid, over);
    }

    fn delete(&mut self, uid: &JobUid, now: Timestamp) {
        let Some(over) = self.over.get_mut(uid) else { return };
        if over.delete(now) {
            self.actions.push(Action::DeletePullJob(over.id.clone()));
        }
        self.agenda.wake(uid, over.due());
    }

    fn pull_job_gone(&mut self, uid: &JobUid) {
        self.lists.child_gone(uid);
        self.forget(uid);
    }

    fn forget(&mut self, uid: &JobUid) {
        self.early.remove(uid);
        self.agenda.remove(uid);
        let was_over = self.over.remove(uid).is_some();
        let job = self.running.remove(uid);
        if was_over || job.is_some() {
            self.actions.push(Action::Liveness(uid.clone()));
        }
        if let Some(mut job) = job {
            if let Some(group) = self.groups.get_mut(&job.group) {
                job.leave(group);
            }
            self.leave_group(uid, &job.group);
        }
    }
}

/// Nodes at a time, of jobs that share it: their list's word, or the least of theirs where the list is not known.
fn parallelism(lists: &Lists, jobs: &HashMap<JobUid, Job>, id: &JobUid, group: &Group) -> u32 {
    let own = || group.members.iter().filter_map(|uid| jobs.get(uid)?.parallelism()).min();
    lists.parallelism(id).or_else(own).unwrap_or_default()
}
