//! The API server, the nodes, and what is in flight between them and the jobs.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
use serde::Serialize;

use super::super::super::*;
use super::super::driver::owner;
use super::expected::{ExpectedJob, ExpectedState};
use crate::kruise::rules::{self, ValidListJob};
use crate::kruise::{TagRequest, TagState};
use crate::shared::events::ObjectKind;
use crate::shared::outcomes::WriteOutcome;
use crate::shared::rng::Rng;

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) zone: char,
    pub(super) online: bool,
    /// When the node went offline, or was created.
    pub(super) since: Timestamp,
}

/// The tag of a job in a NodeImage.
#[derive(Clone, Debug)]
pub(super) struct Tag {
    pub(super) key: TagKey,
    pub(super) state: TagState,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) jobs: KruiseJobs,
    pub(super) now: Timestamp,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) api: BTreeMap<JobUid, ImagePullJob>,
    pub(super) lists: BTreeMap<JobUid, ImageListPullJob>,
    pub(super) tags: BTreeMap<(JobUid, String), Tag>,
    /// Requests that are not written into a NodeImage yet: node, request, whether for a new round.
    pub(super) requests: Vec<(String, Arc<TagRequest>, bool)>,
    pub(super) writes: Vec<JobWrite>,
    /// Objects with a failed last write that may have reached the API server: the jobs may write the same again.
    pub(super) unsure: HashSet<WriteTarget>,
    pub(super) expected: BTreeMap<JobUid, ExpectedJob>,
    /// The last valid spec of each list.
    pub(super) expected_lists: BTreeMap<JobUid, Option<ValidListJob>>,
    pub(super) made: u32,
    pub(super) trace: bool,
}

/// The slot group of a job.
pub(super) fn group(job: &ImagePullJob) -> JobUid {
    let owner = job.metadata.owner_references.iter().flatten().next();
    JobUid(owner.map_or_else(|| job.metadata.uid.clone().unwrap(), |owner| owner.uid.clone()))
}

/// Sets an object's generation and version: each is another one if the content is.
pub(super) fn stamp(metadata: &mut ObjectMeta, spec: &impl Serialize, status: &impl Serialize) {
    let hash = |content: &str| {
        i64::from(content.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31) ^ u32::from(byte)))
    };
    let (spec, status) = (serde_json::to_string(spec).unwrap(), serde_json::to_string(status).unwrap());
    metadata.generation = Some(hash(&spec));
    metadata.resource_version = Some(hash(&(spec + &status)).to_string());
}

impl World {
    pub(super) fn new(rng: Rng, trace: bool) -> Self {
        let mut world = Self {
            rng,
            jobs: KruiseJobs::default(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            nodes: BTreeMap::new(),
            pods: BTreeMap::new(),
            api: BTreeMap::new(),
            lists: BTreeMap::new(),
            tags: BTreeMap::new(),
            requests: Vec::new(),
            writes: Vec::new(),
            unsure: HashSet::new(),
            expected: BTreeMap::new(),
            expected_lists: BTreeMap::new(),
            made: 0,
            trace,
        };
        world.input(Input::Pods(Vec::new()));
        world
    }

    pub(super) fn input(&mut self, input: Input) {
        self.jobs.handle(input, self.now);
    }

    pub(super) fn labels(&self, node: &str) -> BTreeMap<String, String> {
        [("zone".to_owned(), self.nodes[node].zone.to_string())].into()
    }

    pub(super) fn metadata(&mut self, name: &str) -> ObjectMeta {
        self.made += 1;
        ObjectMeta {
            namespace: Some("team".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(format!("uid-{}-{name}", self.made)),
            ..ObjectMeta::default()
        }
    }

    /// Gives the jobs the state of a tag.
    pub(super) fn tell(&mut self, job: &JobUid, node: &str, key: &TagKey, state: TagState) {
        if let Some(job_state) = self.expected.get_mut(job) {
            job_state.observe(node, key, state);
        }
        let (job, key) = (job.clone(), key.clone());
        self.input(Input::NodeImage(NodeImageUpdate::Tag { job, node: node.into(), key, state }));
    }

    /// Gives the jobs an ImagePullJob, as the watch does.
    pub(super) fn tell_job(&mut self, uid: &JobUid) {
        let job = self.api.get_mut(uid).unwrap();
        stamp(&mut job.metadata, &job.spec, &job.status);
        let job = job.clone();
        self.sync();
        let is_over = job.status.as_ref().is_some_and(|status| status.completion_time.is_some());
        self.expected.entry(uid.clone()).or_default().observe_spec(&job.spec, is_over);
        self.input(Input::PullJob(Ok(Box::new(job))));
    }

    pub(super) fn delete_job(&mut self, uid: &JobUid) {
        self.api.remove(uid);
        self.input(Input::PullJobGone(uid.clone()));
    }

    /// Flushes once, checks each action, and checks that nothing is left for a second flush.
    pub(super) fn flush(&mut self) {
        self.sync();
        for action in self.jobs.flush(self.now) {
            if self.trace {
                eprintln!("{} {action:?}", self.now);
            }
            match action {
                Action::RequestTag { node, request, new_round } => {
                    self.check_request(&node.0, &request, new_round);
                    let job = JobUid(request.owner.uid.clone().unwrap());
                    self.expected
                        .get_mut(&job)
                        .unwrap()
                        .states
                        .insert(node.0.clone(), ExpectedState::Pending);
                    // A later request replaces an earlier one.
                    self.requests
                        .retain(|(at, other, _)| *at != node.0 || other.owner.uid != request.owner.uid);
                    self.requests.push((node.0, request, new_round));
                }
                Action::Event(event) if event.kind == ObjectKind::ImagePullJob => {
                    let job_state = self.expected.get_mut(&event.object.uid).unwrap();
                    match event.reason {
                        "Unresponsive" => job_state.gave_up = true,
                        "Completed" | "Failed" => {
                            self.check_end(&event);
                            self.expected.get_mut(&event.object.uid).unwrap().ended = true;
                        }
                        _ => {}
                    }
                }
                Action::Event(_) | Action::LivenessChanged(_) => {}
                Action::Write(write) => {
                    if let JobWrite::PullJobStatus(id, generation, status) = &write
                        && let Some(job) = self.api.get(&id.uid)
                    {
                        assert_eq!(Some(*generation), job.metadata.generation);
                        self.check_status(&id.uid, status);
                    }
                    let target = write.target();
                    let is_other = |other: &JobWrite| other.target() != target;
                    assert!(self.writes.iter().all(is_other), "two writes of {target:?}");
                    self.writes.push(write);
                }
            }
        }
        assert_eq!(self.jobs.flush(self.now), [], "a second flush");
        let wakeup = self.jobs.next_wakeup();
        assert!(wakeup.is_none_or(|at| at > self.now), "{wakeup:?} has passed, it is {}", self.now);
    }

    /// A NodeImage is written.
    pub(super) fn land_request(&mut self, index: usize) {
        let (node, request, new_round) = self.requests.remove(index);
        let job = JobUid(request.owner.uid.clone().unwrap());
        if !self.nodes.contains_key(&node) {
            return;
        }
        let key = request.key.clone();
        let known = self.tags.get(&(job.clone(), node.clone())).filter(|tag| tag.key == key && !new_round);
        let state = known.map_or(TagState::Pending, |tag| tag.state);
        self.tags.insert((job.clone(), node.clone()), Tag { key: key.clone(), state });
        self.tell(&job, &node, &key, state);
    }

    /// Ends a write: it is made, or it fails, in which case it may have been made (`landed`) or not.
    pub(super) fn land_write(&mut self, index: usize, done: bool, landed: bool) {
        let write = self.writes.remove(index);
        let target = write.target();
        let made = if landed { self.apply(write) } else { WriteOutcome::Gone };
        let outcome = if done { made } else { WriteOutcome::Failed };
        if outcome == WriteOutcome::Done {
            self.unsure.remove(&target)
        } else {
            self.unsure.insert(target.clone())
        };
        self.input(Input::Written { target, outcome });
    }

    /// Makes a write, unless its object is gone, or another one than that which it's about.
    pub(super) fn apply(&mut self, write: JobWrite) -> WriteOutcome {
        match write {
            JobWrite::PullJobStatus(id, generation, status) => {
                let Some(job) = self.api.get_mut(&id.uid) else { return WriteOutcome::Gone };
                if job.metadata.generation != Some(generation) {
                    return WriteOutcome::Failed;
                }
                job.status = Some(*status);
                self.tell_job(&id.uid);
            }
            JobWrite::ListJobStatus(id, generation, status) => {
                let Some(list) = self.lists.get_mut(&id.uid) else { return WriteOutcome::Gone };
                if list.metadata.generation != Some(generation) {
                    return WriteOutcome::Failed;
                }
                list.status = Some(*status);
            }
            JobWrite::DeletePullJob(id, generation) => {
                let Some(job) = self.api.get(&id.uid) else { return WriteOutcome::Gone };
                if job.metadata.generation == Some(generation) {
                    self.delete_job(&id.uid);
                }
            }
            JobWrite::DeleteListJob(id, generation) => {
                let Some(list) = self.lists.get(&id.uid) else { return WriteOutcome::Gone };
                if list.metadata.generation != Some(generation) {
                    return WriteOutcome::Done;
                }
                self.lists.remove(&id.uid);
                self.input(Input::ListJobGone(id.uid.clone()));
                self.collect(&id.uid);
            }
            // The garbage collector would delete the child at once.
            JobWrite::CreateChild { list, .. } if !self.lists.contains_key(&list.uid) => {
                return WriteOutcome::Gone;
            }
            JobWrite::CreateChild { list, name, spec } => {
                if self.api.values().any(|job| job.metadata.name.as_ref() == Some(&name)) {
                    let is_ours = |job: &ImagePullJob| group(job) == list.uid && job.spec.image == spec.image;
                    let is_there = self.api.values().any(is_ours);
                    return if is_there { WriteOutcome::Done } else { WriteOutcome::Gone };
                }
                let mut job = ImagePullJob::new(&name, spec.into());
                job.metadata = self.metadata(&name);
                job.metadata.owner_references = Some(vec![owner(&list)]);
                let uid = JobUid(job.metadata.uid.clone().unwrap());
                self.api.insert(uid.clone(), job);
                self.tell_job(&uid);
            }
            JobWrite::UpdateChild { child, version, spec, .. } => {
                let Some(job) = self.api.get_mut(&child.uid) else { return WriteOutcome::Gone };
                if job.metadata.resource_version != version {
                    return WriteOutcome::Failed;
                }
                job.spec = spec.into();
                self.tell_job(&child.uid);
            }
            JobWrite::DeleteChild { child, .. } => {
                if !self.api.contains_key(&child.uid) {
                    return WriteOutcome::Gone;
                }
                self.delete_job(&child.uid);
            }
        }
        WriteOutcome::Done
    }

    /// The garbage collector: deletes the children of a deleted list.
    pub(super) fn collect(&mut self, list: &JobUid) {
        let children = self.api.iter().filter(|(uid, job)| group(job) == *list && *uid != list);
        let children: Vec<JobUid> = children.map(|(uid, _)| uid.clone()).collect();
        for child in children {
            self.delete_job(&child);
        }
    }

    /// Lets time pass, and runs everything that falls due.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now.checked_add(time).unwrap();
        while let Some(at) = self.jobs.next_wakeup().filter(|at| *at <= until) {
            self.now = at;
            self.flush();
        }
        self.now = until;
        self.flush();
    }

    /// Restarts cloudcore: of what was in flight some has arrived, at random or all of it.
    pub(super) fn restart(&mut self, at_random: bool) {
        self.jobs = KruiseJobs::default();
        let arrives = |rng: &mut Rng| !at_random || rng.chance(50);
        for (node, request, new_round) in std::mem::take(&mut self.requests) {
            if arrives(&mut self.rng) {
                self.requests.push((node, request, new_round));
                self.land_request(0);
            }
        }
        for write in std::mem::take(&mut self.writes) {
            if arrives(&mut self.rng) {
                self.apply(write);
            }
        }
        self.jobs = KruiseJobs::default();
        self.unsure.clear();
        self.expected.clear();
        // After a restart a list that is refused or has finished does not bound its children.
        self.expected_lists.clear();
        for (uid, list) in &self.lists {
            let ended = list.status.as_ref().is_some_and(|status| status.completion_time.is_some());
            let valid = rules::list_job(&list.spec).ok().filter(|_| !ended);
            self.expected_lists.insert(uid.clone(), valid);
        }
        for uid in self.api.keys().cloned().collect::<Vec<_>>() {
            let job = &self.api[&uid];
            let ended = job.status.as_ref().is_some_and(|status| status.completion_time.is_some());
            let mut job_state = ExpectedJob { ended, ..ExpectedJob::default() };
            job_state.observe_spec(&job.spec, ended);
            self.expected.insert(uid, job_state);
        }
        let jobs_first = at_random && self.rng.chance(50);
        if jobs_first {
            self.tell_all_jobs();
        }
        for (name, node) in &mut self.nodes {
            (node.online, node.since) = (false, self.now);
            let labels = Arc::new([("zone".to_owned(), node.zone.to_string())].into());
            self.jobs.handle(
                Input::NodeImage(NodeImageUpdate::Exists { node: NodeName(name.clone()), labels }),
                self.now,
            );
        }
        for ((job, node), tag) in self.tags.clone() {
            self.tell(&job, &node, &tag.key, tag.state);
        }
        self.input(Input::Pods(self.pods.values().cloned().collect()));
        if !jobs_first {
            self.tell_all_jobs();
        }
        self.flush();
    }

    fn tell_all_jobs(&mut self) {
        self.input(Input::PullJobs(self.api.values().map(|job| Ok(Box::new(job.clone()))).collect()));
        self.input(Input::ListJobs(self.lists.values().map(|list| Ok(Box::new(list.clone()))).collect()));
    }
}
