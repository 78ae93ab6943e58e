//! The API server, the nodes, and what is on its way between them and the jobs.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};

use super::super::super::*;
use super::super::driver::owner;
use super::Rng;
use super::book::{Book, Mark};
use crate::kruise::rules::{self, ValidListJob};
use crate::kruise::{Standing, Wish};
use crate::shared::events::ObjectKind;

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) zone: char,
    pub(super) online: bool,
    /// When it went offline, or was made.
    pub(super) since: Timestamp,
}

/// What a NodeImage has of a job.
#[derive(Clone, Debug)]
pub(super) struct Tag {
    pub(super) key: (String, String),
    pub(super) standing: Standing,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) jobs: Jobs,
    pub(super) now: Timestamp,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) api: BTreeMap<JobUid, ImagePullJob>,
    pub(super) lists: BTreeMap<JobUid, ImageListPullJob>,
    pub(super) tags: BTreeMap<(JobUid, String), Tag>,
    /// On their way to the API server.
    pub(super) asks: Vec<(String, Arc<Wish>, bool)>,
    pub(super) writes: Vec<Action>,
    /// What was written is not known to the jobs for sure.
    pub(super) unsure: HashSet<Object>,
    pub(super) books: BTreeMap<JobUid, Book>,
    /// The last of each that was not refused.
    pub(super) list_books: BTreeMap<JobUid, Option<ValidListJob>>,
    pub(super) made: u32,
    pub(super) trace: bool,
}

/// With which others a job shares its slots.
pub(super) fn group(job: &ImagePullJob) -> JobUid {
    let owner = job.metadata.owner_references.iter().flatten().next();
    JobUid(owner.map_or_else(|| job.metadata.uid.clone().unwrap(), |owner| owner.uid.clone()))
}

/// Of which object a write is.
fn object(action: &Action) -> Object {
    match action {
        Action::PullJobStatus(id, _) | Action::DeletePullJob(id) => Object::PullJob(id.uid.clone()),
        Action::ListJobStatus(id, _) | Action::DeleteListJob(id) => Object::ListJob(id.uid.clone()),
        Action::MakeChild { list, spec, .. } | Action::ChangeChild { list, spec, .. } => {
            Object::Child(list.uid.clone(), spec.image.clone())
        }
        Action::DeleteChild { list, image, .. } => Object::Child(list.uid.clone(), image.clone()),
        Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => panic!("{action:?} is no write"),
    }
}

impl World {
    pub(super) fn new(rng: Rng, trace: bool) -> Self {
        Self {
            rng,
            jobs: Jobs::default(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            nodes: BTreeMap::new(),
            pods: BTreeMap::new(),
            api: BTreeMap::new(),
            lists: BTreeMap::new(),
            tags: BTreeMap::new(),
            asks: Vec::new(),
            writes: Vec::new(),
            unsure: HashSet::new(),
            books: BTreeMap::new(),
            list_books: BTreeMap::new(),
            made: 0,
            trace,
        }
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

    /// Tells the jobs how a tag stands.
    pub(super) fn tell(&mut self, job: &JobUid, node: &str, key: &(String, String), standing: Standing) {
        if let Some(book) = self.books.get_mut(job) {
            book.told(node, key, standing);
        }
        let (image, tag) = key.clone();
        let news = News::Standing { job: job.clone(), node: node.into(), image, tag, standing };
        self.input(Input::News(news));
    }

    /// Tells the jobs of an ImagePullJob.
    pub(super) fn tell_job(&mut self, uid: &JobUid) {
        let job = self.api[uid].clone();
        self.sync();
        self.books.entry(uid.clone()).or_default().told_spec(&job.spec);
        self.input(Input::PullJob(Ok(Box::new(job))));
    }

    pub(super) fn delete_job(&mut self, uid: &JobUid) {
        self.api.remove(uid);
        self.input(Input::PullJobGone(uid.clone()));
    }

    /// One flush, with the laws; and nothing is left for another one.
    pub(super) fn flush(&mut self) {
        self.sync();
        for action in self.jobs.flush(self.now) {
            if self.trace {
                eprintln!("{} {action:?}", self.now);
            }
            match action {
                Action::Ask { node, wish, again } => {
                    self.may_ask(&node.0, &wish, again);
                    let job = JobUid(wish.owner.uid.clone().unwrap());
                    self.books.get_mut(&job).unwrap().marks.insert(node.0.clone(), Mark::Open);
                    // The later one replaces the earlier one.
                    self.asks.retain(|(at, other, _)| *at != node.0 || other.owner.uid != wish.owner.uid);
                    self.asks.push((node.0, wish, again));
                }
                Action::Event(event) if event.kind == ObjectKind::ImagePullJob => {
                    let book = self.books.get_mut(&event.object.uid).unwrap();
                    match event.reason {
                        "Unresponsive" => book.gave_up = true,
                        "Completed" | "Failed" => {
                            self.may_end(&event);
                            self.books.get_mut(&event.object.uid).unwrap().ended = true;
                        }
                        _ => {}
                    }
                }
                Action::Event(_) | Action::Liveness(_) => {}
                write => {
                    if let Action::PullJobStatus(id, status) = &write
                        && self.api.contains_key(&id.uid)
                    {
                        self.may_say(&id.uid, status);
                    }
                    let of = object(&write);
                    assert!(self.writes.iter().all(|other| object(other) != of), "two writes of {of:?}");
                    self.writes.push(write);
                }
            }
        }
        assert_eq!(self.jobs.flush(self.now), [], "a second flush");
        let wakeup = self.jobs.next_wakeup();
        assert!(wakeup.is_none_or(|at| at > self.now), "{wakeup:?} has passed, it is {}", self.now);
    }

    /// A NodeImage is written.
    pub(super) fn land_ask(&mut self, index: usize) {
        let (node, wish, again) = self.asks.remove(index);
        let job = JobUid(wish.owner.uid.clone().unwrap());
        if !self.nodes.contains_key(&node) {
            return;
        }
        let key = (wish.image.clone(), wish.tag.clone());
        let known = self.tags.get(&(job.clone(), node.clone())).filter(|tag| tag.key == key && !again);
        let standing = known.map_or(Standing::Open, |tag| tag.standing);
        self.tags.insert((job.clone(), node.clone()), Tag { key: key.clone(), standing });
        self.tell(&job, &node, &key, standing);
    }

    /// A write ends: it is made, or fails, made or not.
    pub(super) fn land_write(&mut self, index: usize, done: bool, landed: bool) {
        let write = self.writes.remove(index);
        let object = object(&write);
        let outcome = match (done, landed && self.apply(write)) {
            (false, _) => WriteOutcome::Failed,
            (true, true) => WriteOutcome::Done,
            (true, false) => WriteOutcome::Gone,
        };
        if outcome == WriteOutcome::Done {
            self.unsure.remove(&object)
        } else {
            self.unsure.insert(object.clone())
        };
        self.input(Input::Written { object, outcome });
    }

    /// What a write does. Says whether it found its object.
    pub(super) fn apply(&mut self, write: Action) -> bool {
        match write {
            Action::PullJobStatus(id, status) => {
                let Some(job) = self.api.get_mut(&id.uid) else { return false };
                job.status = Some(*status);
                self.tell_job(&id.uid);
            }
            Action::ListJobStatus(id, status) => {
                let Some(list) = self.lists.get_mut(&id.uid) else { return false };
                list.status = Some(*status);
            }
            Action::DeletePullJob(id) => {
                if !self.api.contains_key(&id.uid) {
                    return false;
                }
                self.delete_job(&id.uid);
            }
            Action::DeleteListJob(id) => {
                if self.lists.remove(&id.uid).is_none() {
                    return false;
                }
                self.input(Input::ListJobGone(id.uid.clone()));
                self.collect(&id.uid);
            }
            // The API server would collect it at once.
            Action::MakeChild { list, .. } if !self.lists.contains_key(&list.uid) => return false,
            Action::MakeChild { list, name, spec } => {
                if self.api.values().any(|job| job.metadata.name.as_ref() == Some(&name)) {
                    return self
                        .api
                        .values()
                        .any(|job| group(job) == list.uid && job.spec.image == spec.image);
                }
                let mut job = ImagePullJob::new(&name, *spec);
                job.metadata = self.metadata(&name);
                job.metadata.owner_references = Some(vec![owner(&list)]);
                let uid = JobUid(job.metadata.uid.clone().unwrap());
                self.api.insert(uid.clone(), job);
                self.tell_job(&uid);
            }
            Action::ChangeChild { child, spec, .. } => {
                let Some(job) = self.api.get_mut(&child.uid) else { return false };
                job.spec = *spec;
                self.tell_job(&child.uid);
            }
            Action::DeleteChild { child, .. } => {
                if !self.api.contains_key(&child.uid) {
                    return false;
                }
                self.delete_job(&child.uid);
            }
            Action::Ask { .. } | Action::Event(_) | Action::Liveness(_) => {}
        }
        true
    }

    /// The children of a list that is gone go, too.
    pub(super) fn collect(&mut self, list: &JobUid) {
        let children = self.api.iter().filter(|(uid, job)| group(job) == *list && *uid != list);
        let children: Vec<JobUid> = children.map(|(uid, _)| uid.clone()).collect();
        for child in children {
            self.delete_job(&child);
        }
    }

    /// Time goes by, with everything that it brings.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now.checked_add(time).unwrap();
        while let Some(at) = self.jobs.next_wakeup().filter(|at| *at <= until) {
            self.now = at;
            self.flush();
        }
        self.now = until;
        self.flush();
    }

    /// Cloudcore starts anew: what was on its way may have arrived or not.
    pub(super) fn restart(&mut self, by_lot: bool) {
        self.jobs = Jobs::default();
        let lot = |rng: &mut Rng| !by_lot || rng.chance(50);
        for (node, wish, again) in std::mem::take(&mut self.asks) {
            if lot(&mut self.rng) {
                self.asks.push((node, wish, again));
                self.land_ask(0);
            }
        }
        for write in std::mem::take(&mut self.writes) {
            if lot(&mut self.rng) {
                self.apply(write);
            }
        }
        self.jobs = Jobs::default();
        self.unsure.clear();
        self.books.clear();
        // A list that is refused or over has no word in the new life.
        self.list_books.clear();
        for (uid, list) in &self.lists {
            let ended = list.status.as_ref().is_some_and(|status| status.completion_time.is_some());
            let valid = rules::list_job(&list.spec).ok().filter(|_| !ended);
            self.list_books.insert(uid.clone(), valid);
        }
        for uid in self.api.keys().cloned().collect::<Vec<_>>() {
            let job = &self.api[&uid];
            let ended = job.status.as_ref().is_some_and(|status| status.completion_time.is_some());
            let mut book = Book { ended, ..Book::default() };
            book.told_spec(&job.spec);
            self.books.insert(uid, book);
        }
        let jobs_first = by_lot && self.rng.chance(50);
        if jobs_first {
            self.tell_all_jobs();
        }
        for (name, node) in &mut self.nodes {
            (node.online, node.since) = (false, self.now);
            let labels = Arc::new([("zone".to_owned(), node.zone.to_string())].into());
            self.jobs.handle(Input::News(News::Node { node: NodeName(name.clone()), labels }), self.now);
        }
        for ((job, node), tag) in self.tags.clone() {
            self.tell(&job, &node, &tag.key, tag.standing);
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
