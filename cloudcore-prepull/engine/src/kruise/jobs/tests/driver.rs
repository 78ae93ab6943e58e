//! An API server that makes every write at once, and a clock that the test turns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use prepull_api::crd::kruise::{
    ImageListPullJob, ImageListPullJobStatus, ImagePullJob, ImagePullJobSpec, ImagePullJobStatus,
};
use prepull_api::task::{JobUid, NodeName};
use serde_json::Value;

use super::super::*;
use crate::shared::outcomes::WriteOutcome;

use crate::shared::events::ObjectEvent;
use crate::shared::objects::ObjectId;

pub(super) struct Driver {
    pub(super) jobs: KruiseJobs,
    pub(super) now: Timestamp,
    pub(super) api: BTreeMap<String, ImagePullJob>,
    pub(super) lists: BTreeMap<String, ImageListPullJob>,
    /// The actions since the log was last cleared.
    pub(super) log: Vec<Action>,
    /// How the next writes of statuses and deletions of jobs end; `Done` once there are none left.
    pub(super) outcomes: Vec<WriteOutcome>,
    /// The same for children.
    pub(super) child_outcomes: Vec<WriteOutcome>,
    uids: u32,
    versions: u32,
}

pub(super) fn uid(name: &str) -> JobUid {
    JobUid(format!("uid-{name}"))
}

impl Driver {
    /// With no node and no pod.
    pub(super) fn new() -> Self {
        let mut driver = Self {
            jobs: KruiseJobs::default(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            api: BTreeMap::new(),
            lists: BTreeMap::new(),
            log: Vec::new(),
            outcomes: Vec::new(),
            child_outcomes: Vec::new(),
            uids: 0,
            versions: 0,
        };
        driver.jobs.handle(Input::Pods(Vec::new()), driver.now);
        driver
    }

    /// With these nodes, online.
    pub(super) fn with(nodes: &[&str]) -> Self {
        let mut driver = Self::new();
        for node in nodes {
            driver.node(node, &[]);
            driver.online(node, true);
        }
        driver
    }

    pub(super) fn input(&mut self, input: Input) {
        self.jobs.handle(input, self.now);
    }

    pub(super) fn node(&mut self, node: &str, labels: &[(&str, &str)]) {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.input(Input::NodeImage(NodeImageUpdate::Exists { node: node.into(), labels: Arc::new(labels) }));
    }

    pub(super) fn online(&mut self, node: &str, online: bool) {
        self.input(Input::NodeImage(NodeImageUpdate::Online(node.into(), online)));
    }

    pub(super) fn pod(&mut self, name: &str, labels: &[(&str, &str)], node: Option<&str>) {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let node = node.map(NodeName::from);
        self.input(Input::Pod(Pod { namespace: "team".to_owned(), name: name.to_owned(), labels, node }));
    }

    /// An object has another version, and another generation if its spec is.
    fn raise(&mut self, metadata: &mut ObjectMeta, is_spec: bool) {
        self.versions += 1;
        metadata.resource_version = Some(self.versions.to_string());
        *metadata.generation.get_or_insert(0) += i64::from(is_spec);
    }

    pub(super) fn metadata(name: &str) -> ObjectMeta {
        ObjectMeta {
            namespace: Some("team".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid(name).0),
            ..ObjectMeta::default()
        }
    }

    /// Creates or changes an ImagePullJob.
    pub(super) fn job(&mut self, name: &str, spec: Value) {
        let spec: ImagePullJobSpec = serde_json::from_value(spec).unwrap();
        let known = self.api.get(name).cloned();
        let mut job = known.unwrap_or_else(|| ImagePullJob::new(name, ImagePullJobSpec::default()));
        if job.metadata.uid.is_none() {
            job.metadata = Self::metadata(name);
        }
        job.spec = spec;
        self.raise(&mut job.metadata, true);
        self.api.insert(name.to_owned(), job.clone());
        self.input(Input::PullJob(Ok(Box::new(job))));
        self.settle();
    }

    /// Creates or changes an ImageListPullJob.
    pub(super) fn list(&mut self, name: &str, spec: Value) {
        let spec = serde_json::from_value(spec).unwrap();
        let known = self.lists.get(name).cloned();
        let (metadata, status) =
            known.map_or((Self::metadata(name), None), |list| (list.metadata, list.status));
        let mut list = ImageListPullJob { metadata, spec, status };
        self.raise(&mut list.metadata, true);
        self.lists.insert(name.to_owned(), list.clone());
        self.input(Input::ListJob(Ok(Box::new(list))));
        self.settle();
    }

    /// The tag of a job's present image has this state on a node.
    pub(super) fn set_state(&mut self, job: &str, node: &str, state: TagState) {
        let spec = crate::kruise::rules::pull_job(&self.api[job].spec).unwrap();
        self.set_state_of(job, node, (&spec.image.image, &spec.image.tag), state);
        self.settle();
    }

    /// The same for a tag that need not be the job's present one.
    pub(super) fn set_state_of(
        &mut self,
        job: &str,
        node: &str,
        (image, tag): (&str, &str),
        state: TagState,
    ) {
        let job = JobUid(self.api[job].metadata.uid.clone().unwrap());
        let (node, key) = (node.into(), TagKey::new(image, tag));
        self.input(Input::NodeImage(NodeImageUpdate::Tag { job, node, key, state }));
    }

    pub(super) fn succeeds(&mut self, job: &str, nodes: &[&str]) {
        for node in nodes {
            self.set_state(job, node, TagState::Succeeded(self.now));
        }
    }

    pub(super) fn fails(&mut self, job: &str, nodes: &[&str]) {
        for node in nodes {
            self.set_state(job, node, TagState::Failed(self.now));
        }
    }

    /// Cloudcore restarts and lists everything again.
    pub(super) fn restart(&mut self, nodes: &[&str]) {
        self.jobs = KruiseJobs::default();
        for node in nodes {
            self.node(node, &[]);
        }
        let jobs = self.api.values().map(|job| Ok(Box::new(job.clone()))).collect();
        let lists = self.lists.values().map(|list| Ok(Box::new(list.clone()))).collect();
        self.input(Input::ListJobs(lists));
        self.input(Input::PullJobs(jobs));
        self.input(Input::Pods(Vec::new()));
    }

    /// Reconciles and makes the writes until nothing is left to do now.
    pub(super) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 1000, "it does not come to rest: {:?}", self.log.last());
            let actions = self.jobs.flush(self.now);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.log.push(action.clone());
                if let Action::Write(write) = action {
                    self.carry_out(write);
                }
            }
        }
    }

    fn carry_out(&mut self, write: JobWrite) {
        let target = write.target();
        let is_child = matches!(target, WriteTarget::Child(..));
        let outcomes = if is_child { &mut self.child_outcomes } else { &mut self.outcomes };
        let outcome = if outcomes.is_empty() { WriteOutcome::Done } else { outcomes.remove(0) };
        let outcome = if outcome == WriteOutcome::Done { self.apply(write) } else { outcome };
        self.input(Input::Written { target, outcome });
    }

    /// Makes a write, unless the object is another one than that which it's about.
    pub(super) fn apply(&mut self, write: JobWrite) -> WriteOutcome {
        match write {
            JobWrite::PullJobStatus(id, generation, status) => {
                let Some(mut job) = self.api.get(&id.name).cloned() else { return WriteOutcome::Done };
                if job.metadata.generation != Some(generation) {
                    return WriteOutcome::Failed;
                }
                job.status = Some(*status);
                self.raise(&mut job.metadata, false);
                self.put_job(job);
            }
            JobWrite::ListJobStatus(id, generation, status) => {
                let Some(list) = self.lists.get_mut(&id.name) else { return WriteOutcome::Done };
                if list.metadata.generation != Some(generation) {
                    return WriteOutcome::Failed;
                }
                list.status = Some(*status);
            }
            JobWrite::DeletePullJob(id, generation) => {
                if self.api[&id.name].metadata.generation == Some(generation) {
                    self.delete(&id.name);
                }
            }
            JobWrite::DeleteListJob(..) => {}
            JobWrite::CreateChild { list, name, spec } => self.create_child(&list, &name, spec.into()),
            JobWrite::UpdateChild { child, version, spec, .. } => {
                let mut job = self.api[&child.name].clone();
                if version.is_some_and(|version| job.metadata.resource_version != Some(version)) {
                    return WriteOutcome::Failed;
                }
                job.spec = spec.into();
                self.raise(&mut job.metadata, true);
                self.put_job(job);
            }
            JobWrite::DeleteChild { child, .. } => self.delete(&child.name),
        }
        WriteOutcome::Done
    }

    fn put_job(&mut self, job: ImagePullJob) {
        self.api.insert(job.metadata.name.clone().unwrap(), job.clone());
        self.input(Input::PullJob(Ok(Box::new(job))));
    }

    pub(super) fn delete(&mut self, name: &str) {
        if let Some(job) = self.api.remove(name) {
            self.input(Input::PullJobGone(JobUid(job.metadata.uid.unwrap())));
        }
    }

    fn create_child(&mut self, list: &ObjectId, name: &str, spec: ImagePullJobSpec) {
        self.uids += 1;
        let mut job = ImagePullJob::new(name, spec);
        job.metadata = ObjectMeta {
            uid: Some(format!("child-{}", self.uids)),
            owner_references: Some(vec![owner(list)]),
            ..Self::metadata(name)
        };
        self.raise(&mut job.metadata, true);
        assert!(self.api.insert(name.to_owned(), job.clone()).is_none(), "{name} is there already");
        self.input(Input::PullJob(Ok(Box::new(job))));
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        self.pass_for(Duration::from_secs(seconds));
    }

    /// Lets time pass, and runs everything that falls due.
    pub(super) fn pass_for(&mut self, time: Duration) {
        let until = self.now.checked_add(time).unwrap();
        for round in 0.. {
            assert!(round < 100_000, "too much happens before {until}");
            let Some(at) = self.jobs.next_wakeup().filter(|at| *at <= until) else { break };
            self.now = self.now.max(at);
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    /// The nodes that were asked since the last look at the log, with a star for a new round.
    pub(super) fn take_asked(&mut self) -> Vec<String> {
        let asked = self.log.iter().filter_map(|action| match action {
            Action::RequestTag { node, new_round, .. } => {
                Some(format!("{node}{}", if *new_round { "*" } else { "" }))
            }
            _ => None,
        });
        let asked = asked.collect();
        self.log.clear();
        asked
    }

    /// Type, reason and note of the events since the last look at the log.
    pub(super) fn take_events(&mut self) -> Vec<String> {
        let events = self.log.iter().filter_map(|action| match action {
            Action::Event(ObjectEvent { warning, reason, note, .. }) => {
                Some(format!("{} {reason}: {note}", if *warning { "Warning" } else { "Normal" }))
            }
            _ => None,
        });
        let events = events.collect();
        self.log.clear();
        events
    }

    pub(super) fn status(&self, job: &str) -> ImagePullJobStatus {
        self.api[job].status.clone().unwrap_or_default()
    }

    pub(super) fn list_status(&self, list: &str) -> ImageListPullJobStatus {
        self.lists[list].status.clone().unwrap_or_default()
    }

    /// desired, active, succeeded, failed, after the last write that the pace allows.
    pub(super) fn numbers(&mut self, job: &str) -> [i32; 4] {
        self.pass(2);
        let status = self.status(job);
        [status.desired, status.active, status.succeeded, status.failed]
    }

    pub(super) fn has_finished(&self, job: &str) -> bool {
        self.status(job).completion_time.is_some()
    }
}

pub(super) fn owner(list: &ObjectId) -> OwnerReference {
    OwnerReference {
        api_version: "apps.kruise.io/v1alpha1".to_owned(),
        kind: "ImageListPullJob".to_owned(),
        name: list.name.clone(),
        uid: list.uid.0.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
