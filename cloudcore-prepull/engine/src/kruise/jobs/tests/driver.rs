//! An API server that takes every write at once, and a hand to turn the clock.

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
use crate::kruise::{News, Standing};
use crate::shared::events::ObjectEvent;
use crate::shared::objects::ObjectId;

pub(super) struct Driver {
    pub(super) jobs: Jobs,
    pub(super) now: Timestamp,
    pub(super) api: BTreeMap<String, ImagePullJob>,
    pub(super) lists: BTreeMap<String, ImageListPullJob>,
    /// What was done since somebody looked.
    pub(super) log: Vec<Action>,
    /// How the next writes of statuses and deletions of jobs end; done, if nothing is said.
    pub(super) outcomes: Vec<WriteOutcome>,
    /// The same for children.
    pub(super) child_outcomes: Vec<WriteOutcome>,
    uids: u32,
}

pub(super) fn uid(name: &str) -> JobUid {
    JobUid(format!("uid-{name}"))
}

impl Driver {
    pub(super) fn new() -> Self {
        Self {
            jobs: Jobs::default(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            api: BTreeMap::new(),
            lists: BTreeMap::new(),
            log: Vec::new(),
            outcomes: Vec::new(),
            child_outcomes: Vec::new(),
            uids: 0,
        }
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
        self.input(Input::News(News::Node { node: node.into(), labels: Arc::new(labels) }));
    }

    pub(super) fn online(&mut self, node: &str, online: bool) {
        self.input(Input::News(News::Online(node.into(), online)));
    }

    pub(super) fn pod(&mut self, name: &str, labels: &[(&str, &str)], node: Option<&str>) {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let node = node.map(NodeName::from);
        self.input(Input::Pod(Pod { namespace: "team".to_owned(), name: name.to_owned(), labels, node }));
    }

    fn metadata(name: &str) -> ObjectMeta {
        ObjectMeta {
            namespace: Some("team".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid(name).0),
            ..ObjectMeta::default()
        }
    }

    /// Makes an ImagePullJob, or changes it.
    pub(super) fn job(&mut self, name: &str, spec: Value) {
        let spec: ImagePullJobSpec = serde_json::from_value(spec).unwrap();
        let known = self.api.get(name).cloned();
        let mut job = known.unwrap_or_else(|| ImagePullJob::new(name, ImagePullJobSpec::default()));
        if job.metadata.uid.is_none() {
            job.metadata = Self::metadata(name);
        }
        job.spec = spec;
        self.api.insert(name.to_owned(), job.clone());
        self.input(Input::PullJob(Ok(Box::new(job))));
        self.settle();
    }

    /// Makes an ImageListPullJob, or changes it.
    pub(super) fn list(&mut self, name: &str, spec: Value) {
        let spec = serde_json::from_value(spec).unwrap();
        let status = self.lists.get(name).and_then(|list| list.status.clone());
        let list = ImageListPullJob { metadata: Self::metadata(name), spec, status };
        self.lists.insert(name.to_owned(), list.clone());
        self.input(Input::ListJob(Ok(Box::new(list))));
        self.settle();
    }

    /// How the present image of a job stands on a node.
    pub(super) fn stands(&mut self, job: &str, node: &str, standing: Standing) {
        let spec = crate::kruise::rules::pull_job(&self.api[job].spec).unwrap();
        self.stands_for(job, node, (&spec.image.0, &spec.image.1), standing);
        self.settle();
    }

    pub(super) fn stands_for(
        &mut self,
        job: &str,
        node: &str,
        (image, tag): (&str, &str),
        standing: Standing,
    ) {
        let job = JobUid(self.api[job].metadata.uid.clone().unwrap());
        let (node, image, tag) = (node.into(), image.to_owned(), tag.to_owned());
        self.input(Input::News(News::Standing { job, node, image, tag, standing }));
    }

    pub(super) fn succeeds(&mut self, job: &str, nodes: &[&str]) {
        for node in nodes {
            self.stands(job, node, Standing::Succeeded(self.now));
        }
    }

    pub(super) fn fails(&mut self, job: &str, nodes: &[&str]) {
        for node in nodes {
            self.stands(job, node, Standing::Failed(self.now));
        }
    }

    /// Cloudcore starts anew, and is told everything again.
    pub(super) fn restart(&mut self, nodes: &[&str]) {
        self.jobs = Jobs::default();
        for node in nodes {
            self.node(node, &[]);
        }
        let jobs = self.api.values().map(|job| Ok(Box::new(job.clone()))).collect();
        let lists = self.lists.values().map(|list| Ok(Box::new(list.clone()))).collect();
        self.input(Input::ListJobs(lists));
        self.input(Input::PullJobs(jobs));
        self.input(Input::Pods(Vec::new()));
    }

    /// Lets everything happen that can happen now.
    pub(super) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 1000, "it never settles: {:?}", self.log.last());
            let actions = self.jobs.flush(self.now);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.log.push(action.clone());
                self.carry_out(action);
            }
        }
    }

    fn carry_out(&mut self, action: Action) {
        let outcomes = match action {
            Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => return,
            Action::MakeChild { .. } | Action::ChangeChild { .. } | Action::DeleteChild { .. } => {
                &mut self.child_outcomes
            }
            _ => &mut self.outcomes,
        };
        let outcome = if outcomes.is_empty() { WriteOutcome::Done } else { outcomes.remove(0) };
        let done = outcome == WriteOutcome::Done;
        let object = match action {
            Action::PullJobStatus(id, status) => {
                if done && let Some(job) = self.api.get_mut(&id.name) {
                    job.status = Some(*status);
                    let job = Box::new(job.clone());
                    self.input(Input::PullJob(Ok(job)));
                }
                Object::PullJob(id.uid)
            }
            Action::ListJobStatus(id, status) => {
                if done && let Some(list) = self.lists.get_mut(&id.name) {
                    list.status = Some(*status);
                }
                Object::ListJob(id.uid)
            }
            Action::DeletePullJob(id) => {
                if done {
                    self.delete(&id.name);
                }
                Object::PullJob(id.uid)
            }
            Action::DeleteListJob(id) => Object::ListJob(id.uid),
            Action::MakeChild { list, name, spec } => {
                let image = spec.image.clone();
                if done {
                    self.make_child(&list, &name, *spec);
                }
                Object::Child(list.uid, image)
            }
            Action::ChangeChild { list, child, spec } => {
                let image = spec.image.clone();
                if done {
                    let job = self.api.get_mut(&child.name).unwrap();
                    job.spec = *spec;
                    let job = Box::new(job.clone());
                    self.input(Input::PullJob(Ok(job)));
                }
                Object::Child(list.uid, image)
            }
            Action::DeleteChild { list, child, image } => {
                if done {
                    self.delete(&child.name);
                }
                Object::Child(list.uid, image)
            }
            Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => return,
        };
        self.input(Input::Written { object, outcome });
    }

    pub(super) fn delete(&mut self, name: &str) {
        if let Some(job) = self.api.remove(name) {
            self.input(Input::PullJobGone(JobUid(job.metadata.uid.unwrap())));
        }
    }

    fn make_child(&mut self, list: &ObjectId, name: &str, spec: ImagePullJobSpec) {
        self.uids += 1;
        let mut job = ImagePullJob::new(name, spec);
        job.metadata = ObjectMeta {
            uid: Some(format!("child-{}", self.uids)),
            owner_references: Some(vec![owner(list)]),
            ..Self::metadata(name)
        };
        assert!(self.api.insert(name.to_owned(), job.clone()).is_none(), "{name} is there already");
        self.input(Input::PullJob(Ok(Box::new(job))));
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        self.pass_for(Duration::from_secs(seconds));
    }

    /// Time goes by, with everything that it brings.
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

    /// The nodes that were asked since somebody looked, with `again` as a star.
    pub(super) fn asked(&mut self) -> Vec<String> {
        let asked = self.log.iter().filter_map(|action| match action {
            Action::Ask { node, again, .. } => Some(format!("{node}{}", if *again { "*" } else { "" })),
            _ => None,
        });
        let asked = asked.collect();
        self.log.clear();
        asked
    }

    /// The events since somebody looked: reason and note.
    pub(super) fn events(&mut self) -> Vec<String> {
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

    pub(super) fn is_over(&self, job: &str) -> bool {
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
