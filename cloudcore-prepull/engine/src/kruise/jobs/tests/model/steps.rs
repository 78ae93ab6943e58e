//! The random steps, and how everything ends.

use std::sync::Arc;
use std::time::Duration;

use prepull_api::crd::kruise::{ImageListPullJob, ImageListPullJobSpec, ImagePullJob, ImagePullJobSpec};
use serde_json::json;

use super::super::super::*;
use super::world::{Node, World, group, stamp};
use super::{IMAGES, NODES, template};
use crate::kruise::TagState;
use crate::kruise::rules;

impl World {
    pub(super) fn step(&mut self) {
        let node = self.rng.pick(NODES).to_owned();
        match self.rng.below(100) {
            0..8 => self.node(&node),
            8..20 => self.turn(&node),
            20..24 => self.new_job(),
            24..26 => self.new_list(),
            26..34 => self.edit(),
            34..36 => self.delete(),
            36..42 => self.pod(&node),
            42..62 => self.answer(),
            62..64 => self.meddle(),
            64..74 if !self.requests.is_empty() => {
                let index = self.rng.below(self.requests.len());
                self.land_request(index);
            }
            74..88 if !self.writes.is_empty() => {
                let index = self.rng.below(self.writes.len());
                let (done, landed) = (self.rng.chance(70), self.rng.chance(50));
                self.land_write(index, done, done || landed);
            }
            88..90 => self.restart(true),
            _ => {
                let longest = self.rng.pick(&[1_000, 30_000, 70_000, 300_000, 90_000_000]);
                let time = Duration::from_millis(self.rng.between(0, longest - 1));
                self.pass(time);
            }
        }
    }

    /// A NodeImage is created, deleted, or gets other labels.
    fn node(&mut self, name: &str) {
        let known = self.nodes.get(name).copied();
        if known.is_some() && self.rng.chance(30) {
            self.nodes.remove(name);
            self.tags.retain(|(_, node), _| node != name);
            self.requests.retain(|(node, ..)| node != name);
            for job_state in self.expected.values_mut() {
                job_state.states.remove(name);
                job_state.early_states.retain(|(node, _), _| node != name);
            }
            return self.input(Input::NodeImage(NodeImageUpdate::Deleted(name.into())));
        }
        let zone = if self.rng.chance(60) { 'x' } else { 'y' };
        let since = known.map_or(self.now, |known| known.since);
        let online = known.is_some_and(|known| known.online);
        self.nodes.insert(name.to_owned(), Node { zone, online, since });
        let labels = Arc::new(self.labels(name));
        self.input(Input::NodeImage(NodeImageUpdate::Exists { node: name.into(), labels }));
    }

    fn turn(&mut self, name: &str) {
        let online = self.rng.chance(65);
        self.online(name, online);
    }

    fn online(&mut self, name: &str, online: bool) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        if node.online && !online {
            node.since = self.now;
        }
        node.online = online;
        self.input(Input::NodeImage(NodeImageUpdate::Online(name.into(), online)));
    }

    fn pod(&mut self, node: &str) {
        let name = format!("p{}", self.rng.below(3));
        if self.rng.chance(25) {
            self.pods.remove(&name);
            return self.input(Input::PodGone { namespace: "team".to_owned(), name });
        }
        let app = if self.rng.chance(70) { "web" } else { "db" };
        let pod = Pod {
            namespace: "team".to_owned(),
            name: name.clone(),
            labels: [("app".to_owned(), app.to_owned())].into(),
            node: self.rng.chance(85).then(|| node.into()),
        };
        self.pods.insert(name, pod.clone());
        self.input(Input::Pod(pod));
    }

    fn job_spec(&mut self) -> ImagePullJobSpec {
        let mut spec = template(&mut self.rng);
        spec["image"] = json!(self.rng.pick(IMAGES));
        serde_json::from_value(spec).unwrap()
    }

    fn list_spec(&mut self) -> ImageListPullJobSpec {
        let mut spec = template(&mut self.rng);
        let images = 1 + self.rng.below(3);
        spec["images"] = json!(IMAGES[..images]);
        if self.rng.chance(20) {
            spec["pullSecrets"] = json!(["s"]);
        }
        serde_json::from_value(spec).unwrap()
    }

    fn new_job(&mut self) {
        if self.api.len() > 6 {
            return;
        }
        let mut job = ImagePullJob::new("", self.job_spec());
        job.metadata = self.metadata(&format!("job-{}", self.made));
        let uid = JobUid(job.metadata.uid.clone().unwrap());
        self.api.insert(uid.clone(), job);
        self.tell_job(&uid);
    }

    fn new_list(&mut self) {
        if self.lists.len() > 1 {
            return;
        }
        let mut list = ImageListPullJob::new("", self.list_spec());
        list.metadata = self.metadata(&format!("list-{}", self.made));
        let uid = JobUid(list.metadata.uid.clone().unwrap());
        self.lists.insert(uid.clone(), list);
        self.tell_list(&uid);
    }

    fn tell_list(&mut self, uid: &JobUid) {
        let list = self.lists.get_mut(uid).unwrap();
        stamp(&mut list.metadata, &list.spec, &list.status);
        let list = list.clone();
        let ended = list.status.as_ref().is_some_and(|status| status.completion_time.is_some());
        let expected = self.expected_lists.entry(uid.clone()).or_default();
        if let Ok(valid) = rules::list_job(&list.spec)
            && !ended
        {
            *expected = Some(valid);
        }
        self.input(Input::ListJob(Ok(Box::new(list))));
    }

    /// A user edits a job or a list, but no children: those are the list's.
    fn edit(&mut self) {
        let lists: Vec<JobUid> = self.lists.keys().cloned().collect();
        if self.rng.chance(30)
            && let Some(uid) = self.rng.choose(&lists).cloned()
        {
            let spec = self.list_spec();
            self.lists.get_mut(&uid).unwrap().spec = spec;
            return self.tell_list(&uid);
        }
        let own = self.api.iter().filter(|(uid, job)| group(job) == **uid);
        let own: Vec<JobUid> = own.map(|(uid, _)| uid.clone()).collect();
        let Some(uid) = self.rng.choose(&own).cloned() else { return };
        let mut spec = self.job_spec();
        let known = &mut self.api.get_mut(&uid).unwrap().spec;
        if self.rng.chance(70) {
            spec.image.clone_from(&known.image);
        }
        *known = spec;
        self.tell_job(&uid);
    }

    fn delete(&mut self) {
        let jobs: Vec<JobUid> = self.api.keys().cloned().collect();
        let lists: Vec<JobUid> = self.lists.keys().cloned().collect();
        if self.rng.chance(20)
            && let Some(uid) = self.rng.choose(&lists).cloned()
        {
            self.lists.remove(&uid);
            self.input(Input::ListJobGone(uid.clone()));
            self.expected_lists.remove(&uid);
            return self.collect(&uid);
        }
        if let Some(uid) = self.rng.choose(&jobs).cloned() {
            self.delete_job(&uid);
        }
    }

    /// A node ends a pull, of the same image in the same way each time.
    fn end(&mut self, job: &JobUid, node: &str) {
        let tag = self.tags.get_mut(&(job.clone(), node.to_owned())).unwrap();
        let bad = (node.len() + tag.key.image.len() + usize::from(node.as_bytes()[1])).is_multiple_of(3);
        tag.state = if bad { TagState::Failed(self.now) } else { TagState::Succeeded(self.now) };
        let (key, state) = (tag.key.clone(), tag.state);
        self.tell(job, node, &key, state);
    }

    fn pending(&self) -> Vec<(JobUid, String)> {
        let open = self.tags.iter().filter(|((_, node), tag)| {
            tag.state == TagState::Pending && self.nodes.get(node).is_some_and(|node| node.online)
        });
        open.map(|(of, _)| of.clone()).collect()
    }

    fn answer(&mut self) {
        if let Some((job, node)) = self.rng.choose(&self.pending()).cloned() {
            self.end(&job, &node);
        }
    }

    /// A user removes a tag, or another job has it pulled once more.
    fn meddle(&mut self) {
        let tags: Vec<(JobUid, String)> = self.tags.keys().cloned().collect();
        let Some(of) = self.rng.choose(&tags).cloned() else { return };
        let key = self.tags[&of].key.clone();
        if self.rng.chance(50) {
            self.tags.remove(&of);
            return self.tell(&of.0, &of.1, &key, TagState::Absent);
        }
        self.tags.get_mut(&of).unwrap().state = TagState::Pending;
        self.tell(&of.0, &of.1, &key, TagState::Pending);
    }

    /// Corrects what is refused or paused, and has every node answer until nothing is left.
    pub(super) fn settle(&mut self) {
        let correct = |parallelism: &mut Option<_>, refused: bool| {
            let paused = serde_json::to_value(&*parallelism).unwrap() == 0;
            if refused || paused {
                *parallelism = Some(serde_json::from_value(json!(2)).unwrap());
            }
        };
        for uid in self.lists.keys().cloned().collect::<Vec<_>>() {
            let spec = &mut self.lists.get_mut(&uid).unwrap().spec;
            let refused = rules::list_job(spec).is_err();
            correct(&mut spec.template.parallelism, refused);
            self.tell_list(&uid);
        }
        for uid in self.api.keys().cloned().collect::<Vec<_>>() {
            let job = self.api.get_mut(&uid).unwrap();
            let refused = rules::pull_job(&job.spec).is_err();
            if group(job) == uid {
                correct(&mut job.spec.template.parallelism, refused);
                self.tell_job(&uid);
            }
        }
        for node in NODES {
            self.online(node, true);
        }
        let until = self.now.checked_add(Duration::from_secs(3600)).unwrap();
        while self.now < until {
            self.land_all();
            let open = self.pending();
            for (job, node) in &open {
                self.end(job, node);
            }
            let next = self.now.checked_add(Duration::from_secs(1)).unwrap();
            let wakeup = if open.is_empty() { self.jobs.next_wakeup().unwrap_or(until) } else { next };
            let next = wakeup.clamp(next, until.max(next));
            self.pass(next.duration_since(self.now).unsigned_abs());
        }
    }

    /// Everything that is in flight arrives.
    pub(super) fn land_all(&mut self) {
        self.flush();
        while !(self.requests.is_empty() && self.writes.is_empty()) {
            while !self.requests.is_empty() {
                self.land_request(0);
            }
            while !self.writes.is_empty() {
                self.land_write(0, true, true);
            }
            self.flush();
        }
    }
}
